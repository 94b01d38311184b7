"""What constant shapes cost, row by row, for the terminal's table and for the page."""

from __future__ import annotations

from packfp8.report.result import Report
from packfp8.report.sentences import percent


def constant_rows(report: Report) -> list[tuple[str, str, str]]:
    """(name, figure, note) of packs of constant shape; none where they were not asked for."""
    static = report.static
    if static is None:
        return []
    bounds, frames = f"max_sequences={static.max_sequences}", ""  # as sampler and collator spell them: to be copied
    if static.frame_budget:
        bounds, frames = f"{bounds}, frame_budget={static.frame_budget}", " and encoder frames"
    rows = [
        ("static: packs", f"{static.stream.packs:,}", f"{bounds}: the most sequences{frames} of a pack"),
        ("static: max_seqlen", f"{static.max_seqlen:,}", "the longest slot, rounded up: as far as positions need to reach"),
        ("static: filler", percent(static.filler), f"{static.filler_tokens:,} tokens in no slot"),
    ]
    if static.frame_budget:
        rows += [
            ("static: silence", percent(static.silent), "of the encoder's frames: ends of rooms, and what no clip takes"),
            ("static: clips unused", f"{static.unused_clips:,}", f"of {static.clips:,} places a pack, an offset each"),
        ]
    if static.over_budget:
        rows.append(("static: over the frames", f"{static.over_budget:,}", "examples whose audio no pack can hold"))
    return rows
