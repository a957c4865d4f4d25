"""Sampled output, judged by the laws of drafter and target: the rules `rejection` and `block`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from pilotfish_workers.speculative.accept import Outcome
from pilotfish_workers.speculative.judged_rows import JudgedRows
from pilotfish_workers.speculative.law import SparseLaw
from pilotfish_workers.speculative.rules import Verdict, block, rejection
from pilotfish_workers.speculative.target_laws import TargetLaws, Wanted, take_rows

_NO_LAW: NDArray[np.float64] = np.empty(0)


def judge_by_law(chained: torch.Tensor, parts: Sequence[JudgedRows]) -> None:
    """Fill in the outcomes under `rejection` and `block`: few numbers of each row are looked at,
    and of the law of one row a case a token is drawn.

    Args:
        chained: float32 `[R, V]`, what the chain left of the rows that `parts` have places for.
    """
    rows: list[int] = []
    for part in parts:
        rows += range(part.place, part.place + part.num_rows)
    laws = TargetLaws(take_rows(chained, rows))
    start = 0
    for part in parts:  # from now on a place is one among the laws
        part.place, start = start, start + part.num_rows
    reaching = []
    wanted = []
    for part, verdict in zip(parts, _verdicts(laws, parts), strict=True):
        index = verdict.num_accepted
        part.outcome = Outcome(index, part.ending)
        if index < part.num_rows:
            reaching.append(part)
            wanted.append(_wanted(part, verdict))
    for part, token in zip(reaching, laws.draw(wanted), strict=True):
        part.outcome = replace(part.outcome, token=token)


def _verdicts(laws: TargetLaws, parts: Sequence[JudgedRows]) -> list[Verdict]:
    queries = [_Query.of(part) for part in parts]
    p = laws.at(
        np.concatenate([query.rows for query in queries]),
        np.concatenate([query.ids for query in queries]),
    )
    ends = np.cumsum([query.ids.size for query in queries])
    pieces = np.split(p, ends[:-1])
    return [query.verdict(piece) for query, piece in zip(queries, pieces, strict=True)]


@dataclass(frozen=True, slots=True, eq=False)
class _Query:
    """The numbers that one case's test needs.

    Attributes:
        q: the law of each drafted token that is judged.
        rows, ids: int64 `[n]`, of which p is wanted: first the drafted tokens, then for `block`
            the tokens that q has in the second and later rows.
    """

    part: JudgedRows
    q: list[SparseLaw]
    rows: NDArray[np.int64]
    ids: NDArray[np.int64]

    @classmethod
    def of(cls, part: JudgedRows) -> _Query:
        drafted = part.drafted
        known = part.case.laws
        q = [SparseLaw.certain(t) for t in drafted] if known is None else known[: len(drafted)]
        places = np.arange(part.place, part.place + len(drafted))
        rows, ids = [places], [np.array(drafted, dtype=np.int64)]
        if part.case.sampler.rule == "block":
            rows += [np.full(law.ids.shape, at) for law, at in zip(q[1:], places[1:], strict=True)]
            ids += [law.ids for law in q[1:]]
        return cls(part, list(q), np.concatenate(rows), np.concatenate(ids))

    def verdict(self, p: NDArray[np.float64]) -> Verdict:
        """By p of each of `ids` in its row."""
        sampler, base = self.part.case.sampler, self.part.case.sampler.position

        def coin(index: int) -> float:
            return sampler.coins.accept(base + index, base)

        drafted = self.part.drafted
        ours = p[: len(drafted)].tolist()
        theirs = [law.probability(t) for law, t in zip(self.q, drafted, strict=True)]
        if sampler.rule != "block":
            return rejection(ours, theirs, coin)
        sizes = [law.ids.size for law in self.q[1:]]
        supports = np.split(p[len(drafted) :], np.cumsum(sizes)[:-1]) if sizes else []
        laws = [law.probabilities for law in self.q[1:]]
        return block(ours, theirs, [_NO_LAW, *supports], [_NO_LAW, *laws], coin)


def _wanted(part: JudgedRows, verdict: Verdict) -> Wanted:
    index = verdict.num_accepted
    sampler = part.case.sampler
    uniform = sampler.coins.token(sampler.position + index)
    if verdict.scale is None:
        return Wanted(part.place + index, uniform)
    drafted, laws = part.case.drafted, part.case.laws
    less = SparseLaw.certain(drafted[index]) if laws is None else laws[index]
    return Wanted(part.place + index, uniform, verdict.scale, less)
