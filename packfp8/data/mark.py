"""Mark: a place in a pass from which it can be taken up; and the state of a sampler, which is a mark and a few steps.

A state is a dict of plain values, the same on every rank. It names examples by their place in the source: those of the
lookahead, a few kilobytes, and those of the packs that wait in the dealer for others of their cost, at most two windows.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields

from packfp8.errors import StateError

FORMAT = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """A place between two steps.

    Attributes:
        step: number of the step that comes next.
        position: items walked.
        order: checksum (CRC-32) of their names in the order of the walk, those passed over by the filter left out.
        held: places in the source of the examples in the packer.
        lengths: checksum (CRC-32) of places, tokens and frames of all examples in the packer and the dealer.
        packer, dealer: their states; both name examples by their place in the source.
        set_aside: examples set aside so far.
    """

    step: int
    position: int
    order: int
    held: tuple[int, ...]
    lengths: int
    packer: dict
    dealer: dict
    set_aside: int


def to_state(*, terms: dict, epoch: int, step: int, mark: Mark, set_aside: list[int]) -> dict:
    """The state after `step` of `epoch`: the latest mark before it, from which the steps up to it are planned again."""
    saved = asdict(mark) | {"held": list(mark.held), "set_aside": list(set_aside)}
    return {"format": FORMAT, "terms": terms, "epoch": epoch, "step": step, "mark": saved}


def mark_of(state: dict) -> Mark:
    """The mark of a checked state."""
    saved = state["mark"]
    return Mark(**{**saved, "held": tuple(saved["held"]), "set_aside": len(saved["set_aside"])})


def check_state(state: object, terms: dict) -> dict:
    """The state, where a sampler of these terms can go on from it.

    Raises:
        StateError: it is not a sampler's state, or was saved under other terms.
    """
    whole = isinstance(state, dict) and {"format", "terms", "epoch", "step", "mark"} <= set(state)
    if not whole or state["format"] != FORMAT or set(state["mark"] or ()) != {field.name for field in fields(Mark)}:
        raise StateError(
            "this is not a state of a PackingSampler",
            got=f"keys {sorted(state)}" if isinstance(state, dict) else type(state).__name__,
            expected=f"what PackingSampler.state_dict() returned, in format {FORMAT}",
            because="a state that is not whole cannot be continued exactly",
            fix="load the state that was saved, unchanged",
        )
    saved = state["terms"]
    if saved.get("dp") != terms["dp"]:
        raise StateError(
            "the state was saved in a world of another size",
            got=f"{saved.get('dp')} data-parallel ranks when it was saved, {terms['dp']} now",
            expected="the same number",
            because="a step is one pack for each rank: other sizes would deal the packs of the open window into other steps",
            fix="resume with as many data-parallel ranks, or start the epoch anew",
        )
    other = sorted(name for name in {*saved, *terms} if saved.get(name) != terms.get(name))
    if other:
        raise StateError(
            f"the state was saved under another {', '.join(other)}",
            got=", ".join(f"{name} {saved.get(name)!r}" for name in other),
            expected=", ".join(f"{name} {terms.get(name)!r}" for name in other),
            because="under other terms the same examples would go into other packs: some would be repeated and others lost",
            fix="resume with the settings of the saved run, or start the epoch anew",
        )
    return state
