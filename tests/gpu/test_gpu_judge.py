"""Judging and drawing on a CUDA device decide as on the processor."""

from __future__ import annotations

from typing import Any

import pytest

from pilotfish_broker.sampling import SamplingParams
from pilotfish_workers.speculative.coins import Coins
from pilotfish_workers.speculative.sampler import Case, Draw, Sampler

torch = pytest.importorskip("torch")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
NUM_JOBS, VOCAB, K = 64, 5003, 3
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "greedy": {"frequency_penalty": 0.4, "logprobs": 2},
    "rejection": {"temperature": 0.8, "top_p": 0.9, "rule": "rejection"},
    "block": {"temperature": 0.8, "min_p": 0.01, "rule": "block"},
    "coupled": {"temperature": 0.8, "top_k": 50, "rule": "coupled"},
    "coupled, all tokens": {"temperature": 1.0, "rule": "coupled"},
}


@pytest.mark.parametrize("way", WAYS)
def test_the_device_changes_no_decision(way: str) -> None:
    from pilotfish_workers.speculative.best import best_tokens
    from pilotfish_workers.speculative.draw import draw_tokens
    from pilotfish_workers.speculative.judge import judge

    params = SamplingParams.from_mapping(WAYS[way])
    samplers = [Sampler(params, Coins(seed), [1, 2, 3], 2) for seed in range(NUM_JOBS)]
    generator = torch.Generator().manual_seed(4)
    logits = torch.randn(NUM_JOBS * (K + 1), VOCAB, generator=generator) * 2
    logits[::9, 5] = torch.nan
    logits[1::2, 7] = -torch.inf
    drafting = logits.view(NUM_JOBS, K + 1, VOCAB)[:, 0] + 0.1
    found = []
    for device in ("cpu", "cuda"):
        there = logits.to(device)
        drawn = draw_tokens(drafting.to(device), [Draw(one) for one in samplers])
        cases = []
        for sampler, one in zip(samplers, drawn, strict=True):
            if one.token < 0:
                cases.append(Case(sampler, (1,) * K))
            else:
                laws = None if one.law is None else [one.law] * K
                cases.append(Case(sampler, (one.token,) * K, laws))
        outcomes = judge(there, best_tokens(there), cases, [K + 1] * NUM_JOBS)
        found.append(([one.token for one in drawn], outcomes))
    assert found[0][0] == found[1][0]
    for ours, theirs in zip(found[0][1], found[1][1], strict=True):
        assert (ours.num_accepted, ours.token) == (theirs.num_accepted, theirs.token)
        for one, other in zip(ours.logprobs or [], theirs.logprobs or [], strict=True):
            assert one.logprob == pytest.approx(other.logprob, abs=1e-5)
            assert [token for token, _ in one.top] == [token for token, _ in other.top]
