"""Parameters of a request in OpenAI's words, mapped to sampling parameters.

What changes nothing is accepted at the value at which it changes nothing; everything else that is
not honoured is refused by name, so that nobody gets an answer to another question.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from pilotfish_broker.errors import InvalidRequest, UnsupportedParameter
from pilotfish_broker.spec import SamplingParams

#: OpenAI's name → the values at which it asks for nothing; null always does.
WITHOUT_EFFECT: Mapping[str, tuple[Any, ...]] = {
    "n": (1,),
    "stream": (False,),
    "top_p": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logprobs": (False,),
    "stop": (),
}
NO_DEFAULTS: Mapping[str, Any] = {}
HONOURED = frozenset(item.name for item in fields(SamplingParams))


def read_params(
    body: Mapping[str, Any], *, is_chat: bool, defaults: Mapping[str, Any] = NO_DEFAULTS
) -> SamplingParams:
    """Sampling parameters of a request's body, from which prompt and model have been taken.

    Args:
        body: name → value as in the request; null means "not given".
        is_chat: `max_completion_tokens` is a chat parameter and means `max_tokens`.
        defaults: parameters of ours for requests that do not give them.

    Raises:
        UnsupportedParameter: parameters that are not honoured; all of them are named.
        InvalidRequest: a value is out of range.
    """
    values = {name: value for name, value in body.items() if value is not None}
    if is_chat and "max_completion_tokens" in values:
        limit = values.pop("max_completion_tokens")
        if values.setdefault("max_tokens", limit) != limit:
            raise InvalidRequest(
                "max_tokens and max_completion_tokens mean the same, but differ",
                field="max_completion_tokens",
            )
    for name, allowed in WITHOUT_EFFECT.items():
        if name in values and _is_one_of(values[name], allowed):
            del values[name]
    refused = [name for name in body if name in values and name not in HONOURED]
    if refused:
        raise _unsupported(refused, values)
    return SamplingParams.from_mapping({**defaults, **values})


def _is_one_of(value: Any, allowed: tuple[Any, ...]) -> bool:
    """Equality that does not take true for 1."""
    return any(
        value == item and isinstance(value, bool) == isinstance(item, bool) for item in allowed
    )


def _unsupported(names: list[str], values: Mapping[str, Any]) -> UnsupportedParameter:
    described = [
        f"{name!r} (here {values[name]!r}; it can be left out)"
        if name in WITHOUT_EFFECT
        else f"{name!r}"
        for name in names
    ]
    word = "parameter" if len(names) == 1 else "parameters"
    return UnsupportedParameter(
        f"unsupported {word} {', '.join(described)}; supported are {', '.join(sorted(HONOURED))}",
        field=names[0],
    )
