"""What a pass decides for each case, whatever else is in the pass."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pilotfish_broker.sampling import SamplingParams
from pilotfish_workers.model.grammar import GrammarError
from pilotfish_workers.speculative import judge as judging
from pilotfish_workers.speculative.accept import (
    BAD_LOGITS,
    NOT_JUDGED,
    NOTHING_ALLOWED,
    Outcome,
    accept_greedy,
)
from pilotfish_workers.speculative.best import best_tokens
from pilotfish_workers.speculative.chain import ChainRow, apply_chain
from pilotfish_workers.speculative.coins import Coins
from pilotfish_workers.speculative.draw import draw_tokens
from pilotfish_workers.speculative.judge import judge
from pilotfish_workers.speculative.law import SparseLaw
from pilotfish_workers.speculative.sampler import Case, Draw, Sampler
from tests.grammar_kit import VOCAB as GRAMMAR_VOCAB
from tests.grammar_kit import byte_level, constraint
from tests.law_kit import PROMPT, Engine, Toy, Unlike

VOCAB = 12
PLAIN: dict[str, Any] = {"temperature": 0.0}
WAYS: dict[str, dict[str, Any]] = {
    "plain": PLAIN,
    "greedy": {"temperature": 0.0, "frequency_penalty": 0.5},
    "rejection": {"temperature": 1.0, "rule": "rejection"},
    "block": {"temperature": 1.0, "rule": "block"},
    "coupled": {"temperature": 1.0, "rule": "coupled"},
}
SAMPLED = ("rejection", "block", "coupled")


def sampler(seed: int = 1, output: Sequence[int] = (), **params: Any) -> Sampler:
    made = SamplingParams.from_mapping(params)
    return Sampler(made, Coins(seed), [*PROMPT, *output], len(PROMPT))


def logits_of(num_rows: int, seed: int = 0, spread: float = 2.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_rows, VOCAB, generator=generator) * spread


def num_rows(case: Case | None) -> int:
    if case is None:
        return 0
    return len(case.scored) + (1 + len(case.drafted) if case.is_judged else 0)


def run(logits: torch.Tensor, *cases: Case | None) -> list[Outcome | None]:
    before = logits.clone()
    outcomes = judge(logits, best_tokens(logits), cases, [num_rows(case) for case in cases])
    assert torch.equal(logits.nan_to_num(7.5), before.nan_to_num(7.5)), "the logits were changed"
    return outcomes


def run_one(logits: torch.Tensor, case: Case) -> Outcome:
    outcome = run(logits, case)[0]
    assert outcome is not None
    return outcome


def laws_for(drafted: Sequence[int], share: float = 0.5) -> list[SparseLaw]:
    """Laws that give each drafted token this share, and a neighbour the rest."""
    return [
        SparseLaw(
            np.array([token, (token + 1) % VOCAB]), np.array([share, 1 - share], dtype=np.float32)
        )
        for token in drafted
    ]


# --- greedy ---


def test_plain_greedy_rows_never_reach_the_chain(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(logits: torch.Tensor, rows: Sequence[ChainRow]) -> torch.Tensor:
        raise AssertionError("a distribution for greedy rows")

    monkeypatch.setattr(judging, "apply_chain", never)
    logits = logits_of(7)
    best = best_tokens(logits)
    drafted = [best[0], best[1], (best[2] + 1) % VOCAB]
    first, second = run(logits, Case(sampler(), drafted), Case(sampler(), best[4:6]))
    assert first == Outcome(2, best[2])
    assert second == Outcome(2, best[6])


def test_one_call_of_the_chain_serves_all_rows_that_need_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[int] = []

    def counting(logits: torch.Tensor, rows: Sequence[ChainRow]) -> torch.Tensor:
        calls.append(len(rows))
        return apply_chain(logits, rows)

    monkeypatch.setattr(judging, "apply_chain", counting)
    cases = [Case(sampler(**way), (1, 2), laws_for((1, 2))) for way in WAYS.values()]
    run(logits_of(15), *cases)
    assert calls == [12]  # all but the three rows of "plain"


@given(seed=st.integers(0, 1000), k=st.integers(0, 4), data=st.data())
def test_greedy_with_a_chain_takes_the_argmax_of_what_the_chain_leaves(
    seed: int, k: int, data: st.DataObject
) -> None:
    own = sampler(
        output=data.draw(st.lists(st.integers(0, VOCAB - 1), max_size=4)),
        temperature=0.0,
        frequency_penalty=1.5,
        logit_bias={3: 2.0},
        bad_words=((4,), (5, 6)),
    )
    logits = logits_of(k + 1, seed)
    rows = [ChainRow(own) for _ in range(k + 1)]
    drafted: list[int] = []
    wanted: list[int] = []
    for index in range(k + 1):
        rows[index] = ChainRow(own, tuple(drafted))
        wanted.append(int(apply_chain(logits, rows)[index].argmax()))
        is_right = data.draw(st.booleans())
        drafted.append(wanted[-1] if is_right else (wanted[-1] + 1) % VOCAB)
    drafted = drafted[:k]
    assert run_one(logits, Case(own, drafted)) == accept_greedy(drafted, wanted)


@pytest.mark.parametrize("way", ["plain", "greedy"])
def test_at_temperature_0_a_token_nearly_as_likely_as_the_best_is_rejected(way: str) -> None:
    logits = torch.zeros(2, VOCAB)
    logits[0, 4], logits[0, 7] = 5.0, math.nextafter(5.0, 0.0) - 1e-6
    case = Case(sampler(**WAYS[way]), (7,), [SparseLaw.certain(7)])
    assert run_one(logits, case) == Outcome(0, 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("way", ["plain", "greedy"])
def test_the_lowest_id_wins_a_tie(way: str, dtype: torch.dtype) -> None:
    logits = torch.zeros(1, VOCAB, dtype=dtype)
    logits[0, [9, 5, 10]] = 1.0
    is_narrow = dtype in (torch.bfloat16, torch.float16)
    wanted = Outcome(0, 5, near_ties=(0,) if is_narrow else ())
    assert run_one(logits, Case(sampler(**WAYS[way]))) == wanted


def test_near_ties_of_all_jobs_are_looked_for_at_once_and_are_those_of_each_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a device every look waits for it, and a look a job would cost more than the pass."""
    looks: list[str] = []

    def counting(name: str) -> Callable[..., list[float]]:
        function = getattr(judging, name)

        def counted(*values: Any) -> list[float]:
            looks.append(name)
            found: list[float] = function(*values)
            return found

        return counted

    for name in ("leads", "resolutions"):
        monkeypatch.setattr(judging, name, counting(name))
    num_near = 0
    for seed in range(40):
        logits = logits_of(4 * 12, seed).bfloat16()
        best = best_tokens(logits)
        cases: list[Case | None] = []
        for number in range(12):
            first, second, third, _ = best[4 * number : 4 * number + 4]
            drafted = [(first, second, third), (first, second, 0), (1, 1, 1)][number % 3]
            way = ("plain", "greedy", "coupled", "rejection")[number % 4]
            cases.append(Case(sampler(**WAYS[way]), drafted))
        looks.clear()
        outcomes = run(logits, *cases)
        assert sorted(looks) == ["leads", "leads", "resolutions"]  # plain ones; by the chain; all
        for number, (case, outcome) in enumerate(zip(cases, outcomes, strict=True)):
            assert case is not None
            assert outcome is not None
            assert run_one(logits[4 * number : 4 * number + 4], case) == outcome
            num_near += len(outcome.near_ties)
    assert num_near > 20, "no near ties: the test shows nothing"


@pytest.mark.parametrize("way", WAYS)
def test_a_grammar_that_cannot_be_followed_ends_its_own_job_only(way: str, tmp_path: Path) -> None:
    """An output that the library does not take back, which no grammar that was tried has shown."""
    text = byte_level(tmp_path)
    made = constraint(text, regex="a*")
    broken = Sampler(
        SamplingParams(**WAYS[way], regex="a*"),
        Coins(1),
        [*PROMPT, *text.encode("b")],
        len(PROMPT),
        constraint=made,
    )
    with pytest.raises(GrammarError):
        broken.masks(())
    logits = torch.randn(6, GRAMMAR_VOCAB, generator=torch.Generator().manual_seed(3))
    other = Case(sampler(**WAYS[way]), (1, 2), laws_for((1, 2)))
    found = run(logits, Case(broken, (1, 2), laws_for((1, 2))), other)
    assert found == [Outcome(0, NOTHING_ALLOWED), *run(logits[3:], other)]


# --- sampled ---


def test_the_coupled_rule_gives_the_same_tokens_whatever_is_drafted_and_beside_whom() -> None:
    """Any K, any drafter, alone or in a batch, begun anywhere: position and seed decide."""
    params = SamplingParams(
        temperature=0.9, top_p=0.95, rule="coupled", frequency_penalty=0.3, bad_words=((3,),)
    )
    target = Toy(5, VOCAB)
    count, length = 8, 12

    def outputs(drafter: Toy, ks: Sequence[int]) -> list[list[int]]:
        engine = Engine(target, drafter, params, ks=ks)
        return [output[:length] for output in engine.sample(count, length).outputs]

    wanted = outputs(target, (0,))
    assert len({tuple(output) for output in wanted}) == count
    for ks in ((1,), (2,), (3, 0), (8,), (4, 1, 0, 2)):
        assert outputs(target, ks) == wanted
        assert outputs(Toy(6, VOCAB), ks) == wanted
        assert outputs(Toy(7, VOCAB + 4), ks) == wanted
    samples = Engine(target, target, params, ks=(6,)).sample(count, length)
    assert samples.num_accepted == 6 * samples.num_rounds  # its own draws are always right
    for seed, output in enumerate(wanted):  # alone, resumed at any position
        for done in (0, 1, 7, 11):
            own = Engine.sampler(params, Coins(seed), [*PROMPT, *output[:done]])
            logits = target.logits([own.tokens])
            assert run_one(logits, Case(own)).token == output[done]


@pytest.mark.parametrize("rule", SAMPLED)
def test_a_token_that_is_drawn_without_a_draft_belongs_to_its_position(rule: str) -> None:
    """Plain rounds give the same tokens wherever a job is taken up again."""
    params = SamplingParams(temperature=1.0, rule=rule, top_k=6)
    target = Toy(5, VOCAB)
    output = Engine(target, target, params, ks=(0,)).sample(1, 12).outputs[0]
    for done in range(12):
        own = Engine.sampler(params, Coins(0), [*PROMPT, *output[:done]])
        assert run_one(target.logits([own.tokens]), Case(own)) == Outcome(0, output[done])


@pytest.mark.parametrize("rule", ["rejection", "block"])
@pytest.mark.parametrize("num_accepted", [0, 1, 2])
def test_the_last_token_is_drawn_with_the_coin_of_its_position(
    rule: str, num_accepted: int
) -> None:
    """All tokens are equally likely there, so the coin can be read off the token."""
    for seed in range(20):
        output = [5] * (seed % 7)
        own = sampler(seed, output, temperature=1.0, rule=rule)
        logits = torch.full((3, VOCAB), -torch.inf)
        logits[0, 4] = logits[1, 6] = 0.0
        logits[num_accepted] = 0.0
        logits[num_accepted, VOCAB - 1] = -torch.inf
        drafted = [4, 6]
        if num_accepted < 2:
            drafted[num_accepted] = VOCAB - 1
        uniform = Coins(seed).token(len(output) + num_accepted)
        wanted = Outcome(num_accepted, int(uniform * (VOCAB - 1)))
        assert run_one(logits, Case(own, drafted)) == wanted


@pytest.mark.parametrize("rule", SAMPLED)
def test_an_outcome_does_not_depend_on_what_else_is_in_the_pass(rule: str) -> None:
    cases, parts = [], []
    for seed in range(40):
        part = logits_of(1 + seed % 4, seed)
        drafted = best_tokens(part)[:-1]
        own = sampler(seed, temperature=1.3, min_p=0.05, rule=rule)
        cases.append(Case(own, drafted, laws_for(drafted)))
        parts.append(part)
    alone = [run_one(part, case) for part, case in zip(parts, cases, strict=True)]
    assert {outcome.num_accepted for outcome in alone} >= {0, 1, 2}
    mates: list[Case | None] = [None, Case(sampler(temperature=0.7)), Case(sampler())]
    together = run(torch.cat([logits_of(2, 99), *parts]), *mates, *cases)
    assert together[3:] == alone
    backwards = run(torch.cat(parts[::-1]), *cases[::-1])
    assert backwards[::-1] == alone


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_equal_laws_reject_nothing_and_give_no_nan(rule: str) -> None:
    """The drafter is the target: its law is p up to how float32 rounds it."""
    params = {"temperature": 0.7, "top_p": 0.9, "rule": rule}
    for seed in range(60):
        own = sampler(seed, **params)
        logits = logits_of(4, seed)
        drafted: list[int] = []
        laws = []
        for index in range(3):
            drawn = draw_tokens(logits[index : index + 1], [Draw(own, tuple(drafted))])[0]
            assert drawn.law is not None
            drafted.append(drawn.token)
            laws.append(drawn.law)
        assert run_one(logits, Case(own, drafted, laws)).num_accepted == 3


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_equal_certain_laws_reject_nothing(rule: str) -> None:
    logits = torch.full((3, VOCAB), -torch.inf)
    logits[0, 3] = logits[1, 5] = logits[2, 8] = 1.0
    case = Case(sampler(temperature=1.0, rule=rule), (3, 5))
    assert run_one(logits, case) == Outcome(2, 8)


@pytest.mark.parametrize("way", SAMPLED)
def test_one_case_twice_is_decided_the_same_and_another_base_draws_other_coins(way: str) -> None:
    """One party decides, and whoever computes it again decides the same."""
    outcomes = []
    for output in ([], [4]):
        cases = [
            Case(sampler(seed, output, **WAYS[way]), (2, 3), laws_for((2, 3))) for seed in range(60)
        ]
        logits = logits_of(3).repeat(60, 1)
        outcomes.append(run(logits, *cases))
        assert run(logits, *cases) == outcomes[-1]
    assert outcomes[0] != outcomes[1]


# --- what cannot be judged ---


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("bad", [0, 1, 2])
def test_an_unusable_row_matters_only_where_it_is_reached(bad: int, value: float, way: str) -> None:
    logits = torch.full((3, VOCAB), -30.0)
    for row, token in enumerate((4, 5, 6)):
        logits[row, token] = 30.0
    mate = Case(sampler(3, **WAYS[way]), (4, 5))
    mates_outcome = run_one(logits, mate)
    assert mates_outcome == Outcome(2, 6)
    broken = logits.clone()
    broken[bad, 1 if value > 0 or math.isnan(value) else slice(None)] = value
    right = Case(sampler(**WAYS[way]), (4, 5), [SparseLaw.certain(4), SparseLaw.certain(5)])
    wrong = Case(sampler(**WAYS[way]), (9, 5), [SparseLaw.certain(9), SparseLaw.certain(5)])
    outcomes = run(torch.cat([broken, logits, broken]), right, mate, wrong)
    assert outcomes[0] == Outcome(bad, BAD_LOGITS)
    assert outcomes[1] == mates_outcome
    assert outcomes[2] == (Outcome(0, 4) if bad else Outcome(0, BAD_LOGITS))


@pytest.mark.parametrize("way", WAYS)
def test_minus_infinity_is_fine_while_one_logit_is_finite(way: str) -> None:
    logits = torch.full((2, VOCAB), -torch.inf)
    logits[0, 3] = logits[1, 8] = -7.0
    assert run_one(logits, Case(sampler(**WAYS[way]), (3,))) == Outcome(1, 8)


@pytest.mark.parametrize("way", ["greedy", *SAMPLED])
@pytest.mark.parametrize("empty", [0, 1, 2])
def test_a_row_that_is_left_nothing_matters_only_where_it_is_reached(empty: int, way: str) -> None:
    class Until:
        """Allows one token a row, and none in the row `empty`."""

        def masks(self, output: Sequence[int], drafted: Sequence[int]) -> np.ndarray:
            rows = np.zeros((len(drafted) + 1, 1), dtype=np.int32)
            for index in range(len(rows)):
                rows[index] = 0 if index == empty else 1 << 4 + index
            return rows

        def rewind(self) -> None: ...

    for drafted, wanted in (
        ((4, 5), Outcome(empty, NOTHING_ALLOWED)),
        ((9, 5), Outcome(0, 4) if empty else Outcome(0, NOTHING_ALLOWED)),
    ):
        own = sampler(**WAYS[way])
        own.constraint = Until()
        mate = Case(sampler(2, **WAYS[way]), (4,))
        rows = logits_of(2, 3)
        outcomes = run(torch.cat([logits_of(3), rows]), Case(own, drafted), mate)
        assert outcomes == [wanted, run_one(rows, mate)]


@pytest.mark.parametrize("way", ["greedy", *SAMPLED])
def test_allowed_tokens_that_the_logits_rule_out_leave_nothing(way: str) -> None:
    logits = logits_of(1)
    logits[0, [2, 3]] = -torch.inf
    case = Case(sampler(**WAYS[way], allowed_token_ids=(2, 3), top_p=0.5, top_k=2))
    assert run_one(logits, case) == Outcome(0, NOTHING_ALLOWED)


@pytest.mark.parametrize("way", ["greedy", *SAMPLED])
def test_a_forbidden_draft_is_rejected_and_the_rows_behind_it_do_no_harm(way: str) -> None:
    """Behind it the constraint's masks allow nothing at all."""
    for seed in range(50):
        own = sampler(seed, output=[6], **WAYS[way])
        own.constraint = Unlike(VOCAB)
        drafted = (6, 2, 3)  # no token twice in a row
        outcome = run_one(logits_of(4, seed), Case(own, drafted, laws_for(drafted, 0.9)))
        assert outcome.num_accepted == 0
        assert outcome.token in own.constraint.allows([6])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("foreign", [VOCAB, VOCAB + 1, (1 << 32) - 1])
def test_a_token_that_the_target_lacks_is_rejected(way: str, foreign: int) -> None:
    """Penalties, masks and laws that speak of it do no harm."""
    for seed in range(30):
        own = sampler(seed, **(WAYS[way] | {"presence_penalty": 0.1 if way != "plain" else 0}))
        drafted = (2, foreign)
        laws = [
            SparseLaw(np.array([2, foreign]), np.array([0.25, 0.75], dtype=np.float32)),
            SparseLaw(np.array([foreign, 3]), np.array([0.75, 0.25], dtype=np.float32)),
        ]
        outcome = run_one(logits_of(3, seed), Case(own, drafted, laws))
        assert outcome.num_accepted <= 1
        assert 0 <= outcome.token < VOCAB


# --- log-probabilities ---


def reference(logits: torch.Tensor, row: int) -> list[float]:
    """log softmax by definition, in float64."""
    values: list[float] = torch.log_softmax(logits[row].double(), -1).tolist()
    return values


def check_logprobs(found: Any, logits: torch.Tensor, first: int, tokens: list[int], n: int) -> None:
    assert len(found) == len(tokens)
    for row, (one, token) in enumerate(zip(found, tokens, strict=True), first):
        wanted = reference(logits, row)
        assert one.logprob == pytest.approx(wanted[token], abs=1e-5)
        ranked = sorted(range(VOCAB), key=lambda t: -wanted[t])[:n]
        assert [t for t, _ in one.top] == ranked
        assert [value for _, value in one.top] == pytest.approx(
            [wanted[t] for t in ranked], abs=1e-5
        )


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("n", [0, 1, 3, VOCAB, VOCAB + 5])
def test_each_emitted_token_has_its_log_probability_by_the_models_own_logits(
    way: str, n: int
) -> None:
    seen = set()
    for seed in range(12):
        logits = logits_of(5, seed)
        own = sampler(seed, **(WAYS[way] | {"logprobs": n, "logit_bias": {2: 3.0}}))
        if way == "plain":
            own = sampler(seed, temperature=0.0, logprobs=n)
        best = best_tokens(logits[1:])
        drafted = [best[0], best[1], 7]
        case = Case(own, drafted, laws_for(drafted))
        mate = Case(sampler(**WAYS[way]))
        mates, outcome = run(logits, mate, case)
        assert mates is not None
        assert outcome is not None
        assert mates.logprobs is None
        check_logprobs(outcome.logprobs, logits, 1, outcome.tokens(drafted), n)
        assert replace(outcome, logprobs=None) == run_one(
            logits[1:], replace(case, sampler=replace_logprobs(own))
        )
        seen.add(outcome.num_accepted)
    assert len(seen) > 1


def replace_logprobs(own: Sampler) -> Sampler:
    """The same job without log-probabilities."""
    params = replace(own.params, logprobs=None)
    return Sampler(params, own.coins, own.tokens, own.num_prompt)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("is_judged", [True, False])
def test_prompt_tokens_are_scored_also_in_a_chunk_that_is_not_the_last(
    way: str, is_judged: bool
) -> None:
    logits = logits_of(5 + is_judged)
    scored = [4, 0, 11, 3, 3]
    own = sampler(**WAYS[way], prompt_logprobs=2)
    case = Case(own, scored=scored, is_judged=is_judged)
    outcome = run_one(logits, case)
    check_logprobs(outcome.scored, logits, 0, scored, 2)
    assert outcome.logprobs is None
    if is_judged:
        assert outcome.token == run_one(logits[5:], Case(sampler(**WAYS[way]))).token
    else:
        assert (outcome.num_accepted, outcome.token) == (0, NOT_JUDGED)


def test_prompt_and_output_are_scored_together_with_numbers_of_their_own() -> None:
    logits = logits_of(4)
    own = sampler(temperature=0.0, prompt_logprobs=1, logprobs=3)
    best = best_tokens(logits)
    outcome = run_one(logits, Case(own, [best[2]], scored=[5, 6]))
    check_logprobs(outcome.scored, logits, 0, [5, 6], 1)
    check_logprobs(outcome.logprobs, logits, 2, best[2:], 3)


@pytest.mark.parametrize("is_judged", [True, False])
def test_a_prompt_that_breaks_the_model_is_not_scored_in_silence(is_judged: bool) -> None:
    logits = logits_of(2 + is_judged)
    logits[1, 3] = math.nan
    own = sampler(temperature=0.0, prompt_logprobs=0)
    assert run_one(logits, Case(own, scored=[5, 6], is_judged=is_judged)).token == BAD_LOGITS


@pytest.mark.parametrize("way", WAYS)
def test_tokens_before_an_unusable_row_keep_their_log_probabilities(way: str) -> None:
    logits = torch.full((2, VOCAB), -30.0)
    logits[0, 4], logits[1, 0] = 30.0, math.nan
    own = sampler(**WAYS[way], logprobs=1)
    outcome = run_one(logits, Case(own, (4,)))
    assert (outcome.num_accepted, outcome.token) == (1, BAD_LOGITS)
    check_logprobs(outcome.logprobs, logits, 0, [4], 1)


def test_many_prompt_tokens_are_scored_in_pieces() -> None:
    logits = logits_of(200)
    scored = [row % VOCAB for row in range(200)]
    own = sampler(prompt_logprobs=1)
    outcome = run_one(logits, Case(own, scored=scored, is_judged=False))
    check_logprobs(outcome.scored, logits, 0, scored, 1)


def test_log_probabilities_are_computed_in_float32_of_low_precision_logits() -> None:
    logits = logits_of(1).bfloat16()
    outcome = run_one(logits, Case(sampler(logprobs=VOCAB)))
    assert outcome.logprobs is not None
    total = sum(math.exp(value) for _, value in outcome.logprobs[0].top)
    assert total == pytest.approx(1, abs=1e-5)
    tops = outcome.logprobs[0].top
    assert tops == sorted(tops, key=lambda pair: (-pair[1], pair[0]))


# --- what the caller must not ask ---


@pytest.mark.parametrize(
    ("cases", "counts", "message"),
    [
        ([Case(sampler(), (1,))], [1], "rows"),
        ([Case(sampler())], [3], "rows"),
        ([Case(sampler(), (1, 2), laws_for((1,)))], [3], "laws"),
        ([Case(sampler(), scored=(1,), is_judged=False)], [3], "rows"),
    ],
)
def test_rows_that_do_not_fit_are_a_mistake_of_the_caller(
    cases: list[Case], counts: list[int], message: str
) -> None:
    logits = logits_of(3)
    with pytest.raises(ValueError, match=message):
        judge(logits, best_tokens(logits), cases, counts)


def test_a_pass_without_cases_has_no_outcomes() -> None:
    assert run(logits_of(0)) == []
    assert run(logits_of(0), None, None) == [None, None]
