"""One sequence's round: what it feeds into a pass, and what the pass's outcome makes of it."""

from __future__ import annotations

from typing import Any

from pilotfish_broker.digest import extend
from pilotfish_broker.ownership import Ending, Tail
from pilotfish_workers.model.interface import BAD_LOGITS, Rows
from pilotfish_workers.speculative.accept import Outcome
from pilotfish_workers.speculative.stops import cut
from pilotfish_workers.verify.scheduler import Work
from pilotfish_workers.verify.sequence import Sequence


class BadLogits(Exception):
    """The target's logits are unusable at a position that the output needs."""


def rows_of(work: Work) -> Rows:
    """The rows that a sequence contributes to a pass."""
    sequence, start = work.sequence, work.sequence.num_computed
    tokens = sequence.tokens[start : start + work.num_tokens] + work.drafted
    num_logits = 1 + len(work.drafted) if work.is_decoding else 0
    return Rows(tokens=tokens, start=start, blocks=sequence.blocks, num_logits=num_logits)


def settle(sequence: Sequence, drafted: list[int], outcome: Outcome) -> tuple[Tail, str | None]:
    """Append a round's tokens to a sequence.

    Returns:
        what to commit, and why the output ends with it ("stop", "length") or None.

    Raises:
        BadLogits: nothing was changed; the job cannot go on.
    """
    base = sequence.committed
    tokens, reason = cut(outcome.tokens(drafted), sequence.stop_ids, sequence.remaining)
    if BAD_LOGITS in tokens:  # behind a rejected draft or a stop token they harm nobody
        raise BadLogits
    # drafts behind a stop token were never judged: they count as neither drafted nor accepted
    num_drafted = min(len(drafted), len(tokens)) if reason == "stop" else len(drafted)
    num_accepted = min(outcome.num_accepted, num_drafted)
    sequence.tokens += tokens
    sequence.num_computed = len(sequence.tokens) - 1
    sequence.digest = extend(sequence.digest, tokens)
    sequence.drafted = []
    sequence.await_until = None
    sequence.draft_length.learn(len(drafted), outcome.num_accepted)
    text = sequence.detokenizer.push(_visible(tokens, sequence.stop_ids, reason))
    if reason is not None:
        text += sequence.detokenizer.flush()
    sequence.rounds += 1
    sequence.num_drafted += num_drafted
    sequence.num_accepted += num_accepted
    tail = Tail(sequence.job, sequence.epoch, base, tokens, text, num_drafted, num_accepted)
    return tail, reason


def nothing(sequence: Sequence) -> Tail:
    """A tail that adds no token."""
    return Tail(sequence.job, sequence.epoch, sequence.committed, [])


def summary(sequence: Sequence, ending: Ending) -> dict[str, Any]:
    """What the Celery task returns for a job that succeeded."""
    return {
        "finish_reason": ending.reason,
        "tokens": sequence.committed,
        "rounds": sequence.rounds,
        "drafted": sequence.num_drafted,
        "accepted": sequence.num_accepted,
    }


def _visible(tokens: list[int], stop_ids: frozenset[int], reason: str | None) -> list[int]:
    """The tokens that become text: all but the one that stopped the output."""
    return tokens[:-1] if reason == "stop" and tokens[-1] in stop_ids else tokens
