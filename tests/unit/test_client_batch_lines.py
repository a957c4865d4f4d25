"""Request files: both forms of a line, and every way in which one can be wrong."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pilotfish.batch_lines import InvalidBatch, check_each, read_request, read_requests
from pilotfish_broker.errors import InvalidRequest
from pilotfish_broker.spec import SamplingParams


def write(path: Path, *lines: Any) -> Path:
    raw = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines]
    path.write_bytes(b"\n".join(raw) + b"\n")
    return path


def openai(body: dict[str, Any], url: str = "/v1/completions", **more: Any) -> dict[str, Any]:
    return {"custom_id": "a", "method": "POST", "url": url, "body": body, **more}


def test_a_short_line_is_a_completion_named_by_its_number(tmp_path: Path) -> None:
    path = write(tmp_path / "in", b"", {"prompt": "hi", "max_tokens": 3})
    (request,) = read_requests(path)
    assert (request.custom_id, request.kind, request.prompt) == ("line-2", "completion", "hi")
    assert request.params == SamplingParams(max_tokens=3)


def test_an_openai_chat_line_is_read_with_its_own_word_for_the_limit() -> None:
    messages = [{"role": "user", "content": "hi"}]
    body = {"model": "m", "messages": messages, "max_completion_tokens": 5, "temperature": 0}
    raw = json.dumps(openai(body, "/v1/chat/completions")).encode()
    request = read_request(7, raw)
    assert (request.custom_id, request.kind, request.model) == ("a", "chat", "m")
    assert request.prompt == messages
    assert request.params.max_tokens == 5


def test_token_ids_and_short_chat_lines_are_read() -> None:
    assert read_request(1, b'{"prompt": [1, 2]}').prompt == [1, 2]
    assert read_request(1, b'{"messages": [{"role": "user", "content": "x"}]}').kind == "chat"


def test_the_limit_of_the_command_line_is_for_lines_without_one() -> None:
    nine = {"max_tokens": 9}
    assert read_request(1, b'{"prompt": "x"}', nine).params.max_tokens == 9
    assert read_request(1, b'{"prompt": "x", "max_tokens": 2}', nine).params.max_tokens == 2
    assert read_request(1, b'{"prompt": "x", "max_tokens": null}', nine).params.max_tokens == 9


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (b"{", "malformed JSON"),
        (b'{"prompt": "x"} trailing', "malformed JSON"),
        (b'{"prompt": "x", "temperature": NaN}', "NaN is no JSON value"),
        (b"[" * 100_000, "malformed JSON"),
        (b'{"custom_id": "\\udfff", "prompt": "x"}', "half of a character pair"),
        (b"\xff\xfe", "not UTF-8"),
        (b"[1]", "not a JSON object"),
        (b"{}", "either 'prompt' or 'messages'"),
        (b'{"prompt": "x", "messages": []}', "either 'prompt' or 'messages'"),
        (b'{"prompt": ""}', "empty"),
        (b'{"prompt": ["a", "b"]}', "whole number"),
        (b'{"prompt": [{"role": "user", "content": "x"}]}', "belong into 'messages'"),
        (b'{"messages": [1, 2]}', "list of messages"),
        (b'{"messages": []}', "list of messages"),
        (b'{"messages": [{"role": "user", "content": ["x"]}]}', "message 1"),
        (b'{"prompt": "\\ud800"}', "half of a character pair"),
        (b'{"prompt": "x", "max_tokens": 0}', "max_tokens must lie between 1"),
        (b'{"prompt": "x", "max_tokens": true}', "max_tokens must be a whole number"),
        (b'{"prompt": "x", "max_completion_tokens": 3}', "'max_completion_tokens'"),
        (b'{"prompt": "x", "best_of": 3, "tools": []}', "parameters 'best_of', 'tools'; supported"),
        (b'{"prompt": "x", "n": 0}', "n must lie between 1"),
        (b'{"prompt": "x", "n": true}', "n must be a whole number"),
        (b'{"prompt": "x", "temperature": -0.7}', "temperature must lie between 0"),
        (b'{"prompt": "x", "stop": "\\udfff"}', "half of a character pair"),
        (b'{"prompt": "x", "custom_id": 3}', "custom_id must be a text"),
        (b'{"prompt": "x", "custom_id": ""}', "custom_id must be a text"),
        (b'{"prompt": "x", "model": 3}', "model must be a text"),
        (b'{"custom_id": "a", "body": {"prompt": "x"}}', "method must be 'POST'"),
        (b'{"method": "POST", "url": "/v1/embeddings", "body": {}}', "url must be one of"),
        (b'{"method": "POST", "url": ["/v1"], "body": {}}', "url must be one of"),
        (b'{"method": "POST", "url": "/v1/completions", "body": 1}', "body must be"),
        (b'{"method": "POST", "url": "/v1/completions", "body": {}}', "'prompt' is missing"),
        (
            b'{"method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}, "seed": 1}',
            "'seed' does not belong beside 'body'",
        ),
    ],
)
def test_a_line_that_cannot_be_served_says_why(raw: bytes, said: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read_request(1, raw)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    "extra",
    [
        {"n": 1},
        {"stream": False},
        {"top_p": 1.0},
        {"presence_penalty": 0},
        {"stop": None},
        {"frequency_penalty": 0.0},
        {"logprobs": False},
        {"logprobs": None},
        {"tools": None},
        {"stop": []},
        {"logit_bias": {}},
        {"response_format": {"type": "text"}},
    ],
)
def test_what_changes_nothing_is_accepted(extra: dict[str, Any]) -> None:
    raw = json.dumps({"prompt": "x", **extra}).encode()
    assert read_request(1, raw).params == SamplingParams()


def test_all_problems_are_reported_with_their_lines(tmp_path: Path) -> None:
    lines = [{"prompt": "x", "custom_id": "a"}, b"{", {"prompt": ""}]
    lines += [{"prompt": "y", "custom_id": "a"}, {"prompt": "z", "custom_id": "line-6"}]
    lines += [{"prompt": "unnamed"}]
    with pytest.raises(InvalidBatch) as caught:
        read_requests(write(tmp_path / "in", *lines))
    assert [problem.line for problem in caught.value.problems] == [2, 3, 4, 6]
    assert "line 4: custom_id 'a' was used before, on line 1" in str(caught.value)


def test_a_long_list_of_problems_is_cut_but_counted(tmp_path: Path) -> None:
    with pytest.raises(InvalidBatch) as caught:
        read_requests(write(tmp_path / "in", *[b"{"] * 80))
    assert len(caught.value.problems) == 80
    assert "80 lines cannot be served" in str(caught.value)
    assert "and 30 more" in str(caught.value)


def test_a_file_without_a_request_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="holds no request"):
        read_requests(write(tmp_path / "in", b"", b"   "))


def test_windows_line_ends_and_a_byte_order_mark_are_no_problem(tmp_path: Path) -> None:
    path = tmp_path / "in"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\r\n{"prompt": "b"}')
    assert [request.prompt for request in read_requests(path)] == ["a", "b"]


def test_checks_of_many_requests_report_all_of_them(tmp_path: Path) -> None:
    requests = read_requests(write(tmp_path / "in", {"prompt": "a"}, {"prompt": "b"}))

    def refuse(_: object) -> None:
        raise InvalidRequest("no")

    with pytest.raises(InvalidBatch) as caught:
        check_each(tmp_path / "in", requests, refuse)
    assert [problem.line for problem in caught.value.problems] == [1, 2]


@given(st.binary(max_size=200))
def test_no_bytes_make_the_reader_fail_otherwise(raw: bytes) -> None:
    with contextlib.suppress(InvalidRequest):
        read_request(1, raw)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=6,
)
names = st.sampled_from(
    [
        "prompt",
        "messages",
        "custom_id",
        "method",
        "url",
        "body",
        "model",
        "max_tokens",
        "temperature",
        "stop_token_ids",
        "ignore_eos",
        "speculation",
        "n",
        "stop",
        "stream",
        "logprobs",
        "top_logprobs",
        "logit_bias",
        "bad_words",
        "response_format",
        "json_schema",
        "echo",
    ]
)


@given(st.dictionaries(names, json_values, max_size=6))
def test_no_object_makes_the_reader_fail_otherwise(values: dict[str, Any]) -> None:
    with contextlib.suppress(InvalidRequest):
        read_request(1, json.dumps(values).encode())
