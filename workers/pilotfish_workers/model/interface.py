"""What the engines need of a model, without importing torch.

An engine owns block tables and committed tokens; a model owns the weights and the KV that the
blocks stand for. One call, one packed pass.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from pilotfish_workers.model.block_pool import BlockPool
from pilotfish_workers.speculative.accept import BAD_LOGITS, Outcome
from pilotfish_workers.speculative.sampler import Case, Draw, Drawn

__all__ = ["BAD_LOGITS", "Model", "ModelInfo", "Rows"]


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What is known of a loaded model."""

    name: str
    path: str
    family: str
    """`model_type` of its configuration, such as `llama`."""
    vocab_size: int
    """Rows of the output layer; it may exceed the tokenizer's vocabulary."""
    context_length: int
    """Most tokens a sequence may have, prompt and output together."""
    num_layers: int
    dtype: str
    device: str
    fingerprint: str
    """SHA-256, hexadecimal, over configuration, weights' identity, and dtype."""
    eos_ids: tuple[int, ...]
    """Token ids that end an output, in ascending order; may be empty."""


@dataclass(frozen=True, slots=True)
class Rows:
    """What one sequence contributes to one packed pass."""

    tokens: list[int]
    """Token ids to run, at least one."""
    start: int
    """Position of `tokens[0]`: the number of tokens whose KV the pool holds already."""
    blocks: list[int]
    """Block table, covering at least `start + len(tokens)` tokens."""
    num_logits: int
    """Logits are wanted for the last `num_logits` tokens; 0 for a prefill chunk that is not
    the last."""


class Model(Protocol):
    """A target or draft model with its paged KV pool."""

    @property
    def info(self) -> ModelInfo:
        """What is known of the model."""
        ...

    @property
    def pool(self) -> BlockPool:
        """The blocks that `Rows.blocks` speak of; the engine allocates and releases them."""
        ...

    def greedy(self, rows: Sequence[Rows]) -> list[list[int]]:
        """Run one packed, ragged pass and return the argmax tokens.

        Writes the KV of every token into the pool. Returns for each row, in order, the argmax
        token id after each of its last `num_logits` tokens: the lowest id on a tie, `BAD_LOGITS`
        where the logits are unusable. To roll back, run different tokens from an earlier `start`.
        """
        ...

    def verify(self, rows: Sequence[Rows], cases: Sequence[Case | None]) -> list[Outcome | None]:
        """Run one packed, ragged pass as the target and judge what was drafted.

        `rows[i].num_logits` is the number of logits that `cases[i]` speaks of; a chunk of a prompt
        of which nothing is wanted has no case and no outcome.
        """
        ...

    def draw(self, rows: Sequence[Rows], draws: Sequence[Draw | None]) -> list[Drawn | None]:
        """Run one packed, ragged pass as a drafter and draw the next token of each row that has a
        draw; its `num_logits` is 1. A row without one (0 logits) only computes KV."""
        ...
