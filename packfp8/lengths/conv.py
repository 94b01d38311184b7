"""Conv: one convolution or pooling step along time, as integers."""

from __future__ import annotations

from dataclasses import dataclass

from packfp8.errors import LengthError
from packfp8.lengths.whole import checked_size


@dataclass(frozen=True, slots=True)
class Conv:
    """How one layer shortens time: a convolution, a pooling, or the stacking of `kernel` frames (`stride == kernel`).

    The formula is the one stated for `torch.nn.Conv1d`, and for `torch.nn.MaxPool1d` where `ceil` is set (there the last
    window may hang over the end, but must begin inside the input or its left padding).

    Args:
        kernel: frames that one output looks at, before dilation.
        stride: frames from one output to the next.
        padding: frames added on each side; a pair (left, right) where they differ, as in causal subsampling.
        dilation: distance between the frames that the kernel looks at.
        ceil: rounds up where the floor is usual (`ceil_mode=True`).

    Raises:
        LengthError: a size is not a whole number or is out of range.
    """

    kernel: int
    stride: int = 1
    padding: int | tuple[int, int] = 0
    dilation: int = 1
    ceil: bool = False

    def __post_init__(self) -> None:
        for name in ("kernel", "stride", "dilation"):
            object.__setattr__(self, name, checked_size(f"the {name} of a convolution", getattr(self, name), least=1))
        if isinstance(self.padding, tuple) and len(self.padding) != 2:
            raise LengthError(
                "the padding of a convolution has more or fewer than two sides",
                got=self.padding,
                expected="a number for both sides, or a pair (left, right)",
                because="time has a beginning and an end; Conv1d pads both",
                fix="Conv(kernel, stride, padding=(left, right))",
            )
        sides = tuple(checked_size("the padding of a convolution", side, least=0) for side in self.sides)
        object.__setattr__(self, "padding", sides if isinstance(self.padding, tuple) else sides[0])
        object.__setattr__(self, "ceil", bool(self.ceil))

    @property
    def sides(self) -> tuple[int, int]:
        """Frames of padding on the left and on the right."""
        return self.padding if isinstance(self.padding, tuple) else (self.padding, self.padding)

    @property
    def span(self) -> int:
        """Frames from the first to the last that one output looks at, both counted."""
        return self.dilation * (self.kernel - 1) + 1

    def __call__(self, frames):
        """Frames that come out where `frames` go in: an int for an int, int64 for an int64 array of any shape.

        No frame comes out of none, and none where the kernel does not fit (torch raises there).
        """
        # Operators only, so that one line serves a Python int and an array; a comparison counts as 0 or 1.
        left, right = self.sides
        room = frames + (left + right - self.span)
        if self.ceil:
            out = -(-room // self.stride) + 1
            out = out - ((out - 1) * self.stride >= frames + left)
        else:
            out = room // self.stride + 1
        return out * ((out > 0) & (frames > 0))
