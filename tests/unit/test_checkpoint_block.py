"""A stored block is the one that was asked for, whole and sound, or a miss with a reason."""

from __future__ import annotations

import hashlib
import re
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pilotfish_checkpoint.address import BlockId, Layout, blocks_of
from pilotfish_checkpoint.block import Block, Miss, Reason, decode, encode
from tests.checkpoint_kit import LAYOUT, MODEL, make_blocks

FIRST, BLOCK = make_blocks(2)
VALUE = encode(BLOCK)
HEADER_AT = 52  # 4 + 4 + 4 + 8 + 32


def reason_of(raw: bytes | None, wanted: BlockId = BLOCK.id) -> Reason | None:
    found = decode(raw, wanted)
    return found.reason if isinstance(found, Miss) else None


def sealed(header: bytes, payload: bytes, *, magic: bytes = b"PFKV", version: int = 1) -> bytes:
    """A value with whatever is in it, and the checksum that belongs to it."""
    head = struct.pack("<4sIIQ", magic, version, len(header), len(payload))
    return head + hashlib.sha256(head + header + payload).digest() + header + payload


def header_of(block: BlockId, **changed: Any) -> bytes:
    parts = {
        "fingerprint": block.fingerprint,
        "dtype": block.layout.dtype,
        "block_size": block.layout.block_size,
        "layers": block.layout.layers,
        "parent": block.parent,
        "tokens": block.tokens,
        **changed,
    }
    packed: bytes = msgpack.packb(list(parts.values()))
    return packed


def test_a_block_comes_back_as_it_was() -> None:
    assert decode(VALUE, BLOCK.id) == BLOCK
    assert bytes(Block(BLOCK.id, memoryview(BLOCK.payload)).payload) == BLOCK.payload


def test_the_value_is_what_the_page_says() -> None:
    assert sealed(header_of(BLOCK.id), bytes(BLOCK.payload)) == VALUE
    assert VALUE[HEADER_AT:].endswith(BLOCK.payload)


def test_the_payload_is_not_copied() -> None:
    found = decode(VALUE, BLOCK.id)
    assert isinstance(found, Block)
    assert isinstance(found.payload, memoryview)
    assert found.payload.obj is VALUE


def test_a_payload_of_several_dimensions_is_stored_in_row_major_order() -> None:
    shaped = memoryview(BLOCK.payload).cast("B", [4, len(BLOCK.payload) // 4])
    assert encode(Block(BLOCK.id, shaped)) == VALUE


@pytest.mark.parametrize("mask", [0x01, 0x10, 0x80, 0xFF])
def test_any_byte_that_changed_makes_it_a_miss(mask: int) -> None:
    for position in range(len(VALUE)):
        damaged = bytearray(VALUE)
        damaged[position] ^= mask
        assert reason_of(bytes(damaged)) is not None, position


def test_damage_is_noticed_by_the_checksum_and_nothing_else() -> None:
    """The planted mistake for the test above: with a checksum that always fits, a byte of the
    payload may change and nobody would see it."""
    damaged = bytearray(VALUE)
    damaged[-1] ^= 1
    assert reason_of(bytes(damaged)) is Reason.DAMAGED
    resealed = sealed(header_of(BLOCK.id), bytes(damaged[-len(BLOCK.payload) :]))
    assert reason_of(resealed) is None


def test_every_shorter_value_is_a_miss() -> None:
    for length in range(len(VALUE)):
        assert reason_of(VALUE[:length]) is Reason.TRUNCATED, length


@given(st.binary(min_size=1, max_size=64))
def test_a_longer_value_is_a_miss(more: bytes) -> None:
    assert reason_of(VALUE + more) is Reason.TRUNCATED
    assert reason_of(more + VALUE) is not None


@given(st.binary(max_size=200))
def test_rubbish_is_a_miss(raw: bytes) -> None:
    assert reason_of(raw) in (Reason.TRUNCATED, Reason.FOREIGN)


@given(st.binary(max_size=200), st.binary(max_size=40))
def test_rubbish_with_a_right_checksum_is_a_miss(header: bytes, payload: bytes) -> None:
    assert reason_of(sealed(header, payload)) is not None


@given(st.integers(0, len(VALUE)), st.integers(0, len(VALUE)), st.binary(max_size=8))
def test_a_value_with_a_part_replaced_is_a_miss(begin: int, end: int, part: bytes) -> None:
    changed = VALUE[:begin] + part + VALUE[end:]
    assert (reason_of(changed) is None) == (changed == VALUE)


def test_nothing_there_is_a_miss() -> None:
    assert reason_of(None) is Reason.ABSENT
    assert reason_of(b"") is Reason.TRUNCATED


LAYERS = ((1, 4, 2), (2, 3, 3))  # the same number of bytes


@pytest.mark.parametrize(
    ("wanted", "reason"),
    [
        (replace(BLOCK.id, fingerprint="b" * 64), Reason.MODEL),
        (replace(BLOCK.id, layout=replace(LAYOUT, dtype="bfloat16")), Reason.DTYPE),
        (replace(BLOCK.id, layout=replace(LAYOUT, layers=LAYERS)), Reason.LAYOUT),
        (replace(BLOCK.id, parent=FIRST.id.parent), Reason.PREFIX),
        (replace(BLOCK.id, tokens=(4, 5, 6, 8)), Reason.TOKENS),
    ],
)
def test_another_block_under_the_same_address_is_a_miss(wanted: BlockId, reason: Reason) -> None:
    """What a collision of digests would be: the value is sound, and of something else."""
    assert reason_of(VALUE, wanted) is reason


def test_another_block_size_is_a_miss() -> None:
    half = replace(LAYOUT, block_size=2)
    wanted = BlockId(MODEL, half, BLOCK.id.parent, BLOCK.id.tokens[:2])
    assert reason_of(VALUE, wanted) is Reason.LAYOUT


@pytest.mark.parametrize("version", [0, 2, (1 << 32) - 1])
def test_another_format_version_is_a_miss(version: int) -> None:
    raw = sealed(header_of(BLOCK.id), bytes(BLOCK.payload), version=version)
    assert reason_of(raw) is Reason.VERSION


def test_what_begins_otherwise_is_no_block() -> None:
    assert reason_of(sealed(header_of(BLOCK.id), bytes(BLOCK.payload), magic=b"GGUF")) is (
        Reason.FOREIGN
    )


@pytest.mark.parametrize("change", [-1, 1])
def test_a_payload_of_another_length_is_a_miss(change: int) -> None:
    payload = (bytes(BLOCK.payload) + b"\0")[: len(BLOCK.payload) + change]
    assert reason_of(sealed(header_of(BLOCK.id), payload)) is Reason.LAYOUT


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"\xc1",
        b"\xdd\xff\xff\xff\xff",
        b"\x91" * 5000,
        msgpack.packb([1, 2, 3]),
        msgpack.packb({}),
        header_of(BLOCK.id) + b"\0",
        b"\xdc\0\x06" + header_of(BLOCK.id)[1:],  # the same list, written longer than need be
    ],
)
def test_a_sound_value_with_an_unreadable_header_is_a_miss(header: bytes) -> None:
    assert reason_of(sealed(header, bytes(BLOCK.payload))) is Reason.HEADER


def test_a_header_of_other_types_is_a_miss() -> None:
    for name in ("fingerprint", "dtype", "block_size", "layers", "parent", "tokens"):
        for other in (None, -1, 1.5, True, "x", b"x", [], {}, [[]]):
            raw = sealed(header_of(BLOCK.id, **{name: other}), bytes(BLOCK.payload))
            assert reason_of(raw) is not None, (name, other)


def test_a_payload_that_does_not_fit_the_layout_is_refused() -> None:
    payload = bytes(BLOCK.payload)
    for wrong in (payload[:-1], payload + b"\0", b""):
        with pytest.raises(ValueError, match="a payload must be"):
            Block(BLOCK.id, wrong)
    with pytest.raises(ValueError, match="a payload must be"):
        Block(BLOCK.id, memoryview(payload * 2)[::2])


def test_the_example_of_the_page_is_what_is_stored() -> None:
    page = (Path(__file__).parents[2] / "docs" / "checkpoints.md").read_text(encoding="utf-8")
    (shown,) = re.findall(r"^```text\n(.*?)^```", page, re.M | re.S)
    (block,) = blocks_of("m", Layout("float16", 2, ((1, 1, 1),)), [7, 300])
    payload = struct.pack("<4e", 1, 2, 3, 4)
    assert bytes.fromhex(shown) == encode(Block(block, payload))
    assert block.address.hex() in page
