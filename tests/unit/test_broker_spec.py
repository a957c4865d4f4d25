"""What is refused at submit, and with which field."""

from __future__ import annotations

from typing import Any

import msgpack
import pytest

from pilotfish_broker.errors import DecodeError, InvalidRequest
from pilotfish_broker.spec import (
    MAX_PROMPT_BYTES,
    MAX_TOKENS,
    SPEC_VERSION,
    TERMINAL,
    JobSpec,
    SamplingParams,
    Status,
    check_prompt,
)

GOOD_PROMPTS: list[Any] = [
    "hi",
    " ",
    "\0",
    "🦈",
    "x" * MAX_PROMPT_BYTES,
    [0],
    [(1 << 31) - 1],
    [{"role": "user", "content": "hi"}],
    [{"role": "system", "content": ""}, {"role": "user", "content": "hi"}],
]
BAD_PROMPTS: list[Any] = [
    "",
    "x" * (MAX_PROMPT_BYTES + 1),
    "é" * (MAX_PROMPT_BYTES // 2 + 1),
    "\ud83e",
    "half \udd88 a pair",
    [],
    None,
    5,
    b"hi",
    {"role": "user", "content": "hi"},
    (1, 2),
    [-1],
    [1 << 31],
    [True],
    [1.0],
    ["a"],
    [None],
    [1, {"role": "user", "content": "hi"}],
    [0] * (MAX_TOKENS + 1),
    [{}],
    [{"role": "user"}],
    [{"content": "hi"}],
    [{"role": "user", "content": "hi", "name": "x"}],
    [{"role": "", "content": "hi"}],
    [{"role": 1, "content": "hi"}],
    [{"role": "user", "content": None}],
    [{"role": "user", "content": ["hi"]}],
    [{"role": "user", "content": ""}],
    [{"role": "user", "content": "\ud83e"}],
    [{"role": "\ud83e", "content": "hi"}],
    [{"role": "r" * MAX_PROMPT_BYTES, "content": "hi"}],
    [{"role": "user", "content": "x" * (MAX_PROMPT_BYTES // 2)}] * 2,
]


@pytest.mark.parametrize("prompt", GOOD_PROMPTS, ids=lambda p: repr(p)[:40])
def test_a_prompt_of_any_known_form_survives_its_record(prompt: Any) -> None:
    spec = JobSpec(model="m", prompt=prompt, params=SamplingParams())
    assert JobSpec.from_bytes(spec.to_bytes()) == spec


@pytest.mark.parametrize("prompt", BAD_PROMPTS, ids=lambda p: repr(p)[:40])
def test_a_prompt_that_no_worker_could_use_is_refused(prompt: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check_prompt(prompt)
    assert caught.value.field in ("prompt", "messages")
    with pytest.raises(InvalidRequest):
        JobSpec(model="m", prompt=prompt, params=SamplingParams())


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("model", ""),
        ("model", "a/b"),
        ("model", "a:b"),
        ("model", None),
        ("priority", 101),
        ("priority", -101),
        ("priority", True),
        ("priority", 1.5),
        ("group", "a:b"),
        ("group", None),
        ("group", 3),
        ("params", None),
        ("params", {"max_tokens": 1}),
    ],
)
def test_a_job_with_a_bad_field_is_refused_by_name(name: str, value: Any) -> None:
    fields: dict[str, Any] = {"model": "m", "prompt": "hi", "params": SamplingParams()}
    with pytest.raises(InvalidRequest) as caught:
        JobSpec(**{**fields, name: value})
    assert caught.value.field == name


@pytest.mark.parametrize("prompt", ["hi", [1, 2]])
def test_the_prompt_is_echoed_where_it_is_known(prompt: Any) -> None:
    params = SamplingParams(echo=True)
    assert JobSpec(model="m", prompt=prompt, params=params).params.echo


def test_chat_messages_are_not_echoed() -> None:
    messages = [{"role": "user", "content": "hi"}]
    with pytest.raises(InvalidRequest, match="chat messages") as caught:
        JobSpec(model="m", prompt=messages, params=SamplingParams(echo=True))
    assert caught.value.field == "echo"


@pytest.mark.parametrize("sample", [0, 2])
def test_a_sample_is_one_of_those_asked_for(sample: int) -> None:
    spec = JobSpec(model="m", prompt="hi", params=SamplingParams(n=3), sample=sample)
    assert JobSpec.from_bytes(spec.to_bytes()).sample == sample


@pytest.mark.parametrize("sample", [-1, 3, True, 1.0, None])
def test_another_sample_is_refused(sample: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        JobSpec(model="m", prompt="hi", params=SamplingParams(n=3), sample=sample)
    assert caught.value.field == "sample"


def test_all_fields_of_a_job_survive_its_record() -> None:
    params = SamplingParams(
        max_tokens=3,
        min_tokens=2,
        temperature=0.5,
        top_k=7,
        top_p=0.5,
        min_p=0.25,
        typical_p=0.75,
        repetition_penalty=1.5,
        frequency_penalty=-1.0,
        presence_penalty=2.0,
        logit_bias=((3, -1.0), (9, 100.0)),
        bad_words=("né🦈", (1, 2)),
        allowed_token_ids=(1, 2, 3),
        stop=("\n", "END"),
        include_stop_str_in_output=True,
        stop_token_ids=(4, 5),
        seed=(1 << 64) - 1,
        n=3,
        logprobs=0,
        prompt_logprobs=20,
        echo=True,
        regex="a+",
        rule="block",
        speculation=2,
    )
    spec = JobSpec(model="m", prompt=[1, 2], params=params, priority=-7, group="g", sample=2)
    assert JobSpec.from_bytes(spec.to_bytes()) == spec


WHOLE = JobSpec(model="m", prompt="hi", params=SamplingParams(stop=("x",)))


def rewritten(**changes: Any) -> bytes:
    """The record of a job with some fields changed past the checks."""
    version, values = msgpack.unpackb(WHOLE.to_bytes())
    params = {**values["params"], **changes.pop("params", {})}
    version = changes.pop("version", version)
    raw: bytes = msgpack.packb([version, {**values, "params": params, **changes}])
    return raw


def test_a_record_written_again_unchanged_is_the_same() -> None:
    assert rewritten() == WHOLE.to_bytes()


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\xc1",
        msgpack.packb(None),
        msgpack.packb([SPEC_VERSION]),
        msgpack.packb([SPEC_VERSION, {}]),
        msgpack.packb([SPEC_VERSION, []]),
        WHOLE.to_bytes()[:-1],
        WHOLE.to_bytes() + b"\x00",
        rewritten(version=1),
        rewritten(version=SPEC_VERSION + 1),
        rewritten(version=None),
        rewritten(model="a/b"),
        rewritten(sample=1),
        rewritten(unknown=1),
        rewritten(params={"temperature": -1.0}),
        rewritten(params={"stop": [b"\xff"]}),
        rewritten(params={"unknown": 1}),
        WHOLE.to_bytes().replace(b"hi", b"h\xff"),
        b"\x91" * 100_000,
    ],
    ids=lambda raw: repr(raw)[:30],
)
def test_bytes_that_are_no_job_are_refused(raw: bytes) -> None:
    with pytest.raises(DecodeError) as caught:
        JobSpec.from_bytes(raw)
    assert caught.value.raw is raw


def test_the_terminal_words_are_those_that_end_a_job() -> None:
    assert {status for status in Status if status.is_terminal} == TERMINAL
    assert set(Status) - TERMINAL == {Status.QUEUED, Status.RUNNING}
