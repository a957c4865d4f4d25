"""What a verify worker may do with the jobs it owns. Every call is fenced by nonce and epoch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from pilotfish_broker.codec import encode
from pilotfish_broker.connection import Redis
from pilotfish_broker.keys import Keys
from pilotfish_broker.messages import Frame
from pilotfish_broker.scripts import Scripts
from pilotfish_broker.spec import Status
from pilotfish_broker.stream import pack_ids

INBOX_TTL_MS = 60_000

ClaimOutcome = Literal["claimed", "yours", "held", "ended", "missing", "unregistered"]


@dataclass(frozen=True, slots=True)
class Identity:
    """One incarnation of one worker process: its id, and the random nonce that fences it."""

    worker: str
    nonce: str


@dataclass(frozen=True, slots=True)
class Tail:
    """Tokens to append to a job at an expected length, and what they add to its statistics.

    Attributes:
        expected: committed output tokens before these.
        text: characters that became visible.
        drafted, accepted: of the proposal that this round verified; 0 for plain decoding.
        near_ties: tokens of these that rounding in half precision may have decided.
        logprobs: packed log-probabilities of each of `tokens`, or nothing.
        prompt_logprobs: packed ones of the prompt's tokens from the second on, or nothing; they
            belong into one tail of a job.
    """

    job: str
    epoch: int
    expected: int
    tokens: list[int]
    text: str = ""
    drafted: int = 0
    accepted: int = 0
    near_ties: int = 0
    logprobs: bytes = b""
    prompt_logprobs: bytes = b""

    def arguments(self) -> list[str | int | bytes]:
        return [
            self.expected,
            len(self.tokens),
            pack_ids(self.tokens),
            self.text.encode(),
            len(self.text),
            self.drafted,
            self.accepted,
            self.near_ties,
            self.logprobs,
            self.prompt_logprobs,
        ]


@dataclass(frozen=True, slots=True)
class Commit:
    """A tail to commit, and the frame that its draft worker gets if that succeeds."""

    tail: Tail
    frame: Frame | None = None
    inbox: str = ""


@dataclass(frozen=True, slots=True)
class Ending:
    """How a job ends: `reason` is "stop" or "length" when it succeeded."""

    status: Status
    reason: str
    error: str = ""


class Ownership:
    """The scripts that only an owner's calls can make succeed."""

    def __init__(
        self,
        client: Redis,
        keys: Keys,
        identity: Identity,
        model: str,
        *,
        result_ttl_seconds: float,
        inbox_frames: int,
    ) -> None:
        self._client = client
        self._keys = keys
        self._scripts = Scripts(client)
        self._identity = identity
        self._model = model
        self._ttl_ms = int(result_ttl_seconds * 1000)
        self._inbox_frames = inbox_frames

    def claim(self, job: str) -> tuple[ClaimOutcome, int]:
        """Try to become the owner; returns the outcome and the epoch (see claim.lua)."""
        keys = [
            self._keys.job(job),
            self._keys.pending(self._model),
            self._keys.dispatched(self._model),
            self._keys.running(self._model),
            self._keys.worker_jobs(self._identity.worker),
            self._keys.leases,
        ]
        outcome, epoch = self._scripts.run(
            "claim", keys, [job, self._identity.worker, self._identity.nonce]
        )
        return outcome.decode(), epoch

    def admit(self, job: str, epoch: int, prompt_ids: Sequence[int], fingerprint: str) -> str:
        """Record the prompt's token ids and the model: "ok", "fenced" or "other_model"."""
        args = [self._identity.nonce, epoch, pack_ids(prompt_ids), fingerprint]
        reply: str = self._scripts.run("admit", [self._keys.job(job)], args).decode()
        return reply

    def commit(self, commits: Sequence[Commit]) -> list[str]:
        """Commit one round of many jobs in one call; see commit.lua for the outcomes."""
        inboxes = list(dict.fromkeys(c.inbox for c in commits if c.frame is not None))
        keys: list[str] = []
        args: list[str | int | bytes] = [
            self._identity.nonce,
            len(commits),
            self._inbox_frames,
            INBOX_TTL_MS,
        ]
        for item in commits:
            keys += [self._keys.job(item.tail.job), self._keys.tokens(item.tail.job)]
            args += [item.tail.epoch, *item.tail.arguments()]
            if item.frame is None:
                args += [b"", 0]
            else:
                args += [encode(item.frame), inboxes.index(item.inbox) + 1]
        replies = self._scripts.run("commit", keys + inboxes, args)
        return [reply.decode() for reply in replies]

    def finish(self, tail: Tail, ending: Ending, group: str) -> str:
        """Commit the last tokens and end the job: "finished", "already" or "fenced"."""
        keys = [
            self._keys.job(tail.job),
            self._keys.tokens(tail.job),
            self._keys.running(self._model),
            self._keys.worker_jobs(self._identity.worker),
            self._keys.done(group),
        ]
        args = [
            tail.job,
            self._identity.nonce,
            tail.epoch,
            *tail.arguments(),
            str(ending.status),
            ending.reason,
            ending.error,
            self._ttl_ms,
        ]
        reply: str = self._scripts.run("finish", keys, args).decode()
        return reply

    def release(self, job: str, epoch: int) -> bool:
        """Give a job back to the queue, its committed tokens kept; one that is to be cancelled
        ends instead. False: fenced."""
        group: bytes | None = self._client.hget(self._keys.job(job), "group")
        keys = [
            self._keys.job(job),
            self._keys.pending(self._model),
            self._keys.running(self._model),
            self._keys.worker_jobs(self._identity.worker),
            self._keys.tokens(job),
            self._keys.done((group or b"").decode()),
        ]
        args = [job, self._identity.nonce, epoch, self._ttl_ms]
        reply: bytes = self._scripts.run("release", keys, args)
        return reply != b"fenced"
