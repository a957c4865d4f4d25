"""What every draft source promises for sampled jobs: tokens, and the laws they were drawn from."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from pilotfish_broker.messages import Sync, Verdict
from pilotfish_workers.draft.model_source import ModelSource
from pilotfish_workers.draft.ngram import NgramSource
from pilotfish_workers.draft.sampling import draft_sampler
from pilotfish_workers.draft.session import DraftSession
from pilotfish_workers.draft.source import Draft, Drafted, DraftSource
from pilotfish_workers.model.interface import Rows
from pilotfish_workers.model.runner import ModelRunner
from pilotfish_workers.model.text import Text
from pilotfish_workers.speculative.law import SparseLaw
from pilotfish_workers.speculative.sampler import Case, Draw, Drawn, Sampler
from tests.logits_model import LogitsModel
from tests.tiny_models import build_tiny
from tests.worker_kit import draft_of, drafting, job_spec, sampler_of

PROMPT = [7, 9, 33, 50, 7, 9, 33, 50, 7, 9]
ALPHA = 1e-6
BY_LAW = ("rejection", "block")
CHAINS: dict[str, dict[str, Any]] = {
    "bare": {"temperature": 1.0},
    "temperature": {"temperature": 0.6},
    "top_k": {"temperature": 1.0, "top_k": 5},
    "top_p": {"temperature": 1.3, "top_p": 0.6},
    "min_p": {"temperature": 1.0, "min_p": 0.2},
    "typical_p": {"temperature": 1.0, "typical_p": 0.5},
    "penalty": {"temperature": 1.0, "repetition_penalty": 1.8},
    "several": {"temperature": 0.9, "repetition_penalty": 1.4, "top_k": 20, "top_p": 0.8},
}


def patient(source: DraftSource, drafts: Sequence[Draft], ks: Sequence[int]) -> list[Drafted]:
    """Propose again while the source asks for another call."""
    for _ in range(50):
        answers = source.propose(drafts, ks)
        ready = [answer for answer in answers if answer is not None]
        if len(ready) == len(answers):
            return ready
    pytest.fail("the source never gets ready")


def one(source: DraftSource, draft: Draft, k: int) -> Drafted:
    return patient(source, [draft], [k])[0]


def as_numbers(drafted: Drafted) -> tuple[list[int], Any]:
    """For comparing two proposals, laws included."""
    laws = drafted.laws and [(law.ids.tolist(), law.weights.tolist()) for law in drafted.laws]
    return drafted.tokens, laws


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    folder = build_tiny(tmp_path_factory.mktemp("tiny"), "llama", num_layers=1, hidden=32)
    return ModelRunner.load(str(folder), device="cpu", num_threads=1, kv_tokens=16384)


def logits_source() -> DraftSource:
    return ModelSource(LogitsModel(num_blocks=200, vocab_size=100), prefill_tokens=64)


@pytest.fixture(params=[NgramSource, logits_source, "real"], ids=["ngram", "logits", "real"])
def make(request: pytest.FixtureRequest) -> Callable[[], DraftSource]:
    if request.param == "real":
        runner = request.getfixturevalue("runner")
        return lambda: ModelSource(runner, prefill_tokens=64)
    return request.param  # type: ignore[no-any-return]


# --- for every source ------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["bare", "top_k", "several"])
@pytest.mark.parametrize("rule", ["greedy", "rejection", "block", "coupled"])
def test_a_token_was_certain_or_comes_with_a_law_that_has_it(
    make: Callable[[], DraftSource], rule: str, name: str
) -> None:
    params = CHAINS[name] | ({"temperature": 0.0} if rule == "greedy" else {"rule": rule})
    source = make()
    draft = draft_of(PROMPT, **params)
    drafted = one(source, draft, 8)
    source.learn(draft, None)
    assert len(drafted.tokens) == 8
    if rule in BY_LAW and isinstance(source, ModelSource):
        assert drafted.laws is not None
        assert len(drafted.laws) == 8
        for token, law in zip(drafted.tokens, drafted.laws, strict=True):
            assert law.probability(token) > 0
    else:
        assert drafted.laws is None


@pytest.mark.parametrize("rule", ["rejection", "block", "coupled"])
def test_a_seeded_draft_is_the_same_whenever_and_beside_whom_it_is_made(
    make: Callable[[], DraftSource], rule: str
) -> None:
    """The number of tokens wanted, batch mates, an earlier answer: nothing but the job matters."""
    params = {"temperature": 1.0, "seed": 5, "rule": rule}
    draft, source = draft_of(PROMPT, job="a", **params), make()
    alone = one(source, draft, 8).tokens
    assert one(source, draft, 8).tokens == alone
    assert one(source, draft, 3).tokens == alone[:3]
    source.learn(draft, None)
    mates = [draft_of([5] * size, job=f"mate {size}", **CHAINS["several"]) for size in (3, 40)]
    twin = draft_of(PROMPT, job="b", **params)
    answers = patient(source, [mates[0], twin, mates[1]], [5, 8, 2])
    assert answers[1].tokens == alone
    for other in (*mates, twin):
        source.learn(other, None)


@pytest.mark.parametrize("rule", ["rejection", "coupled"])
def test_ids_that_the_draft_model_does_not_have_do_no_harm(
    make: Callable[[], DraftSource], rule: str
) -> None:
    beyond = 1_000_000
    params = {"temperature": 1.0, "rule": rule, "bad_words": ((beyond,), (9, beyond))}
    source = make()
    drafts = [
        draft_of(PROMPT, **params, logit_bias=((5, 1.0), (beyond, 50.0))),
        draft_of(PROMPT, **params, allowed_token_ids=(3, beyond)),
        draft_of(PROMPT, **params, allowed_token_ids=(beyond,)),
    ]
    answers = patient(source, drafts, [4] * 3)
    assert all(token < beyond for answer in answers for token in answer.tokens)
    if isinstance(source, ModelSource):
        assert [len(answer.tokens) for answer in answers] == [4, 4, 0]
    for draft in drafts:
        source.learn(draft, None)


# --- drafting by a model -----------------------------------------------------------------------


def reference(logits: torch.Tensor, tokens: list[int], params: dict[str, Any]) -> torch.Tensor:
    """float64 `[V]`: the next token's law by transformers' own processors, cut to 64 tokens."""
    chain = LogitsProcessorList()
    if "repetition_penalty" in params:
        chain.append(RepetitionPenaltyLogitsProcessor(params["repetition_penalty"]))
    chain.append(TemperatureLogitsWarper(params["temperature"]))
    for name, warper in (
        ("top_k", TopKLogitsWarper),
        ("top_p", TopPLogitsWarper),
        ("min_p", MinPLogitsWarper),
        ("typical_p", TypicalLogitsWarper),
    ):
        if name in params:
            chain.append(warper(params[name]))
    law = chain(torch.tensor([tokens]), logits.double()[None]).softmax(-1)[0]
    law[law < law.topk(64).values[-1]] = 0
    return law / law.sum()


@pytest.mark.parametrize("rule", BY_LAW)
@pytest.mark.parametrize("chain", CHAINS.values(), ids=CHAINS)
def test_a_law_is_the_draft_models_own_after_the_jobs_whole_chain(
    chain: dict[str, Any], rule: str
) -> None:
    model = LogitsModel(seed=3)
    for job in range(5):
        drafted = one(ModelSource(model, 64), draft_of(PROMPT, job=str(job), rule=rule, **chain), 6)
        tokens = list(PROMPT)
        for token, law in zip(drafted.tokens, drafted.laws or (), strict=True):
            expected = reference(model.logits_after(tokens), tokens, chain)
            mine = torch.zeros(100, dtype=torch.float64)
            mine[torch.from_numpy(law.ids)] = torch.from_numpy(law.probabilities)
            torch.testing.assert_close(mine, expected, atol=1e-6, rtol=0)
            tokens.append(token)


NUM_JOBS, K, NUM_BINS = 400, 4, 16


def fit(model: Any, **params: Any) -> float:
    """p-value of the drafted tokens under the laws that came with them.

    Where a token lies in its law, the likeliest first, spread evenly over its probability, is
    uniform and independent of the tokens before (Rosenblatt, "Remarks on a multivariate
    transformation", 1952); 1,600 such places, 400 jobs of 4 tokens, are counted in 16 equal bins.
    """
    source, spread = ModelSource(model, 10_000), np.random.default_rng(1)
    drafts = [draft_of(PROMPT, job=f"job {number}", **params) for number in range(NUM_JOBS)]
    counts = np.zeros(NUM_BINS)
    for drafted in patient(source, drafts, [K] * NUM_JOBS):
        assert drafted.laws is not None
        for token, law in zip(drafted.tokens, drafted.laws, strict=True):
            counts[int(NUM_BINS * _place(token, law, spread.random()))] += 1
    for draft in drafts:
        source.learn(draft, None)
    assert counts.sum() == NUM_JOBS * K
    expected = NUM_JOBS * K / NUM_BINS
    statistic = float(((counts - expected) ** 2 / expected).sum())
    halves = torch.tensor([(NUM_BINS - 1) / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(halves[0], halves[1]))


def _place(token: int, law: SparseLaw, spread: float) -> float:
    probabilities = law.probabilities
    order = np.argsort(-probabilities, kind="stable")
    before = float(probabilities[order][: int(np.flatnonzero(law.ids[order] == token)[0])].sum())
    return before + spread * law.probability(token)


@pytest.mark.parametrize(
    ("rule", "name"),
    [
        ("rejection", "bare"),
        ("rejection", "top_k"),
        ("rejection", "several"),
        ("block", "temperature"),
        ("block", "top_p"),
    ],
)
def test_tokens_are_drawn_from_the_laws_that_are_told(
    runner: ModelRunner, rule: str, name: str
) -> None:
    assert fit(runner, rule=rule, **CHAINS[name]) >= ALPHA


class Lying:
    """A draft model that tells another law than it draws from."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner, self.info, self.pool = runner, runner.info, runner.pool

    def draw(self, rows: Sequence[Rows], draws: Sequence[Draw | None]) -> list[Drawn | None]:
        """The tokens of one sampler with the laws of another."""
        drawing = self.runner.draw(rows, [one and self.changed(one, self.drawing) for one in draws])
        telling = self.runner.draw(rows, [one and self.changed(one, self.telling) for one in draws])
        return [a and b and Drawn(a.token, b.law) for a, b in zip(drawing, telling, strict=True)]

    def changed(self, one: Draw, change: Callable[[Sampler], Sampler]) -> Draw:
        return Draw(change(one.sampler), one.drafted)

    def drawing(self, sampler: Sampler) -> Sampler:
        return sampler

    def telling(self, sampler: Sampler) -> Sampler:
        return sampler


def with_params(sampler: Sampler, **changes: Any) -> Sampler:
    params = replace(sampler.params, **changes)
    return Sampler(params, sampler.coins, sampler.tokens, sampler.num_prompt)


class TellsUnfiltered(Lying):
    def telling(self, sampler: Sampler) -> Sampler:
        return with_params(sampler, top_k=0, top_p=1.0)


class DrawsTheArgmax(Lying):
    def drawing(self, sampler: Sampler) -> Sampler:
        return with_params(sampler, top_k=1)


class TellsAnotherTemperature(Lying):
    def telling(self, sampler: Sampler) -> Sampler:
        return with_params(sampler, temperature=1.0)


@pytest.mark.parametrize(
    ("lie", "name"),
    [
        (TellsUnfiltered, "top_k"),
        (TellsUnfiltered, "top_p"),
        (DrawsTheArgmax, "bare"),
        (TellsAnotherTemperature, "temperature"),
    ],
)
def test_another_law_than_the_one_drawn_from_would_be_noticed(
    runner: ModelRunner, lie: type[Lying], name: str
) -> None:
    assert fit(lie(runner), rule="rejection", **CHAINS[name]) < ALPHA


def test_without_temperature_a_draft_is_the_argmax_with_and_without_a_sampler(
    runner: ModelRunner,
) -> None:
    source = ModelSource(runner, 64)
    drafts = [draft_of(PROMPT), draft_of(PROMPT, temperature=0.0, seed=4, rule="block")]
    bare, sampled = patient(source, drafts, [12, 12])
    for draft in drafts:
        source.learn(draft, None)
    assert bare == sampled == Drafted(own_tokens(runner, PROMPT, 12, temperature=0.0))


def own_tokens(model: Any, prompt: list[int], count: int, **params: Any) -> list[int]:
    """The output of a model as the target, one token a pass and nothing drafted."""
    tokens = list(prompt)
    sampler = sampler_of(tokens, len(prompt), **params)
    blocks = model.pool.allocate(model.pool.num_blocks_for(len(prompt) + count))
    start = 0
    for _ in range(count):
        (outcome,) = model.verify([Rows(tokens[start:], start, blocks, 1)], [Case(sampler)])
        start = len(tokens)
        tokens.append(outcome.token)
    model.pool.release(blocks)
    return tokens[len(prompt) :]


@pytest.mark.parametrize("params", [{"seed": 11}, {"rule": "coupled"}], ids=["seed", "no seed"])
@pytest.mark.parametrize("name", ["bare", "top_p", "typical_p", "several"])
def test_a_coupled_draft_by_the_target_itself_is_the_targets_own_output(
    runner: ModelRunner, name: str, params: dict[str, Any]
) -> None:
    params = CHAINS[name] | params
    output = own_tokens(runner, PROMPT, 60, **params)
    source, draft = ModelSource(runner, 64), draft_of(PROMPT, **params)
    for number in range(12):
        k, done = 1 + number % 8, len(draft.tokens) - len(PROMPT)
        drafted = one(source, draft, k)
        assert drafted.tokens == output[done : done + k]
        accepted = (5 * number) % (k + 1)
        num_valid = len(draft.tokens) + accepted
        draft.tokens += output[done : done + accepted + 1]
        source.learn(draft, num_valid)
    source.learn(draft, None)


@pytest.mark.parametrize("rule", ["greedy", "rejection", "block", "coupled"])
@pytest.mark.parametrize("k", [1, 12])
def test_a_self_draft_stands_whole_under_every_rule(rule: str, k: int) -> None:
    """p and q are equal: nothing is rejected, at any length and in any round."""
    model = LogitsModel(num_blocks=400, block_size=16, context=2000)
    chain = {"temperature": 1.0, "repetition_penalty": 1.2, "top_k": 30}
    params = chain | ({"temperature": 0.0} if rule == "greedy" else {"rule": rule})
    source, draft = ModelSource(model, 64), draft_of(PROMPT, **params)
    tokens = list(PROMPT)
    sampler = sampler_of(tokens, len(PROMPT), **params)
    blocks = model.pool.allocate(model.pool.num_blocks_for(10 + 20 * 17))
    computed = 0
    for _ in range(20):
        drafted = one(source, draft, k)
        rows = Rows(tokens[computed:] + drafted.tokens, computed, blocks, k + 1)
        (outcome,) = model.verify([rows], [Case(sampler, drafted.tokens, drafted.laws)])
        assert outcome is not None
        assert outcome.num_accepted == k
        num_valid = len(tokens) + k
        tokens += outcome.tokens(drafted.tokens)
        draft.tokens += outcome.tokens(drafted.tokens)
        source.learn(draft, num_valid)
        computed = num_valid


# --- what a constraint and a verifier do to it -------------------------------------------------


class Thirds:
    """Structured output whose n-th token is n modulo 3; it ends after 23.

    It keeps the output that it has followed, as a compiled grammar does, and takes only what
    continues it.
    """

    def __init__(self) -> None:
        self.output: list[int] = []

    def masks(self, output: Sequence[int], drafted: Sequence[int]) -> Any:
        assert list(output[: len(self.output)]) == self.output, "it was not told of the change"
        self.output = list(output)
        whole = [*output, *drafted]
        rows = [self.allowed(whole[: len(output) + n]) for n in range(len(drafted) + 1)]
        bits = np.packbits(np.array(rows), axis=1, bitorder="little")
        return np.pad(bits, ((0, 0), (0, -bits.shape[1] % 4))).view("<i4").astype(np.int32)

    @staticmethod
    def allowed(output: Sequence[int]) -> Any:
        is_over = bool(output) and output[-1] == 23
        return (np.arange(100) % 3 == len(output) % 3) & (not is_over)

    def rewind(self) -> None:
        self.output = []


def constrain(draft: Draft) -> None:
    """Let a draft follow `Thirds`, whatever stands for it in the job's parameters."""
    assert draft.sampler is not None
    assert draft.sampler.params.is_structured
    draft.sampler.constraint = Thirds()


@pytest.mark.parametrize("rule", ["greedy", "rejection", "block", "coupled"])
def test_forbidden_tokens_are_filtered_before_the_draw(rule: str) -> None:
    params = {"temperature": 0.0} if rule == "greedy" else {"temperature": 1.5, "rule": rule}
    source = ModelSource(LogitsModel(num_blocks=2000), 64)
    lengths = set()
    for job in range(30):
        draft = draft_of(PROMPT[: 1 + job % 10], [0], job=str(job), regex="thirds", **params)
        constrain(draft)
        drafted = one(source, draft, 12)
        output = [0]
        for token, law in zip(drafted.tokens, drafted.laws or [None] * 12, strict=False):
            allowed = Thirds.allowed(output)
            assert allowed[token]
            assert law is None or allowed[law.ids].all()
            output.append(token)
        assert len(drafted.tokens) == 12 or drafted.tokens[-1] == 23, "the last one is sent too"
        lengths.add(len(drafted.tokens))
        source.learn(draft, None)
    assert len(lengths) > 1, "none of the drafts came to the end"


HANDLE = 77
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("verdict"), st.integers(0, 8), st.integers(0, 99)),
        st.tuples(st.just("plain"), st.integers(1, 3), st.integers(0, 99)),
        st.tuples(st.just("sync"), st.integers(0, 20), st.integers(0, 99)),
    ),
    max_size=10,
)


def step(session: DraftSession, source: DraftSource, kind: str, n: int, token: int) -> None:
    """A frame from the verify worker, and what the draft engine makes of it."""
    base = session.committed
    if kind == "verdict" and session.proposed:
        accepted = min(n, len(session.proposed))
        num_valid = session.on_verdict(Verdict(HANDLE, base, accepted, token, 4))
    else:
        base = max(0, base - n) if kind == "sync" else base
        tokens = [token] * (1 if kind == "sync" else n)
        num_valid = session.on_sync(Sync("job", 1, HANDLE, base, tokens, 4))
    source.learn(session.draft, num_valid)


@pytest.mark.parametrize("rule", ["greedy", "rejection", "block", "coupled"])
@settings(
    max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(scripts=st.lists(STEPS, min_size=1, max_size=3), is_constrained=st.booleans())
def test_frames_leave_nothing_behind(
    rule: str, scripts: list[list[tuple[str, int, int]]], is_constrained: bool
) -> None:
    """Whatever was accepted, rejected or rewritten by a Sync: cache, counts and grammar are as in
    a fresh session, so tokens and laws are too."""
    source = logits_source()
    chain = {"temperature": 1.0, "presence_penalty": 1.0, "repetition_penalty": 1.5, "top_k": 40}
    params = chain | ({"temperature": 0.0} if rule == "greedy" else {"rule": rule})
    if is_constrained:
        params["regex"] = "thirds"

    def session_of(output: Iterable[int], number: int) -> DraftSession:
        session = drafting(PROMPT, list(output), job=f"job {number}", **params)
        if is_constrained:
            constrain(session.draft)
        session.on_sync(Sync("job", 1, HANDLE, session.committed, [], 4))
        return session

    sessions = [session_of([0], number) for number in range(len(scripts))]
    for turn in range(max(map(len, scripts)) + 1):
        answers = patient(source, [s.draft for s in sessions], [s.k for s in sessions])
        for number, (session, answer) in enumerate(zip(sessions, answers, strict=True)):
            if session.k == 0:
                continue
            fresh = session_of(session.draft.tokens[len(PROMPT) :], number)
            alone = one(logits_source(), fresh.draft, session.k)
            assert as_numbers(answer) == as_numbers(alone)
            session.propose(answer)
            if turn < len(scripts[number]):
                step(session, source, *scripts[number][turn])


@pytest.fixture(scope="module")
def text(runner: ModelRunner) -> Text:
    return Text(runner.info.path)


SENTENCES = {
    first + "".join(rest)
    for first in ("the", "an", "in")
    for count in range(3)
    for rest in itertools.product((" the", " er"), repeat=count)
}


@pytest.mark.parametrize("rule", ["greedy", "rejection", "block", "coupled"])
def test_drafts_follow_a_grammar_to_its_end_and_stand_before_the_target(
    runner: ModelRunner, text: Text, rule: str
) -> None:
    params = {"temperature": 0.0} if rule == "greedy" else {"temperature": 2.0, "rule": rule}
    spec = job_spec(PROMPT, regex="(the|an|in)( (the|er)){0,2}", **params)

    def sampler(tokens: list[int], job: str) -> Sampler:
        return draft_sampler(
            spec, job=job, tokens=tokens, num_prompt=len(PROMPT), info=runner.info, words=text
        )

    source, blocks, written = ModelSource(runner, 64), runner.pool.allocate(4), set()
    for job in map(str, range(10)):
        tokens, own = list(PROMPT), list(PROMPT)
        draft, target, computed = Draft(tokens, sampler(tokens, job)), sampler(own, job), 0
        while own[-1] != 0:
            drafted = one(source, draft, 3)
            rows = Rows(own[computed:] + drafted.tokens, computed, blocks, len(drafted.tokens) + 1)
            (outcome,) = runner.verify([rows], [Case(target, drafted.tokens, drafted.laws)])
            assert outcome is not None
            assert outcome.num_accepted == len(drafted.tokens)
            computed = len(own) + outcome.num_accepted
            for sequence in (own, tokens):
                sequence += outcome.tokens(drafted.tokens)
            source.learn(draft, computed)
        source.learn(draft, None)
        end = own.index(0, len(PROMPT))
        written.add(b"".join(map(text.token_bytes, own[len(PROMPT) : end])).decode())
    runner.pool.release(blocks)
    assert written <= SENTENCES
    assert rule == "greedy" or len(written) > 1


def test_an_output_against_the_grammar_is_drafted_for_all_the_same(
    runner: ModelRunner, text: Text
) -> None:
    tokens = [*PROMPT, *text.encode("no the")]
    spec = job_spec(PROMPT, regex="(the|an)*", temperature=1.0)
    sampler = draft_sampler(
        spec, job="a", tokens=tokens, num_prompt=len(PROMPT), info=runner.info, words=text
    )
    source, draft = ModelSource(runner, 64), Draft(tokens, sampler)
    drafted = one(source, draft, 6)
    source.learn(draft, None)
    assert len(drafted.tokens) == 6
