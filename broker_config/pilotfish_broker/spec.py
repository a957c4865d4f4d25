"""What a job is: its status words, its sampling parameters, and what is checked at submit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from enum import StrEnum
from typing import Any

import msgpack

from pilotfish_broker.errors import DecodeError, InvalidRequest, UnsupportedParameter
from pilotfish_broker.settings import MAX_DRAFT_TOKENS, MODEL_NAME

MAX_PROMPT_BYTES = 4 << 20
MAX_TOKENS = 1 << 20
SPEC_VERSION = 1
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


def _whole(name: str, value: Any, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequest(f"{name} must be a whole number, not {value!r}", field=name)
    if not low <= value <= high:
        raise InvalidRequest(f"{name} must lie between {low} and {high}, not {value}", field=name)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are chosen and when to stop. Only greedy decoding is honoured so far.

    Attributes:
        max_tokens: most tokens to generate, at least 1; the model's context may end it sooner.
        temperature: must be 0 (greedy): the target's most likely token at each position.
        ignore_eos: go on after the model's end-of-sequence tokens.
        stop_token_ids: further token ids that end the output; like the model's own
            end-of-sequence token, the one that stops is kept in the token ids and not in the text.
        speculation: "auto", "off", or a fixed number of drafted tokens a round.

    Raises:
        InvalidRequest: a value is out of range.
        UnsupportedParameter: a value asks for what is not honoured yet.
    """

    max_tokens: int = 256
    temperature: float = 0.0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    speculation: str | int = "auto"

    def __post_init__(self) -> None:
        _whole("max_tokens", self.max_tokens, 1, MAX_TOKENS)
        number = self.temperature
        if isinstance(number, bool) or not isinstance(number, (int, float)) or not number >= 0:
            raise InvalidRequest(
                f"temperature must be a number from 0 up, not {number!r}", field="temperature"
            )
        if number != 0:
            raise UnsupportedParameter(
                f"temperature {number} asks for sampling, which is not served yet: "
                "leave it out or set it to 0 for greedy decoding",
                field="temperature",
            )
        # 0, 0.0 and -0.0 are one request, so they must be written alike
        object.__setattr__(self, "temperature", 0.0)
        if not isinstance(self.ignore_eos, bool):
            raise InvalidRequest("ignore_eos must be true or false", field="ignore_eos")
        self._check_stop_token_ids()
        if isinstance(self.speculation, str):
            if self.speculation not in ("auto", "off"):
                raise InvalidRequest(
                    f"speculation must be 'auto', 'off' or a number, not {self.speculation!r}",
                    field="speculation",
                )
        else:
            _whole("speculation", self.speculation, 1, MAX_DRAFT_TOKENS)

    def _check_stop_token_ids(self) -> None:
        ids = self.stop_token_ids
        if isinstance(ids, (str, bytes)) or not isinstance(ids, Sequence):
            raise InvalidRequest(
                "stop_token_ids must be a list of token ids", field="stop_token_ids"
            )
        for token in ids:
            _whole("stop_token_ids", token, 0, (1 << 31) - 1)
        object.__setattr__(self, "stop_token_ids", tuple(ids))

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> SamplingParams:
        """Parameters by name; a name that is not honoured is refused, never ignored.

        Raises:
            UnsupportedParameter: a name that no field honours.
            InvalidRequest: a value is out of range.
        """
        known = {item.name for item in fields(cls)}
        for name in values:
            if name not in known:
                raise UnsupportedParameter(
                    f"parameter {name!r} is not supported; supported are "
                    + ", ".join(sorted(known)),
                    field=name,
                )
        return cls(**values)


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
        _whole("prompt", item, 0, (1 << 31) - 1)
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
    """

    model: str
    prompt: Prompt
    params: SamplingParams
    priority: int = 0
    group: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.model, str) or not MODEL_NAME.fullmatch(self.model):
            raise InvalidRequest(f"{self.model!r} is no model name", field="model")
        check_prompt(self.prompt)
        _whole("priority", self.priority, -100, 100)
        if not isinstance(self.params, SamplingParams):
            raise InvalidRequest("params must be SamplingParams", field="params")
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
