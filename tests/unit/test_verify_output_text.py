"""Visible text: stop strings cut it at once, and no more than they need is held back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pilotfish_workers.model.detokenizer import ByteDetokenizer, WindowDetokenizer
from pilotfish_workers.verify.output_text import OutputText, Pushed

# A byte-level vocabulary: overlapping pieces, a euro sign cut into its bytes, an empty token.
BYTES = [b"a", b"b", b"ab", b"ba", b"aab", b"bca", b"c", b"", "é".encode(), b"\xe2", b"\x82\xac"]
# One with byte fallback, whose decoder makes a run of bytes text as a whole.
PIECES = ["a", "b", "ab", "cab", "", "<61>", "<62>", "<0A>", "<E2>", "<82>", "<AC>", "<FF>"]


def byte_text(ids: Sequence[int]) -> str:
    return b"".join(BYTES[token] for token in ids).decode(errors="replace")


def piece_text(ids: Iterable[int]) -> str:
    """What a decoder with byte fallback makes of `ids`: an invalid run is replaced as a whole."""
    text, run = "", b""
    for piece in [*(PIECES[token] for token in ids if PIECES[token]), "end"]:
        if piece.startswith("<"):
            run += bytes.fromhex(piece[1:-1])
            continue
        try:
            text += run.decode()
        except UnicodeDecodeError:
            text += "\ufffd" * len(run)
        text, run = text + piece, b""
    return text.removesuffix("end")


def bytewise(**options: object) -> OutputText:
    return OutputText(ByteDetokenizer(BYTES.__getitem__), **options)  # type: ignore[arg-type]


def piecewise(**options: object) -> OutputText:
    detokenizer = WindowDetokenizer(
        piece_text, lambda token: PIECES[token] == "", lambda token: PIECES[token][0] == "<"
    )
    return OutputText(detokenizer, **options)  # type: ignore[arg-type]


def first_end(text: str, stop: tuple[str, ...], begin: int) -> tuple[int, int] | None:
    """Where the first stop string is complete behind `begin` characters, and its length."""
    for end in range(begin + 1, len(text) + 1):
        lengths = [len(string) for string in stop if text[:end].endswith(string)]
        if lengths:
            return end, max(lengths)
    return None


def expected(
    decode: Callable[[Sequence[int]], str],
    ids: Sequence[int],
    stop: tuple[str, ...],
    include: bool,
    min_tokens: int,
) -> tuple[int, str, bool]:
    """Plain decoding: decode the whole output after each token and look at it."""
    seen = 0  # characters of tokens before `min_tokens`
    for count in range(1, len(ids) + 1):
        text = decode(ids[:count])
        if text.endswith("\ufffd"):  # half a character, or bytes that never become one
            continue
        if count < min_tokens:
            seen = len(text)
            continue
        if (end := first_end(text, stop, seen)) is not None:
            return count, text[: end[0] if include else end[0] - end[1]], True
        seen = len(text)
    return len(ids), decode(ids), False


def in_rounds(
    fresh: Callable[[], OutputText], ids: Sequence[int], sizes: Sequence[int], crashes: int = 0
) -> tuple[int, str, bool]:
    """Push `ids` in rounds; after the round whose bit is set in `crashes`, begin anew there."""
    output, shown, done = fresh(), "", 0
    for number, size in enumerate([*sizes, *[1] * len(ids)]):
        pushed = output.push(ids[done : done + size])
        shown += pushed.text
        if pushed.is_stopped:
            assert output.flush() == ""
            return done + pushed.num_tokens, shown, True
        done += pushed.num_tokens
        if done == len(ids):
            break
        if crashes >> number & 1:
            output = fresh()
            output.resume(ids[:done])
    return done, shown + output.flush(), False


STOPS = st.lists(st.text("abcé€", min_size=1, max_size=4), min_size=1, max_size=4).map(tuple)
SIZES = st.lists(st.integers(1, 6), max_size=12)


@given(
    ids=st.lists(st.integers(0, len(BYTES) - 1), min_size=1, max_size=25),
    stop=STOPS,
    include=st.booleans(),
    min_tokens=st.integers(0, 8),
    sizes=SIZES,
    crashes=st.integers(0, 2**12),
)
@settings(deadline=None, max_examples=250)
def test_any_rounds_and_crashes_give_what_a_look_after_each_token_gives(
    ids: list[int],
    stop: tuple[str, ...],
    include: bool,
    min_tokens: int,
    sizes: list[int],
    crashes: int,
) -> None:
    def fresh() -> OutputText:
        return bytewise(stop=stop, include_stop=include, min_tokens=min_tokens)

    wanted = expected(byte_text, ids, stop, include, min_tokens)
    assert in_rounds(fresh, ids, sizes) == wanted
    assert in_rounds(fresh, ids, sizes, crashes) == wanted


@given(
    ids=st.lists(st.integers(0, len(PIECES) - 1), min_size=1, max_size=25),
    stop=st.lists(st.text("abc\n€", min_size=1, max_size=3), min_size=1, max_size=3).map(tuple),
    include=st.booleans(),
    min_tokens=st.integers(0, 8),
    sizes=SIZES,
    crashes=st.integers(0, 2**12),
)
@settings(deadline=None, max_examples=250)
def test_byte_fallback_stops_as_promptly_although_its_text_comes_late(
    ids: list[int],
    stop: tuple[str, ...],
    include: bool,
    min_tokens: int,
    sizes: list[int],
    crashes: int,
) -> None:
    def fresh() -> OutputText:
        return piecewise(stop=stop, include_stop=include, min_tokens=min_tokens)

    wanted = expected(piece_text, ids, stop, include, min_tokens)
    assert in_rounds(fresh, ids, sizes) == wanted
    assert in_rounds(fresh, ids, sizes, crashes) == wanted


@given(
    ids=st.lists(st.integers(0, len(BYTES) - 1), min_size=1, max_size=25), stop=STOPS, sizes=SIZES
)
@settings(deadline=None, max_examples=150)
def test_no_more_is_held_back_than_may_become_a_stop_string(
    ids: list[int], stop: tuple[str, ...], sizes: list[int]
) -> None:
    output, plain = bytewise(stop=stop), ByteDetokenizer(BYTES.__getitem__)
    shown, text, done = "", "", 0
    for size in [*sizes, *[1] * len(ids)]:
        pushed = output.push(ids[done : done + size])
        shown += pushed.text
        text += plain.push(ids[done : done + size])
        done += pushed.num_tokens
        if pushed.is_stopped or done == len(ids):
            break
        beginnings = {string[:size] for string in stop for size in range(1, len(string))}
        held = max((len(b) for b in beginnings if text.endswith(b)), default=0)
        assert shown == text[: len(text) - held]


@given(ids=st.lists(st.integers(0, len(BYTES) - 1), max_size=25), sizes=SIZES)
def test_without_stop_strings_the_text_is_the_detokenizers(
    ids: list[int], sizes: list[int]
) -> None:
    output, plain = bytewise(), ByteDetokenizer(BYTES.__getitem__)
    done = 0
    for size in [*sizes, len(ids)]:
        part = ids[done : done + size]
        done += len(part)
        assert output.push(part) == Pushed(len(part), plain.push(part), False)
    assert output.flush() == plain.flush()


@pytest.mark.parametrize(
    ("stop", "include", "shown"),
    [
        pytest.param(("bca",), False, "aab", id="before the stop string"),
        pytest.param(("bca",), True, "aabbca", id="after it"),
        pytest.param(("ca", "bca"), False, "aab", id="the longest of those complete together"),
        pytest.param(("b", "bca"), False, "aa", id="the first to be complete, though a prefix"),
        pytest.param(("aabb!", "bc"), False, "aab", id="behind a beginning that came to nothing"),
        pytest.param(("caab", "a"), True, "a", id="the first character of all"),
    ],
)
def test_a_stop_string_ends_a_long_accepted_run(
    stop: tuple[str, ...], include: bool, shown: str
) -> None:
    run = [4, 5, 4, 4, 4, 4]  # aab bca aab …
    pushed = bytewise(stop=stop, include_stop=include).push(run)
    assert (pushed.text, pushed.is_stopped) == (shown, True)
    assert pushed.num_tokens == (1 if shown in ("aa", "a") else 2)


def test_a_stop_string_over_half_characters_of_two_rounds() -> None:
    output = bytewise(stop=("€é",))
    assert output.push([0, 9]) == Pushed(2, "a", False)
    assert output.push([10]) == Pushed(1, "", False)
    assert output.push([8, 0, 0]) == Pushed(1, "", True)
    assert output.flush() == ""


def test_what_never_became_a_stop_string_is_shown_at_the_end() -> None:
    output = bytewise(stop=("abca", "ac"))
    assert output.push([1, 2]).text == "b"
    assert output.flush() == "ab"


def test_a_flush_that_completes_a_stop_string_is_cut_too() -> None:
    output = bytewise(stop=("a\ufffd",))
    assert output.push([1, 0, 9]) == Pushed(3, "b", False)
    assert output.flush() == ""


def test_a_newline_of_byte_fallback_stops_at_its_own_token() -> None:
    output = piecewise(stop=("\n",))
    assert output.push([0, PIECES.index("<0A>"), 1, 1]) == Pushed(2, "a", True)


def test_a_stop_string_complete_too_early_is_passed_over_and_the_next_one_counts() -> None:
    output = bytewise(stop=("b",), min_tokens=3)
    assert output.push([2, 2]) == Pushed(2, "abab", False)
    assert output.push([0, 1, 1]) == Pushed(2, "a", True)
    early = bytewise(stop=("bb",), min_tokens=3)
    assert early.push([1, 1, 1, 0]) == Pushed(3, "b", True), "it may begin before the third token"


def test_what_was_passed_over_in_a_run_of_bytes_stays_so_after_a_crash() -> None:
    output = piecewise(stop=("\n",), min_tokens=2)
    output.resume([PIECES.index("<0A>")])
    assert output.push([0]) == Pushed(1, "\na", False)
    assert output.push([PIECES.index("<0A>")]) == Pushed(1, "", True)


def test_the_prompt_is_shown_first_and_once_and_is_not_searched() -> None:
    output = bytewise(stop=("abc",), prefix="abcab")
    assert output.push([6]) == Pushed(1, "abcabc", False)
    assert output.push([0]).text == ""
    resumed = bytewise(stop=("abc",), prefix="abcab")
    resumed.resume([6, 0])
    assert resumed.push([6]) == Pushed(1, "ac", False)
    fresh = bytewise(prefix="abcab")
    fresh.resume([])
    assert fresh.push([]) == Pushed(0, "abcab", False)
    assert bytewise(prefix="abcab").flush() == "abcab"
