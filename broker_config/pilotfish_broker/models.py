"""Model records: what clients and draft workers know of a target, kept when workers leave."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgpack

from pilotfish_broker.connection import Redis
from pilotfish_broker.errors import InvalidRequest
from pilotfish_broker.keys import Keys
from pilotfish_broker.sampling import SamplingParams

MOST_PROMPT_LOGPROBS = 1 << 18  # some 5 MB in one entry of a stream


@dataclass(frozen=True, slots=True)
class ModelRecord:
    """A served target.

    Attributes:
        context_length: most tokens of prompt and output together.
        vocabulary_size: token ids are below it.
        tokenizer: fingerprint of its tokenizer's vocabulary.
        fingerprint: identity of weights and configuration.
    """

    name: str
    context_length: int
    vocabulary_size: int
    tokenizer: str
    fingerprint: str
    family: str


def check_token_ids(ids: Sequence[int], *, context_length: int, vocabulary_size: int) -> None:
    """Check a prompt's token ids against a model.

    Raises:
        InvalidRequest: there are none, no room is left for an output token, or the model does
            not have one of them.
    """
    if not ids:
        raise InvalidRequest("the prompt has no tokens", field="prompt")
    if len(ids) >= context_length:
        raise InvalidRequest(
            f"the prompt has {len(ids)} tokens; the model's context of {context_length} "
            "leaves no room for output",
            field="prompt",
        )
    if max(ids) >= vocabulary_size:
        raise InvalidRequest(
            f"token id {max(ids)} is not below the vocabulary size {vocabulary_size}",
            field="prompt",
        )


def check_params(params: SamplingParams, vocabulary_size: int) -> None:
    """Check the token ids among a job's parameters against a model.

    Raises:
        InvalidRequest: the model does not have one of them.
    """
    named: dict[str, Iterable[int]] = {
        "logit_bias": (token for token, _ in params.logit_bias),
        "allowed_token_ids": params.allowed_token_ids or (),
        "stop_token_ids": params.stop_token_ids,
        "bad_words": (id for word in params.bad_words if not isinstance(word, str) for id in word),
    }
    for name, ids in named.items():
        if (largest := max(ids, default=0)) >= vocabulary_size:
            raise InvalidRequest(
                f"{name} has the token id {largest}, which is not below the vocabulary size "
                f"{vocabulary_size}",
                field=name,
            )


def check_prompt_logprobs(params: SamplingParams, num_prompt: int) -> None:
    """Check that a prompt's log-probabilities are of a size that one entry can hold.

    Raises:
        InvalidRequest: there would be too many.
    """
    if params.prompt_logprobs is None:
        return
    count = num_prompt * (1 + params.prompt_logprobs)
    if count > MOST_PROMPT_LOGPROBS:
        raise InvalidRequest(
            f"prompt_logprobs {params.prompt_logprobs} of {num_prompt} prompt tokens are {count} "
            f"numbers, and {MOST_PROMPT_LOGPROBS} is the most: ask for fewer, or a shorter prompt",
            field="prompt_logprobs",
        )


def write_model(client: Redis, keys: Keys, record: ModelRecord, vocabulary: list[str]) -> None:
    """Publish a model record, and the vocabulary that names a first difference."""
    packed = zlib.compress(msgpack.packb(vocabulary), 1)
    pipeline = client.pipeline(transaction=True)
    pipeline.hset(
        keys.model(record.name),
        mapping={
            "context_length": record.context_length,
            "vocabulary_size": record.vocabulary_size,
            "tokenizer": record.tokenizer,
            "fingerprint": record.fingerprint,
            "family": record.family,
        },
    )
    pipeline.set(keys.vocabulary(record.name), packed)
    pipeline.sadd(keys.models, record.name)
    pipeline.execute()


def read_model(client: Redis, keys: Keys, name: str) -> ModelRecord | None:
    """The record of a served name, or None where nobody ever served it."""
    fields = {k.decode(): v.decode() for k, v in client.hgetall(keys.model(name)).items()}
    if not fields:
        return None
    return ModelRecord(
        name=name,
        context_length=int(fields["context_length"]),
        vocabulary_size=int(fields["vocabulary_size"]),
        tokenizer=fields["tokenizer"],
        fingerprint=fields["fingerprint"],
        family=fields["family"],
    )


def read_vocabulary(client: Redis, keys: Keys, name: str) -> list[str] | None:
    """Tokens of a served name by id, or None where there is no record."""
    raw = client.get(keys.vocabulary(name))
    if raw is None:
        return None
    tokens: list[str] = msgpack.unpackb(zlib.decompress(raw))
    return tokens


def list_models(client: Redis, keys: Keys) -> list[ModelRecord]:
    """All names ever served, in alphabetical order."""
    names: Iterable[bytes] = client.smembers(keys.models)
    records = (read_model(client, keys, name.decode()) for name in sorted(names))
    return [record for record in records if record is not None]
