"""The digest of a prefix grows with it and tells prefixes apart."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pilotfish_broker.digest import extend

ids = st.lists(st.integers(0, (1 << 31) - 1), max_size=40)


@given(ids, ids)
def test_extending_by_parts_equals_extending_at_once(first: list[int], second: list[int]) -> None:
    assert extend(extend(0, first), second) == extend(0, first + second)


@given(ids, ids)
def test_different_prefixes_have_different_digests(first: list[int], second: list[int]) -> None:
    assert (extend(0, first) == extend(0, second)) == (first == second)


@given(ids)
def test_a_digest_fits_an_unsigned_wire_integer(tokens: list[int]) -> None:
    assert 0 <= extend(0, tokens) < (1 << 61) - 1


def test_leading_zeros_count() -> None:
    assert len({extend(0, [0] * n) for n in range(50)}) == 50


def test_the_value_is_the_same_in_every_process() -> None:
    assert extend(0, [1, 2, 3]) == 44_391_350_866_968_888  # by hand: ((2·B + 3)·B + 4) mod P
    assert extend(0, range(3)) == extend(0, [0, 1, 2])
