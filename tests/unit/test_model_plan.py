"""How a packed pass is laid out."""

from dataclasses import replace

import pytest
import torch

from pilotfish_workers.model import paged_attention, pass_plan
from pilotfish_workers.model.errors import ModelError
from pilotfish_workers.model.interface import Rows
from pilotfish_workers.model.kv_pool import KvPool, KvShape
from pilotfish_workers.model.paged_attention import LayerCall, PagedPass
from pilotfish_workers.model.pass_plan import build_plan

CPU = torch.device("cpu")
PLAIN = LayerCall(0)


def decoding_rows(count: int) -> list[Rows]:
    """`count` sequences of up to 250 tokens with 1 to 5 tokens to run each."""
    return [
        Rows([1] * (1 + i % 5), 3 * i % 240, list(range(i * 16, i * 16 + 16)), 1)
        for i in range(count)
    ]


def attend_to(rows: list[Rows], num_blocks: int, call: LayerCall = PLAIN) -> torch.Tensor:
    """Attention of one random layer with two query heads a key head, `[N, 4, 8]`."""
    generator = torch.Generator().manual_seed(0)
    kv = KvPool([KvShape(2, 8, 8)], num_blocks * 16, torch.float32, CPU)
    for tensor in (kv.keys[0], kv.values[0]):
        tensor[:-1] = torch.randn(tensor[:-1].shape, generator=generator)
    plan = build_plan(rows, 16, kv.zero_slot, CPU)
    count = plan.token_ids.shape[1]
    query = torch.randn(count, 4, 8, generator=generator)
    key, value = torch.randn(2, count, 2, 8, generator=generator)
    return PagedPass(plan, kv).attend(query, key, value, call)


def test_the_number_of_kernel_calls_does_not_grow_with_the_number_of_sequences() -> None:
    few = build_plan(decoding_rows(2), 16, 10_000, CPU)
    many = build_plan(decoding_rows(80), 16, 10_000, CPU)
    assert len(many.groups) == len(few.groups) == 1


def test_plain_decoding_needs_no_reordering() -> None:
    rows = [Rows([7], 5 + i, [i], 1) for i in range(9)]
    plan = build_plan(rows, 16, 10_000, CPU)
    assert plan.output_index is None
    assert [group.query_index for group in plan.groups] == [None]
    assert plan.logit_index.tolist() == list(range(9))


def test_a_prefill_chunk_does_not_share_a_group_with_decoding() -> None:
    rows = [*decoding_rows(4), Rows([1] * 200, 0, list(range(100, 113)), 0)]
    shapes = [(g.num_rows, g.query_len) for g in build_plan(rows, 16, 10_000, CPU).groups]
    assert shapes == [(4, 4), (1, 200)]


def test_a_gather_that_would_be_too_large_is_split_without_changing_the_result(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows = decoding_rows(20)
    whole = attend_to(rows, 320)
    monkeypatch.setattr(pass_plan, "_MAX_GROUP_SLOTS", 3 * 256)
    assert len(build_plan(rows, 16, 10_000, CPU).groups) == 7
    torch.testing.assert_close(attend_to(rows, 320), whole)


def test_a_pass_over_many_rows_equals_one_pass_a_row() -> None:
    """Rows of one layer are independent, however they are grouped and padded."""
    rows = [*decoding_rows(6), Rows([1] * 90, 10, list(range(200, 207)), 0)]
    together = attend_to(rows, 320)
    begin = 0
    for row in rows:
        end = begin + len(row.tokens)
        alone = attend_one(rows, row, begin, end, PLAIN)
        torch.testing.assert_close(together[begin:end], alone)
        begin = end


SINKS = torch.tensor([3.0, -1.0, 0.5, 1.0])
WRITTEN_OUT = {
    "cap": LayerCall(0, softcap=0.5),
    "sinks": LayerCall(0, sinks=SINKS),
    "all": LayerCall(0, scaling=0.7, window=9, softcap=0.5, sinks=SINKS),
}


@pytest.mark.parametrize("at_once", [1 << 24, 5000])
@pytest.mark.parametrize("call", WRITTEN_OUT.values(), ids=WRITTEN_OUT)
def test_caps_and_sinks_are_the_textbook_ones_however_many_queries_are_done_at_once(
    monkeypatch: pytest.MonkeyPatch, call: LayerCall, at_once: int
) -> None:
    monkeypatch.setattr(paged_attention, "_MAX_SCORES", at_once)
    rows = [*decoding_rows(6), Rows([1] * 90, 10, list(range(200, 207)), 0)]
    together = attend_to(rows, 320, call)
    begin = 0
    for row in rows:
        end = begin + len(row.tokens)
        alone = attend_one(rows, row, begin, end, call)
        torch.testing.assert_close(together[begin:end], alone)
        begin = end
    plain = replace(call, softcap=None, sinks=None)
    assert (together - attend_to(rows, 320, plain)).abs().max() > 0.1


def attend_one(rows: list[Rows], row: Rows, begin: int, end: int, call: LayerCall) -> torch.Tensor:
    """The same numbers as `attend_to(rows)`, but only `row` runs, by textbook attention."""
    generator = torch.Generator().manual_seed(0)
    pools = []
    for _ in range(2):
        pools.append(torch.randn(320 * 16, 2, 8, generator=generator))
    count = sum(len(other.tokens) for other in rows)
    query = torch.randn(count, 4, 8, generator=generator)[begin:end]
    new = torch.randn(2, count, 2, 8, generator=generator)[:, begin:end]
    last = row.start + len(row.tokens)
    slots = [row.blocks[p // 16] * 16 + p % 16 for p in range(last)]
    key, value = (
        torch.cat([pool[slots[: row.start]], fresh]).repeat_interleave(2, dim=1)
        for pool, fresh in zip(pools, new, strict=True)
    )
    scores = torch.einsum("qhd,khd->hqk", query, key) * (call.scaling or 8**-0.5)
    if call.softcap:
        scores = call.softcap * torch.tanh(scores / call.softcap)
    places = torch.arange(last) - torch.arange(row.start, last).unsqueeze(1)
    is_unseen = (places > 0) | (places <= -(call.window or last))
    odds = scores.masked_fill(is_unseen, -torch.inf).exp()
    rest = 0 if call.sinks is None else call.sinks.exp().view(-1, 1, 1)
    weights = odds / (odds.sum(-1, keepdim=True) + rest)
    return torch.einsum("hqk,khd->qhd", weights, value)


def test_a_pool_that_does_not_fit_says_so() -> None:
    with pytest.raises(ModelError, match="ask for fewer tokens"):
        KvPool([KvShape(8, 128, 128)], 1 << 46, torch.float32, CPU)
