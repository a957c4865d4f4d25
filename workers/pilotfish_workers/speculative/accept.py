"""Which drafted tokens stand.

The words, used everywhere in pilotfish:

drafted
    proposed by a draft worker.
accepted
    drafted, and kept by the rule.
recovered
    the target's own token at the first rejection.
bonus
    the target's own token after all drafted ones were accepted.
committed
    durable in Redis: accepted tokens, then the recovered or the bonus one.

Leviathan, Kalman, Matias, arXiv 2211.17192 (algorithm 1) and Chen et al., arXiv 2302.01318
(algorithm 2) give the rule for sampled output (see `rules.py`). At temperature 0 both laws are
one-hot and the rule becomes equality with the target's argmax, which is what stands here. Every
rule returns the same `Outcome`. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from pilotfish_workers.speculative.sampler import Case, Draw, Drawn

if TYPE_CHECKING:
    from pilotfish_workers.model.interface import Rows

BAD_LOGITS: Final = -1
"""Stands for a token where the logits hold NaN or +inf, or nothing finite at all."""
NOTHING_ALLOWED: Final = -2
"""Stands for a token where the job's own parameters leave none."""
NOT_JUDGED: Final = -3
"""Stands for the token of a prompt's chunk that is not the last."""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one position, by the model's own logits before the chain.

    Attributes:
        logprob: of the token that stands there.
        top: (token id, log-probability) of the most likely ones, the likeliest first.
    """

    logprob: float
    top: list[tuple[int, float]]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a rule decides about one proposal.

    Attributes:
        num_accepted: leading drafted tokens that stand.
        token: the recovered token, or the bonus token when all were accepted; negative where
            there is none.
        logprobs: for each accepted token and for `token` (if there is one), where the job wants
            them.
        scored: the same for the prompt tokens that were to be scored.
        near_ties: which of these tokens (0 is the first accepted one) the target chose so narrowly
            that rounding in half precision may have decided; greedy and `coupled` only.
    """

    num_accepted: int
    token: int
    logprobs: list[TokenLogprobs] | None = None
    scored: list[TokenLogprobs] | None = None
    near_ties: tuple[int, ...] = ()

    def tokens(self, drafted: Sequence[int]) -> list[int]:
        """The tokens to commit."""
        return [*drafted[: self.num_accepted], self.token]


def accept_greedy(drafted: Sequence[int], targets: Sequence[int]) -> Outcome:
    """Accept each drafted token that equals the target's argmax, up to the first that does not.

    Args:
        drafted: K token ids, K ≥ 0.
        targets: K + 1 token ids; `targets[i]` is the target's argmax after the committed prefix
            and the first i drafted tokens. So the last committed token's logits judge the first
            drafted one.

    Raises:
        ValueError: `targets` is not one longer than `drafted`.
    """
    if len(targets) != len(drafted) + 1:
        raise ValueError(f"{len(drafted)} drafted tokens need {len(drafted) + 1} targets")
    kept = 0
    while kept < len(drafted) and drafted[kept] == targets[kept]:
        kept += 1
    return Outcome(num_accepted=kept, token=targets[kept])


def verify_plain(
    answers: Sequence[Sequence[int]], rows: Sequence[Rows], cases: Sequence[Case | None]
) -> list[Outcome | None]:
    """`Model.verify` for a model that has no logits to show, from what its `greedy` answered.

    Raises:
        ValueError: a job wants more than the argmax, or not that many answers.
    """
    return [
        None if case is None else _judge_plain(ids, row, case)
        for ids, row, case in zip(answers, rows, cases, strict=True)
    ]


def draw_plain(
    answers: Sequence[Sequence[int]], rows: Sequence[Rows], draws: Sequence[Draw | None]
) -> list[Drawn | None]:
    """`Model.draw` for a model that has no logits to show, from what its `greedy` answered.

    Raises:
        ValueError: a job wants more than the argmax, or not that many answers.
    """
    return [
        None if draw is None else Drawn(_judge_plain(ids, row, Case(draw.sampler)).token)
        for ids, row, draw in zip(answers, rows, draws, strict=True)
    ]


def _judge_plain(ids: Sequence[int], row: Rows, case: Case) -> Outcome:
    if not case.sampler.is_plain or case.scored:
        raise ValueError("sampling and log-probabilities need a model that shows its logits")
    if len(ids) != row.num_logits:
        raise ValueError(f"{len(ids)} answers for a row that wants {row.num_logits}")
    return accept_greedy(case.drafted, ids) if case.is_judged else Outcome(0, NOT_JUDGED)
