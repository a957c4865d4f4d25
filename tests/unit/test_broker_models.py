"""What a model's record says about a prompt."""

from __future__ import annotations

import pytest

from pilotfish_broker.errors import InvalidRequest
from pilotfish_broker.models import check_token_ids


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
