"""What tests of the client share: a served model, and a worker that says what it is told to."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from pilotfish_broker.connection import connect
from pilotfish_broker.keys import Keys
from pilotfish_broker.leases import Leases
from pilotfish_broker.logprobs import TokenLogprob, pack_logprobs
from pilotfish_broker.models import ModelRecord, write_model
from pilotfish_broker.ownership import Commit, Ending, Identity, Ownership, Tail
from pilotfish_broker.spec import Status

MODEL = "m"
VOCABULARY = 256
CONTEXT = 64


def serve_model(client: Any, keys: Keys, name: str = MODEL) -> None:
    """Publish a model record, as a verify worker does when it has loaded the model."""
    record = ModelRecord(name, CONTEXT, VOCABULARY, "tokenizer", "weights", "test")
    write_model(client, keys, record, ["a", "b"])


class Speaker:
    """A verify worker whose target is a list of (token ids, text) rounds."""

    def __init__(self, url: str, keys: Keys, name: str = "w1") -> None:
        self.client = connect(url)
        self._keys = keys
        self.identity = Identity(name, f"nonce-of-{name}")
        self.leases = Leases(self.client, keys, self.identity, "verify", MODEL, 60)
        self.own = Ownership(
            self.client, keys, self.identity, MODEL, result_ttl_seconds=60, inbox_frames=4
        )

    def register(self, slots: int = 100, **fields: str) -> None:
        self.leases.register(slots, {"pid": 1, **fields})

    def begin(self, job: str, prompt: Sequence[int] = (1, 2)) -> int:
        outcome, epoch = self.own.claim(job)
        assert outcome == "claimed", outcome
        assert self.own.admit(job, epoch, prompt, "f") == "ok"
        return epoch

    def commit(
        self,
        job: str,
        epoch: int,
        length: int,
        tokens: list[int],
        text: str,
        *,
        logprobs: Sequence[TokenLogprob] = (),
        prompt: Sequence[TokenLogprob] = (),
    ) -> int:
        """Commit one round at `length`; gives the length reached. `prompt`: log-probabilities of
        the prompt's tokens from the second on."""
        tail = Tail(
            job,
            epoch,
            length,
            tokens,
            text,
            drafted=2,
            accepted=len(tokens) - 1,
            logprobs=pack_logprobs(logprobs) if logprobs else b"",
            prompt_logprobs=pack_logprobs(prompt) if prompt else b"",
        )
        assert self.own.commit([Commit(tail)]) == ["ok"]
        return length + len(tokens)

    def say(self, job: str, epoch: int, rounds: Sequence[tuple[list[int], str]]) -> int:
        """Commit rounds from the beginning; gives the length reached."""
        length = 0
        for tokens, text in rounds:
            length = self.commit(job, epoch, length, tokens, text)
        return length

    def end(
        self,
        job: str,
        epoch: int,
        length: int,
        status: Status = Status.SUCCEEDED,
        error: str = "",
        group: str = "",
    ) -> None:
        reason = "stop" if status is Status.SUCCEEDED else "error"
        tail = Tail(job, epoch, length, [])
        assert self.own.finish(tail, Ending(status, reason, error), group) == "finished"

    def run(
        self, job: str, rounds: Sequence[tuple[list[int], str]] = (([7], "x"),), group: str = ""
    ) -> None:
        """A whole job."""
        epoch = self.begin(job)
        self.end(job, epoch, self.say(job, epoch, rounds), group=group)

    def close(self) -> None:
        self.client.close()


class Background:
    """Runs a function in a thread; leaving the block waits for it and passes its error on."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(function, arguments))

    def _run(self, function: Any, arguments: Any) -> None:
        try:
            function(*arguments)
        except BaseException as error:
            self._error = error

    def __enter__(self) -> Background:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.join(timeout=30)
        if self._error is not None:
            raise self._error
