"""One sequence's round: what it feeds into a pass, and what the pass's outcome makes of it."""

from __future__ import annotations

from collections.abc import Sequence as Tokens
from typing import Any

from pilotfish_broker.digest import extend
from pilotfish_broker.logprobs import join_positions, pack_position
from pilotfish_broker.ownership import Ending, Tail
from pilotfish_workers.model.interface import Rows
from pilotfish_workers.speculative.accept import BAD_LOGITS, Outcome, TokenLogprobs
from pilotfish_workers.speculative.sampler import Case
from pilotfish_workers.speculative.stops import cut
from pilotfish_workers.verify.scheduler import Work
from pilotfish_workers.verify.sequence import Sequence

NEVER_FED = 0  # stands for a drafted token that the target does not have; its row decides nothing
UNUSABLE = "the target's logits hold NaN or infinity for this job"


class NoToken(Exception):
    """There is no token at a position that the output needs; the message says why."""


def rows_of(work: Work, vocab_size: int) -> Rows:
    """The rows that a sequence contributes to a pass."""
    sequence, start = work.sequence, work.sequence.num_computed
    drafted = [token if token < vocab_size else NEVER_FED for token in work.drafted]
    tokens = sequence.tokens[start : start + work.num_tokens] + drafted
    num_logits = len(_scored(work)) + (1 + len(drafted) if work.is_decoding else 0)
    return Rows(tokens=tokens, start=start, blocks=sequence.blocks, num_logits=num_logits)


def case_of(work: Work) -> Case | None:
    """What is to be judged of those rows; None for a chunk of a prompt of which nothing is."""
    scored = _scored(work)
    if not work.is_decoding and not scored:
        return None
    laws = work.sequence.laws
    return Case(
        sampler=work.sequence.sampler,
        drafted=work.drafted,
        laws=None if laws is None else laws[: len(work.drafted)],
        scored=scored,
        is_judged=work.is_decoding,
    )


def _scored(work: Work) -> list[int]:
    """The prompt tokens whose log-probabilities this pass gives."""
    sequence, start = work.sequence, work.sequence.num_computed
    if not sequence.wants_prompt_logprobs:
        return []
    return sequence.tokens[start + 1 : start + work.num_tokens + (not work.is_decoding)]


def keep_scores(sequence: Sequence, scored: list[TokenLogprobs]) -> None:
    """Keep a chunk's prompt log-probabilities; one that was computed before (the sequence lost
    its blocks since) brings nothing new. Call it before `num_computed` moves."""
    num_known = len(sequence.prompt_logprobs)
    new = scored[max(0, num_known - sequence.num_computed) :]
    tokens = sequence.tokens[num_known + 1 : num_known + 1 + len(new)]
    sequence.prompt_logprobs += _packed(sequence, tokens, new)


def settle(sequence: Sequence, drafted: list[int], outcome: Outcome) -> tuple[Tail, str | None]:
    """Append a round's tokens to a sequence.

    Returns:
        what to commit, and why the output ends with it ("stop", "length") or None.

    Raises:
        NoToken: no token was appended; the job cannot go on.
    """
    base = sequence.committed
    prompt_logprobs = b""
    if sequence.wants_prompt_logprobs:
        prompt_logprobs = join_positions(sequence.prompt_logprobs)
    tokens, reason = cut(outcome.tokens(drafted), sequence.sampler.stop_ids, sequence.remaining)
    # what has no token is behind a rejected draft or a stop, where it harms nobody, or the last
    shown = tokens[:-1] if tokens[-1] < 0 or _is_stop(sequence, tokens, reason) else tokens
    pushed = sequence.output.push(shown)
    text = pushed.text
    if pushed.is_stopped:
        tokens, reason = tokens[: pushed.num_tokens], "stop"
    elif tokens[-1] < 0:
        raise NoToken(
            UNUSABLE
            if tokens[-1] == BAD_LOGITS
            else f"the job's parameters leave no token at output position {base + len(shown)}"
        )
    elif reason is not None:
        text += sequence.output.flush()
    # drafts behind a stop were never judged: they count as neither drafted nor accepted
    num_drafted = min(len(drafted), len(tokens)) if reason == "stop" else len(drafted)
    num_accepted = min(outcome.num_accepted, num_drafted)
    sequence.tokens.extend(tokens)
    sequence.num_computed = len(sequence.tokens) - 1
    sequence.digest = extend(sequence.digest, tokens)
    sequence.drafted, sequence.laws = [], None
    sequence.await_until = None
    sequence.draft_length.learn(len(drafted), outcome.num_accepted)
    sequence.rounds += 1
    sequence.num_drafted += num_drafted
    sequence.num_accepted += num_accepted
    tail = Tail(
        sequence.job,
        sequence.epoch,
        base,
        tokens,
        text,
        num_drafted,
        num_accepted,
        near_ties=sum(index < len(tokens) for index in outcome.near_ties),
        logprobs=_details(sequence, tokens, outcome.logprobs),
        prompt_logprobs=prompt_logprobs,
    )
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


def _is_stop(sequence: Sequence, tokens: list[int], reason: str | None) -> bool:
    """Whether the last token is the one that ended the output; it has no text."""
    return reason == "stop" and tokens[-1] in sequence.sampler.stop_ids


def _details(
    sequence: Sequence, tokens: Tokens[int], logprobs: list[TokenLogprobs] | None
) -> bytes:
    """Log-probabilities as they are stored, one for each of `tokens`."""
    return b"" if logprobs is None else join_positions(_packed(sequence, tokens, logprobs))


def _packed(sequence: Sequence, tokens: Tokens[int], logprobs: list[TokenLogprobs]) -> list[bytes]:
    """One position's bytes for each, for as long as there are both."""
    text = sequence.token_bytes
    return [
        pack_position(
            token, item.logprob, text(token), [(id, value, text(id)) for id, value in item.top]
        )
        for token, item in zip(tokens, logprobs, strict=False)
    ]
