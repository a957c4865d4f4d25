"""Coins are functions of what they are for: the same anywhere, and unrelated otherwise."""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pilotfish_workers.speculative.coins import Coins, Purpose

WORDS = st.integers(0, (1 << 63) - 1)
MASK = (1 << 64) - 1


def philox(counter: list[int], key: list[int]) -> list[int]:
    """Philox4x64-10, written down from the paper's section 4.3 and its table of constants."""
    for number in range(10):
        high_a, low_a = divmod(0xD2E7470EE14C6C93 * counter[0], 1 << 64)
        high_b, low_b = divmod(0xCA5A826395121157 * counter[2], 1 << 64)
        first = (key[0] + number * 0x9E3779B97F4A7C15) & MASK
        second = (key[1] + number * 0xBB67AE8584CAA73B) & MASK
        counter = [high_b ^ counter[1] ^ first, low_b, high_a ^ counter[3] ^ second, low_a]
    return counter


def middle(word: int) -> float:
    """The middle of the part of (0, 1) that a word's upper 52 bits name."""
    return math.ldexp((word >> 12) * 2 + 1, -53)


@given(seed=st.integers(0, MASK), sample=st.integers(0, 1000), position=WORDS, base=WORDS)
def test_a_coin_is_philox_of_seed_sample_position_base_and_purpose(
    seed: int, sample: int, position: int, base: int
) -> None:
    coins = Coins(seed, sample)
    expected = {
        purpose: middle(philox([1, position, at, purpose], [seed, sample])[0])
        for purpose, at in ((Purpose.TOKEN, 0), (Purpose.ACCEPT, base), (Purpose.DRAFT, base))
    }
    assert coins.token(position) == expected[Purpose.TOKEN]
    assert coins.accept(position, base) == expected[Purpose.ACCEPT]
    assert coins.draft(position, base) == expected[Purpose.DRAFT]


@given(seed=st.integers(0, MASK), position=WORDS)
def test_noise_is_the_same_stream_word_by_word(seed: int, position: int) -> None:
    words = [
        word
        for block in range(1, 4)
        for word in philox([block, position, 0, Purpose.TOKEN], [seed, 0])
    ]
    assert Coins(seed).noise(position, 11).tolist() == [middle(word) for word in words[:11]]


def test_coins_do_not_change_between_versions() -> None:
    """A job that another version has begun must go on with the same coins."""
    coins = Coins(42, 1)
    assert coins.token(7) == 0.2906834043483587
    assert coins.accept(7, 5) == 0.2847353389370283
    assert coins.draft(7, 5) == 0.21588917485501613
    assert Coins.of_job("job-1", None, 0).token(0) == 0.912866343607489


@pytest.mark.parametrize("seed", [-1, -(1 << 63), 1 << 64, 1 << 200, (1 << 63) + 1, MASK])
def test_any_whole_number_is_a_seed_modulo_two_to_the_64(seed: int) -> None:
    assert Coins(seed).token(3) == Coins(seed % (1 << 64)).token(3)
    assert Coins(seed).token(3) != Coins(seed + 1).token(3)  # no bit is lost on the way


def test_a_job_with_a_seed_has_its_coins_and_one_without_those_of_its_id() -> None:
    assert (
        Coins.of_job("a", 5, 2).token(1) == Coins(5, 2).token(1) == Coins.of_job("b", 5, 2).token(1)
    )
    own = int.from_bytes(hashlib.sha256(b"a").digest()[:8], "little")
    assert Coins.of_job("a", None, 2).token(1) == Coins(own, 2).token(1)
    assert Coins.of_job("b", None, 2).token(1) != Coins.of_job("a", None, 2).token(1)


def test_what_was_drawn_before_changes_nothing() -> None:
    fresh, used = Coins(9), Coins(9)
    used.noise(4, 1001)
    used.accept(4, 2)
    assert used.token(4) == fresh.token(4)
    assert used.noise(4, 5).tolist() == fresh.noise(4, 5).tolist()
    assert used.noise(5, 1).tolist() == [fresh.token(5)]


@given(position=st.integers(0, 1 << 20), size=st.integers(0, 300), more=st.integers(0, 300))
def test_a_longer_vocabulary_only_adds_to_the_noise(position: int, size: int, more: int) -> None:
    coins = Coins(1)
    assert (coins.noise(position, size + more)[:size] == coins.noise(position, size)).all()


def test_noise_is_a_callers_own() -> None:
    coins = Coins(1)
    coins.noise(0, 8)[:] = 0
    assert coins.noise(0, 8).all()


def test_no_two_purposes_positions_bases_samples_or_seeds_share_a_coin() -> None:
    drawn = []
    for seed, sample in itertools.product(range(4), range(4)):
        coins = Coins(seed, sample)
        drawn += [coins.token(position) for position in range(8)]
        for draw in (coins.accept, coins.draft):
            drawn += [draw(position, base) for base in range(8) for position in range(base, 12)]
    assert len(set(drawn)) == len(drawn)


def test_an_end_of_the_range_is_never_drawn() -> None:
    extremes = [middle(0), middle(MASK)]
    assert 0 < extremes[0] < extremes[1] < 1
    # the same by the module's own two ways, given the extreme words
    for word, expected in ((0, extremes[0]), (MASK, extremes[1])):
        coins = Coins(1)
        coins._philox = Fixed(word)  # type: ignore[assignment]
        assert coins.token(0) == expected
        assert coins.noise(0, 2).tolist() == [expected, expected]


class Fixed:
    """A generator of one word."""

    def __init__(self, word: int) -> None:
        self.word = word
        self.state: object = None

    def random_raw(self, size: int | None = None) -> object:
        return self.word if size is None else np.full(size, self.word, dtype=np.uint64)


ALPHA = 1e-6
NUM_COINS = 10_000


def uniformity(values: np.ndarray) -> float:
    """Bound of Massart on the p-value of Kolmogorov and Smirnov: P(D > d) ≤ 2 exp(−2 n d²)."""
    ordered = np.sort(values)
    steps = np.arange(len(ordered) + 1) / len(ordered)
    distance = max((steps[1:] - ordered).max(), (ordered - steps[:-1]).max())
    return min(1.0, 2 * math.exp(-2 * len(ordered) * distance**2))


def unrelatedness(values: np.ndarray) -> float:
    """The same for sums and differences with a neighbour: modulo 1 they are uniform again."""
    sums, differences = values[1:] + values[:-1], values[1:] - values[:-1]
    return min(uniformity(sums % 1), uniformity(differences % 1))


STREAMS: dict[str, Callable[[int], float]] = {
    "by position": lambda i: Coins(3).token(i),
    "by base": lambda i: Coins(3).accept(i + 2, i),
    "by seed": lambda i: Coins(i).draft(1, 0),
    "by sample": lambda i: Coins(3, i).token(0),
}


@pytest.mark.parametrize("stream", STREAMS)
def test_coins_are_uniform_and_neighbours_unrelated(stream: str) -> None:
    values = np.array([STREAMS[stream](i) for i in range(NUM_COINS)])
    assert uniformity(values) > ALPHA
    assert unrelatedness(values) > ALPHA


def test_noise_is_uniform_over_the_vocabulary_and_neighbours_unrelated() -> None:
    noise = Coins(8).noise(0, NUM_COINS)
    assert uniformity(noise) > ALPHA
    assert unrelatedness(noise) > ALPHA


def test_the_tests_of_uniformity_see_what_they_should() -> None:
    """The planted faults: a density of 0.8 + 0.4 u, equal neighbours, opposite neighbours."""
    noise = Coins(8).noise(0, NUM_COINS)
    assert uniformity((np.sqrt(0.64 + 0.8 * noise) - 0.8) / 0.4) < ALPHA
    equal = noise[: NUM_COINS // 2].repeat(2)
    opposite = np.where(np.arange(NUM_COINS) % 2, 1 - equal, equal)
    for related in (equal, opposite):
        assert uniformity(related) > ALPHA
        assert unrelatedness(related) < ALPHA
