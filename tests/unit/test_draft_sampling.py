"""A drafter's sampler: the target's coins, and what it cannot follow left out."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from pilotfish_broker.errors import InvalidRequest
from pilotfish_workers.draft.sampling import draft_sampler
from pilotfish_workers.speculative.sampler import Constraint, Sampler
from tests.worker_kit import FunctionModel, active_of, job_spec

TOKENS = [1, 2, 3, 9]
INFO = FunctionModel().info
NUM_WORDS = 4  # of 32 tokens each, for a vocabulary of 100


class Grammar:
    """A compiled grammar of nothing but fives that says so when an output has another token."""

    def masks(self, output: Sequence[int], drafted: Sequence[int]) -> Any:
        if set(output) - {5}:
            raise RuntimeError("this does not follow the grammar")
        return np.full((len(drafted) + 1, NUM_WORDS), 1 << 5, dtype=np.int32)

    def rewind(self) -> None: ...


class Words:
    """A tokenizer whose words and grammars are what a test says."""

    def __init__(self, compiled: Callable[[], Constraint | None]) -> None:
        self._compiled = compiled

    def word_ids(self, word: str) -> list[tuple[int, ...]]:
        return [tuple(word.encode())]

    def constraint(self, *_: Any, **__: Any) -> Constraint | None:
        return self._compiled()


def built(words: Words | None = None, **params: Any) -> Sampler:
    return draft_sampler(
        job_spec(**params), job="job", tokens=TOKENS, num_prompt=3, info=INFO, words=words
    )


def test_it_holds_the_very_list_of_the_session() -> None:
    sampler = built(temperature=1)
    assert sampler.tokens is TOKENS
    assert (sampler.num_prompt, sampler.position) == (3, 1)


@pytest.mark.parametrize("params", [{}, {"seed": 7}, {"seed": 7, "rule": "block"}])
def test_its_coins_and_its_rule_are_the_targets(params: dict[str, Any]) -> None:
    params = params | {"temperature": 0.7}
    ours, theirs = built(**params), active_of(job_spec(**params), TOKENS, 3).sampler
    assert ours.rule == theirs.rule
    assert ours.coins.token(5) == theirs.coins.token(5)
    assert ours.coins.draft(5, 4) == theirs.coins.draft(5, 4)


def test_jobs_and_samples_have_coins_of_their_own() -> None:
    def first(job: str, sample: int = 0, **params: Any) -> float:
        spec = replace(job_spec(temperature=1, n=2, **params), sample=sample)
        sampler = draft_sampler(spec, job=job, tokens=TOKENS, num_prompt=3, info=INFO, words=None)
        return sampler.coins.draft(0, 0)

    assert first("a") != first("b"), "a job's id is its seed"
    assert first("a", seed=1) == first("b", seed=1) != first("a", seed=2)
    assert first("a", 0, seed=1) != first("a", 1, seed=1)


def test_logprobs_do_not_make_a_greedy_draft_dear() -> None:
    assert built(logprobs=5, prompt_logprobs=2).is_plain


def test_a_grammar_and_bad_words_are_followed_where_there_is_a_tokenizer() -> None:
    sampler = built(Words(Grammar), regex="5*", bad_words=("xy", (4, 5)))
    sampler.tokens = [1, 2, 3, 5]
    assert np.array_equal(sampler.masks([5]), Grammar().masks([5], [5]))
    assert set(sampler.bad_words) == {(120, 121), (4, 5)}


def test_what_the_target_allowed_against_the_grammar_ends_no_session() -> None:
    """As where its end-of-sequence token is another one."""
    sampler = built(Words(Grammar), regex="5*")
    assert sampler.tokens[3:] == [9]
    masks = sampler.masks([5, 6])
    assert masks is not None
    assert (masks.shape, set(masks.ravel().tolist())) == ((3, NUM_WORDS), {-1})
    sampler.tokens = [1, 2, 3, 5]
    sampler.rewind()
    assert np.array_equal(sampler.masks([]), Grammar().masks([5], [])), "after a Sync it is back"


@pytest.mark.parametrize("error", [InvalidRequest("no such rule"), RuntimeError("a panic")])
def test_a_grammar_that_does_not_compile_here_is_left_to_the_target(error: Exception) -> None:
    def compiled() -> Constraint | None:
        raise error

    sampler = built(Words(compiled), regex="a+", temperature=1, bad_words=((4, 5),))
    assert sampler.constraint is None
    assert sampler.bad_words == ((4, 5),), "what needs no tokenizer is followed all the same"


def test_torch_is_not_loaded() -> None:
    script = "import sys, pilotfish_workers.draft.sampling; sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], check=False, timeout=60)
    assert done.returncode == 0
