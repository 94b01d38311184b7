"""Two budgets at once: fill of packs within tokens and encoder frames, and microseconds an example, beside tokens alone.

    python tests/bench/bench_budgets.py [--num 100000] [--lookahead 256] [--json]

Fill is that of packs before the last. Frames are those of a clip and one of silence; their budget is the 95th percentile, or
the median, of the frames of packs made without it. Times are processor seconds, the least of three passes, with and without the
frame budget in turn. Real corpora, where PACKFP8_TEST_DATA is set, come as recorded, and again in shuffled epochs to `--num`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator

import click
import numpy as np
from bench_stream import fill_of
from corpora import librispeech_parts, real_parts

from packfp8.packing import StreamPacker


def within_both(tokens: np.ndarray, frames: np.ndarray, budget: int, percentile: int, lookahead: int) -> dict:
    """Return the figures of packs within a token and a frame budget, beside those of packs within the tokens' alone."""
    pairs = list(zip(tokens.tolist(), frames.tolist()))
    free, free_seconds = timed(StreamPacker(budget, lookahead=lookahead), pairs)
    most = max(int(np.percentile([sum(pairs[key][1] for key in pack) for pack in free], percentile)), int(frames.max()))
    packs, seconds = timed(StreamPacker(budget, lookahead=lookahead, frame_budget=most), pairs)
    for _ in range(2):
        free_seconds = min(free_seconds, timed(StreamPacker(budget, lookahead=lookahead), pairs)[1])
        seconds = min(seconds, timed(StreamPacker(budget, lookahead=lookahead, frame_budget=most), pairs)[1])
    held = [sum(pairs[key][1] for key in pack) for pack in packs]
    if max(held) > most or sorted(key for pack in packs for key in pack) != list(range(len(pairs))):
        raise SystemExit("an example was lost or repeated, or a pack is over its frames")
    sizes = tokens.tolist()
    return {
        "examples": len(pairs), "percentile": percentile, "frame_budget": most, "packs_free": len(free), "packs": len(packs),
        "least": max(-(-int(tokens.sum()) // budget), -(-int(frames.sum()) // most)),
        "fill_free": fill_of(free, sizes, budget), "fill": fill_of(packs, sizes, budget),
        "frame_fill": sum(held[:-1]) / max(1, len(held[:-1]) * most),
        "microseconds_free": 1e6 * free_seconds / len(pairs), "microseconds": 1e6 * seconds / len(pairs),
    }  # fmt: skip


def timed(packer: StreamPacker, pairs: list[tuple[int, int]]) -> tuple[list[list[int]], float]:
    """Return the packs of a stream and the processor seconds they took."""
    packs, started = [], time.process_time()
    for key, (length, frames) in enumerate(pairs):
        packer.push(key, length, frames)
        while (pack := packer.pop()) is not None:
            packs.append(pack)
    packer.flush()
    while (pack := packer.pop()) is not None:
        packs.append(pack)
    return packs, time.process_time() - started


def spoken(num: int) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """Yield name, tokens and frames of corpora of speech and text."""
    rng = np.random.default_rng(0)
    for name, (frames, text) in real_parts().items():
        shuffled = np.concatenate([rng.permutation(len(frames)) for _ in range(max(1, num // len(frames)))])
        for told, order in ((name, np.arange(len(frames))), (f"{name}, {len(shuffled) // len(frames)} times", shuffled)):
            yield told, (frames + text)[order], frames[order] + 1
    frames, text = librispeech_parts(num)
    half = rng.random(num) < 0.5
    yield "libri", frames + text, frames + 1
    yield "audio alone", frames + 1, frames + 1
    yield "half text alone", frames + text, np.where(half, frames + 1, 0)
    yield "runs of 100", frames + text, np.where(np.arange(num) // 100 % 2, frames + 1, 0)


@click.command()
@click.option("--num", default=100_000, help="examples in each corpus")
@click.option("--lookahead", default=256)
@click.option("--json", "as_json", is_flag=True)
def main(num: int, lookahead: int, as_json: bool) -> None:
    """Measure packs within two budgets."""
    rows = []
    if not as_json:
        print(f"lookahead {lookahead}; fill before the final pack; least packs by either budget")
        print(
            f"{'corpus':<28}{'budget':>7}{'frames':>7}  {'at':<4}{'packs free':>11}{'packs':>7}{'least':>7}{'fill free %':>12}"
            f"{'fill %':>10}{'of frames %':>12}{'us free':>9}{'us':>7}{'ratio':>7}"
        )
    for name, tokens, frames in spoken(num):
        for budget, percentile in ((8192, 95), (8192, 50), (2048, 95)):
            row = {"corpus": name, "budget": budget} | within_both(tokens, frames, budget, percentile, lookahead)
            rows.append(row)
            if not as_json:
                print(
                    f"{name:<28}{budget:>7}{row['frame_budget']:>7}  p{percentile:<3}{row['packs_free']:>11}{row['packs']:>7}"
                    f"{row['least']:>7}{100 * row['fill_free']:>12.4f}{100 * row['fill']:>10.4f}"
                    f"{100 * row['frame_fill']:>12.2f}{row['microseconds_free']:>9.2f}{row['microseconds']:>7.2f}"
                    f"{row['microseconds'] / row['microseconds_free']:>7.2f}"
                )
    if as_json:
        print(json.dumps(rows))


if __name__ == "__main__":
    main()
