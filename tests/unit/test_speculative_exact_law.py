"""Sampled output has the target's law, with every parameter, by every rule, some tokens deep.

Drafting and judging are the real ones, the models are toys; the drafter's logits have nothing to do
with the target's. Probabilities are computed by definition (see `law_kit`). Every check is a
chi-square test of NUM_SAMPLES joint outputs of NUM_TOKENS tokens at ALPHA, over rounds with
different numbers of drafted tokens, and each fault below fails it with just as many samples.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from pilotfish_broker.sampling import SamplingParams
from pilotfish_workers.speculative import judge
from pilotfish_workers.speculative.chain import ChainRow, apply_chain
from pilotfish_workers.speculative.coins import Coins
from pilotfish_workers.speculative.law import SparseLaw
from pilotfish_workers.speculative.sampler import Case
from pilotfish_workers.speculative.target_laws import TargetLaws, Wanted
from tests.law_kit import ALPHA, Engine, Toy, Unlike, expected, p_value

NUM_SAMPLES = 1000
MANY_SAMPLES = 8000
NUM_TOKENS = 3
TARGET, DRAFTER = Toy(1, 7), Toy(2, 7)
LARGER_DRAFTER = Toy(4, 9)
LARGER_DRAFTER.table[..., 7:] += 0.5  # often drafts what the target lacks
RULES = ("rejection", "block", "coupled")
SLOW = pytest.mark.slow
QUICK_BLOCK = [pytest.param("rejection", marks=SLOW), "block"]
"""The rules that look at q; one of them is enough to see a fault in what both rest on."""

TOGETHER: dict[str, dict[str, Any]] = {
    "hot": {
        "temperature": 1.5,
        "top_p": 0.8,
        "frequency_penalty": 0.9,
        "presence_penalty": -1.2,
        "logit_bias": {0: 1.0, 3: -1.5},
    },
    "cold": {
        "temperature": 0.7,
        "top_k": 3,
        "repetition_penalty": 1.8,
        "min_tokens": 1,
        "bad_words": ((4, 5), (2, 1)),
    },
    "odd": {
        "temperature": 1.3,
        "min_p": 0.3,
        "typical_p": 0.7,
        "allowed_token_ids": (0, 2, 4, 5, 6),
    },
}
ALONE: dict[str, dict[str, Any]] = {
    "top_k": {"top_k": 2},
    "top_p": {"top_p": 0.75},
    "min_p": {"min_p": 0.2},
    "typical_p": {"typical_p": 0.7},
    "repetition_penalty": {"repetition_penalty": 1.6},
    "frequency_penalty": {"frequency_penalty": 0.9},
    "presence_penalty": {"presence_penalty": 0.9},
    "logit_bias": {"logit_bias": {2: -1.0, 4: 0.7}},
    "allowed_token_ids": {"allowed_token_ids": (0, 2, 3)},
    "min_tokens": {"min_tokens": 2},
    "bad_words": {"bad_words": ((1, 0), (2, 3), (2,))},
}
WITHOUT = {
    "temperature": 1.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "typical_p": 1.0,
    "repetition_penalty": 1.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "logit_bias": {},
    "allowed_token_ids": None,
    "min_tokens": 0,
    "bad_words": (),
}


def params_of(rule: str = "rejection", **values: Any) -> SamplingParams:
    return SamplingParams.from_mapping({"rule": rule, "temperature": 1.0, **values})


def check(values: dict[str, Any], rule: str, num_samples: int) -> None:
    """The law is right, and one that lacks any of the parameters would not be."""
    params = params_of(rule, **values)
    samples = Engine(TARGET, DRAFTER, params).sample(num_samples, NUM_TOKENS)
    assert samples.num_accepted > samples.num_rounds / 10
    assert p_value(samples.outputs, expected(TARGET, params, NUM_TOKENS)) > ALPHA
    for name in values:
        forgetful = params_of(rule, **{**values, name: WITHOUT[name]})
        assert p_value(samples.outputs, expected(TARGET, forgetful, NUM_TOKENS)) < ALPHA, name


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        pytest.param(name, rule, marks=[] if (name == "hot" or rule == "rejection") else SLOW)
        for name in TOGETHER
        for rule in RULES
    ],
)
def test_the_law_is_the_targets_with_parameters_together(name: str, rule: str) -> None:
    check(TOGETHER[name], rule, NUM_SAMPLES)


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("temperature", [0.7, 1.5])
@pytest.mark.parametrize("name", ALONE)
def test_the_law_is_the_targets_with_each_parameter(
    name: str, temperature: float, rule: str
) -> None:
    check({"temperature": temperature, **ALONE[name]}, rule, MANY_SAMPLES)


@pytest.mark.parametrize("rule", QUICK_BLOCK)
def test_a_greedy_draft_is_judged_as_certain(rule: str) -> None:
    check_engine(Engine(TARGET, DRAFTER, params_of(rule), SamplingParams()))


@pytest.mark.parametrize("rule", QUICK_BLOCK)
def test_a_token_that_the_target_lacks_is_judged_and_rejected(rule: str) -> None:
    check_engine(Engine(TARGET, LARGER_DRAFTER, params_of(rule)))


@pytest.mark.parametrize("rule", QUICK_BLOCK)
def test_a_drafter_that_does_not_know_what_is_forbidden_is_put_right(rule: str) -> None:
    params = params_of(rule, allowed_token_ids=(1, 2, 4), top_p=0.9)
    check_engine(Engine(TARGET, DRAFTER, params, params_of(rule)))


@pytest.mark.parametrize("rule", QUICK_BLOCK)
def test_equal_laws_keep_their_law(rule: str) -> None:
    params = params_of(rule, temperature=0.7, top_p=0.9)
    engine = Engine(TARGET, TARGET, params)
    samples = engine.sample(NUM_SAMPLES, NUM_TOKENS)
    assert p_value(samples.outputs, expected(TARGET, params, NUM_TOKENS)) > ALPHA


@pytest.mark.parametrize(
    ("rule", "drafter_knows"),
    [
        pytest.param(rule, knows, marks=[] if rule == "block" and not knows else SLOW)
        for rule in RULES
        for knows in (True, False)
    ],
)
def test_a_constraint_holds_in_every_row(rule: str, drafter_knows: bool) -> None:
    rules = Unlike(TARGET.vocab_size)
    engine = Engine(
        TARGET,
        DRAFTER,
        params_of(rule, temperature=1.4, top_p=0.95),
        constraint=rules,
        draft_constraint=rules if drafter_knows else None,
    )
    outputs = engine.sample(NUM_SAMPLES, NUM_TOKENS).outputs
    assert p_value(outputs, expected(TARGET, engine.params, NUM_TOKENS, rules)) > ALPHA
    assert p_value(outputs, expected(TARGET, engine.params, NUM_TOKENS)) < ALPHA


def check_engine(engine: Engine) -> None:
    assert value_of(engine) > ALPHA


def value_of(engine: Engine) -> float:
    samples = engine.sample(NUM_SAMPLES, NUM_TOKENS)
    return p_value(samples.outputs, expected(TARGET, engine.params, NUM_TOKENS))


class Unfiltered(Engine):
    """Reports as q what the drafter's logits are before the chain."""

    def report(self, case: Case) -> Case:
        laws = []
        for index in range(len(case.drafted)):
            context = [*case.sampler.tokens, *case.drafted[:index]]
            p = torch.softmax(self.drafter.logits([context])[0], -1).numpy()
            laws.append(SparseLaw(np.arange(len(p)), p))
        return replace(case, laws=laws)


class Cut(Engine):
    """Drops a drafted token that the target lacks."""

    def report(self, case: Case) -> Case:
        kept = [token for token in case.drafted if token < self.target.vocab_size]
        assert case.laws is not None
        return replace(case, drafted=kept, laws=case.laws[: len(kept)])


class Choosy(Engine):
    """Does not hand in what it holds for unlikely; what comes before it stays."""

    def report(self, case: Case) -> Case:
        assert case.laws is not None
        pairs = zip(case.drafted, case.laws, strict=True)
        likely = [law.probability(token) > 0.3 for token, law in pairs]
        count = likely.index(False) if False in likely else len(likely)
        return replace(case, drafted=case.drafted[:count], laws=case.laws[:count])


class Raw(Engine):
    """Judges by the target's softmax without the chain."""

    def report(self, case: Case) -> Case:
        own = case.sampler
        raw = params_of(self.params.rule or "rejection")
        return replace(case, sampler=self.sampler(raw, own.coins, own.tokens))


class SharedCoin(Coins):
    """The test for acceptance looks at the coin that the token was drawn with."""

    def accept(self, position: int, base: int) -> float:
        return self.draft(position, base)


class OneTokenCoin(Coins):
    """The same coin for the token of every position."""

    def token(self, position: int) -> float:
        return super().token(0)

    def noise(self, position: int, size: int) -> Any:
        return super().noise(0, size)


class ByPosition(Coins):
    """Coins of acceptance that belong to the position alone."""

    def accept(self, position: int, base: int) -> float:
        return super().accept(position, 0)


FILTERED: dict[str, Any] = {"temperature": 3.0, "top_k": 4}
FAULTS: dict[str, Engine] = {
    f"{fault}, {rule}": engine
    for rule in ("rejection", "block")
    for fault, engine in {
        "softmax of a greedy draft": Unfiltered(TARGET, DRAFTER, params_of(rule), SamplingParams()),
        "q before the filters": Unfiltered(TARGET, DRAFTER, params_of(rule, **FILTERED)),
        "p before the filters": Raw(TARGET, DRAFTER, params_of(rule, **FILTERED)),
        "foreign token cut": Cut(TARGET, LARGER_DRAFTER, params_of(rule), ks=(3, 2)),
        "unlikely token cut": Choosy(TARGET, DRAFTER, params_of(rule)),
        "coin of the draw": Engine(TARGET, DRAFTER, params_of(rule), coins=SharedCoin),
        "one coin for all tokens": Engine(TARGET, DRAFTER, params_of(rule), coins=OneTokenCoin),
    }.items()
} | {
    "one noise for all tokens": Engine(TARGET, DRAFTER, params_of("coupled"), coins=OneTokenCoin),
}


@pytest.mark.parametrize(
    "fault", [pytest.param(f, marks=SLOW if "rejection" in f else []) for f in FAULTS]
)
def test_a_planted_fault_is_seen(fault: str) -> None:
    assert value_of(FAULTS[fault]) < ALPHA


TARGET_FAULTS: dict[str, Callable[[Wanted], Wanted]] = {
    "no residual": lambda wanted: replace(wanted, less=None),
    "residual of the row before": lambda wanted: (
        wanted if wanted.less is None else replace(wanted, row=max(0, wanted.row - 1))
    ),
    "bonus of the row before": lambda wanted: (
        replace(wanted, row=max(0, wanted.row - 1)) if wanted.less is None else wanted
    ),
}


@pytest.mark.parametrize("rule", QUICK_BLOCK)
@pytest.mark.parametrize("fault", TARGET_FAULTS)
def test_a_fault_planted_in_the_last_draw_is_seen(
    fault: str, rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = TargetLaws.draw

    def faulty(laws: TargetLaws, wanted: Sequence[Wanted]) -> list[int]:
        return draw(laws, [TARGET_FAULTS[fault](one) for one in wanted])

    monkeypatch.setattr(TargetLaws, "draw", faulty)
    assert value_of(Engine(TARGET, DRAFTER, params_of(rule))) < ALPHA


def _without_drafted(rows: Sequence[ChainRow]) -> list[ChainRow]:
    return [replace(row, drafted=()) for row in rows]


def _in_the_last_row_alone(rows: Sequence[ChainRow]) -> list[ChainRow]:
    behind = [*rows[1:], None]
    return [
        row if after is None or after.sampler is not row.sampler else _raw(row)
        for row, after in zip(rows, behind, strict=True)
    ]


def _raw(row: ChainRow) -> ChainRow:
    own = row.sampler
    return replace(row, sampler=Engine.sampler(params_of(), own.coins, own.tokens))


CHAIN_FAULTS = {
    "drafted tokens are not counted": _without_drafted,
    "only the bonus row": _in_the_last_row_alone,
}


@pytest.mark.parametrize("rule", [*QUICK_BLOCK, pytest.param("coupled", marks=SLOW)])
@pytest.mark.parametrize("fault", CHAIN_FAULTS)
def test_a_fault_planted_in_the_chain_is_seen(
    fault: str, rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def faulty(logits: torch.Tensor, rows: Sequence[ChainRow]) -> torch.Tensor:
        return apply_chain(logits, CHAIN_FAULTS[fault](rows))

    monkeypatch.setattr(judge, "apply_chain", faulty)
    params = params_of(rule, frequency_penalty=1.5, bad_words=((1, 0), (2, 3), (2,)))
    assert value_of(Engine(TARGET, DRAFTER, params)) < ALPHA


@pytest.mark.slow
def test_a_fault_planted_in_the_coins_of_block_is_seen_over_several_rounds() -> None:
    """Coins that belong to the position alone are looked at in more than one round."""
    engine = Engine(Toy(0, 3), Toy(100, 3), params_of("block"), ks=(2,))
    laws = expected(engine.target, engine.params, NUM_TOKENS)
    assert p_value(engine.sample(4000, NUM_TOKENS).outputs, laws) > ALPHA
    faulty = replace(engine, coins=ByPosition)
    assert p_value(faulty.sample(4000, NUM_TOKENS).outputs, laws) < ALPHA
