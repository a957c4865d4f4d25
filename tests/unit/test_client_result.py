"""Reading a token stream: each token and character once, whatever is repeated."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pilotfish.result import Cursor
from pilotfish_broker.stream import Entry


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
