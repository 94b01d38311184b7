"""Snapshot: a saved state is taken back by a packer of the same settings only."""

from __future__ import annotations

from packfp8.errors import StateError


def settings_checked(kind: str, settings: dict, fields: tuple[str, ...], state: dict) -> dict:
    """Return the state; raises StateError where it lacks a field or was saved under other settings."""
    missing = [name for name in ("settings", *fields) if not isinstance(state, dict) or name not in state]
    missing = missing or [name for name in settings if name not in state["settings"]]
    if missing:
        raise StateError(
            f"this is not a state of {kind}",
            got=f"no {', '.join(missing)}",
            expected=f"what {kind}.state_dict() returned",
            because="a state that is not whole cannot be continued exactly",
            fix="load the state that was saved, unchanged",
        )
    saved = state["settings"]
    other = sorted(name for name in {*saved, *settings} if saved.get(name) != settings.get(name))
    if other:
        raise StateError(
            f"the state was saved by a {kind} with other settings",
            got=", ".join(f"{name} {saved.get(name)!r}" for name in other),
            expected=", ".join(f"{name} {settings.get(name)!r}" for name in other),
            because="under other settings the same examples would go into other packs",
            fix="resume with the settings of the saved run, or start anew",
        )
    return state
