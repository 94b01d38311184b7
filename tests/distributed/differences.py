"""How far 20 steps on each mesh are from one process that sees the same packs: losses, gradient norms, one unequal window.

    PYTHONPATH=. python tests/distributed/differences.py

Relative differences, the largest over steps and ranks; of the window the largest absolute one of a gradient. The same runs are
held to bounds in `test_meshes.py`.
"""

from __future__ import annotations

import contextlib
import io
import tempfile
from pathlib import Path

import ranks
import torch
from workload import MESHES


def differences(found: dict, mesh: str, layout: str) -> tuple[float, float, float]:
    """Of the losses, of the gradient norms, and of the window's gradients."""
    world = torch.Size(MESHES[mesh].values()).numel()
    (alone,), peers = found[1], found[world]
    steps = [
        (abs(ours[n] - right[n]) / abs(right[n]), n)
        for peer in peers
        for ours, right in zip(peer["training", mesh, layout], alone["training", mesh, layout], strict=True)
        for n in (0, 1)
    ]
    right = alone["window", mesh, layout]["gradients"]
    window = [
        (peer["window", mesh, layout]["gradients"][name] - grad).abs().max() for peer in peers for name, grad in right.items()
    ]
    return (*(max(apart for apart, which in steps if which == n) for n in (0, 1)), float(max(window)))


def main() -> None:
    """Run all meshes and print the table."""
    with tempfile.TemporaryDirectory() as folder:
        ranks.items()  # before the fork
        with contextlib.redirect_stdout(io.StringIO()):
            found = {world: ranks.forked(ranks.work, world, Path(folder)) for world in (1, 2, 4, 8)}
    print(f"{'mesh':<28}{'layout':<8}{'loss':>10}{'gradient norm':>16}{'window, gradients':>20}")
    for mesh in MESHES:
        for layout in ranks.LAYOUTS:
            loss, norm, window = differences(found, mesh, layout)
            print(f"{mesh:<28}{layout:<8}{loss:>10.1e}{norm:>16.1e}{window:>20.1e}")


if __name__ == "__main__":
    main()
