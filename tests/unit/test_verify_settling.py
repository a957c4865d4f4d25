"""What a sequence feeds into a pass, and what becomes of a round's tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pilotfish_broker.digest import extend
from pilotfish_broker.logprobs import unpack_logprobs
from pilotfish_workers.speculative.accept import (
    BAD_LOGITS,
    NOTHING_ALLOWED,
    Outcome,
    TokenLogprobs,
)
from pilotfish_workers.speculative.law import SparseLaw
from pilotfish_workers.verify.scheduler import Work
from pilotfish_workers.verify.sequence import Sequence as Active
from pilotfish_workers.verify.settling import (
    NEVER_FED,
    NoToken,
    case_of,
    keep_scores,
    rows_of,
    settle,
)
from tests.worker_kit import active_of, job_spec

VOCABULARY = 100
STOP = 42


def letters(text: str) -> list[int]:
    """Tokens whose text this is."""
    return [ord(letter) - 97 for letter in text]


def sequence_of(output: Sequence[int] = (), **params: object) -> Active:
    """One that has computed all but its last token."""
    spec = job_spec(**{"max_tokens": 30, **params})
    sequence = active_of(spec, [1, 2, 3, *output], 3, stop_ids=(STOP,))
    sequence.num_computed = len(sequence.tokens) - 1
    return sequence


def scores(tokens: Sequence[int]) -> list[TokenLogprobs]:
    """Log-probabilities that tell which token they belong to."""
    return [TokenLogprobs(-float(token), [(token, -0.5)]) for token in tokens]


# --- what goes into a pass ----------------------------------------------------------------------


def test_a_case_has_the_laws_of_the_tokens_that_it_judges() -> None:
    sequence = sequence_of(temperature=1.0)
    laws = [SparseLaw.certain(token) for token in (5, 6, 7)]
    sequence.drafted, sequence.laws = [5, 6, 7], laws
    case = case_of(Work(sequence, 1, [5, 6], True))  # no more can matter
    assert case is not None
    assert case.laws == laws[:2]
    assert (case.drafted, case.is_judged, case.scored) == ([5, 6], True, [])
    sequence.laws = None
    case = case_of(Work(sequence, 1, [5, 6], True))
    assert case is not None
    assert case.laws is None


def test_a_token_that_the_target_lacks_is_judged_and_not_fed() -> None:
    sequence = sequence_of(temperature=1.0)
    work = Work(sequence, 1, [5, VOCABULARY], True)
    rows, case = rows_of(work, VOCABULARY), case_of(work)
    assert (rows.tokens, rows.start, rows.num_logits) == ([3, 5, NEVER_FED], 2, 3)
    assert case is not None
    assert list(case.drafted) == [5, VOCABULARY]


def test_a_chunk_of_a_prompt_asks_for_nothing() -> None:
    sequence = sequence_of()
    sequence.num_computed = 0
    work = Work(sequence, 2, [], False)
    assert case_of(work) is None
    rows = rows_of(work, VOCABULARY)
    assert (rows.tokens, rows.start, rows.num_logits) == ([1, 2], 0, 0)


@given(
    length=st.integers(1, 20),
    chunks=st.lists(st.integers(1, 7), max_size=20),
    restart=st.integers(0, 20),
)
def test_a_prompt_in_chunks_is_scored_once_and_whole(
    length: int, chunks: list[int], restart: int
) -> None:
    """Also where the sequence lost its blocks meanwhile and begins again with other chunks."""
    spec = job_spec(range(10, 10 + length), prompt_logprobs=1)
    sequence = active_of(spec, [*range(10, 10 + length)], length)
    for number, chunk in enumerate([*chunks, *[length] * 2]):
        if number == restart:
            sequence.num_computed = 0
        tokens = min(chunk, length - sequence.num_computed)
        is_last = sequence.num_computed + tokens == length
        work = Work(sequence, tokens, [], is_last)
        rows, case = rows_of(work, VOCABULARY), case_of(work)
        num_scored = 0 if case is None else len(case.scored)
        assert rows.num_logits == num_scored + is_last <= len(rows.tokens)
        if case is not None:
            # each row scores the token behind the one that was fed to it
            fed = rows.tokens[len(rows.tokens) - rows.num_logits :]
            assert [token - 1 for token in case.scored] == fed[:num_scored]
            keep_scores(sequence, scores(case.scored))
        sequence.num_computed += tokens
        if is_last:
            break
    assert len(sequence.prompt_logprobs) == length - 1
    tail, _ = settle(sequence, [], Outcome(0, 7))
    found = unpack_logprobs(tail.prompt_logprobs)
    assert [item.chosen.token_id for item in found] == [*range(11, 10 + length)]
    assert [item.chosen.logprob for item in found] == [-float(t) for t in range(11, 10 + length)]
    assert not sequence.wants_prompt_logprobs


# --- what comes out of it -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("params", "text", "tokens", "shown", "reason"),
    [
        pytest.param({}, "abcdef", "abcdef", "abcdef", None, id="it goes on"),
        pytest.param({"stop": ("cd",)}, "abcdef", "abcd", "ab", "stop", id="a stop string"),
        pytest.param(
            {"stop": ("cd",), "include_stop_str_in_output": True},
            *("abcdef", "abcd", "abcd", "stop"),
            id="a stop string that is shown",
        ),
        pytest.param({"stop": ("fg",)}, "abcdef", "abcdef", "abcde", None, id="it may become one"),
        pytest.param(
            {"stop": ("fg",), "max_tokens": 6}, *["abcdef"] * 3, "length", id="it came to nothing"
        ),
        pytest.param({"max_tokens": 3}, "abcdef", "abc", "abc", "length", id="the limit"),
        pytest.param({"stop_token_ids": (3,)}, "abcdef", "abcd", "abc", "stop", id="a stop token"),
        pytest.param(
            {"stop_token_ids": (3,), "stop": ("bc",)},
            *("abcdef", "abc", "a", "stop"),
            id="a stop string before a stop token",
        ),
        pytest.param(
            {"stop_token_ids": (3,), "max_tokens": 3},
            *("abcdef", "abc", "abc", "length"),
            id="a stop token beyond the limit",
        ),
        pytest.param(
            {"stop": ("cd",), "max_tokens": 3},
            *("abcdef", "abc", "abc", "length"),
            id="a stop string beyond the limit",
        ),
    ],
)
def test_text_tokens_and_log_probabilities_end_together(
    params: dict[str, object], text: str, tokens: str, shown: str, reason: str | None
) -> None:
    """All but the last token were drafted and accepted."""
    sequence = sequence_of(logprobs=1, **params)
    *drafted, last = letters(text)
    digest = sequence.digest
    outcome = Outcome(len(drafted), last, logprobs=scores(letters(text)))
    tail, why = settle(sequence, drafted, outcome)
    assert (tail.tokens, tail.text, why) == (letters(tokens), shown, reason)
    assert [item.chosen.token_id for item in unpack_logprobs(tail.logprobs)] == tail.tokens
    assert [item.chosen.logprob for item in unpack_logprobs(tail.logprobs)] == [
        -float(token) for token in tail.tokens
    ]
    assert sequence.tokens == [1, 2, 3, *tail.tokens]
    assert sequence.digest == extend(digest, tail.tokens)
    if reason == "stop":  # what was drafted behind a stop counts as nothing
        assert tail.drafted == tail.accepted == min(len(drafted), len(tokens))
    else:
        assert (tail.drafted, tail.accepted) == (len(drafted), len(drafted))


def test_a_round_is_appended_and_its_proposal_forgotten() -> None:
    sequence = sequence_of(output=[9], temperature=1.0)
    sequence.drafted, sequence.laws = [5, 6], [SparseLaw.certain(5), SparseLaw.certain(6)]
    sequence.await_until = math.inf
    tail, reason = settle(sequence, [5, 6], Outcome(1, 8))
    assert (tail.expected, tail.tokens, reason) == (1, [5, 8], None)
    assert (tail.drafted, tail.accepted) == (2, 1)
    assert sequence.tokens == [1, 2, 3, 9, 5, 8]
    assert sequence.num_computed == 5, "the new token has no KV yet"
    assert (sequence.drafted, sequence.laws, sequence.await_until) == ([], None, None)
    assert (sequence.rounds, sequence.num_drafted, sequence.num_accepted) == (1, 2, 1)


@pytest.mark.parametrize(
    ("token", "message"),
    [(BAD_LOGITS, "NaN or infinity"), (NOTHING_ALLOWED, "no token at output position 3")],
)
def test_where_no_token_can_follow_the_job_cannot_go_on(token: int, message: str) -> None:
    sequence = sequence_of(output=[9])
    with pytest.raises(NoToken, match=message):
        settle(sequence, [5, 6, 7], Outcome(2, token))
    assert sequence.tokens == [1, 2, 3, 9]


@pytest.mark.parametrize("token", [BAD_LOGITS, NOTHING_ALLOWED])
@pytest.mark.parametrize(
    ("params", "tokens", "reason"),
    [
        ({"stop_token_ids": (6,)}, [5, 6], "stop"),
        ({"stop": ("fg",)}, [5, 6], "stop"),
        ({"max_tokens": 2}, [5, 6], "length"),
    ],
)
def test_where_the_output_ended_before_nothing_has_to_follow(
    params: dict[str, object], tokens: list[int], reason: str, token: int
) -> None:
    sequence = sequence_of(**params)
    tail, why = settle(sequence, [5, 6], Outcome(2, token))
    assert (tail.tokens, why) == (tokens, reason)


def test_log_probabilities_are_stored_for_those_alone_who_want_them() -> None:
    assert settle(sequence_of(), [], Outcome(0, 7))[0].logprobs == b""
    (item,) = unpack_logprobs(
        settle(sequence_of(logprobs=1), [], Outcome(0, 7, scores([7])))[0].logprobs
    )
    assert (item.chosen.token_id, item.chosen.logprob, item.chosen.text) == (7, -7.0, b"h")
    assert [(top.token_id, np.isclose(top.logprob, -0.5)) for top in item.top] == [(7, True)]
