"""Which models can be asked for, and what their records say about a request."""

from __future__ import annotations

import time

from pilotfish.connection import Connection
from pilotfish_broker.errors import UnknownModel
from pilotfish_broker.models import (
    ModelRecord,
    check_params,
    check_prompt_logprobs,
    check_token_ids,
    list_models,
    read_model,
)
from pilotfish_broker.spec import JobSpec, Prompt, SamplingParams

FRESH_SECONDS = 10.0


class ServedModels:
    """Model records, read again when they are some seconds old."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._records: dict[str, tuple[float, ModelRecord]] = {}

    def list(self) -> list[ModelRecord]:
        """All names ever served."""
        with self._connection.answering():
            return list_models(self._connection.redis, self._connection.keys)

    def choose(self, model: str | None) -> str:
        """The name itself, or the only one ever served where none is given.

        Raises:
            UnknownModel: none was given and there is not exactly one.
        """
        if model is not None:
            return model
        names = [record.name for record in self.list()]
        if len(names) == 1:
            return names[0]
        raise UnknownModel(
            f"name one of the served models: {', '.join(names)}"
            if names
            else "no model has been served here yet; start a verify worker, or name the model",
            field="model",
        )

    def require(self, name: str) -> ModelRecord:
        """The record of a served name.

        Raises:
            UnknownModel: no worker has ever served it.
        """
        record = self._record(name)
        if record is None:
            names = ", ".join(known.name for known in self.list()) or "none yet"
            raise UnknownModel(
                f"no worker has ever served a model named {name!r}; served so far: {names}",
                field="model",
            )
        return record

    def check(self, spec: JobSpec, *, wait_for_model: bool) -> None:
        """Check a request against the record of its model.

        Raises:
            UnknownModel: no worker has ever served it, and the caller does not wait for it.
            InvalidRequest: token ids that the model does not have, or too many.
        """
        if wait_for_model and self._record(spec.model) is None:
            return
        check_request(spec.prompt, spec.params, self.require(spec.model))

    def _record(self, name: str) -> ModelRecord | None:
        read_at, record = self._records.get(name, (0.0, None))
        if record is None or time.monotonic() - read_at > FRESH_SECONDS:
            with self._connection.answering():
                record = read_model(self._connection.redis, self._connection.keys, name)
            if record is not None:
                self._records[name] = (time.monotonic(), record)
        return record


def check_request(prompt: Prompt, params: SamplingParams, record: ModelRecord) -> None:
    """Check the token ids of a request against the model; a prompt of another kind passes.

    Raises:
        InvalidRequest: an id that the model does not have, no room for an output token, or more
            log-probabilities of the prompt than can be kept.
    """
    check_params(params, record.vocabulary_size)
    if isinstance(prompt, str) or not isinstance(prompt[0], int):
        return
    check_prompt_logprobs(params, len(prompt))
    check_token_ids(
        [token for token in prompt if isinstance(token, int)],
        context_length=record.context_length,
        vocabulary_size=record.vocabulary_size,
    )
