"""One job's way of choosing tokens: what a rule needs besides logits. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from pilotfish_broker.sampling import Rule, SamplingParams
from pilotfish_workers.speculative.coins import Coins
from pilotfish_workers.speculative.history import History
from pilotfish_workers.speculative.law import SparseLaw


class Constraint(Protocol):
    """What structured output allows next. State of one output; rolled back with rejections."""

    def masks(self, output: Sequence[int], drafted: Sequence[int]) -> NDArray[np.int32]:
        """Allowed tokens after `output` and 0, 1, … all of `drafted`.

        Returns:
            int32 `[len(drafted) + 1, ceil(vocab / 32)]`; bit t % 32 of word t // 32 is set where
            token t is allowed. Rows behind a drafted token that is not allowed hold nothing of
            meaning: a rule rejects that token. The state afterwards is that after `output`.
        """
        ...

    def rewind(self) -> None:
        """Forget all output: `output` may differ from what was given before."""
        ...


@dataclass(slots=True, eq=False)
class Sampler:
    """Chooses the tokens of one sequence, by the target or by a drafter.

    It keeps no copy of the tokens: `tokens` is the sequence's own list, prompt and committed
    output, which only grows; call `rewind` when it changed in another way.

    Attributes:
        stop_ids: token ids that end the output; they cannot come before `params.min_tokens`.
        bad_words: token sequences that may not come.
        scratch: what a judge keeps between rounds, such as masks on the device.
    """

    params: SamplingParams
    coins: Coins
    tokens: list[int]
    num_prompt: int
    stop_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    constraint: Constraint | None = None
    history: History = field(init=False)
    scratch: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.history = History(self.tokens, self.num_prompt)

    @property
    def rule(self) -> Rule:
        """How drafted tokens are judged."""
        return self.params.chosen_rule

    @property
    def position(self) -> int:
        """Output tokens so far: the place of the next one among them, and a round's base."""
        return len(self.tokens) - self.num_prompt

    @property
    def is_plain(self) -> bool:
        """Whether the argmax of the model's own logits is all that is wanted."""
        params = self.params
        return (
            params.temperature == 0
            and not params.changes_logits
            and params.logprobs is None
            and params.prompt_logprobs is None
        )

    def masks(self, drafted: Sequence[int]) -> NDArray[np.int32] | None:
        """`Constraint.masks` after the committed output; None where nothing is constrained."""
        if self.constraint is None:
            return None
        return self.constraint.masks(self.tokens[self.num_prompt :], drafted)

    def rewind(self) -> None:
        """Forget what was concluded from `tokens`."""
        self.history.rewind()
        if self.constraint is not None:
            self.constraint.rewind()


@dataclass(frozen=True, slots=True)
class Case:
    """What a target's pass judges of one sequence.

    The sequence's logits, one row a token, are first `len(scored)` rows whose next token is known
    (prompt log-probabilities), then, where `is_judged`, 1 + K rows: after the last committed token
    and after each drafted one.

    Attributes:
        drafted: K token ids, K ≥ 0. Only the last may be one that the target does not have
            (any id from the vocabulary size on); it is rejected.
        laws: q for each drafted token, or None where each was certain (a greedy drafter, n-grams):
            then q is one-hot. Used by the rules `rejection` and `block` only.
        scored: prompt tokens to give log-probabilities for.
        is_judged: False for a chunk of a prompt that is not the last.
    """

    sampler: Sampler
    drafted: Sequence[int] = ()
    laws: Sequence[SparseLaw] | None = None
    scored: Sequence[int] = ()
    is_judged: bool = True


@dataclass(frozen=True, slots=True)
class Draw:
    """What a drafter's pass draws for one sequence: the token after `drafted`.

    Attributes:
        drafted: tokens drafted in this round so far.
    """

    sampler: Sampler
    drafted: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class Drawn:
    """A drafted token and the law it was drawn from; None where it was certain, or where the
    rule needs no law. `token` is negative where none could be drawn (see `accept.py`)."""

    token: int
    law: SparseLaw | None = None
