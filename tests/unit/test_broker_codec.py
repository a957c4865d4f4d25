"""Frames survive the wire, and no bytes whatever do more harm than a DecodeError."""

from __future__ import annotations

import struct
from dataclasses import fields
from typing import Any, get_args

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pilotfish_broker.codec import (
    FORMAT_VERSION,
    MAX_ENTRY_BYTES,
    MAX_INTEGER,
    MAX_LAW_BYTES,
    MAX_TOKEN,
    TAGS,
    decode_all,
    encode,
    encode_all,
)
from pilotfish_broker.errors import DecodeError
from pilotfish_broker.messages import Close, Frame, Open, Proposal, Sync, Verdict


def law(*pairs: tuple[int, float]) -> bytes:
    """A sparse law in bytes."""
    ids, weights = zip(*pairs, strict=True)
    return struct.pack(f"<{len(ids)}I{len(ids)}f", *ids, *weights)


counts = st.integers(0, MAX_INTEGER)
digests = st.integers(0, (1 << 61) - 1)
token_ids = st.integers(0, MAX_TOKEN)
ids = st.lists(token_ids, max_size=20)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)
laws = st.integers(1, 4).flatmap(lambda m: st.binary(min_size=8 * m, max_size=8 * m))
proposals = ids.flatmap(
    lambda tokens: st.builds(
        Proposal,
        counts,
        counts,
        digests,
        st.just(tokens),
        st.none() | st.lists(laws, min_size=len(tokens), max_size=len(tokens)),
    )
)
frames = st.one_of(
    st.builds(Open, texts, counts, texts, counts),
    proposals,
    st.builds(Verdict, counts, counts, counts, token_ids, counts),
    st.builds(Sync, texts, counts, counts, counts, ids, counts),
    st.builds(Close, texts, counts, counts, texts),
)
EXAMPLES: list[Frame] = [
    Open("job", 1, "pf:inbox:d", 0),
    Proposal(1, 2, (1 << 61) - 2, [3, 4], [law((3, 0.5), (9, 0.25)), law((4, 1.0))]),
    Proposal(1, 2, 0, [3]),
    Proposal(1, 2, 0, [], []),
    Verdict(1, 2, 1, 5, 4),
    Sync("job", 1, 2, 3, [4, 5], 6),
    Close("job", 1, 2, "done"),
]


def packed(parts: Any) -> bytes:
    raw: bytes = msgpack.packb(parts)
    return raw


def refused(raw: bytes) -> DecodeError:
    with pytest.raises(DecodeError) as caught:
        decode_all(raw)
    assert caught.value.raw is raw
    assert len(str(caught.value)) < 200
    return caught.value


@given(st.lists(frames, max_size=5))
def test_frames_of_one_entry_come_back_as_they_were_sent(sent: list[Frame]) -> None:
    assert decode_all(encode_all(sent)) == sent
    assert decode_all(b"".join(encode(frame) for frame in sent)) == sent


def test_every_kind_of_frame_has_a_tag_and_an_example() -> None:
    assert {type(frame) for frame in EXAMPLES} == set(TAGS.values())
    assert set(TAGS.values()) == set(get_args(Frame))


@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_frames_or_a_decode_error(raw: bytes) -> None:
    try:
        decoded = decode_all(raw)
    except DecodeError:
        refused(raw)
    else:
        assert all(type(frame) in TAGS.values() for frame in decoded)


@given(st.lists(frames, min_size=1, max_size=3), st.data())
def test_an_entry_with_some_bytes_changed_is_frames_or_a_decode_error(
    sent: list[Frame], data: st.DataObject
) -> None:
    raw = bytearray(encode_all(sent))
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    try:
        decoded = decode_all(bytes(raw))
    except DecodeError:
        return
    assert encode_all(decoded), "a changed entry must not decode to nothing"


@pytest.mark.parametrize("frame", EXAMPLES, ids=repr)
def test_a_truncated_frame_is_refused_at_every_length(frame: Frame) -> None:
    raw = encode(frame)
    for length in range(1, len(raw)):
        refused(raw[:length])


@pytest.mark.parametrize("frame", EXAMPLES, ids=repr)
def test_a_frame_with_rubbish_behind_it_is_refused(frame: Frame) -> None:
    for rubbish in (b"\x00", b"\xc1", b"\x92", packed("x")):
        refused(encode(frame) + rubbish)


json_like = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.floats()
    | st.text("ab"),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text("ab"), inner, max_size=3),
    max_leaves=12,
)


@given(st.sampled_from(EXAMPLES), st.data())
def test_a_field_of_another_type_is_refused_or_was_of_its_type(
    frame: Frame, data: st.DataObject
) -> None:
    parts = msgpack.unpackb(encode(frame))
    place = data.draw(st.integers(2, len(parts) - 1))
    parts[place] = data.draw(json_like)
    try:
        (decoded,) = decode_all(packed(parts))
    except DecodeError:
        return
    name = fields(frame)[place - 2].name
    value, was = getattr(decoded, name), getattr(frame, name)
    assert type(value) is type(was) or name == "q"


@pytest.mark.parametrize("version", [0, 1, 3, -1, True, 2.0, "2", None, [1], [[[1]]] * 1000])
def test_another_format_version_is_refused(version: Any) -> None:
    assert "version" in str(refused(packed([version, 5, "job", 1, 2, "done"])))


@pytest.mark.parametrize("tag", [0, 6, -1, True, 1.0, "Open", None, [1], {"a": 1}, 1 << 63])
def test_an_unknown_tag_is_refused(tag: Any) -> None:
    assert "tag" in str(refused(packed([FORMAT_VERSION, tag, "job", 1, "inbox", 0])))


@pytest.mark.parametrize("frame", EXAMPLES, ids=repr)
def test_a_field_too_many_or_too_few_is_refused(frame: Frame) -> None:
    parts = msgpack.unpackb(encode(frame))
    refused(packed([*parts, 0]))
    refused(packed(parts[:-1]))


@pytest.mark.parametrize(
    "frame",
    [
        Verdict(-1, 0, 0, 0, 0),
        Verdict(True, 0, 0, 0, 0),
        Verdict(0, 0, 0, MAX_TOKEN + 1, 0),
        Verdict(0, MAX_INTEGER + 1, 0, 0, 0),
        Proposal(0, 0, 0, [-1]),
        Proposal(0, 0, 0, [MAX_TOKEN + 1]),
        Proposal(0, 0, 0, [True]),
        Proposal(0, 0, 0, [1], [1]),  # type: ignore[list-item]
        Proposal(0, 0, 0, [1], [[[1, 0.5]]]),  # type: ignore[list-item]
        Proposal(0, 0, 0, [1], ["12345678"]),  # type: ignore[list-item]
        Proposal(0, 0, 0, [1], [None]),  # type: ignore[list-item]
        Proposal(0, 0, 0, [1], b"12345678"),  # type: ignore[arg-type]
        Proposal(0, 0, 0, [1], [b""]),
        Proposal(0, 0, 0, [1], [b"1234567"]),
        Proposal(0, 0, 0, [1], [b"123456789"]),
        Proposal(0, 0, 0, [1], [bytes(MAX_LAW_BYTES + 8)]),
        Proposal(0, 0, 0, [1], []),
        Proposal(0, 0, 0, [], [bytes(8)]),
        Proposal(0, 0, 0, [1, 2], [bytes(8)]),
        Sync(b"job", 1, 0, 0, [], 0),  # type: ignore[arg-type]
        Close("job", 1.0, 0, ""),  # type: ignore[arg-type]
    ],
    ids=repr,
)
def test_a_value_that_would_hurt_its_reader_is_refused(frame: Frame) -> None:
    refused(encode(frame))


@pytest.mark.parametrize("depth", [3, 100, 511, 512, 2000, 100_000])
@pytest.mark.parametrize("head", [b"\x91", b"\x81\xa1a", b"\xdd\x00\xff\xff\xff", b"\xdc\xff\xff"])
def test_deep_nesting_and_boastful_lengths_are_refused(head: bytes, depth: int) -> None:
    refused(head * depth)
    refused(head * depth + b"\x00")


@pytest.mark.parametrize(
    "part", [msgpack.Timestamp(1, 2), msgpack.ExtType(5, b"x"), {"a": 1}, b"raw", "text", 7, None]
)
def test_what_is_no_list_is_no_frame(part: Any) -> None:
    refused(packed(part))
    refused(packed([FORMAT_VERSION, 5, "job", 1, 2, part]) if part != "text" else packed([]))


def test_an_entry_too_large_is_refused_unread() -> None:
    assert "too large" in str(refused(b"\x00" * (MAX_ENTRY_BYTES + 1)))


def test_a_long_sync_fits() -> None:
    frame = Sync("job", 1, 2, 0, list(range(200_000)), 4)
    assert decode_all(encode(frame)) == [frame]


def test_the_widest_law_fits() -> None:
    frame = Proposal(1, 2, 3, [5] * 16, [bytes(MAX_LAW_BYTES)] * 16)
    assert decode_all(encode(frame)) == [frame]


def test_text_that_is_no_utf8_is_refused() -> None:
    refused(encode(Close("job", 1, 2, "done")).replace(b"done", b"do\xffe"))
