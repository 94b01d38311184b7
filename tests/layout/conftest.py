"""What the layout's tests share: errors line by line, and a literal split of a pack over CP ranks."""

import pytest

NAMES = ["got", "expected", "because", "fix"]


@pytest.fixture(scope="session")
def lines_of():
    """A function from a PackError to its five lines by name; none of them may be empty."""

    def lines_of(error):
        what, *rest = str(error).split("\n")
        lines = [line.split(":", 1) for line in rest]
        assert [name.strip() for name, _ in lines] == NAMES
        named = {"what": what} | {name.strip(): text.strip() for name, text in lines}
        assert all(named.values())
        return named

    return lines_of


@pytest.fixture(scope="session")
def split_literally():
    """A function (slots, cp) -> tokens of each rank, where a slot is a list of its tokens: slice by slice, nothing clever."""

    def split_literally(slots, cp):
        ranks = [[] for _ in range(cp)]
        for slot in slots:
            if cp == 1:
                ranks[0] += slot
                continue
            size, rest = divmod(len(slot), 2 * cp)
            assert rest == 0
            chunks = [slot[n * size : (n + 1) * size] for n in range(2 * cp)]
            for rank in range(cp):
                ranks[rank] += chunks[rank] + chunks[2 * cp - 1 - rank]
        return ranks

    return split_literally
