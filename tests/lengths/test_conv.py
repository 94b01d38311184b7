"""Conv against torch's own layers, and its laws."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from packfp8.errors import LengthError
from packfp8.lengths import Conv

sizes = st.integers(1, 6)


@given(kernel=sizes, stride=sizes, padding=st.integers(0, 6), dilation=st.integers(1, 3))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_a_convolution_counts_as_torch_does(kernel, stride, padding, dilation):
    layer = torch.nn.Conv1d(1, 1, kernel, stride, padding, dilation)
    conv = Conv(kernel, stride, padding, dilation)
    for frames in range(1, 40):
        if frames + 2 * padding < conv.span:
            assert conv(frames) == 0
            with pytest.raises(RuntimeError, match="Kernel size can't be greater"):
                layer(torch.zeros(1, 1, frames))
        else:
            assert conv(frames) == layer(torch.zeros(1, 1, frames)).shape[-1]


@given(kernel=sizes, stride=sizes, data=st.data(), ceil=st.booleans())
@settings(max_examples=60, deadline=None, derandomize=True)
def test_a_pooling_counts_as_torch_does_rounded_down_or_up(kernel, stride, data, ceil):
    padding = data.draw(st.integers(0, kernel // 2))  # torch pads a pooling by at most half of its kernel
    layer = torch.nn.MaxPool1d(kernel, stride, padding, ceil_mode=ceil)
    conv = Conv(kernel, stride, padding, ceil=ceil)
    for frames in range(1, 40):
        try:
            real = layer(torch.zeros(1, 1, frames)).shape[-1]
        except RuntimeError:  # torch refuses an output of no frames
            real = 0
        assert conv(frames) == real


def test_unequal_sides_are_the_sum_that_a_causal_convolution_pads():
    layer = torch.nn.Sequential(torch.nn.ConstantPad1d((2, 1), 0.0), torch.nn.Conv1d(1, 1, 3, 2))
    conv = Conv(3, 2, (2, 1))
    assert [conv(n) for n in range(1, 50)] == [layer(torch.zeros(1, 1, n)).shape[-1] for n in range(1, 50)]
    assert conv(10) != Conv(3, 2, 1)(10) or conv(11) != Conv(3, 2, 1)(11)


def test_no_frame_comes_out_of_none_even_where_padding_alone_would_fill_the_kernel():
    assert Conv(3, 1, padding=2)(0) == 0
    assert Conv(2, 2, ceil=True)(0) == 0


@given(
    conv=st.builds(Conv, sizes, sizes, st.integers(0, 3), st.integers(1, 3), st.booleans()),
    frames=st.lists(st.integers(0, 10**12), min_size=1),
)
@settings(max_examples=100, deadline=None, derandomize=True)
def test_an_array_counts_as_its_elements(conv, frames):
    array = conv(np.array(frames, dtype=np.int64))
    assert array.dtype == np.int64
    assert array.tolist() == [conv(n) for n in frames]
    assert all(type(conv(n)) is int for n in frames)


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"kernel": 0}, "kernel"),
        ({"kernel": 3, "stride": 0}, "stride"),
        ({"kernel": 3, "padding": -1}, "padding"),
        ({"kernel": 3, "dilation": 0}, "dilation"),
        ({"kernel": 3.0}, "kernel"),
        ({"kernel": True}, "kernel"),
    ],
)
def test_a_size_that_cannot_be_is_refused(arguments, name, five_lines):
    with pytest.raises(LengthError) as error:
        Conv(**arguments)
    five_lines(
        error.value,
        what=f"the {name} of a convolution cannot be",
        got=repr([*arguments.values()][-1]),
        expected="a whole number of at least",
        because="integers only",
        fix="the real layer",
    )


def test_padding_of_three_sides_is_refused(five_lines):
    with pytest.raises(LengthError) as error:
        Conv(3, 2, (1, 1, 1))
    five_lines(
        error.value,
        what="more or fewer than two sides",
        got="(1, 1, 1)",
        expected="a pair (left, right)",
        because="Conv1d pads both",
        fix="padding=(left, right)",
    )
