"""Laws over the whole vocabulary: single probabilities, and draws from what is left of them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pilotfish_workers.speculative.law import SparseLaw
from pilotfish_workers.speculative.target_laws import TargetLaws, Wanted

VOCAB = 9
GRID = 9000


def logits_of(num_rows: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(num_rows, VOCAB, generator=generator) * 2
    logits[:, 4] = -torch.inf
    return logits


def law_of(**weights: float) -> SparseLaw:
    ids = [int(name.removeprefix("t")) for name in weights]
    return SparseLaw(np.array(ids), np.array(list(weights.values()), dtype=np.float32))


def shares(laws: TargetLaws, row: int, scale: float, less: SparseLaw | None) -> np.ndarray:
    """How much of (0, 1) leads to each token."""
    points = (np.arange(GRID) + 0.5) / GRID
    tokens = laws.draw([Wanted(row, float(point), scale, less) for point in points])
    counts: np.ndarray = np.bincount(tokens, minlength=VOCAB) / GRID
    return counts


def test_single_probabilities_are_those_of_the_softmax_and_0_outside_of_the_vocabulary() -> None:
    logits = logits_of(3)
    wanted = torch.softmax(logits.double(), -1).numpy()
    rows, ids = np.divmod(np.arange(3 * VOCAB), VOCAB)
    assert TargetLaws(logits).at(rows, ids) == pytest.approx(wanted.ravel(), rel=1e-6)
    foreign = np.array([VOCAB, VOCAB + 1, (1 << 32) - 1])
    assert TargetLaws(logits).at(np.zeros(3, dtype=np.int64), foreign).tolist() == [0, 0, 0]


@pytest.mark.parametrize("scale", [1.0, 0.6, 0.3])
@pytest.mark.parametrize(
    "less",
    [
        None,
        law_of(t2=0.5, t7=0.25, t0=0.25),
        law_of(t4=1.0),
        law_of(t1=3.0, t9=4.0, t4000000000=1.0),
    ],
    ids=["all of p", "three tokens", "one that p lacks", "tokens beyond the vocabulary"],
)
def test_draws_are_the_inverse_of_what_is_left_of_p(scale: float, less: SparseLaw | None) -> None:
    logits = logits_of(3, seed=2)
    p = torch.softmax(logits[1].double(), -1).numpy()
    left = p * scale
    if less is not None:
        for token, q in zip(less.ids.tolist(), less.probabilities, strict=True):
            if token < VOCAB:
                left[token] = max(0.0, left[token] - q)
    wanted = left / left.sum()
    found = shares(TargetLaws(logits), 1, scale, less)
    assert found == pytest.approx(wanted, abs=2 / GRID)
    assert not found[wanted == 0].any()


def test_where_nothing_is_left_the_token_is_drawn_from_p() -> None:
    logits = torch.full((2, VOCAB), -torch.inf)
    logits[0, [3, 6]] = 0.0
    assert shares(TargetLaws(logits), 0, 1.0, law_of(t3=1.0, t6=1.0))[[3, 6]].tolist() == [0.5, 0.5]


def test_the_ends_of_the_range_lead_to_tokens_that_can_come() -> None:
    logits = torch.full((1, VOCAB), -torch.inf)
    logits[0, [2, 6]] = torch.tensor([0.0, -90.0])
    laws = TargetLaws(logits)
    ends = [Wanted(0, 2.0**-53), Wanted(0, 1 - 2.0**-53)]
    assert set(laws.draw(ends)) <= {2, 6}
    assert laws.draw([]) == []


def test_each_of_many_draws_has_its_own_row_and_its_own_q() -> None:
    logits = logits_of(50, seed=3)
    laws = TargetLaws(logits)
    wanted = [
        Wanted(row, (row + 0.5) / 50, 0.5 + row / 100, law_of(t1=1.0, t5=2.0) if row % 2 else None)
        for row in range(50)
    ]
    assert laws.draw(wanted) == [laws.draw([one])[0] for one in wanted]
    assert laws.draw(wanted[::-1]) == laws.draw(wanted)[::-1]
