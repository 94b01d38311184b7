"""What the tests of the wrapper share: batches of all kinds of examples, and the lines of an error."""

import pytest

from packfp8.data import Collator
from packfp8.rule import align

BF16 = align("bf16")


@pytest.fixture
def collate(measure, mixed):
    def collate(rule=BF16, examples=mixed, **options):
        return Collator(measure=measure, rule=rule, **options).collate(examples)

    return collate


@pytest.fixture
def lines():
    """lines(caught) -> the lines of an error that was raised."""

    def lines(caught):
        return str(caught.value).splitlines()

    return lines
