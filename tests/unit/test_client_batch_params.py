"""Parameters of request lines: OpenAI's words, ours, and what neither has."""

from __future__ import annotations

import json
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from pilotfish.batch_params import read_params
from pilotfish_broker.errors import InvalidRequest, UnsupportedParameter
from pilotfish_broker.sampling import SamplingParams

SCHEMA = {"type": "object", "properties": {"b": {"type": "string"}, "a": {"type": "integer"}}}
#: A value for each parameter of ours that is not its default, as JSON has it.
OTHERS: dict[str, Any] = {
    "max_tokens": 9,
    "min_tokens": 2,
    "temperature": 0.7,
    "top_k": 5,
    "top_p": 0.9,
    "min_p": 0.05,
    "typical_p": 0.95,
    "repetition_penalty": 1.1,
    "frequency_penalty": 0.5,
    "presence_penalty": -0.5,
    "logit_bias": {"7": -100, "3": 2.5},
    "bad_words": ["no", [4, 5]],
    "allowed_token_ids": [1, 2, 3],
    "stop": ["\n", "END"],
    "include_stop_str_in_output": True,
    "stop_token_ids": [11],
    "ignore_eos": True,
    "seed": 7,
    "n": 3,
    "logprobs": 2,
    "prompt_logprobs": 1,
    "echo": True,
    "json_schema": SCHEMA,
    "regex": "[a-z]+",
    "grammar": 'start: "a"',
    "rule": "block",
    "speculation": 4,
}


def read(kind: str, **body: Any) -> SamplingParams:
    """A body as it comes out of a line of JSON."""
    return read_params(json.loads(json.dumps(body)), is_chat=kind == "chat")


def test_every_parameter_of_ours_has_a_case() -> None:
    assert set(OTHERS) == {item.name for item in fields(SamplingParams)}


def test_the_readme_gives_every_parameter_and_each_number_that_is_its_default() -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    section = readme.partition("\n## Sampling\n")[2].partition("\n## ")[0]
    for item in fields(SamplingParams):
        assert f"`{item.name}`" in section, item.name
        shown = re.search(rf"`{item.name}` \(([^:)]*)", section)
        if shown is not None and isinstance(item.default, int | float):
            assert shown[1] == f"{json.dumps(item.default):.5}".removesuffix(".0"), item.name


@pytest.mark.parametrize("name", OTHERS)
def test_every_parameter_of_ours_is_taken_by_its_own_name(name: str) -> None:
    params = read("completion", **{name: OTHERS[name]})
    assert params == SamplingParams(**{name: OTHERS[name]})
    assert params != SamplingParams()
    if name not in ("echo", "logprobs"):
        assert read("chat", **{name: OTHERS[name]}) == params


def test_values_that_json_writes_otherwise_are_read() -> None:
    params = read("completion", logit_bias={"7": -100, "3": 2.5}, stop="END", json_schema=SCHEMA)
    assert params.logit_bias == ((3, 2.5), (7, -100.0))
    assert params.stop == ("END",)
    assert json.loads(params.json_schema or "") == SCHEMA
    assert read("completion", json_schema=json.dumps(SCHEMA)) == read(
        "completion", json_schema=SCHEMA
    )


def test_greedy_is_what_a_request_gets_that_says_nothing() -> None:
    assert read("completion").chosen_rule == "greedy"
    assert read("chat", top_p=0.5, seed=3).chosen_rule == "greedy"
    assert read("chat", temperature=1, seed=3).chosen_rule == "coupled"


@pytest.mark.parametrize(
    ("body", "logprobs"),
    [
        ({}, None),
        ({"logprobs": False}, None),
        ({"logprobs": True}, 0),
        ({"logprobs": True, "top_logprobs": 0}, 0),
        ({"logprobs": True, "top_logprobs": 20}, 20),
    ],
)
def test_a_chat_asks_for_logprobs_by_two_words(body: dict[str, Any], logprobs: int | None) -> None:
    params = read("chat", **body)
    assert (params.logprobs, params.prompt_logprobs) == (logprobs, None)


@pytest.mark.parametrize(
    ("body", "logprobs", "prompt"),
    [
        ({"logprobs": False}, None, None),
        ({"logprobs": 0}, 0, None),
        ({"logprobs": 5}, 5, None),
        ({"logprobs": 5, "echo": False}, 5, None),
        ({"logprobs": 5, "echo": True}, 5, 5),
        ({"logprobs": 5, "echo": True, "prompt_logprobs": 2}, 5, 2),
        ({"echo": True}, None, None),
    ],
)
def test_a_completion_asks_by_a_number_and_for_an_echoed_prompt_too(
    body: dict[str, Any], logprobs: int | None, prompt: int | None
) -> None:
    params = read("completion", **body)
    assert (params.logprobs, params.prompt_logprobs) == (logprobs, prompt)


@pytest.mark.parametrize("kind", ["chat", "completion"])
@pytest.mark.parametrize(
    ("given", "schema"),
    [
        ({"type": "text"}, None),
        ({"type": "json_object"}, {"type": "object"}),
        ({"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}, SCHEMA),
        (
            {
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": {}, "strict": True, "description": "y"},
            },
            {},
        ),
        (
            {"type": "json_schema", "json_schema": {"name": "x", "schema": {}, "strict": None}},
            {},
        ),
    ],
)
def test_a_response_format_becomes_a_schema(
    kind: str, given: dict[str, Any], schema: dict[str, Any] | None
) -> None:
    params = read(kind, response_format=given)
    if schema is None:
        assert params == SamplingParams()
    else:
        assert json.loads(params.json_schema or "") == schema
        assert list(json.loads(params.json_schema or "")) == list(schema)  # their order counts


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "it must have the type"),
        ("json", "it must have the type"),
        ([], "it must have the type"),
        ({"type": "grammar"}, "it must have the type"),
        ({"type": "json_schema"}, "it must have the type"),
        ({"type": "json_schema", "json_schema": SCHEMA}, "with a name and a schema"),
        ({"type": "json_schema", "json_schema": {"name": "x", "schema": 3}}, "with a name and"),
        ({"type": "json_schema", "json_schema": {"name": 3, "schema": {}}}, "with a name and"),
        ({"type": "text", "indent": 2}, "'indent' is not known"),
        (
            {"type": "json_schema", "json_schema": {"name": "x", "schema": {}, "indent": 2}},
            "'indent' is not known",
        ),
        (
            {"type": "json_schema", "json_schema": {"name": "x", "schema": {}, "strict": 1}},
            "strict must be true or false",
        ),
    ],
)
def test_a_response_format_of_another_form_is_refused(given: Any, said: str) -> None:
    with pytest.raises(InvalidRequest, match=said) as caught:
        read("chat", response_format=given)
    assert "response_format" in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "body", "name"),
    [
        ("completion", {"best_of": 2}, "best_of"),
        ("completion", {"best_of": 1}, "best_of"),
        ("completion", {"suffix": "x"}, "suffix"),
        ("completion", {"max_completion_tokens": 3}, "max_completion_tokens"),
        ("completion", {"top_logprobs": 3}, "top_logprobs"),
        ("completion", {"stream": True}, "stream"),
        ("completion", {"user": "me"}, "user"),
        ("chat", {"tools": []}, "tools"),
        ("chat", {"tool_choice": "none"}, "tool_choice"),
        ("chat", {"stream_options": {}}, "stream_options"),
        ("chat", {"stream": 0}, "stream"),
        ("chat", {"echo": True}, "echo"),
        ("chat", {"beam_width": 4}, "beam_width"),
    ],
)
def test_what_is_not_honoured_is_refused_by_name(
    kind: str, body: dict[str, Any], name: str
) -> None:
    with pytest.raises(UnsupportedParameter, match=f"unsupported parameter '{name}'") as caught:
        read(kind, **body, temperature=0.5)
    assert caught.value.field == name
    supported = str(caught.value).partition("supported are ")[2].split(", ")
    assert name not in supported
    assert {"temperature", "top_p", "response_format"} <= set(supported)


@pytest.mark.parametrize(
    ("kind", "body", "said"),
    [
        ("chat", {"top_logprobs": 3}, "top_logprobs needs logprobs"),
        ("chat", {"top_logprobs": 3, "logprobs": False}, "top_logprobs needs logprobs"),
        ("chat", {"logprobs": True, "top_logprobs": 21}, "top_logprobs must lie between 0 and 20"),
        ("chat", {"logprobs": True, "top_logprobs": True}, "top_logprobs must be a whole number"),
        ("chat", {"logprobs": 3}, "logprobs must be true or false"),
        ("completion", {"logprobs": True}, "logprobs must be a whole number"),
        ("completion", {"logprobs": 21}, "logprobs must lie between 0 and 20"),
        ("completion", {"logit_bias": {"x": 1}}, "logit_bias must be a whole number, not 'x'"),
        ("completion", {"logit_bias": {"1": 1, "01": 2}}, "logit_bias has the token id 1 twice"),
        ("completion", {"logit_bias": 3}, "logit_bias must map"),
        ("completion", {"n": 129}, "n must lie between 1 and 128"),
        ("completion", {"stop": ["a", ""]}, "stop holds an empty text"),
        ("completion", {"json_schema": 3}, "json_schema must be a JSON schema"),
        ("completion", {"regex": "a", "grammar": "b"}, "regex and grammar cannot be combined"),
        (
            "chat",
            {"response_format": {"type": "json_object"}, "json_schema": {}},
            "json_schema says the same",
        ),
        (
            "chat",
            {"response_format": {"type": "json_object"}, "regex": "a"},
            "json_schema and regex cannot be combined",
        ),
        ("chat", {"max_tokens": 3, "max_completion_tokens": 4}, "mean the same, but differ"),
    ],
)
def test_a_value_that_cannot_be_used_is_named(kind: str, body: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidRequest, match=said):
        read(kind, **body)


def test_defaults_are_for_requests_that_do_not_say() -> None:
    defaults = {"temperature": 0.8, "top_p": 0.9, "seed": 5}
    params = read_params({"temperature": 0, "seed": None}, is_chat=True, defaults=defaults)
    assert params == SamplingParams(temperature=0, top_p=0.9, seed=5)
    limited = read_params({"max_completion_tokens": 3}, is_chat=True, defaults={"max_tokens": 9})
    assert limited.max_tokens == 3
