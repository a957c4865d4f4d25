"""What sampling parameters are refused, by name and with advice, and in what form they are kept."""

from __future__ import annotations

import json
import math
from collections import UserDict
from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pilotfish_broker.checks import MAX_IDS
from pilotfish_broker.errors import InvalidRequest, UnsupportedParameter
from pilotfish_broker.sampling import CHECKS, MAX_TOKENS, RULES, SamplingParams
from pilotfish_broker.sampling_checks import (
    MAX_BAD_WORD,
    MAX_BAD_WORDS,
    MAX_BIASES,
    MAX_SCHEMA_DEPTH,
    MAX_STOP_CHARACTERS,
    MAX_STOPS,
    MAX_STRUCTURE_BYTES,
)
from pilotfish_broker.spec import JobSpec

HUGE = 10**5000
NO_NUMBERS: list[Any] = [True, False, "1", None, [1], {}, 1j]
NO_FLOATS: list[Any] = [*NO_NUMBERS, math.nan, math.inf, -math.inf, HUGE, -HUGE]
NO_WHOLES: list[Any] = [*NO_FLOATS, 1.0]
NO_FLAGS: list[Any] = [1, 0, "true", "", None, [], 1.0]
NO_LISTS: list[Any] = ["12", b"12", 12, None, True, {1: 2}, {1, 2}]
NO_TEXTS: list[Any] = [b"x", 5, True, ["x"], {"x": 1}, ""]
NO_IDS: list[Any] = [-1, 1 << 31, True, 1.0, "1", None, [1], HUGE]
HALF_A_PAIR = "\ud83e"
BIG = "x" * (MAX_STRUCTURE_BYTES + 1)
DEEP = "[" * 100_000


def nested(levels: int) -> Any:
    """A JSON value of so many levels, the innermost a number."""
    value: Any = 1
    for _ in range(levels - 1):
        value = {"a": value}
    return value


def circular() -> dict[str, Any]:
    value: dict[str, Any] = {}
    value["self"] = value
    return value


BAD: dict[str, list[Any]] = {
    "max_tokens": [*NO_WHOLES, 0, -1, MAX_TOKENS + 1],
    "min_tokens": [*NO_WHOLES, -1, MAX_TOKENS + 1],
    "temperature": [*NO_FLOATS, -0.1, 1e-3 - 1e-9, 1e-30, 5e-324, 100.1],
    "top_k": [*NO_WHOLES, -2, 1 << 31],
    "top_p": [*NO_FLOATS, 0, -0.0, -0.1, 1.0000001, 2],
    "min_p": [*NO_FLOATS, -1e-9, 1.0000001],
    "typical_p": [*NO_FLOATS, 0, -0.5, 1.0000001],
    "repetition_penalty": [*NO_FLOATS, 0, -1, 0.0099, 100.1],
    "frequency_penalty": [*NO_FLOATS, -2.01, 2.01],
    "presence_penalty": [*NO_FLOATS, -2.01, 2.01],
    "logit_bias": [
        *(bad for bad in NO_LISTS if not isinstance(bad, dict)),
        *({bad: 1} for bad in NO_IDS if bad != "1" and not isinstance(bad, list)),
        *({5: bad} for bad in [*NO_FLOATS, 100.1, -100.1]),
        *({bad: 1} for bad in ["-1", "1.0", " 1", "1 ", "+1", "1_0", "", "x", "²", "٣"]),
        *({bad: 1} for bad in ["00000000005", "9" * 10, "9" * 5000]),
        {5: 1, "5": 1},
        [[5, 1], [5, 2]],
        [[5]],
        [[5, 1, 2]],
        [5, 1],
        ["51"],
        dict.fromkeys(range(MAX_BIASES + 1), 1),
    ],
    "bad_words": [
        *(["x"] if bad == "12" else bad for bad in NO_LISTS if bad != "12"),
        "word",
        *([bad] for bad in NO_TEXTS if bad != ["x"]),
        *([[bad]] for bad in NO_IDS),
        [[]],
        [1, 2],
        ["x" * (MAX_BAD_WORD + 1)],
        [[1] * (MAX_BAD_WORD + 1)],
        [HALF_A_PAIR],
        [str(number) for number in range(MAX_BAD_WORDS + 1)],
    ],
    "allowed_token_ids": [
        *(bad for bad in NO_LISTS if bad is not None),
        *([bad] for bad in NO_IDS),
        [],
        [1] * (MAX_IDS + 1),
    ],
    "stop": [
        *(bad for bad in NO_LISTS if bad != "12"),
        *([bad] for bad in NO_TEXTS),
        "",
        ["x" * (MAX_STOP_CHARACTERS + 1)],
        "x" * (MAX_STOP_CHARACTERS + 1),
        HALF_A_PAIR,
        [str(number) for number in range(MAX_STOPS + 1)],
    ],
    "include_stop_str_in_output": NO_FLAGS,
    "stop_token_ids": [*NO_LISTS, *([bad] for bad in NO_IDS), [1] * (MAX_IDS + 1)],
    "ignore_eos": NO_FLAGS,
    "seed": [*(bad for bad in NO_WHOLES if bad is not None), -(1 << 63) - 1, 1 << 64],
    "n": [*NO_WHOLES, 0, 129],
    "logprobs": [*(bad for bad in NO_WHOLES if bad is not None), -1, 21],
    "prompt_logprobs": [*(bad for bad in NO_WHOLES if bad is not None), -1, 21],
    "echo": NO_FLAGS,
    "json_schema": [
        *["", "{", "nothing", "5", '"text"', "[]", "null", "NaN", '{"a": NaN}', '{"a": 1e400}'],
        *['{"a": Infinity}', "{} {}", f'{{"a": "{HALF_A_PAIR}"}}', '{"a": "\\ud83e"}', DEEP],
        *[b"{}", 5, 1.0, [], ["x"], {"a": math.nan}, {"a": {1, 2}}, {(1,): 2}, {"a": HALF_A_PAIR}],
        {"a": "x" * MAX_STRUCTURE_BYTES},
        {"a": "é" * (MAX_STRUCTURE_BYTES // 2)},
        f'{{"a": "{BIG}"}}',
        nested(MAX_SCHEMA_DEPTH + 1),
        nested(5000),
        circular(),
        {"a": UserDict({"b": 1})},
    ],
    "regex": [*NO_TEXTS, HALF_A_PAIR, BIG, "é" * (MAX_STRUCTURE_BYTES // 2 + 1)],
    "grammar": [*NO_TEXTS, HALF_A_PAIR, BIG],
    "rule": ["greedy", "", "Coupled", True, 1, ["block"], "rejection,block"],
    "speculation": ["on", "", 0, 17, True, 2.0, None, "4", [4]],
}
TAKEN: list[tuple[str, Any, Any]] = [
    *(("max_tokens", edge, edge) for edge in (1, MAX_TOKENS)),
    *(("min_tokens", edge, edge) for edge in (0, 256)),
    *(("temperature", edge, float(edge)) for edge in (0, 1, 1e-3, 100)),
    *(("top_k", edge, max(0, edge)) for edge in (-1, 0, 1, (1 << 31) - 1)),
    *(("top_p", edge, float(edge)) for edge in (1, 1e-9)),
    *(("min_p", edge, float(edge)) for edge in (0, 1)),
    *(("typical_p", edge, float(edge)) for edge in (1, 1e-9)),
    *(("repetition_penalty", edge, float(edge)) for edge in (0.01, 100)),
    *(("frequency_penalty", edge, float(edge)) for edge in (-2, 2)),
    *(("presence_penalty", edge, float(edge)) for edge in (-2, 2)),
    ("logit_bias", {}, ()),
    ("logit_bias", {9: 100, "7": -100, 0: 0}, ((0, 0.0), (7, -100.0), (9, 100.0))),
    ("logit_bias", {"2147483647": 1}, ((2147483647, 1.0),)),
    ("logit_bias", UserDict({9: 1}), ((9, 1.0),)),
    ("logit_bias", [[9, 1], (7, 2.5)], ((7, 2.5), (9, 1.0))),
    ("logit_bias", dict.fromkeys(range(MAX_BIASES), 1), None),
    ("bad_words", [], ()),
    ("bad_words", ["b", [3, 1], "a", (3, 1), "b"], ("b", (3, 1), "a")),
    ("bad_words", ["é" * MAX_BAD_WORD, [1] * MAX_BAD_WORD], None),
    ("allowed_token_ids", None, None),
    ("allowed_token_ids", [5, 0, 5], (0, 5)),
    ("allowed_token_ids", list(range(MAX_IDS)), None),
    ("stop", [], ()),
    ("stop", "\n", ("\n",)),
    ("stop", ["b", "a", "b"], ("b", "a")),
    ("stop", ["🦈" * MAX_STOP_CHARACTERS] * MAX_STOPS, ("🦈" * MAX_STOP_CHARACTERS,)),
    ("include_stop_str_in_output", True, True),
    ("stop_token_ids", [5, (1 << 31) - 1, 0, 5], (0, 5, (1 << 31) - 1)),
    ("ignore_eos", True, True),
    *(("seed", edge, edge) for edge in (None, 0, -(1 << 63), (1 << 64) - 1)),
    *(("n", edge, edge) for edge in (1, 128)),
    *(("logprobs", edge, edge) for edge in (None, 0, 20)),
    *(("prompt_logprobs", edge, edge) for edge in (None, 0, 20)),
    ("echo", True, True),
    ("json_schema", None, None),
    ("json_schema", True, "true"),
    ("json_schema", " false ", "false"),
    ("json_schema", {}, "{}"),
    ("json_schema", '{"b" : [1, 2.50],\n "a": "\\u00e9"}', '{"b":[1,2.5],"a":"é"}'),
    ("json_schema", UserDict({"b": 1, "a": None}), '{"b":1,"a":null}'),
    ("json_schema", {1: 2, "1": 3}, '{"1":3}'),
    ("json_schema", nested(MAX_SCHEMA_DEPTH), None),
    ("json_schema", {"a": "x" * (MAX_STRUCTURE_BYTES - 8)}, None),
    ("regex", "[ab]+|é", "[ab]+|é"),
    ("regex", "x" * MAX_STRUCTURE_BYTES, None),
    ("grammar", 'start: "a"', 'start: "a"'),
    *(("rule", edge, edge) for edge in (None, *RULES)),
    *(("speculation", edge, edge) for edge in ("auto", "off", 1, 16)),
]
UNKNOWN = ["best_of", "max_length", "Temperature", "topp", "", "suffix", "user"]


def label(value: Any) -> str:
    try:
        return repr(value)[:40]
    except (ValueError, RecursionError):
        return f"{type(value).__name__} without a form"


def test_every_parameter_has_a_check_and_a_default_that_it_leaves_alone() -> None:
    assert list(CHECKS) == [item.name for item in fields(SamplingParams)] == list(BAD)
    for item in fields(SamplingParams):
        value = getattr(SamplingParams(), item.name)
        assert (value, type(value)) == (item.default, type(item.default)), item.name


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name in BAD for value in BAD[name]], ids=label
)
def test_a_parameter_out_of_range_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams.from_mapping({name: value})
    assert caught.value.field == name
    assert name in str(caught.value)
    assert len(str(caught.value)) < 300, "a message must not grow with the value"
    assert not isinstance(caught.value, UnsupportedParameter)


@pytest.mark.parametrize(("name", "value", "kept"), TAKEN, ids=label)
def test_a_parameter_at_the_edge_of_its_range_is_taken_in_one_form(
    name: str, value: Any, kept: Any
) -> None:
    params = SamplingParams.from_mapping({name: value})
    taken = getattr(params, name)
    if kept is not None or value is None:
        assert (taken, type(taken)) == (kept, type(kept))
    assert SamplingParams.from_mapping({name: taken}) == params, "its own form is taken again"


def test_every_parameter_is_taken_somewhere() -> None:
    assert {name for name, _, _ in TAKEN} == set(CHECKS)


@pytest.mark.parametrize("name", UNKNOWN)
def test_a_parameter_that_is_not_honoured_is_refused_by_name(name: str) -> None:
    with pytest.raises(UnsupportedParameter) as caught:
        SamplingParams.from_mapping({name: None})
    assert caught.value.field == name
    assert repr(name) in str(caught.value)


@pytest.mark.parametrize(
    ("together", "field", "said"),
    [
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens", "above max_tokens 4"),
        ({"min_tokens": 257}, "min_tokens", "above max_tokens 256"),
        ({"regex": "a", "grammar": "b"}, "grammar", "regex and grammar"),
        ({"json_schema": {}, "regex": "a"}, "regex", "json_schema and regex"),
        ({"json_schema": {}, "regex": "a", "grammar": "b"}, "regex", "give one of them"),
        ({"json_schema": True, "ignore_eos": True}, "ignore_eos", "with json_schema"),
        ({"regex": "a", "ignore_eos": True}, "ignore_eos", "limit the output by max_tokens"),
        ({"grammar": "a", "ignore_eos": True}, "ignore_eos", "with grammar"),
    ],
)
def test_parameters_that_exclude_each_other_are_refused(
    together: dict[str, Any], field: str, said: str
) -> None:
    with pytest.raises(InvalidRequest, match=said) as caught:
        SamplingParams.from_mapping(together)
    assert caught.value.field == field


@pytest.mark.parametrize(
    "together",
    [
        {"min_tokens": 4, "max_tokens": 4},
        {"temperature": 0, "rule": "block"},
        {"temperature": 0, "seed": 1, "top_p": 0.5},
        {"ignore_eos": True, "stop_token_ids": [1]},
        {"regex": "a+", "min_tokens": 2, "stop": "b", "logprobs": 1},
    ],
)
def test_parameters_that_can_be_had_together_are_taken(together: dict[str, Any]) -> None:
    SamplingParams.from_mapping(together)


@pytest.mark.parametrize(
    ("name", "value", "advice"),
    [
        ("temperature", 1e-5, "use 0 for the most likely token, or 0.001 at least"),
        ("temperature", -1, "between 0 and 100"),
        ("top_p", 0, "above 0 and at most 1"),
        ("stop", "", "leave it out"),
        ("allowed_token_ids", [], "leave it out to allow all"),
        ("json_schema", "{", "no valid JSON"),
        ("rule", "greedy", "one of rejection, block, coupled"),
        ("seed", HUGE, "a number of thousands of digits"),
    ],
    ids=label,
)
def test_a_refusal_says_what_to_do(name: str, value: Any, advice: str) -> None:
    with pytest.raises(InvalidRequest, match=advice):
        SamplingParams.from_mapping({name: value})


def test_without_a_rule_a_seed_chooses_it_and_greedy_needs_none() -> None:
    def chosen(**values: Any) -> str:
        return SamplingParams.from_mapping(values).chosen_rule

    assert (
        chosen() == chosen(seed=1) == chosen(rule="block") == chosen(temperature=-0.0) == "greedy"
    )
    assert chosen(temperature=1) == "rejection"
    assert chosen(temperature=1, seed=0) == "coupled"
    for rule in RULES:
        assert chosen(temperature=1, rule=rule) == chosen(temperature=1, rule=rule, seed=1) == rule


EQUAL: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"temperature": 0}, {"temperature": -0.0}),
    ({"temperature": 1}, {"temperature": 1.0}),
    ({"frequency_penalty": 0.0}, {"frequency_penalty": -0.0}),
    ({"top_k": 0}, {"top_k": -1}),
    ({"top_p": 1}, {"top_p": 1.0}),
    ({"logit_bias": {5: 1, 3: -0.0}}, {"logit_bias": {"3": 0, "5": 1.0}}),
    ({"stop": "a"}, {"stop": ["a", "a"]}),
    ({"stop_token_ids": [1, 2]}, {"stop_token_ids": (2, 1, 1)}),
    ({"allowed_token_ids": [1, 2]}, {"allowed_token_ids": (2, 1, 1)}),
    ({"bad_words": ["a", [1, 2]]}, {"bad_words": ("a", (1, 2), "a")}),
    ({"json_schema": {"a": 1}}, {"json_schema": '{ "a" : 1 }'}),
]


@pytest.mark.parametrize(("one", "other"), EQUAL, ids=label)
def test_equal_requests_are_written_alike(one: dict[str, Any], other: dict[str, Any]) -> None:
    """The checksum of the bytes decides whether a repeated id is the same request."""
    first, second = (
        JobSpec(model="m", prompt="hi", params=SamplingParams.from_mapping(values)).to_bytes()
        for values in (one, other)
    )
    assert first == second


def test_keys_of_a_schema_keep_their_order_which_the_output_follows() -> None:
    written = SamplingParams.from_mapping({"json_schema": {"b": 1, "a": 2}}).json_schema
    assert written == '{"b":1,"a":2}'
    assert written != SamplingParams.from_mapping({"json_schema": {"a": 2, "b": 1}}).json_schema


# --- any parameters ------------------------------------------------------------------------------

valid_text = st.characters(exclude_categories=["Cs"])
ids = st.integers(0, (1 << 31) - 1)
json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(valid_text, max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(valid_text, max_size=5), inner, max_size=3)
    ),
    max_leaves=8,
)
schemas = st.booleans() | st.dictionaries(st.text(valid_text, max_size=5), json_values, max_size=3)
structures = st.one_of(
    st.just({}),
    schemas.map(lambda value: {"json_schema": value}),
    schemas.map(lambda value: {"json_schema": json.dumps(value, indent=1)}),
    st.text(valid_text, min_size=1, max_size=20).map(lambda value: {"regex": value}),
    st.text(valid_text, min_size=1, max_size=20).map(lambda value: {"grammar": value}),
)
words = st.text(valid_text, min_size=1, max_size=8)
optional_values = {
    "max_tokens": st.integers(50, MAX_TOKENS),
    "min_tokens": st.integers(0, 50),
    "temperature": st.just(0) | st.floats(1e-3, 100) | st.integers(1, 100),
    "top_k": st.integers(-1, (1 << 31) - 1),
    "top_p": st.floats(0, 1, exclude_min=True),
    "min_p": st.floats(0, 1),
    "typical_p": st.floats(0, 1, exclude_min=True),
    "repetition_penalty": st.floats(0.01, 100) | st.integers(1, 100),
    "frequency_penalty": st.floats(-2, 2),
    "presence_penalty": st.floats(-2, 2) | st.integers(-2, 2),
    "logit_bias": st.dictionaries(ids, st.floats(-100, 100), max_size=5)
    | st.dictionaries(ids.map(str), st.integers(-100, 100), max_size=5),
    "bad_words": st.lists(words | st.lists(ids, min_size=1, max_size=3), max_size=4),
    "allowed_token_ids": st.none() | st.lists(ids, min_size=1, max_size=5),
    "stop": words | st.lists(words, max_size=4),
    "include_stop_str_in_output": st.booleans(),
    "stop_token_ids": st.lists(ids, max_size=4),
    "seed": st.none() | st.integers(-(1 << 63), (1 << 64) - 1),
    "n": st.integers(1, 128),
    "logprobs": st.none() | st.integers(0, 20),
    "prompt_logprobs": st.none() | st.integers(0, 20),
    "echo": st.booleans(),
    "rule": st.none() | st.sampled_from(RULES),
    "speculation": st.sampled_from(["auto", "off"]) | st.integers(1, 16),
}
mappings = st.builds(
    lambda one, other: {**one, **other},
    st.fixed_dictionaries({}, optional=optional_values),
    structures,
)


def test_the_strategy_below_knows_every_parameter() -> None:
    structured = {"json_schema", "regex", "grammar", "ignore_eos"}
    assert {*optional_values, *structured} == set(CHECKS)


@given(mappings, st.data())
def test_any_job_survives_its_record(values: dict[str, Any], data: st.DataObject) -> None:
    params = SamplingParams.from_mapping(values)
    if not params.is_structured:
        params = replace(params, ignore_eos=data.draw(st.booleans()))
    sample = data.draw(st.integers(0, params.n - 1))
    spec = JobSpec(model="m", prompt=[1, 2], params=params, sample=sample)
    raw = spec.to_bytes()
    back = JobSpec.from_bytes(raw)
    assert back == spec
    assert back.to_bytes() == raw
    assert hash(back.params) == hash(params), "every value is of a form that does not change"


@given(
    st.sampled_from(sorted(CHECKS)),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.tuples(inner, inner)
            | st.dictionaries(st.text() | st.integers(), inner, max_size=3)
        ),
        max_leaves=6,
    ),
)
def test_any_value_is_kept_in_a_form_that_can_be_written_or_refused(name: str, value: Any) -> None:
    refused = None
    try:
        params = SamplingParams.from_mapping({name: value})
    except InvalidRequest as error:
        refused = error.field
    else:
        spec = JobSpec(model="m", prompt="hi", params=params)
        assert JobSpec.from_bytes(spec.to_bytes()) == spec
    assert refused in (None, name)
