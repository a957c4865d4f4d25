"""A history counts what a plain count of the whole sequence would, however it grew."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pilotfish_workers.speculative.history import History

TOKENS = st.integers(0, 6)  # few, so that they repeat


def counted(history: History, drafted: list[int]) -> dict[int, int]:
    ids, counts = history.counts(drafted)
    assert ids.dtype == counts.dtype == np.int64
    assert len(set(ids.tolist())) == len(ids) == len(counts)
    return dict(zip(ids.tolist(), counts.tolist(), strict=True))


def expected(prompt: list[int], output: list[int], drafted: list[int]) -> dict[int, int]:
    seen = Counter(output + drafted)
    return {token: seen[token] for token in {*prompt, *output, *drafted}}


@given(
    prompt=st.lists(TOKENS, max_size=6),
    rounds=st.lists(
        st.tuples(st.lists(TOKENS, max_size=5), st.lists(TOKENS, max_size=4)), max_size=6
    ),
)
def test_counts_equal_those_of_the_whole_sequence_in_every_round(
    prompt: list[int], rounds: list[tuple[list[int], list[int]]]
) -> None:
    tokens = list(prompt)
    history = History(tokens, len(prompt))
    for drafted, committed in rounds:
        for size in range(len(drafted) + 1):
            wanted = expected(prompt, tokens[len(prompt) :], drafted[:size])
            assert counted(history, drafted[:size]) == wanted
        tokens += committed
    assert counted(history, []) == expected(prompt, tokens[len(prompt) :], [])


def test_a_prompts_token_counts_only_once_it_stands_in_the_output() -> None:
    tokens = [5, 5, 7]
    history = History(tokens, 3)
    assert counted(history, []) == {5: 0, 7: 0}
    assert counted(history, [7]) == {5: 0, 7: 1}
    tokens.append(5)
    assert counted(history, []) == {5: 1, 7: 0}


def test_drafted_tokens_are_forgotten_after_the_call() -> None:
    history = History([1], 1)
    assert counted(history, [2, 2]) == {1: 0, 2: 2}
    assert counted(history, [3]) == {1: 0, 3: 1}


def test_what_a_call_returned_is_the_callers_own() -> None:
    history = History([1, 2], 1)
    ids, counts = history.counts([])
    ids += 10
    counts += 10
    assert counted(history, []) == {1: 0, 2: 1}


@pytest.mark.parametrize("size", [63, 64, 65, 128, 129, 1000])
def test_any_number_of_different_tokens_is_counted(size: int) -> None:
    tokens = [*range(size), *range(0, size, 2)]
    history = History(tokens, 10)
    assert counted(history, [size + 1]) == expected(tokens[:10], tokens[10:], [size + 1])


def test_a_token_that_no_vocabulary_has_is_counted_like_any_other() -> None:
    assert counted(History([3], 1), [4, 1 << 40]) == {3: 0, 4: 1, 1 << 40: 1}


def test_after_a_rewind_a_changed_list_is_counted_anew() -> None:
    tokens = [1, 2, 3, 3]
    history = History(tokens, 1)
    history.counts([])
    tokens[1:] = [4]
    history.rewind()
    assert counted(history, []) == {1: 0, 4: 1}


def test_only_new_tokens_are_looked_at() -> None:
    class Watched(list[int]):
        num_reads = 0

        def __getitem__(self, index: object) -> object:  # type: ignore[override]
            Watched.num_reads += 1
            return super().__getitem__(index)  # type: ignore[index]

    tokens = Watched(range(1000))
    history = History(tokens, 500)
    history.counts([])
    tokens.append(1)
    Watched.num_reads = 0
    history.counts([2])
    assert Watched.num_reads == 1


def test_it_imports_no_torch() -> None:
    code = "import sys, pilotfish_workers.speculative.history; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
