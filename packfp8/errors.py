"""PackError and its family: every fault a user can cause, told in five lines.

    what happened
      got:      the value that was met
      expected: what would have been right
      because:  why, with the source of the requirement
      fix:      what to do about it

The errors are raised on the data side, before a GPU kernel would fail on the same input.
"""

from __future__ import annotations

_FIELDS = ("got", "expected", "because", "fix")


class PackError(ValueError):
    """A fault in the input or the configuration; its message has five lines.

    Args:
        what: one line that names the offender. Alone, it is taken as a whole message: this is how
            `torch.utils.data.DataLoader` raises a worker's error again in the main process.
        got, expected, because, fix: one line each; all four or none.
    """

    def __init__(
        self,
        what: str,
        *,
        got: object = None,
        expected: object = None,
        because: str | None = None,
        fix: str | None = None,
    ) -> None:
        self.what, self.got, self.expected, self.because, self.fix = what, got, expected, because, fix
        rest = [getattr(self, name) for name in _FIELDS]
        if any(value is not None for value in rest):
            lines = [what, *(f"  {name + ':':<9} {value}" for name, value in zip(_FIELDS, rest))]
            super().__init__("\n".join("\\n".join(line.splitlines()) for line in lines))  # a user's text may hold line ends
        else:
            super().__init__(what)

    def __reduce__(self) -> tuple:
        return _restore, (type(self), self.what, self.got, self.expected, self.because, self.fix)


def _restore(kind: type[PackError], what, got, expected, because, fix) -> PackError:
    return kind(what, got=got, expected=expected, because=because, fix=fix)


class RuleError(PackError):
    """A token count, feature size, recipe or topology that the hardware or the libraries refuse."""


class BudgetError(PackError):
    """A sequence or a batch that does not fit its budget."""


class LengthError(PackError):
    """A duration or a frame count that cannot be, or that disagrees with the real encoder."""


class ExampleError(PackError):
    """An example whose parts do not fit together: no tokens, placeholders without clips, an unknown shape."""


class AudioError(PackError):
    """Audio that is missing, broken, or not what its manifest says."""


class StateError(PackError):
    """A saved state or a batch that belongs to another rule, measure, seed or world."""


class ConfigError(PackError):
    """A configuration that contradicts itself or would silently do nothing."""
