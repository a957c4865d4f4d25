"""What a job has produced: chunks while it runs, a result when it has ended."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from pilotfish.samples import WORST_FIRST
from pilotfish_broker.errors import JobCancelled, JobError, JobExpired, JobFailed
from pilotfish_broker.logprobs import TokenLogprob
from pilotfish_broker.records import JobRecord
from pilotfish_broker.spec import Status
from pilotfish_broker.stream import Entry


@dataclass(frozen=True, slots=True)
class Chunk:
    """What one commit added to a job's output.

    Attributes:
        text: characters that became visible; may be empty, and lags behind the token ids while
            they end in half a character.
        token_ids: committed token ids.
        position: place of the first of them among the output tokens.
        logprobs: log-probabilities of each of the token ids, where the job asked for them.
        prompt_logprobs: those of the prompt's tokens, None for the first, in one chunk of a job
            that asked for them.
    """

    text: str
    token_ids: list[int]
    position: int
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob | None] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Result:
    """A job that has ended, whatever way; where it has several samples, sample 0 of it, which
    holds the others.

    Attributes:
        finish_reason: "stop" or "length" when it succeeded.
        error: why it failed, else "".
        prompt_tokens: 0 where it ended before its prompt was read.
        rounds: target passes that committed tokens of this job.
        drafted, accepted: drafted tokens that were verified, and those of them that were kept.
        near_ties: output tokens that rounding in half precision may have decided; see
            docs/sampling.md.
        started_ms, finished_ms: milliseconds of Redis's clock; 0 where it never started.
        sample: which of the job's samples this is.
        logprobs: log-probabilities of each of `token_ids`; empty where none were asked for.
        prompt_logprobs: those of each of the prompt's tokens, None for the first, which nothing
            comes before; empty where none were asked for.
        others: the samples after this one, in order; only sample 0 has them.
    """

    job_id: str
    status: Status
    model: str
    text: str
    token_ids: list[int]
    finish_reason: str
    error: str
    prompt_tokens: int
    rounds: int
    drafted: int
    accepted: int
    started_ms: int
    finished_ms: int
    sample: int = 0
    near_ties: int = 0
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob | None] = field(default_factory=list)
    others: tuple[Result, ...] = ()

    @property
    def completion_tokens(self) -> int:
        """Output tokens of this sample, an end-of-sequence token included."""
        return len(self.token_ids)

    @property
    def samples(self) -> tuple[Result, ...]:
        """All samples in order, this one first."""
        return (self, *self.others)

    @property
    def unsuccessful(self) -> Result | None:
        """The sample for which the job did not succeed, a failed one before others; None where
        all did."""
        worst = min(self.samples, key=lambda sample: WORST_FIRST.index(sample.status))
        return None if worst.status is Status.SUCCEEDED else worst

    def raise_for_status(self) -> Result:
        """The result itself when all of its samples succeeded.

        Raises:
            JobFailed, JobCancelled, JobExpired: one of them did not.
        """
        bad = self.unsuccessful or self
        if (error := error_of(bad.job_id, bad.status, bad.error)) is not None:
            raise error
        return self

    @classmethod
    def from_record(
        cls, record: JobRecord, entries: Iterable[Entry], others: Iterable[Result] = ()
    ) -> Result:
        """Put a finished record, its token stream and the samples after it together."""
        cursor = Cursor()
        chunks = [cursor.fresh(entry) for entry in entries]
        return cls(
            job_id=record.id,
            status=record.status,
            model=record.spec.model,
            text="".join(chunk.text for chunk in chunks),
            token_ids=[token for chunk in chunks for token in chunk.token_ids],
            finish_reason=record.finish_reason,
            error=record.error,
            prompt_tokens=len(record.prompt_ids or ()),
            rounds=record.rounds,
            drafted=record.drafted,
            accepted=record.accepted,
            near_ties=record.near_ties,
            started_ms=record.started_ms,
            finished_ms=record.finished_ms,
            sample=record.spec.sample,
            logprobs=[item for chunk in chunks for item in chunk.logprobs],
            prompt_logprobs=[item for chunk in chunks for item in chunk.prompt_logprobs],
            others=tuple(others),
        )


def error_of(job: str, status: Status, reason: str) -> JobError | None:
    """The typed error of a job that ended without success, else None."""
    if status is Status.FAILED:
        return JobFailed(job, f"job {job} failed: {reason or 'no reason was recorded'}")
    if status is Status.CANCELLED:
        return JobCancelled(job, f"job {job} was cancelled")
    if status is Status.EXPIRED:
        return JobExpired(job, f"job {job} passed its deadline before it was done")
    return None


class Cursor:
    """How far a reader of a token stream has come; drops what it has seen already.

    After a restart of Redis the last commits may stand in the stream twice, so entries are told
    apart by position, not by id.
    """

    def __init__(self) -> None:
        self.tokens = 0
        self.characters = 0
        self._has_prompt = False

    def fresh(self, entry: Entry) -> Chunk:
        """The part of an entry that is new; empty for a repeat and for the end marker."""
        known = max(0, self.tokens - entry.position)
        tokens, logprobs = entry.tokens[known:], entry.logprobs[known:]
        text = entry.text[max(0, self.characters - entry.offset) :]
        position = entry.position + len(entry.tokens) - len(tokens)
        if tokens:
            self.tokens = position + len(tokens)
        if text:
            self.characters = entry.offset + len(entry.text)
        prompt = [] if self._has_prompt else entry.prompt_logprobs
        self._has_prompt = self._has_prompt or bool(prompt)
        return Chunk(text, tokens, position, logprobs, prompt)
