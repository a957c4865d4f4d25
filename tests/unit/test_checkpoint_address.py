"""Addresses of KV blocks: equal exactly where the KV is."""

from __future__ import annotations

import hashlib
import os
import struct
import subprocess
import sys
from dataclasses import replace

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pilotfish_checkpoint.address import (
    BlockId,
    Layout,
    block_digest,
    blocks_of,
    digests_of,
    root_digest,
)
from tests.checkpoint_kit import LAYOUT, MODEL

TOKENS = list(range(100, 111))  # two full blocks of four, and three tokens more
# Recorded once. Another value means that no store of the day before is of use.
RECORDED = [
    "b96de5b824ab8a3b3393d3f3104a664107b78358b6ba478c3399148cc3eb6ab3",
    "65d71276fd157193296e1b6d6ceb9ea48d0b2ec04450e7011dd6ab265929912b",
]
few_tokens = st.lists(st.integers(0, 3), max_size=24)


def test_the_chain_is_what_the_page_says() -> None:
    packed = msgpack.packb([1, MODEL, "float32", 4, [[2, 3, 3], [1, 4, 2]]])
    digest = hashlib.sha256(b"pilotfish-kv-root\0" + packed).digest()
    expected = []
    for begin in (0, 4):
        tokens = struct.pack("<4I", *TOKENS[begin : begin + 4])
        digest = hashlib.sha256(b"pilotfish-kv-block\0" + digest + tokens).digest()
        expected.append(digest)
    assert digests_of(MODEL, LAYOUT, TOKENS) == expected


def test_addresses_are_those_of_earlier_releases() -> None:
    assert [digest.hex() for digest in digests_of(MODEL, LAYOUT, TOKENS)] == RECORDED


def test_addresses_are_the_same_in_every_process() -> None:
    code = (
        "from tests.checkpoint_kit import LAYOUT, MODEL\n"
        "from pilotfish_checkpoint.address import digests_of\n"
        f"print([digest.hex() for digest in digests_of(MODEL, LAYOUT, {TOKENS})], hash('x'))"
    )
    outputs = [
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.rsplit(" ", 1)
        for seed in ("1", "2")
    ]
    assert outputs[0][1] != outputs[1][1]  # the seeds do change what Python's own hash gives
    assert outputs[0][0] == outputs[1][0] == str(RECORDED)


def test_only_full_blocks_have_an_address() -> None:
    lengths = [len(digests_of(MODEL, LAYOUT, TOKENS[:number])) for number in range(10)]
    assert lengths == [0, 0, 0, 0, 1, 1, 1, 1, 2, 2]


@given(few_tokens, few_tokens)
def test_two_prefixes_share_exactly_the_blocks_before_their_first_difference(
    one: list[int], other: list[int]
) -> None:
    common = 0
    while common < min(len(one), len(other)) and one[common] == other[common]:
        common += 1
    pairs = zip(digests_of(MODEL, LAYOUT, one), digests_of(MODEL, LAYOUT, other), strict=False)
    assert [a == b for a, b in pairs] == [
        index < common // 4 for index in range(min(len(one), len(other)) // 4)
    ]


def test_a_token_changes_its_block_and_all_that_follow() -> None:
    tokens = list(range(12))
    changed = [*tokens[:5], 99, *tokens[6:]]
    before, after = (digests_of(MODEL, LAYOUT, ids) for ids in (tokens, changed))
    assert before[0] == after[0]
    assert not set(before[1:]) & set(after[1:])


@pytest.mark.parametrize(
    "layout",
    [
        replace(LAYOUT, dtype="bfloat16"),
        replace(LAYOUT, layers=((2, 3, 3), (1, 2, 4))),
        replace(LAYOUT, layers=((1, 4, 2), (2, 3, 3))),
        replace(LAYOUT, layers=((2, 3, 3),)),
    ],
    ids=["dtype", "dims", "order", "layers"],
)
def test_another_layout_shares_no_address(layout: Layout) -> None:
    assert not set(digests_of(MODEL, LAYOUT, TOKENS)) & set(digests_of(MODEL, layout, TOKENS))


def test_another_block_size_shares_no_address() -> None:
    smaller = replace(LAYOUT, block_size=2)
    assert root_digest(MODEL, LAYOUT) != root_digest(MODEL, smaller)
    assert not set(digests_of(MODEL, LAYOUT, TOKENS)) & set(digests_of(MODEL, smaller, TOKENS))


def test_another_model_or_format_shares_no_address(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = set(digests_of(MODEL, LAYOUT, TOKENS))
    assert not ours & set(digests_of("b" * 64, LAYOUT, TOKENS))
    monkeypatch.setattr("pilotfish_checkpoint.address.FORMAT_VERSION", 2)
    assert not ours & set(digests_of(MODEL, LAYOUT, TOKENS))


def test_a_block_knows_its_parent_and_its_tokens() -> None:
    first, second = blocks_of(MODEL, LAYOUT, TOKENS)
    assert first.parent == root_digest(MODEL, LAYOUT)
    assert second.parent == first.address
    assert second.tokens == tuple(TOKENS[4:8])
    assert second.address == block_digest(first.address, TOKENS[4:8])


def test_a_chain_may_be_continued_block_by_block() -> None:
    first, second = blocks_of(MODEL, LAYOUT, TOKENS)
    assert BlockId(MODEL, LAYOUT, first.address, tuple(TOKENS[4:8])) == second


def test_token_ids_may_be_of_any_integer_type() -> None:
    numpy = pytest.importorskip("numpy")
    blocks = blocks_of(MODEL, LAYOUT, numpy.array(TOKENS))
    assert blocks == blocks_of(MODEL, LAYOUT, TOKENS)
    assert {type(token) for block in blocks for token in block.tokens} == {int}


@pytest.mark.parametrize("token", [-1, 1 << 31, 1 << 70])
def test_what_is_no_token_id_is_refused(token: int) -> None:
    with pytest.raises(ValueError, match="token ids lie between"):
        digests_of(MODEL, LAYOUT, [0, 1, 2, token])


def test_a_block_of_another_size_is_refused() -> None:
    with pytest.raises(ValueError, match="3 tokens in a block of 4"):
        BlockId(MODEL, LAYOUT, bytes(32), (1, 2, 3))
    with pytest.raises(ValueError, match="a digest has 32 bytes"):
        BlockId(MODEL, LAYOUT, bytes(16), (1, 2, 3, 4))


def test_payload_bytes_count_every_number_once() -> None:
    assert LAYOUT.payload_bytes == 4 * 4 * (2 * 6 + 6)
    assert replace(LAYOUT, dtype="bfloat16").payload_bytes == 2 * 4 * (2 * 6 + 6)


@pytest.mark.parametrize(
    ("dtype", "block_size", "layers"),
    [
        ("int8", 4, ((1, 1, 1),)),
        ("float32", 0, ((1, 1, 1),)),
        ("float32", 4, ()),
        ("float32", 4, ((1, 0, 1),)),
    ],
)
def test_a_layout_that_cannot_be_is_refused(
    dtype: str, block_size: int, layers: tuple[tuple[int, int, int], ...]
) -> None:
    with pytest.raises(ValueError, match=r"dtype|a layout needs"):
        Layout(dtype, block_size, layers)
