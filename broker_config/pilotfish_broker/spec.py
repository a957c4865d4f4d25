"""What a job is: its status words, its prompt, and what is checked at submit."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

import msgpack

from pilotfish_broker.checks import MAX_TOKEN_ID, whole
from pilotfish_broker.errors import DecodeError, InvalidRequest
from pilotfish_broker.sampling import MAX_TOKENS, SamplingParams
from pilotfish_broker.settings import MODEL_NAME

__all__ = [
    "MAX_PROMPT_BYTES",
    "MAX_TOKENS",
    "SPEC_VERSION",
    "TERMINAL",
    "JobSpec",
    "Prompt",
    "SamplingParams",
    "Status",
    "check_prompt",
]

MAX_PROMPT_BYTES = 4 << 20
SPEC_VERSION = 2
ROLES_NEEDED = ("role", "content")

Prompt = str | list[int] | list[dict[str, Any]]


class Status(StrEnum):
    """Where a job stands. It only moves down this list, except that a running job whose
    worker died or drained is queued again."""

    QUEUED = "queued"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"

    @property
    def is_terminal(self) -> bool:
        return self in TERMINAL


TERMINAL = frozenset({Status.SUCCEEDED, Status.FAILED, Status.CANCELLED, Status.EXPIRED})


def check_prompt(prompt: Prompt) -> None:
    """Check what can be checked without a tokenizer.

    Raises:
        InvalidRequest: empty, too large, or of no known form.
    """
    if isinstance(prompt, str):
        if not prompt:
            raise InvalidRequest("the prompt is empty", field="prompt")
        if len(prompt.encode("utf-8", "surrogatepass")) > MAX_PROMPT_BYTES:
            raise InvalidRequest(
                f"the prompt is larger than {MAX_PROMPT_BYTES >> 20} MiB", field="prompt"
            )
        try:
            prompt.encode()
        except UnicodeEncodeError:
            raise InvalidRequest(
                "the prompt holds half of a character pair and is no valid text", field="prompt"
            ) from None
        return
    if not isinstance(prompt, list) or not prompt:
        raise InvalidRequest(
            "a prompt is a text, a list of chat messages or a list of token ids, and not empty",
            field="prompt",
        )
    if all(isinstance(item, dict) for item in prompt):
        _check_messages(prompt)  # type: ignore[arg-type]
        return
    for item in prompt:
        whole("prompt", item, 0, MAX_TOKEN_ID)
    if len(prompt) > MAX_TOKENS:
        raise InvalidRequest(f"the prompt has more than {MAX_TOKENS} tokens", field="prompt")


def _check_messages(messages: list[dict[str, Any]]) -> None:
    size = 0
    for number, message in enumerate(messages, start=1):
        if set(message) != set(ROLES_NEEDED) or not all(
            isinstance(message[key], str) for key in ROLES_NEEDED
        ):
            raise InvalidRequest(
                f"message {number} must have the texts 'role' and 'content' and nothing else",
                field="messages",
            )
        for key in ROLES_NEEDED:
            check_prompt(message[key] or " ")
            size += len(message[key].encode())
        if not message["role"]:
            raise InvalidRequest(f"message {number} has an empty role", field="messages")
    if size > MAX_PROMPT_BYTES:
        raise InvalidRequest(
            f"the messages are larger than {MAX_PROMPT_BYTES >> 20} MiB", field="messages"
        )
    if not any(message["content"] for message in messages):
        raise InvalidRequest("all messages are empty", field="messages")


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSpec:
    """A job as it was submitted: what a worker needs besides the progress.

    Attributes:
        model: served name of the target.
        prompt: text, token ids, or chat messages ({"role", "content"}).
        params: sampling parameters.
        priority: -100 … 100; a higher one is served first.
        group: jobs of one group report their end to one stream (see keys.py), or "".
        sample: which of the `params.n` samples of the prompt this job makes.
    """

    model: str
    prompt: Prompt
    params: SamplingParams
    priority: int = 0
    group: str = ""
    sample: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.model, str) or not MODEL_NAME.fullmatch(self.model):
            raise InvalidRequest(f"{self.model!r} is no model name", field="model")
        check_prompt(self.prompt)
        whole("priority", self.priority, -100, 100)
        if not isinstance(self.params, SamplingParams):
            raise InvalidRequest("params must be SamplingParams", field="params")
        whole("sample", self.sample, 0, self.params.n - 1)
        if self.params.echo and isinstance(self.prompt[0], dict):
            raise InvalidRequest(
                "echo shows a prompt of text or token ids; chat messages become text only where "
                "the model's template is",
                field="echo",
            )
        if self.group != "" and not (
            isinstance(self.group, str) and MODEL_NAME.fullmatch(self.group)
        ):
            raise InvalidRequest(f"{self.group!r} is no group name", field="group")

    def to_bytes(self) -> bytes:
        packed: bytes = msgpack.packb([SPEC_VERSION, asdict(self)])
        return packed

    @classmethod
    def from_bytes(cls, raw: bytes) -> JobSpec:
        """The spec of a job record.

        Raises:
            DecodeError: it was written by another version, or is damaged.
        """
        try:
            version, values = msgpack.unpackb(raw)
            if version != SPEC_VERSION:
                raise ValueError(f"format version {version!r}, this is {SPEC_VERSION}")
            return cls(**{**values, "params": SamplingParams(**values["params"])})
        except (ValueError, TypeError, KeyError, msgpack.UnpackException, InvalidRequest) as error:
            raise DecodeError(f"the job's spec cannot be read here: {error}", raw) from error
