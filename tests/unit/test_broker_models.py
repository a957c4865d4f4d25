"""What a model's record says about a prompt, and about ids among the parameters."""

from __future__ import annotations

from typing import Any

import pytest

from pilotfish_broker.errors import InvalidRequest
from pilotfish_broker.models import (
    MOST_PROMPT_LOGPROBS,
    check_params,
    check_prompt_logprobs,
    check_token_ids,
)
from pilotfish_broker.sampling import SamplingParams


@pytest.mark.parametrize("ids", [[0], [255] * 7])
def test_ids_that_the_model_has_and_that_leave_room_are_taken(ids: list[int]) -> None:
    check_token_ids(ids, context_length=8, vocabulary_size=256)


@pytest.mark.parametrize(
    ("ids", "said"),
    [
        ([], "the prompt has no tokens"),
        ([1] * 8, "has 8 tokens; the model's context of 8 leaves no room for output"),
        ([1, 256], "token id 256 is not below the vocabulary size 256"),
    ],
)
def test_other_ids_are_refused_with_the_reason(ids: list[int], said: str) -> None:
    with pytest.raises(InvalidRequest, match=said) as caught:
        check_token_ids(ids, context_length=8, vocabulary_size=256)
    assert caught.value.field == "prompt"


def with_id(token: int) -> list[tuple[str, Any]]:
    """Every parameter that names tokens, with one of them."""
    return [
        ("logit_bias", {0: 1, token: 0}),
        ("allowed_token_ids", [token, 0]),
        ("stop_token_ids", [token, 0]),
        ("bad_words", ["a text", [0, token, 0]]),
    ]


@pytest.mark.parametrize(("name", "value"), with_id(255))
def test_ids_in_parameters_that_the_model_has_are_taken(name: str, value: Any) -> None:
    check_params(SamplingParams.from_mapping({name: value}), 256)


@pytest.mark.parametrize(("name", "value"), with_id(256))
def test_ids_in_parameters_that_the_model_has_not_are_refused_by_name(
    name: str, value: Any
) -> None:
    said = f"{name} has the token id 256, which is not below the vocabulary size 256"
    with pytest.raises(InvalidRequest, match=said) as caught:
        check_params(SamplingParams.from_mapping({name: value}), 256)
    assert caught.value.field == name


def test_parameters_that_name_no_token_suit_every_model() -> None:
    check_params(SamplingParams(bad_words=("a text",), stop=("b",)), 1)


def test_a_prompts_log_probabilities_fit_into_one_entry_or_are_refused() -> None:
    params = SamplingParams(prompt_logprobs=3)
    most = MOST_PROMPT_LOGPROBS // 4
    check_prompt_logprobs(params, most)
    check_prompt_logprobs(SamplingParams(), 10 * most)
    with pytest.raises(InvalidRequest, match="ask for fewer") as refused:
        check_prompt_logprobs(params, most + 1)
    assert refused.value.field == "prompt_logprobs"
