"""Subset sums against all subsets, one by one."""

from __future__ import annotations

from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from packfp8.packing.subset import fullest, fullest_of

sizes = st.lists(st.integers(1, 12), max_size=9)
rooms = st.integers(1, 40)


def subsets(sizes, room, most):
    """All sets of places whose sizes fit the room."""
    for number in range(min(most, len(sizes)) + 1):
        for chosen in combinations(range(len(sizes)), number):
            if sum(sizes[place] for place in chosen) <= room:
                yield chosen


@given(sizes, rooms)
def test_the_fullest_set_is_the_best_of_all_subsets_and_its_members_stand_as_early_as_they_can(sizes, room):
    chosen, total = fullest(enumerate(sizes), room)
    best = max(sum(sizes[place] for place in one) for one in subsets(sizes, room, len(sizes)))
    equal = [one for one in subsets(sizes, room, len(sizes)) if sum(sizes[place] for place in one) == best]
    assert total == best
    assert tuple(chosen) == min(equal, key=lambda one: one[::-1])


@given(sizes, rooms, st.integers(1, 5))
def test_at_most_so_many_parts_are_as_full_as_the_best_of_all_such_subsets(sizes, room, most):
    chosen, total = fullest_of(most, enumerate(sizes), room)
    assert total == max(sum(sizes[place] for place in one) for one in subsets(sizes, room, most))
    assert len(chosen) <= most
    assert chosen == sorted(set(chosen))
    assert sum(sizes[place] for place in chosen) == total


@given(sizes, rooms)
def test_a_set_that_misses_the_room_is_of_the_fewest_parts(sizes, room):
    chosen, total = fullest_of(9, enumerate(sizes), room)
    if total < room:
        assert len(chosen) == min(len(one) for one in subsets(sizes, room, 9) if sum(sizes[place] for place in one) == total)


def test_no_part_is_looked_at_after_an_exact_fit():
    seen = []

    def parts():
        for place, size in enumerate([3, 4, 5, 6]):
            seen.append(place)
            yield place, size

    assert fullest(parts(), 7) == ([0, 1], 7)
    assert seen == [0, 1]


def test_what_is_larger_than_the_room_is_passed_over():
    assert fullest([("long", 10), ("short", 2)], 3) == (["short"], 2)
    assert fullest([("long", 10)], 3) == ([], 0)
