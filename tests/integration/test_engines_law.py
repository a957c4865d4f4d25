"""Sampled output of both engines has the target's law, with every parameter, by every rule.

Real engines, a real server, real models; the drafter is a clearly different one. Every token is
judged by its law after all the tokens before it, some hundred deep (see `system_law_kit`), with
`NUM_JOBS * LENGTH` tokens for each parameter and rule. Beside that stand faults, planted into the
running system, that fail with as many.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from pilotfish_broker.messages import Proposal
from pilotfish_broker.sampling import SamplingParams
from pilotfish_workers.model.interface import Rows
from pilotfish_workers.model.runner import ModelRunner
from pilotfish_workers.model.text import Text
from pilotfish_workers.speculative import judge
from pilotfish_workers.speculative.chain import ChainRow
from pilotfish_workers.speculative.coins import Coins
from pilotfish_workers.speculative.history import History
from pilotfish_workers.speculative.law import SparseLaw
from pilotfish_workers.speculative.sampler import Draw, Drawn, Sampler
from pilotfish_workers.speculative.target_laws import TargetLaws, Wanted
from pilotfish_workers.verify.sequence import Sequence as Active
from pilotfish_workers.verify.sessions import Sessions
from tests.law_kit import ALPHA
from tests.sampled_engines_kit import PROMPT, Bench, Pair, load
from tests.system_law_kit import Reference, Samples, evidence, greedy, p_value, repeated
from tests.tiny_models import build_tiny

pytestmark = pytest.mark.integration

RULES = ("rejection", "block", "coupled")
BY_LAW = ("rejection", "block")
LENGTH, NUM_JOBS, K = 128, 8, 3
FEW = (70, 72, 74, 76, 78, 80)
END, FULL_STOP = 0, 17
UNITS = ("a", "bc", "bd", "than", "the ", "e ")
"""None begins another, so that there is one way to read a text as a row of them."""

CASES: dict[str, dict[str, Any]] = {
    "cold": {"temperature": 0.7, "allowed_token_ids": FEW},
    "hot": {"temperature": 1.5, "allowed_token_ids": FEW},
    "top_k": {"temperature": 2.5, "top_k": 3, "allowed_token_ids": FEW},
    "top_p": {"top_p": 0.8, "allowed_token_ids": FEW},
    "min_p": {"min_p": 0.2, "allowed_token_ids": FEW},
    "typical_p": {"typical_p": 0.8, "allowed_token_ids": FEW},
    "penalties": {
        "repetition_penalty": 1.8,
        "frequency_penalty": 1.0,
        "presence_penalty": 1.5,
        "allowed_token_ids": tuple(range(82, 90)),
        "max_tokens": LENGTH // 4,
    },
    "logit_bias": {"logit_bias": {70: 1.5, 72: -2.0, 74: 1.0}, "allowed_token_ids": FEW},
    "bad_words": {
        "bad_words": ((70, 72), (72, 74), (74, 74, 76), (80, 70)),
        "allowed_token_ids": FEW,
    },
    "min_tokens": {"min_tokens": 48, "ignore_eos": False, "allowed_token_ids": (END, *FEW)},
    "allowed_token_ids": {"allowed_token_ids": FEW[:4]},
    "regex": {
        "regex": f"({'|'.join(UNITS)})*[.]",
        "logit_bias": {FULL_STOP: -1.5},
        "ignore_eos": False,
    },
    "two": {"temperature": 8.0, "allowed_token_ids": FEW[:2]},
    "two-singly": {"temperature": 8.0, "allowed_token_ids": FEW[:2], "speculation": 1},
}
"""What is asked for beside the temperature, which is 1. The parameter that gives a case its name
is what it is about; the others keep the choice small."""
NUM_SHORTER_JOBS = {"min_tokens": 20, "regex": 20, "penalties": 48}
WITHOUT: dict[str, dict[str, Any]] = {
    "cold": {"temperature": 1.0},
    "hot": {"temperature": 1.0},
    "top_k": {"top_k": 0},
    "top_p": {"top_p": 1.0},
    "min_p": {"min_p": 0.0},
    "typical_p": {"typical_p": 1.0},
    "penalties": {"repetition_penalty": 1.0, "frequency_penalty": 0.0, "presence_penalty": 0.0},
    "logit_bias": {"logit_bias": {}},
    "bad_words": {"bad_words": ()},
    "min_tokens": {"min_tokens": 0},
    "allowed_token_ids": {"allowed_token_ids": None},
    "regex": {"regex": None},
}
"""What each case is about, at the values that ask for nothing."""


def params_of(case: str, rule: str, number: int = 0) -> SamplingParams:
    """Those of one job; a job under `coupled` has a seed, the others take their ids for one."""
    common = {"temperature": 1.0, "max_tokens": LENGTH, "speculation": K, "ignore_eos": True}
    seed = number if rule == "coupled" else None
    return SamplingParams.from_mapping({**common, "rule": rule, "seed": seed, **CASES[case]})


class Follows:
    """The tokens that may follow an output of the regular expression in `CASES`."""

    def __init__(self, text: Text) -> None:
        ids = range(text.vocab_size)
        self._bytes = {token: text.token_bytes(token) for token in ids if text.decode([token])}
        self._units = [unit.encode() for unit in UNITS]
        self._after = cache(self._listed)

    def __call__(self, output: Sequence[int]) -> list[int]:
        if END in output:
            return [END]
        return self._after(self._rest(b"".join(self._bytes[token] for token in output)))

    def _listed(self, rest: bytes | None) -> list[int]:
        if rest == b".":
            return [END]
        if rest is None:
            return []
        return [t for t, more in self._bytes.items() if self._rest(rest + more) is not None]

    def _rest(self, text: bytes) -> bytes | None:
        """What of a text is behind its last whole unit; None if nothing can make it right."""
        while unit := next((unit for unit in self._units if text.startswith(unit)), None):
            text = text.removeprefix(unit)
        is_right = text == b"." or any(unit.startswith(text) for unit in self._units)
        return text if is_right else None


class Lab:
    """A target, a drafter that has nothing to do with it, and what both do by definition."""

    def __init__(self, url: str, client: Any, folder: Path) -> None:
        self.draft_folder = build_tiny(folder / "draft", "llama", 2, num_layers=1, hidden=16)
        target = build_tiny(folder / "target", "llama", 1, num_layers=1, hidden=16)
        pair = Pair.load(target, self.draft_folder)
        self.bench = Bench(url, client, pair)
        self.target = Reference(target, PROMPT, Follows(pair.text))
        self.drafter = Reference(self.draft_folder, PROMPT, Follows(pair.text))

    def sample(
        self, cases: Sequence[str], rules: Sequence[str], num_jobs: int = NUM_JOBS, **options: Any
    ) -> dict[tuple[str, str], Samples]:
        """All of these jobs at once; see `Bench.run`."""
        return self.bench.run(
            {
                (case, rule): {
                    f"{rule}.{case}.{number}": params_of(case, rule, number)
                    for number in range(NUM_SHORTER_JOBS.get(case, num_jobs))
                }
                for case in cases
                for rule in rules
            },
            **options,
        )

    def judged(self, case: str, samples: Samples, **drafter: Any) -> Judged:
        """How well outputs go with the target's law, and with laws that lack a parameter.

        Args:
            drafter: parameters with which the drafter draws, where they are others.
        """
        outputs, params = samples.outputs, params_of(case, "block")
        target = self.target.read(outputs)
        laws = target.laws(params)
        without = {
            name: target.laws(replace(params, **{name: value}))
            for name, value in WITHOUT.get(case, {}).items()
        }
        drafted = self.drafter.read(outputs).laws(replace(params, **drafter))
        favours = [drafted, greedy(drafted), repeated(outputs, laws), *without.values()]
        return Judged(
            p_value(outputs, laws, favours),
            {name: evidence(outputs, laws, other) for name, other in without.items()},
        )


@dataclass(frozen=True, slots=True)
class Judged:
    """What outputs look like.

    Attributes:
        p_value: that outputs of the target's law look at least so odd.
        missed: by parameter, how many times likelier that law makes them than one without it.
    """

    p_value: float
    missed: dict[str, float]


@pytest.fixture(scope="module")
def lab(valkey: Any, tmp_path_factory: pytest.TempPathFactory) -> Lab:
    return Lab(valkey.url, valkey.client(), tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def samples(lab: Lab) -> dict[tuple[str, str], Samples]:
    """Of every case by every rule, side by side in the same passes."""
    return lab.sample([*WITHOUT], RULES)


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("case", WITHOUT)
def test_the_law_is_the_targets(
    lab: Lab, samples: dict[tuple[str, str], Samples], case: str, rule: str
) -> None:
    found = samples[case, rule]
    assert 0 < found.accepted < found.drafted
    assert found.drafted > K * found.rounds / 2, "most rounds are to judge several tokens"
    judged = lab.judged(case, found)
    assert judged.p_value > ALPHA
    # the same outputs show that no parameter was left out
    assert all(times > 1 / ALPHA for times in judged.missed.values()), judged


# --- drafters that draw as they like -----------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Drafter:
    """A drafter that draws by other parameters than the job's; any law is fine for a draft.

    Attributes:
        case: the jobs it drafts for.
        changes: what it draws by instead.
    """

    case: str
    changes: dict[str, Any]

    def asked(self, params: SamplingParams) -> SamplingParams:
        """What it makes of a job's parameters."""
        return replace(params, **self.changes)


DRAFTERS = {
    "sure": Drafter("two", {"logit_bias": {FEW[0]: 37.0}}),
    "unsure": Drafter("two-singly", {"logit_bias": {FEW[0]: 6.8}}),
    "unknowing": Drafter("two", {"allowed_token_ids": FEW[:3], "logit_bias": {FEW[1]: -18.0}}),
}
"""All but one of a hundred drafts of the first are the same token; 70 of the second; almost half of
the third are one that may not come. The target takes one of two tokens, almost by chance."""


def judge_drafter(lab: Lab, name: str, rules: Sequence[str]) -> dict[str, float]:
    """The p-value by rule of twice as many tokens as above."""
    one = DRAFTERS[name]
    samples = lab.sample([one.case], rules, 2 * NUM_JOBS, asked=one.asked)
    assert all(0 < found.accepted < found.drafted for found in samples.values())
    return {
        rule: lab.judged(case, found, **one.changes).p_value
        for (case, rule), found in samples.items()
    }


@pytest.mark.parametrize("name", DRAFTERS)
def test_the_law_is_the_targets_whatever_is_drafted(lab: Lab, name: str) -> None:
    found = judge_drafter(lab, name, RULES)
    assert min(found.values()) > ALPHA, found


# --- planted faults, each with as many tokens as its test above --------------------------------


class WideLaws(ModelRunner):
    """Draws after top_k and reports the law before it."""

    def draw(self, rows: Sequence[Rows], draws: Sequence[Draw | None]) -> list[Drawn | None]:
        drawn = super().draw(rows, draws)
        wide = super().draw(rows, [one and by_others(one, top_k=0) for one in draws])
        return [a and b and replace(a, law=b.law) for a, b in zip(drawn, wide, strict=True)]


class GreedyTokens(ModelRunner):
    """Takes the argmax and reports the softmax."""

    def draw(self, rows: Sequence[Rows], draws: Sequence[Draw | None]) -> list[Drawn | None]:
        drawn = super().draw(rows, draws)
        best = super().draw(rows, [one and by_others(one, temperature=0) for one in draws])
        return [a and b and replace(a, token=b.token) for a, b in zip(drawn, best, strict=True)]


def by_others(one: Draw, **changes: Any) -> Draw:
    """The same draw by other parameters."""
    old = one.sampler
    params = replace(old.params, **changes)
    return replace(one, sampler=Sampler(params, old.coins, old.tokens, old.num_prompt))


def fails(lab: Lab, case: str, rules: Sequence[str], **options: Any) -> None:
    """The fault that is planted now is found under each of these rules."""
    samples = lab.sample([case], rules, **options)
    found = {rule: lab.judged(case, one).p_value for (_, rule), one in samples.items()}
    assert max(found.values()) < ALPHA, found


def shorten(monkeypatch: pytest.MonkeyPatch, keep: Callable[[Proposal], int]) -> None:
    """Have the verify worker use only so many tokens of a proposal."""

    def take(self: Sessions, sequence: Active, frame: Proposal, *more: Any) -> bool:
        count = keep(frame)
        q = frame.q and frame.q[:count]
        return real(self, sequence, replace(frame, tokens=frame.tokens[:count], q=q), *more)

    real = Sessions.take
    monkeypatch.setattr(Sessions, "take", take)


@pytest.mark.slow
@pytest.mark.parametrize("drafter", [WideLaws, GreedyTokens])
def test_a_reported_law_that_was_not_drawn_from_is_found(
    lab: Lab, drafter: type[ModelRunner]
) -> None:
    fails(lab, "top_k", BY_LAW, draft=load(drafter, lab.draft_folder))


@pytest.mark.slow
def test_a_chain_that_the_target_leaves_out_is_found(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(judge, "apply_chain", lambda logits, rows: logits.float())
    fails(lab, "top_k", RULES)


@pytest.mark.slow
def test_a_target_that_only_masks_is_found(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    def masked(logits: torch.Tensor, rows: Sequence[ChainRow]) -> torch.Tensor:
        return logits.masked_fill(real(logits, rows).isinf(), -torch.inf)

    real = judge.apply_chain
    monkeypatch.setattr(judge, "apply_chain", masked)
    fails(lab, "cold", RULES)


@pytest.mark.slow
def test_a_missing_residual_is_found(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    def draw(self: TargetLaws, wanted: Sequence[Wanted]) -> list[int]:
        return real(self, [replace(one, less=None) for one in wanted])

    real = TargetLaws.draw
    monkeypatch.setattr(TargetLaws, "draw", draw)
    fails(lab, "top_p", BY_LAW)


@pytest.mark.slow
def test_penalties_that_do_not_count_drafted_tokens_are_found(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = History.counts
    monkeypatch.setattr(History, "counts", lambda self, drafted: real(self, ()))
    fails(lab, "penalties", RULES)


@pytest.mark.slow
def test_noise_that_does_not_depend_on_the_place_is_found(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Coins.noise
    monkeypatch.setattr(Coins, "noise", lambda self, position, size: real(self, 0, size))
    fails(lab, "hot", ["coupled"])


@pytest.mark.slow
def test_coins_of_an_earlier_round_are_found(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Coins.accept
    monkeypatch.setattr(Coins, "accept", lambda self, position, base: real(self, position, 0))
    assert judge_drafter(lab, "sure", ["block"])["block"] < ALPHA


@pytest.mark.slow
def test_forbidden_drafts_that_are_cut_off_are_found(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    def keep(frame: Proposal) -> int:
        legal = itertools.takewhile(FEW[:2].__contains__, frame.tokens)
        return len([*legal])

    shorten(monkeypatch, keep)
    found = judge_drafter(lab, "unknowing", BY_LAW)
    assert max(found.values()) < ALPHA, found


@pytest.mark.slow
def test_proposals_that_are_dropped_for_what_they_hold_are_found(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    def keep(frame: Proposal) -> int:
        laws = map(SparseLaw.from_bytes, frame.q or [])
        first = [law.probability(token) for token, law in zip(frame.tokens, laws, strict=True)][:1]
        return len(frame.tokens) if first and first[0] >= 0.5 else 0

    shorten(monkeypatch, keep)
    found = judge_drafter(lab, "unsure", BY_LAW)
    assert max(found.values()) < ALPHA, found
