"""Output lines, and what is left of an output file after a crash at any byte."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from pilotfish.batch_lines import read_request
from pilotfish.batch_output import OutputFile, output_line, repair
from pilotfish.result import Result
from pilotfish_broker.errors import InvalidRequest
from pilotfish_broker.logprobs import Alternative, TokenLogprob
from pilotfish_broker.spec import Status


def result(status: Status = Status.SUCCEEDED, error: str = "") -> Result:
    return Result(
        job_id="j1",
        status=status,
        model="m",
        text="blå",
        token_ids=[5, 6, 7],
        finish_reason="stop",
        error=error,
        prompt_tokens=4,
        rounds=2,
        drafted=3,
        accepted=1,
        started_ms=1000,
        finished_ms=2500,
    )


def test_a_completion_becomes_an_openai_line() -> None:
    line = output_line(read_request(1, b'{"prompt": "x", "custom_id": "a"}'), result())
    assert line["custom_id"] == "a"
    assert line["error"] is None
    assert line["response"]["status_code"] == 200
    body = line["response"]["body"]
    assert (body["object"], body["model"], body["created"]) == ("text_completion", "m", 2)
    assert body["choices"] == [
        {"index": 0, "text": "blå", "logprobs": None, "finish_reason": "stop"}
    ]
    assert body["usage"] == {"prompt_tokens": 4, "completion_tokens": 3, "total_tokens": 7}
    assert body["metrics"]["speculative_decoding"] == {
        "num_spec_steps": 2,
        "num_draft_tokens": 3,
        "num_accepted_draft_tokens": 1,
        "mean_acceptance_length": 1.5,
    }


def test_a_chat_becomes_an_assistant_message() -> None:
    request = read_request(1, b'{"messages": [{"role": "user", "content": "x"}]}')
    body = output_line(request, result())["response"]["body"]
    assert body["object"] == "chat.completion"
    assert body["choices"][0]["message"] == {"role": "assistant", "content": "blå"}


@pytest.mark.parametrize(
    ("status", "error", "message"),
    [
        (Status.FAILED, "too long", "too long"),
        (Status.CANCELLED, "", "the job was cancelled"),
        (Status.EXPIRED, "", "the job was expired"),
    ],
)
def test_a_job_that_did_not_succeed_becomes_an_error(
    status: Status, error: str, message: str
) -> None:
    line = output_line(read_request(3, b'{"prompt": "x"}'), result(status, error))
    assert line["response"] is None
    assert line["error"] == {"code": str(status), "message": message}


def sampled(*outputs: tuple[Status, int, str]) -> Result:
    """A result of several samples: (status, tokens, error) of each."""
    first, *others = (
        replace(
            result(status, error),
            job_id=f"j1.{number}" if number else "j1",
            sample=number,
            text=f"t{number}",
            token_ids=[5] * count,
            finished_ms=2500 + 1000 * number,
        )
        for number, (status, count, error) in enumerate(outputs)
    )
    return replace(first, others=tuple(others))


GOOD = Status.SUCCEEDED


@pytest.mark.parametrize("kind", ["prompt", "messages"])
def test_each_sample_is_a_choice_and_counts_once(kind: str) -> None:
    prompt = "x" if kind == "prompt" else [{"role": "user", "content": "x"}]
    request = read_request(1, json.dumps({kind: prompt, "n": 3}).encode())
    line = output_line(request, sampled((GOOD, 3, ""), (GOOD, 5, ""), (GOOD, 1, "")))
    assert line["error"] is None
    body = line["response"]["body"]
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    texts = [
        choice["text"] if kind == "prompt" else choice["message"]["content"]
        for choice in body["choices"]
    ]
    assert texts == ["t0", "t1", "t2"]
    assert body["usage"] == {"prompt_tokens": 4, "completion_tokens": 9, "total_tokens": 13}
    assert body["metrics"]["speculative_decoding"] == {
        "num_spec_steps": 6,
        "num_draft_tokens": 9,
        "num_accepted_draft_tokens": 3,
        "mean_acceptance_length": 1.5,
    }
    assert body["created"] == 4
    assert (line["id"], body["id"][-3:]) == ("batch_req_j1", "-j1")


@pytest.mark.parametrize(
    ("outputs", "code", "message"),
    [
        ([(GOOD, 1, ""), (Status.FAILED, 0, "too long")], "failed", "sample 1: too long"),
        (
            [(Status.CANCELLED, 0, ""), (GOOD, 1, "")],
            "cancelled",
            "sample 0: the job was cancelled",
        ),
        (
            [(Status.CANCELLED, 0, ""), (GOOD, 1, ""), (Status.FAILED, 0, "no luck")],
            "failed",
            "sample 2: no luck",
        ),
    ],
)
def test_one_sample_without_success_makes_the_line_an_error_that_names_it(
    outputs: list[tuple[Status, int, str]], code: str, message: str
) -> None:
    request = read_request(1, json.dumps({"prompt": "x", "n": len(outputs)}).encode())
    line = output_line(request, sampled(*outputs))
    assert line["response"] is None
    assert line["error"] == {"code": code, "message": message}


def test_log_probabilities_have_the_shape_of_their_kind() -> None:
    scored = replace(result(), text="ab", logprobs=[TokenLogprob(Alternative(5, -0.5, b"ab"), [])])
    chat = b'{"messages": [{"role": "user", "content": "x"}], "logprobs": true}'
    (choice,) = output_line(read_request(1, chat), scored)["response"]["body"]["choices"]
    assert choice["logprobs"]["content"][0]["token"] == "ab"
    completion = b'{"prompt": "x", "logprobs": 0}'
    body = output_line(read_request(1, completion), scored)["response"]["body"]
    assert body["choices"][0]["logprobs"]["tokens"] == ["ab"]
    assert "prompt_logprobs" not in body


def test_an_echoed_prompts_log_probabilities_are_among_those_of_the_choice() -> None:
    scored = replace(
        result(),
        text="xyab",
        logprobs=[TokenLogprob(Alternative(5, -0.5, b"ab"), [])],
        prompt_logprobs=[None, TokenLogprob(Alternative(6, -2.0, b"y"), [])],
    )
    raw = b'{"prompt": "xy", "logprobs": 0, "echo": true}'
    body = output_line(read_request(1, raw), scored)["response"]["body"]
    logprobs = body["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["x", "y", "ab"]
    assert logprobs["token_logprobs"] == [None, -2.0, -0.5]
    assert body["prompt_logprobs"] == [None, {"6": {"logprob": -2.0, "decoded_token": "y"}}]
    unscored = output_line(read_request(1, b'{"prompt": "xy", "echo": true}'), scored)
    assert unscored["response"]["body"]["choices"][0]["logprobs"] is None


def test_a_prompts_log_probabilities_stand_apart_where_it_is_not_echoed() -> None:
    scored = replace(result(), prompt_logprobs=[None, TokenLogprob(Alternative(6, -2.0, b"y"), [])])
    raw = b'{"messages": [{"role": "user", "content": "x"}], "prompt_logprobs": 0}'
    body = output_line(read_request(1, raw), scored)["response"]["body"]
    assert body["prompt_logprobs"] == [None, {"6": {"logprob": -2.0, "decoded_token": "y"}}]
    assert body["choices"][0]["logprobs"] is None


def test_a_file_cut_at_any_byte_keeps_its_whole_lines_and_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "out"
    requests = [
        read_request(n, json.dumps({"prompt": "x", "custom_id": f"å{n}"}).encode())
        for n in range(3)
    ]
    with OutputFile(path) as output:
        for request in requests:
            output.write(output_line(request, result()))
    whole = path.read_bytes()
    for size in range(len(whole) + 1):
        path.write_bytes(whole[:size])
        with OutputFile(path) as output:
            assert len(output.finished) == whole[:size].count(b"\n")
            for request in requests:
                if request.custom_id not in output.finished:
                    output.write(output_line(request, result()))
        assert path.read_bytes() == whole


def test_failed_lines_are_known_as_such(tmp_path: Path) -> None:
    path = tmp_path / "out"
    request = read_request(1, b'{"prompt": "x"}')
    with OutputFile(path) as output:
        output.write(output_line(request, result(Status.FAILED, "no")))
        assert output.finished == {"line-1": False}
    assert repair(path) == {"line-1": False}


def test_a_file_of_something_else_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "out"
    path.write_bytes(b"my notes\nand more\n")
    with pytest.raises(InvalidRequest, match="line 1, is no output line"):
        OutputFile(path)
    assert path.read_bytes() == b"my notes\nand more\n"


def test_no_character_of_a_text_ends_its_line_for_any_reader(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    text = "one\u2028two\u2029three\u0085four\nfive"
    request = read_request(1, b'{"prompt": "x", "custom_id": "a"}')
    with OutputFile(path) as output:
        output.write(output_line(request, replace(result(), text=text)))
    (line,) = path.read_text(encoding="utf-8").splitlines()
    assert json.loads(line)["response"]["body"]["choices"][0]["text"] == text
