"""Where the time of a step goes on the GPU, by torch's profiler: kinds of kernels, idle time, and the floor; one picture.

python tests/gpu/kernel_times.py FILE.json FILE.png      draws again what `bench_captured.py --profile` wrote
"""

from __future__ import annotations

import json
import re
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import click
import torch

KINDS = (
    ("attention", r"sdpa|flash|fmha|attention|rope|fused_attn|thd_"),
    ("encoder", r"fft|conv|implicit|wgrad2d|nchw|nhwc|regular_fft|vector_fft"),
    ("matrix products", r"gemm|nvjet|cutlass|xmma|splitk|gemv|addmm|::mm|bmm|matmul"),
    ("quantising", r"quanti|cast_transpose|amax|block_scal|scale_update|transpose|nvte"),
    ("norms, activations", r"norm|swiglu|gated|gelu|silu|activation"),
    ("loss", r"softmax|logsumexp|scatter|gather|sort|radix"),
    ("copies", r"memcpy|memset|copy_"),
)
"""By the first pattern that a kernel's name has, in small letters; the order tells an implicit GEMM of cuDNN from cuBLAS's."""
OTHER, IDLE = "element by element", "idle"
_COLOURS = ("#4e79a7", "#59a14f", "#f28e2b", "#e15759", "#b07aa1", "#edc948", "#76b7b2", "#9c9c9c", "#e8e8e8")
_CATEGORIES = {"kernel", "gpu_memcpy", "gpu_memset", "cpu_op"}


def kind_of(name: str) -> str:
    """The kind of a kernel."""
    return next((kind for kind, pattern in KINDS if re.search(pattern, name.lower())), OTHER)


def traced(run: Callable[[], None], device: str) -> list[tuple[str, float, float]]:
    """Name, begin and end in microseconds of all that ran on the device, or of all operations of a CPU."""
    cuda = device == "cuda"
    activity = torch.profiler.ProfilerActivity.CUDA if cuda else torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[activity]) as profiler:
        run()
        if cuda:
            torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    kernels = [e for e in events if e.get("ph") == "X" and e.get("cat") in _CATEGORIES]
    return sorted(((e["name"], e["ts"], e["ts"] + e["dur"]) for e in kernels), key=lambda kernel: kernel[1])


def bar_of(name: str, kernels: list[tuple[str, float, float]], batches: int) -> dict:
    """Milliseconds a batch by kind, idle time included; kernels that run at once share their time with the first."""
    kinds, names, end = Counter(), Counter(), kernels[0][1]
    for kernel, begin, stop in kernels:
        own = max(0.0, stop - max(begin, end))
        kinds[kind_of(kernel)] += own
        names[kernel] += own
        end = max(end, stop)
    wall, busy = end - kernels[0][1], sum(kinds.values())
    kinds[IDLE] = wall - busy
    top = [[kernel, us / 1e3 / batches] for kernel, us in names.most_common(12)]
    milliseconds = {kind: us / 1e3 / batches for kind, us in kinds.items()}
    return {"name": name, "ms": milliseconds, "busy": busy / wall, "launches": len(kernels) / batches, "top": top}


def profiled(contenders: list, path: str, device: str, floor: dict[str, float]) -> None:
    """Writes numbers (.json) and a picture of them (`path`), and prints the shares, of the contenders that tell most."""
    recipe = next((one.recipe for one in contenders if one.letter in "cd"), None)
    chosen = [one for one in contenders if one.part == "step" and (one.letter in "be" or one.recipe == recipe)]
    bars = []
    for one in chosen:
        eager = "captured" if one.letter in "de" else "eager"
        bars.append(bar_of(f"{one.letter}  {one.recipe}, {eager}", traced(one.run, device), one.batches))
    told = {"floor": floor, "bars": bars}
    Path(path).with_suffix(".json").write_text(json.dumps(told, indent=1) + "\n")
    for bar in bars:
        shares = ", ".join(f"{kind} {ms:.2f}" for kind, ms in sorted(bar["ms"].items(), key=lambda pair: -pair[1]))
        print(f"{bar['name']}: GPU busy {bar['busy']:.1%}, {bar['launches']:.0f} kernels; ms a batch: {shares}")
        for kernel, ms in bar["top"][:6]:
            print(f"    {ms:7.3f} ms  {kernel[:110]}")
    print(flush=True)
    try:
        draw(told, path)
    except ImportError as fault:
        print(f"no picture here ({fault}); python tests/gpu/kernel_times.py {Path(path).with_suffix('.json')} {path}")


def draw(told: dict, path: str) -> None:
    """One bar for each contender, and one for the floor."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    kinds = [kind for kind, _ in KINDS] + [OTHER, IDLE]
    floor = {
        "name": "floor: products at the measured rate",
        "ms": {
            "matrix products": told["floor"]["linear layers"] + told["floor"]["head"],
            "attention": told["floor"]["attention"],
            "encoder": told["floor"]["encoder"],
        },
    }
    bars = [*told["bars"], floor]
    figure, axes = plt.subplots(figsize=(10, 0.9 + 0.6 * len(bars)), layout="constrained")
    for row, bar in enumerate(bars):
        left = 0.0
        for kind, colour in zip(kinds, _COLOURS, strict=True):
            width = bar["ms"].get(kind, 0.0)
            axes.barh(row, width, left=left, color=colour, label=kind if row == 0 else None, edgecolor="white", linewidth=0.4)
            left += width
        axes.text(left, row, f" {left:.1f} ms", va="center", fontsize=9)
    axes.set_yticks(range(len(bars)), [bar["name"] for bar in bars])
    axes.invert_yaxis()
    axes.set_xlabel("ms a batch, on the GPU")
    axes.margins(x=0.12)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.legend(ncols=5, fontsize=8, frameon=False, loc="lower center", bbox_to_anchor=(0.4, 1.0))
    figure.savefig(path, dpi=130)
    plt.close(figure)


@click.command()
@click.argument("numbers", type=click.Path(exists=True))
@click.argument("picture", type=click.Path())
def main(numbers: str, picture: str) -> None:
    """Draw PICTURE of the NUMBERS that a profile wrote."""
    draw(json.loads(Path(numbers).read_text()), picture)


if __name__ == "__main__":
    main()
