"""What is refused at submit, and with which field."""

from __future__ import annotations

import math
from typing import Any

import pytest

from pilotfish_broker.errors import InvalidRequest, UnsupportedParameter
from pilotfish_broker.spec import (
    MAX_PROMPT_BYTES,
    MAX_TOKENS,
    TERMINAL,
    JobSpec,
    SamplingParams,
    Status,
    check_prompt,
)

BAD_PARAMS = [
    ("max_tokens", 0),
    ("max_tokens", -1),
    ("max_tokens", True),
    ("max_tokens", 1.0),
    ("max_tokens", "1"),
    ("max_tokens", None),
    ("max_tokens", MAX_TOKENS + 1),
    ("temperature", -0.1),
    ("temperature", math.nan),
    ("temperature", True),
    ("temperature", "0"),
    ("temperature", None),
    ("ignore_eos", 1),
    ("ignore_eos", "yes"),
    ("stop_token_ids", "12"),
    ("stop_token_ids", b"12"),
    ("stop_token_ids", 12),
    ("stop_token_ids", [-1]),
    ("stop_token_ids", [True]),
    ("stop_token_ids", [1 << 31]),
    ("stop_token_ids", ["1"]),
    ("speculation", "on"),
    ("speculation", 0),
    ("speculation", 17),
    ("speculation", True),
    ("speculation", 2.0),
    ("speculation", None),
]
UNSUPPORTED = [
    ("temperature", 0.7),
    ("temperature", 1),
    ("temperature", math.inf),
    ("top_p", 0.9),
    ("min_p", 0.1),
    ("logit_bias", {}),
    ("bad_words", []),
    ("min_tokens", 1),
    ("seed", 1),
    ("logprobs", True),
    ("", 1),
]


@pytest.mark.parametrize(("name", "value"), BAD_PARAMS)
def test_a_parameter_out_of_range_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams.from_mapping({name: value})
    assert caught.value.field == name
    assert not isinstance(caught.value, UnsupportedParameter)


@pytest.mark.parametrize(("name", "value"), UNSUPPORTED)
def test_a_parameter_that_is_not_honoured_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(UnsupportedParameter) as caught:
        SamplingParams.from_mapping({name: value})
    assert caught.value.field == name
    assert name in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", 1),
        ("max_tokens", MAX_TOKENS),
        ("temperature", 0),
        ("temperature", -0.0),
        ("ignore_eos", True),
        ("stop_token_ids", [0, 5]),
        ("speculation", "off"),
        ("speculation", 16),
    ],
)
def test_a_parameter_at_the_edge_of_its_range_is_taken(name: str, value: Any) -> None:
    taken = getattr(SamplingParams.from_mapping({name: value}), name)
    assert taken == (tuple(value) if isinstance(value, list) else value)


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


def test_equal_jobs_have_equal_records() -> None:
    """The record's checksum decides whether a repeated id is the same request."""
    records = {
        JobSpec(
            model="m",
            prompt="hi",
            params=SamplingParams.from_mapping({"temperature": zero, "stop_token_ids": ids}),
        ).to_bytes()
        for zero in (0, 0.0, -0.0)
        for ids in ([1, 2], (1, 2))
    }
    assert len(records) == 1


def test_all_fields_of_a_job_survive_its_record() -> None:
    params = SamplingParams(max_tokens=3, ignore_eos=True, stop_token_ids=(4, 5), speculation=2)
    spec = JobSpec(model="m", prompt=[1, 2], params=params, priority=-7, group="g")
    assert JobSpec.from_bytes(spec.to_bytes()) == spec


def test_the_terminal_words_are_those_that_end_a_job() -> None:
    assert {status for status in Status if status.is_terminal} == TERMINAL
    assert set(Status) - TERMINAL == {Status.QUEUED, Status.RUNNING}
