"""Reading a token stream: each token and character once, whatever is repeated."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pilotfish.result import Cursor, Result
from pilotfish_broker.errors import JobCancelled, JobFailed
from pilotfish_broker.logprobs import Alternative, TokenLogprob
from pilotfish_broker.spec import Status
from pilotfish_broker.stream import Entry


def scores(*tokens: int) -> list[TokenLogprob]:
    return [TokenLogprob(Alternative(token, -1.0, b"x"), []) for token in tokens]


def result(sample: int, status: Status, error: str = "", others: tuple[Result, ...] = ()) -> Result:
    return Result(
        job_id=f"j.{sample}",
        status=status,
        model="m",
        text="",
        token_ids=[],
        finish_reason="",
        error=error,
        prompt_tokens=0,
        rounds=0,
        drafted=0,
        accepted=0,
        started_ms=0,
        finished_ms=0,
        sample=sample,
        others=others,
    )


def test_a_repeated_entry_gives_nothing_new() -> None:
    cursor = Cursor()
    entry = Entry(0, [1, 2], 0, "ab")
    assert cursor.fresh(entry).token_ids == [1, 2]
    again = cursor.fresh(entry)
    assert (again.token_ids, again.text) == ([], "")


def test_an_entry_that_overlaps_gives_its_new_part() -> None:
    cursor = Cursor()
    cursor.fresh(Entry(0, [1, 2], 0, "ab"))
    chunk = cursor.fresh(Entry(1, [2, 3, 4], 1, "bcd"))
    assert (chunk.token_ids, chunk.text, chunk.position) == ([3, 4], "cd", 2)


def test_log_probabilities_are_cut_like_the_tokens_they_belong_to() -> None:
    cursor = Cursor()
    prompt = [None, *scores(9)]
    first = cursor.fresh(Entry(0, [1, 2], 0, "ab", None, scores(1, 2), prompt))
    assert (first.logprobs, first.prompt_logprobs) == (scores(1, 2), prompt)
    again = cursor.fresh(Entry(0, [1, 2, 3], 0, "abc", None, scores(1, 2, 3), prompt))
    assert (again.token_ids, again.logprobs) == ([3], scores(3))
    assert again.prompt_logprobs == []


def test_a_result_is_a_success_only_with_all_of_its_samples() -> None:
    good = result(1, Status.SUCCEEDED)
    whole = result(0, Status.SUCCEEDED, others=(good,))
    assert whole.samples == (whole, good)
    assert whole.unsuccessful is None
    assert whole.raise_for_status() is whole
    cancelled, failed = result(1, Status.CANCELLED), result(2, Status.FAILED, "no luck")
    with pytest.raises(JobFailed, match=r"j\.2 failed: no luck"):
        result(0, Status.SUCCEEDED, others=(cancelled, failed)).raise_for_status()
    with pytest.raises(JobCancelled, match=r"j\.1"):
        result(0, Status.SUCCEEDED, others=(cancelled,)).raise_for_status()


def test_text_that_becomes_visible_without_tokens_is_not_lost() -> None:
    cursor = Cursor()
    cursor.fresh(Entry(0, [1], 0, ""))
    chunk = cursor.fresh(Entry(1, [], 0, "é"))
    assert (chunk.token_ids, chunk.text, chunk.position) == ([], "é", 1)


@given(
    st.lists(st.tuples(st.integers(0, 4), st.text(max_size=3)), max_size=12),
    st.data(),
)
def test_any_rewinding_gives_the_same_tokens_and_text(
    rounds: list[tuple[int, str]], data: st.DataObject
) -> None:
    """Redis may lose the last commits, which are then made again in rounds of other sizes."""
    tokens = list(range(sum(count for count, _ in rounds)))
    text = "".join(part for _, part in rounds)
    entries, position, offset = [], 0, 0
    for count, part in rounds:
        entries.append(Entry(position, tokens[position : position + count], offset, part))
        position, offset = position + count, offset + len(part)
    back = data.draw(st.integers(0, len(entries)))
    if entries and back:
        first = entries[-back]
        entries.append(
            Entry(first.position, tokens[first.position :], first.offset, text[first.offset :])
        )
    cursor = Cursor()
    chunks = [cursor.fresh(entry) for entry in entries]
    assert [token for chunk in chunks for token in chunk.token_ids] == tokens
    assert "".join(chunk.text for chunk in chunks) == text
