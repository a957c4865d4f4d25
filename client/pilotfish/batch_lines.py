"""Reads a file of requests: OpenAI batch lines, or the short form {"prompt": …}.

The whole file is checked before anything is done with it, and every problem is reported with its
line number.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pilotfish.batch_params import NO_DEFAULTS, read_params
from pilotfish_broker.errors import InvalidRequest
from pilotfish_broker.spec import Prompt, SamplingParams, check_prompt

Kind = Literal["completion", "chat"]
KINDS: Mapping[str, Kind] = {"/v1/completions": "completion", "/v1/chat/completions": "chat"}
ENVELOPE = ("custom_id", "method", "url", "body")
MOST_REPORTED = 50


@dataclass(frozen=True, slots=True)
class Request:
    """One line of the input.

    Attributes:
        line: its number, from 1.
        custom_id: the caller's name for it, or ``line-<number>``; unique in the file.
        kind: which of the two answers it gets.
        model: the model it names, or None.
    """

    line: int
    custom_id: str
    kind: Kind
    prompt: Prompt
    params: SamplingParams
    model: str | None


@dataclass(frozen=True, slots=True)
class Problem:
    """What is wrong with one line."""

    line: int
    text: str


class InvalidBatch(InvalidRequest):
    """The file has lines that cannot be served; no job was submitted.

    Attributes:
        problems: all of them, by line.
    """

    def __init__(self, name: str, problems: Iterable[Problem]) -> None:
        self.problems = sorted(problems, key=lambda problem: problem.line)
        count = len(self.problems)
        shown = [f"  line {p.line}: {p.text}" for p in self.problems[:MOST_REPORTED]]
        if count > MOST_REPORTED:
            shown.append(f"  … and {count - MOST_REPORTED} more")
        counted = "1 line" if count == 1 else f"{count} lines"
        head = f"{name}: {counted} cannot be served, so no job was submitted"
        super().__init__("\n".join([head, *shown]))


def read_requests(path: Path, defaults: Mapping[str, Any] = NO_DEFAULTS) -> list[Request]:
    """All requests of a file.

    Args:
        path: the file, UTF-8, one JSON object a line; blank lines are skipped.
        defaults: sampling parameters by name, for lines that do not give them.

    Raises:
        InvalidBatch: some lines cannot be served, or there is none.
        OSError: the file cannot be read.
    """
    requests: list[Request] = []
    problems: list[Problem] = []
    first_use: dict[str, int] = {}
    for number, raw in _lines(path.read_bytes()):
        try:
            request = read_request(number, raw, defaults)
            if (earlier := first_use.setdefault(request.custom_id, number)) != number:
                raise InvalidRequest(
                    f"custom_id {request.custom_id!r} was used before, on line {earlier}"
                )
        except InvalidRequest as error:
            problems.append(Problem(number, str(error)))
        else:
            requests.append(request)
    if problems:
        raise InvalidBatch(str(path), problems)
    if not requests:
        raise InvalidRequest(f"{path} holds no request")
    return requests


def check_each(path: Path, requests: Iterable[Request], check: Callable[[Request], None]) -> None:
    """Check all requests of a file by a function that raises InvalidRequest.

    Raises:
        InvalidBatch: it raised for some of them; all are reported.
    """
    problems: list[Problem] = []
    for request in requests:
        try:
            check(request)
        except InvalidRequest as error:
            problems.append(Problem(request.line, str(error)))
    if problems:
        raise InvalidBatch(str(path), problems)


def read_request(number: int, raw: bytes, defaults: Mapping[str, Any] = NO_DEFAULTS) -> Request:
    """One line.

    Raises:
        InvalidRequest: it cannot be served.
    """
    values = _parse(raw)
    custom_id = values.pop("custom_id", None)
    if custom_id is None:
        custom_id = f"line-{number}"
    if not isinstance(custom_id, str) or not custom_id:
        raise InvalidRequest("custom_id must be a text and not empty", field="custom_id")
    if not is_text(custom_id):
        raise InvalidRequest("custom_id holds half of a character pair", field="custom_id")
    kind, body = _open_envelope(values)
    model = body.pop("model", None)
    if model is not None and not isinstance(model, str):
        raise InvalidRequest("model must be a text", field="model")
    prompt = _take_prompt(kind, body)
    params = read_params(body, is_chat=kind == "chat", defaults=defaults)
    return Request(number, custom_id, kind, prompt, params, model)


def is_text(value: str) -> bool:
    """Whether a text can be written as UTF-8; JSON can name halves of character pairs."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _lines(data: bytes) -> Iterator[tuple[int, bytes]]:
    data = data.removeprefix(b"\xef\xbb\xbf")  # the byte order mark of some editors
    for number, line in enumerate(data.split(b"\n"), start=1):
        if line.strip():
            yield number, line


def _parse(raw: bytes) -> dict[str, Any]:
    try:
        values = json.loads(raw.decode("utf-8"), parse_constant=_refuse_constant)
    except UnicodeDecodeError:
        raise InvalidRequest("the line is not UTF-8") from None
    except json.JSONDecodeError as error:
        raise InvalidRequest(f"malformed JSON: {error.msg} at column {error.colno}") from None
    except (RecursionError, ValueError) as error:
        raise InvalidRequest(f"malformed JSON: {error}") from None
    if not isinstance(values, dict):
        raise InvalidRequest("the line is not a JSON object")
    return values


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON value")


def _open_envelope(values: dict[str, Any]) -> tuple[Kind, dict[str, Any]]:
    """Kind and body of a line, in either form."""
    if not any(name in values for name in ENVELOPE):
        if ("prompt" in values) == ("messages" in values):
            raise InvalidRequest("the line must have either 'prompt' or 'messages'")
        return ("chat" if "messages" in values else "completion"), values
    for name in values:
        if name not in ENVELOPE:
            raise InvalidRequest(f"{name!r} does not belong beside 'body'", field=name)
    if values.get("method") != "POST":
        raise InvalidRequest("method must be 'POST'", field="method")
    kind = KINDS.get(values["url"]) if isinstance(values.get("url"), str) else None
    if kind is None:
        raise InvalidRequest(f"url must be one of {', '.join(KINDS)}", field="url")
    body = values.get("body")
    if not isinstance(body, dict):
        raise InvalidRequest("body must be a JSON object", field="body")
    return kind, body


def _take_prompt(kind: Kind, body: dict[str, Any]) -> Prompt:
    name = "messages" if kind == "chat" else "prompt"
    if name not in body:
        raise InvalidRequest(f"{name!r} is missing", field=name)
    prompt: Prompt = body.pop(name)
    is_messages = isinstance(prompt, list) and all(isinstance(item, dict) for item in prompt)
    if kind == "chat" and not (is_messages and prompt):
        raise InvalidRequest("messages must be a list of messages and not empty", field=name)
    if kind == "completion" and is_messages and prompt:
        raise InvalidRequest("chat messages belong into 'messages', not 'prompt'", field=name)
    check_prompt(prompt)
    return prompt
