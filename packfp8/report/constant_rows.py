"""What constant shapes cost, row by row, for the terminal's table and for the page."""

from __future__ import annotations

from packfp8.report.result import Report
from packfp8.report.sentences import percent


def constant_rows(report: Report) -> list[tuple[str, str, str]]:
    """(name, figure, note) of packs of constant shape; none where they were not asked for."""
    static = report.static
    if static is None:
        return []
    audio = f" and {static.frame_budget:,} encoder frames" if static.frame_budget else ""
    rows = [
        ("static: packs", f"{static.stream.packs:,}", f"of at most {static.max_sequences:,} sequences{audio}"),
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
