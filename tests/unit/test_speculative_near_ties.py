"""In half precision, choices that rounding may have decided are counted; in float32 none is."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pilotfish_broker.sampling import SamplingParams
from pilotfish_workers.speculative.accept import Outcome
from pilotfish_workers.speculative.best import best_tokens
from pilotfish_workers.speculative.coins import Coins
from pilotfish_workers.speculative.judge import judge
from pilotfish_workers.speculative.near_ties import leads
from pilotfish_workers.speculative.sampler import Case, Sampler

# a tie; a clear choice; two neighbours in bfloat16, which float16 tells well apart
ROWS = [[12.5, 12.5, 3.0], [1.0, 9.0, 2.0], [12.5, 12.4375, 0.0]]
WAYS: list[dict[str, Any]] = [{}, {"min_tokens": 1}, {"temperature": 0.001, "seed": 3}]


def judged(logits: torch.Tensor, drafted: list[int], **params: Any) -> Outcome:
    sampler = Sampler(SamplingParams(**params), Coins(3), [5], 1, stop_ids=(2,))
    outcome = judge(logits, best_tokens(logits), [Case(sampler, drafted)], [len(logits)])[0]
    assert outcome is not None
    return outcome


@pytest.mark.parametrize("params", WAYS, ids=["plain", "chain", "coupled"])
def test_narrow_choices_are_told_by_their_place(params: dict[str, Any]) -> None:
    outcome = judged(torch.tensor(ROWS, dtype=torch.bfloat16), [0, 1], **params)
    assert (outcome.num_accepted, outcome.token) == (2, 0)
    assert outcome.near_ties == (0, 2)
    finer = judged(torch.tensor(ROWS, dtype=torch.float16), [0, 1], **params)
    assert finer.near_ties == (0,)
    assert judged(torch.tensor(ROWS), [0, 1], **params).near_ties == ()


@pytest.mark.parametrize("params", WAYS, ids=["plain", "chain", "coupled"])
def test_what_was_not_emitted_is_not_counted(params: dict[str, Any]) -> None:
    outcome = judged(torch.tensor(ROWS, dtype=torch.bfloat16), [0, 2], **params)
    assert (outcome.num_accepted, outcome.token) == (1, 1)
    assert outcome.near_ties == (0,)


def test_sampled_by_law_has_no_ties() -> None:
    logits = torch.tensor(ROWS[:1], dtype=torch.bfloat16)
    assert judged(logits, [], temperature=1.0).near_ties == ()


def test_a_lead_is_that_over_the_second_and_changes_nothing() -> None:
    scores = torch.tensor([[1.0, 4.0, 3.5], [2.0, 2.0, -torch.inf]])
    before = scores.clone()
    assert leads(scores) == [0.5, 0.0]
    assert torch.equal(scores, before)
    assert leads(scores[:, :1]) == [torch.inf, torch.inf]
