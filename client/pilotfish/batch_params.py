"""Parameters of a request in OpenAI's words and in ours, mapped to sampling parameters.

What is not honoured is refused by name, so that nobody gets an answer to another question. Values
are checked where the parameters themselves are, see sampling.py; here are only the words that mean
something else there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields
from types import MappingProxyType
from typing import Any

from pilotfish_broker.checks import flag, optional, shown, whole
from pilotfish_broker.errors import InvalidRequest, UnsupportedParameter
from pilotfish_broker.sampling import MAX_LOGPROBS, SamplingParams

NO_DEFAULTS: Mapping[str, Any] = MappingProxyType({})
OURS = frozenset(item.name for item in fields(SamplingParams))
COMPLETION = OURS | {"response_format"}
CHAT = (OURS | {"response_format", "max_completion_tokens", "top_logprobs"}) - {"echo"}


def read_params(
    body: Mapping[str, Any], *, is_chat: bool, defaults: Mapping[str, Any] = NO_DEFAULTS
) -> SamplingParams:
    """Sampling parameters of a request's body, from which prompt and model have been taken.

    Args:
        body: name → value as in the request; null means "not given".
        is_chat: which of OpenAI's two forms the request has; some words belong to one of them, and
            `logprobs` differs.
        defaults: parameters of ours for requests that do not give them.

    Raises:
        UnsupportedParameter: parameters that are not honoured; all of them are named.
        InvalidRequest: a value is of the wrong type or out of range.
    """
    values = {name: value for name, value in body.items() if value is not None}
    if values.get("stream") is False:  # an answer in one piece is what there is
        del values["stream"]
    supported = CHAT if is_chat else COMPLETION
    if refused := [name for name in values if name not in supported]:
        raise _unsupported(refused, values, supported)
    for rewrite in (_limit, _chat_logprobs if is_chat else _completion_logprobs, _response_format):
        rewrite(values)
    return SamplingParams.from_mapping({**defaults, **values})


def _unsupported(
    names: list[str], values: Mapping[str, Any], supported: Iterable[str]
) -> UnsupportedParameter:
    described = [
        f"'stream' (here {shown(values[name])}; leave it out)" if name == "stream" else f"{name!r}"
        for name in names
    ]
    word = "parameter" if len(names) == 1 else "parameters"
    return UnsupportedParameter(
        f"unsupported {word} {', '.join(described)}; supported are {', '.join(sorted(supported))}",
        field=names[0],
    )


# --- what is worded otherwise: each changes `values` in place ------------------------------------


def _limit(values: dict[str, Any]) -> None:
    if "max_completion_tokens" not in values:
        return
    limit = values.pop("max_completion_tokens")
    if values.setdefault("max_tokens", limit) != limit:
        raise InvalidRequest(
            "max_tokens and max_completion_tokens mean the same, but differ",
            field="max_completion_tokens",
        )


def _completion_logprobs(values: dict[str, Any]) -> None:
    """A number, as ours. With `echo` the prompt's tokens belong to it."""
    if values.get("logprobs") is False:
        del values["logprobs"]
    if "logprobs" in values and values.get("echo") is True:
        values.setdefault("prompt_logprobs", values["logprobs"])


def _chat_logprobs(values: dict[str, Any]) -> None:
    """Yes or no, with the number in a word of its own."""
    is_asked = flag("logprobs", values.pop("logprobs", False))
    top = optional(_most_likely)("top_logprobs", values.pop("top_logprobs", None))
    if top is not None and not is_asked:
        raise InvalidRequest("top_logprobs needs logprobs to be true", field="top_logprobs")
    if is_asked:
        values["logprobs"] = top or 0


def _most_likely(name: str, value: Any) -> int:
    return whole(name, value, 0, MAX_LOGPROBS)


def _response_format(values: dict[str, Any]) -> None:
    """Text, any JSON object, or JSON by a schema that has a name."""
    given = values.pop("response_format", {"type": "text"})
    match given:
        case {"type": "text", **rest}:
            schema = None
        case {"type": "json_object", **rest}:
            schema = {"type": "object"}
        case {"type": "json_schema", "json_schema": named, **rest}:
            schema = _schema_of(named)
        case _:
            raise _bad_format(
                "it must have the type text, json_object, or json_schema and that schema"
            )
    _refuse_rest(rest)
    if schema is not None and "json_schema" in values:
        raise _bad_format("json_schema says the same; give one of them")
    if schema is not None:
        values["json_schema"] = schema


def _schema_of(named: Any) -> Any:
    """The schema in OpenAI's wrapping. Not to be strict would be leave to differ from it, and
    needs no taking."""
    match named:
        case {"name": str(), "schema": dict(schema), **rest}:
            rest.pop("description", None)
            optional(flag)("response_format.json_schema.strict", rest.pop("strict", None))
            _refuse_rest(rest)
            return schema
    raise _bad_format("json_schema must be an object with a name and a schema")


def _refuse_rest(rest: Iterable[Any]) -> None:
    for name in rest:
        raise _bad_format(f"{shown(name)} is not known there")


def _bad_format(text: str) -> InvalidRequest:
    return InvalidRequest(f"response_format: {text}", field="response_format")
