"""The spellings of FP8 that NeMo users have, read from plain dicts and from nodes that behave like one (OmegaConf).

automodel_backend: {te_fp8: {recipe: block}}                          Transformer Engine
fp8: {enabled: true, recipe_name: tensorwise, filter_fqns: [...]}     torchao
"""

from __future__ import annotations

from packfp8.errors import ConfigError

TORCHAO_KEYS = {
    "filter_fqns": "filter_fqns",
    "enable_fsdp_float8_all_gather": "fsdp_all_gather",
    "precompute_float8_dynamic_scale_for_fsdp": "precompute_scale",
    "force_recompute_fp8_weight_in_bwd": "recompute_weight",
    "emulate": "emulate",
}
"""NeMo Automodel's keys under `fp8` and our argument of `Fp8.torchao`."""

_SWITCHES = TORCHAO_KEYS.keys() - {"filter_fqns"}
_TE = "automodel_backend.te_fp8"


def read(node: object) -> tuple[str, dict] | None:
    """The library ("te" or "torchao") and its arguments; None where no FP8 is asked for.

    Raises:
        ConfigError: both libraries at once, an unknown key, or a section that would do nothing.
    """
    top = _section(node, "the configuration")
    if "recipe_name" in top or "te_fp8" in top:
        raise _does_nothing("a section of FP8 without the name above it", f"keys {sorted(map(str, top))}", f"{_TE}, or fp8")
    backend = _section(top.get("automodel_backend"), "automodel_backend")
    te = _te(_section(backend.get("te_fp8"), _TE)) if backend.get("te_fp8") is not None else None
    torchao = _torchao(_section(top.get("fp8"), "fp8")) if top.get("fp8") is not None else None
    if te is not None and torchao is not None:
        raise ConfigError(
            "two FP8 libraries are configured at once",
            got=f"{_TE}: {te['recipe']!r} and fp8: {torchao['recipe']!r}",
            expected="one of them",
            because="both would claim the same linear layers, and each asks for its own token multiples",
            fix=f"remove {_TE}, or set fp8.enabled: false",
        )
    if te is not None:
        return "te", te
    above = None if torchao is not None else next((name for name, below in top.items() if _asks(below)), None)
    if above is not None:
        given, wanted = f"the configuration above {above}", f"config[{above!r}]"
        raise _does_nothing(f"the FP8 section below {above}", given, wanted, fix=f"Fp8.from_config({wanted})")
    return ("torchao", torchao) if torchao is not None else None


def _te(section: dict) -> dict:
    _only(section, ("recipe",), _TE)
    if section.get("recipe") is None:
        raise _does_nothing(_TE, f"keys {sorted(section)}", "recipe: delayed, current, block, mxfp8, nvfp4, or a recipe object")
    return {"recipe": section["recipe"]}


def _torchao(section: dict) -> dict | None:
    """Arguments of `Fp8.torchao`; None where the section says `enabled: false`."""
    _only(section, ("enabled", "recipe_name", *TORCHAO_KEYS), "fp8")
    enabled = section.get("enabled")
    if not isinstance(enabled, bool):
        raise _does_nothing("fp8", f"enabled: {enabled!r}", "enabled: true or enabled: false")
    if not enabled:
        return None
    arguments = {ours: section[theirs] for theirs, ours in TORCHAO_KEYS.items() if section.get(theirs) is not None}
    texts = [name for name, value in section.items() if name in _SWITCHES and not isinstance(value, bool | None)]
    if texts:
        raise ConfigError(
            f"fp8.{texts[0]} is neither true nor false",
            got=repr(section[texts[0]]),
            expected="true or false",
            because="a text counts as true, 'false' too",
            fix="write it without quotes",
        )
    filters = arguments.get("filter_fqns", ())
    if isinstance(filters, str) or not all(isinstance(part, str) for part in filters):
        raise ConfigError(
            "fp8.filter_fqns is not a list of names",
            got=repr(filters),
            expected="a list of parts of layer names, e.g. [lm_head]",
            because="a text would be read letter by letter, and every layer has one of its letters",
            fix="write filter_fqns: [lm_head]",
        )
    # Automodel's null and torchao's own default are both tensorwise
    return {**arguments, "filter_fqns": tuple(filters), "recipe": section.get("recipe_name") or "tensorwise"}


def _asks(node: object) -> bool:
    """Whether a section of the configuration holds one that asks for FP8. No other key is read: its value may be missing."""
    for path in (("automodel_backend", "te_fp8"), ("fp8", "enabled")):
        found = node
        for key in path:
            found = found[key] if hasattr(found, "keys") and key in found.keys() else None  # noqa: SIM118
        if found is not None and found is not False:
            return True
    return False


def _section(node: object, name: str) -> dict:
    if node is None:
        return {}
    if not (hasattr(node, "keys") and hasattr(node, "__getitem__")):
        raise ConfigError(
            f"{name} is not a section",
            got=repr(node),
            expected="a mapping",
            because="FP8 has settings that only names can tell apart",
            fix=f"write {_TE}: {{recipe: block}}, or fp8: {{enabled: true, recipe_name: tensorwise}}",
        )
    return {key: node[key] for key in node.keys()}  # noqa: SIM118  (a node's own iteration may yield values)


def _only(section: dict, known: tuple[str, ...], name: str) -> None:
    unknown = sorted(str(key) for key in section if key not in known)
    if unknown:
        raise ConfigError(
            f"{name} has a key that nothing reads",
            got=", ".join(unknown),
            expected=f"keys among {', '.join(known)}",
            because="a setting that is passed over would silently do nothing",
            fix="correct the spelling, or remove the key",
        )


def _does_nothing(name: str, got: str, expected: str, fix: str = "complete the section, or remove it") -> ConfigError:
    return ConfigError(
        f"{name} would silently do nothing",
        got=got,
        expected=expected,
        because="who writes an FP8 section expects FP8",
        fix=fix,
    )
