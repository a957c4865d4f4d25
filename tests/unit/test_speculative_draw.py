"""A drafter reports the very law that it drew from, and `coupled` draws with the target's noise."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch

from pilotfish_broker.sampling import SamplingParams
from pilotfish_workers.speculative.accept import BAD_LOGITS, NOTHING_ALLOWED
from pilotfish_workers.speculative.best import best_tokens
from pilotfish_workers.speculative.coins import Coins
from pilotfish_workers.speculative.draw import NUM_ENTRIES, draw_tokens
from pilotfish_workers.speculative.judge import judge
from pilotfish_workers.speculative.sampler import Case, Draw, Drawn, Sampler
from tests.law_kit import ALPHA, PROMPT, Unlike, law, p_value

VOCAB = 12
BY_LAW = ("rejection", "block")


def sampler(seed: int = 1, output: tuple[int, ...] = (), **params: Any) -> Sampler:
    made = SamplingParams.from_mapping(params)
    words = tuple(tuple(int(token) for token in word) for word in made.bad_words)
    return Sampler(made, Coins(seed), [*PROMPT, *output], len(PROMPT), bad_words=words)


def logits_of(num_rows: int, seed: int = 0, size: int = VOCAB, spread: float = 2.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_rows, size, generator=generator) * spread


PARAMS: dict[str, dict[str, Any]] = {
    "hot": {"temperature": 1.5},
    "cold": {"temperature": 0.7, "top_k": 4},
    "filtered": {"temperature": 1.0, "top_p": 0.8, "min_p": 0.02},
    "typical": {"temperature": 1.0, "typical_p": 0.8},
    "penalised": {"temperature": 1.0, "frequency_penalty": 1.0, "repetition_penalty": 1.5},
    "forbidden": {"temperature": 1.0, "bad_words": ((3,), (5, 7)), "logit_bias": {2: 3.0}},
}


@pytest.mark.parametrize("rule", BY_LAW)
@pytest.mark.parametrize("name", PARAMS)
def test_the_reported_law_is_the_drafters_after_the_whole_chain(name: str, rule: str) -> None:
    output, drafted = (4, 9), (5, 5)
    own = sampler(output=output, rule=rule, **PARAMS[name])
    logits = logits_of(1)
    drawn = draw_tokens(logits, [Draw(own, drafted)])[0]
    wanted = law(logits[0], own.params, (*output, *drafted))
    assert drawn.law is not None
    found = np.zeros(VOCAB)
    found[drawn.law.ids] = drawn.law.probabilities
    assert found == pytest.approx(wanted, abs=1e-6)
    assert set(np.flatnonzero(wanted)) == set(drawn.law.ids.tolist())


@pytest.mark.parametrize("rule", BY_LAW)
def test_tokens_come_from_the_reported_law_cut_down_to_its_likeliest(rule: str) -> None:
    """6000 draws, chi-square; a law that was not cut down before the draw would be seen."""
    size, count = 3 * NUM_ENTRIES, 6000
    logits = logits_of(1, size=size, spread=0.7)
    draws = [Draw(sampler(seed, temperature=1.0, rule=rule)) for seed in range(count)]
    drawn = draw_tokens(logits.repeat(count, 1), draws)
    laws = {one.law.to_bytes() for one in drawn if one.law is not None}
    assert len(laws) == 1
    reported = drawn[0].law
    assert reported is not None
    assert len(reported.ids) == NUM_ENTRIES
    assert set(reported.ids.tolist()) == set(logits[0].topk(NUM_ENTRIES).indices.tolist())
    tokens = [(one.token,) for one in drawn]
    by_report = {
        (token,): p
        for token, p in zip(reported.ids.tolist(), reported.probabilities.tolist(), strict=True)
    }
    assert p_value(tokens, by_report) > ALPHA
    whole = torch.softmax(logits[0].double(), -1)
    by_whole = {(token,): float(p) for token, p in enumerate(whole)}
    assert p_value(tokens, by_whole) < ALPHA


@pytest.mark.parametrize("rule", BY_LAW)
def test_a_draw_belongs_to_seed_position_and_base(rule: str) -> None:
    logits = logits_of(1, spread=0.1)

    def token(output: tuple[int, ...], drafted: tuple[int, ...]) -> int:
        own = sampler(7, output, temperature=1.0, rule=rule)
        one = draw_tokens(logits, [Draw(own, drafted)])[0]
        assert one.law is not None
        base = len(output)
        coin = Coins(7).draft(base + len(drafted), base)
        assert one.token == one.law.draw(coin)
        return one.token

    places = [((1,) * base, (2,) * k) for base in range(6) for k in range(6)]
    assert len({token(*place) for place in places}) > 3
    assert token((1, 1), (2,)) == token((1, 1), (2,))


def test_coupled_draws_what_the_target_would_draw_of_the_same_logits() -> None:
    for seed in range(50):
        logits = logits_of(3, seed)
        params = {"temperature": 0.8, "top_p": 0.9, "rule": "coupled"}
        own = sampler(seed, (4, 4), **params)
        drawn: tuple[int, ...] = ()
        for row in range(3):
            one = draw_tokens(logits[row : row + 1], [Draw(own, drawn)])[0]
            assert one.law is None
            drawn += (one.token,)
        outcome = judge(logits, best_tokens(logits), [Case(own, drawn[:2])], [3])[0]
        assert outcome is not None
        assert outcome.tokens(drawn[:2]) == list(drawn)


def test_coupled_draws_alike_from_a_vocabulary_that_is_longer() -> None:
    """The target's output layer may have rows beyond the drafter's, which are never likely."""
    for seed in range(50):
        short = logits_of(1, seed)
        long = torch.cat([short, torch.full((1, 5), -40.0)], dim=1)
        own = sampler(seed, temperature=1.0, rule="coupled")
        assert draw_tokens(short, [Draw(own)]) == draw_tokens(long, [Draw(own)])


def test_greedy_draws_the_argmax_through_the_chain_where_there_is_one() -> None:
    logits = torch.zeros(3, VOCAB)
    logits[:, 4], logits[:, 6] = 2.0, 1.0
    draws = [
        Draw(sampler()),
        Draw(sampler(bad_words=((4,),))),
        Draw(sampler(frequency_penalty=0.6), (4, 4)),
    ]
    assert draw_tokens(logits, draws) == [Drawn(4), Drawn(6), Drawn(6)]


def test_a_constraint_is_followed_before_a_token_is_drawn() -> None:
    for rule in (*BY_LAW, "coupled"):
        for seed in range(30):
            own = sampler(seed, (6,), temperature=2.0, rule=rule)
            own.constraint = Unlike(VOCAB)  # type: ignore[assignment]
            one = draw_tokens(logits_of(1, seed), [Draw(own, (8, 3))])[0]
            assert one.token in Unlike(VOCAB).allows((6, 8, 3))
            if one.law is not None:
                assert not {3, 1} & set(one.law.ids.tolist())


@pytest.mark.parametrize("rule", ["greedy", "chained", *BY_LAW, "coupled"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_unusable_logits_give_no_token_and_harm_no_neighbour(value: float, rule: str) -> None:
    logits = logits_of(3)
    logits[1] = value if value < 0 else logits[1]
    logits[1, 5] = value
    params: dict[str, Any] = {
        "greedy": {},
        "chained": {"logit_bias": {1: 1.0}},
    }.get(rule, {"temperature": 1.0, "rule": rule})
    draws = [Draw(sampler(seed, **params)) for seed in range(3)]
    drawn = draw_tokens(logits, draws)
    assert drawn[1] == Drawn(BAD_LOGITS)
    alone = [draw_tokens(logits[row : row + 1], [draws[row]])[0] for row in (0, 2)]
    assert [drawn[0].token, drawn[2].token] == [one.token for one in alone]


@pytest.mark.parametrize("rule", ["greedy", *BY_LAW, "coupled"])
def test_parameters_that_leave_nothing_give_no_token(rule: str) -> None:
    logits = logits_of(1)
    logits[0, 3] = -torch.inf
    params: dict[str, Any] = {} if rule == "greedy" else {"temperature": 1.0, "rule": rule}
    drawn = draw_tokens(logits, [Draw(sampler(allowed_token_ids=(3,), **params))])
    assert drawn == [Drawn(NOTHING_ALLOWED)]


def test_what_is_too_unlikely_for_float32_has_no_place_in_a_law() -> None:
    logits = torch.full((1, VOCAB), -200.0)
    logits[0, [2, 5]] = torch.tensor([0.0, -80.0])
    drawn = draw_tokens(logits, [Draw(sampler(temperature=1.0))])[0]
    assert drawn.law is not None
    assert sorted(drawn.law.ids.tolist()) == [2, 5]


def test_kinds_of_draws_share_a_pass() -> None:
    logits = logits_of(4)
    before = logits.clone()
    own = [
        sampler(1),
        sampler(2, temperature=1.0, rule="coupled"),
        sampler(3, temperature=1.0, rule="block"),
        sampler(4, temperature=1.0, top_p=0.5),
    ]
    together = draw_tokens(logits, [Draw(one) for one in own])
    alone = [draw_tokens(logits[i : i + 1], [Draw(one)])[0] for i, one in enumerate(own)]
    assert [one.token for one in together] == [one.token for one in alone]
    laws = [one.law and one.law.to_bytes() for one in together]
    assert laws == [one.law and one.law.to_bytes() for one in alone]
    assert [one is None for one in laws] == [True, True, False, False]
    assert torch.equal(logits, before)


def test_rows_and_draws_must_be_as_many() -> None:
    with pytest.raises(ValueError, match="1 draws on 2 rows"):
        draw_tokens(logits_of(2), [Draw(sampler())])
    assert draw_tokens(logits_of(0), []) == []


@pytest.mark.parametrize("top_p", [1.0, 0.6])
def test_the_gumbel_maximum_has_the_law_of_the_logits(top_p: float) -> None:
    """5000 draws, chi-square; whether most tokens are left or few. Other logits would be seen."""
    count = 5000
    logits = logits_of(1, spread=1.0)
    draws = [
        Draw(sampler(seed, temperature=1.0, top_p=top_p, rule="coupled")) for seed in range(count)
    ]
    tokens = [(one.token,) for one in draw_tokens(logits.repeat(count, 1), draws)]
    wanted = law(logits[0], draws[0].sampler.params, ())
    laws = {(token,): float(p) for token, p in enumerate(wanted) if p > 0}
    assert p_value(tokens, laws) > ALPHA
    shifted = law(logits[0] * 1.2, draws[0].sampler.params, ())
    wrong = {(token,): float(p) for token, p in enumerate(shifted) if p > 0}
    assert p_value(tokens, wrong) < ALPHA
    assert Counter(tokens).keys() <= laws.keys()
