"""The chain gives what transformers' processors give, and plain counting where it has none.

The reference is computed row by row: transformers' own processors in the order in which its
`generate` applies them, and between them, in plain numpy, the steps that only pilotfish has.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation import logits_process as hf

from pilotfish_broker.sampling import SamplingParams
from pilotfish_workers.speculative import ranking
from pilotfish_workers.speculative.chain import ChainRow, apply_chain, law_of
from pilotfish_workers.speculative.coins import Coins
from pilotfish_workers.speculative.sampler import Sampler

INF = math.inf


@dataclass(frozen=True)
class Job:
    """One sequence and what was drafted for it."""

    params: SamplingParams
    prompt: list[int]
    output: list[int] = field(default_factory=list)
    drafted: list[int] = field(default_factory=list)
    stop_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    masks: list[list[bool]] | None = None

    def rows(self) -> list[ChainRow]:
        sampler = Sampler(
            self.params,
            Coins(0),
            [*self.prompt, *self.output],
            len(self.prompt),
            stop_ids=self.stop_ids,
            bad_words=self.bad_words,
        )
        return [
            ChainRow(
                sampler,
                self.drafted[:count],
                None if self.masks is None else packed(self.masks[count]),
            )
            for count in range(len(self.drafted) + 1)
        ]


def packed(mask: Sequence[bool]) -> np.ndarray[Any, np.dtype[np.int32]]:
    bits = np.zeros((len(mask) + 31) // 32 * 32, np.uint8)
    bits[: len(mask)] = mask
    return np.packbits(bits, bitorder="little").view(np.int32)


def job(
    prompt: list[int], output: Sequence[int] = (), drafted: Sequence[int] = (), **kw: Any
) -> Job:
    extra = {name: kw.pop(name) for name in ("stop_ids", "bad_words", "masks") if name in kw}
    return Job(SamplingParams(**kw), prompt, [*output], [*drafted], **extra)


# --- the reference ------------------------------------------------------------------------------


@dataclass
class Reference:
    """What one row must become.

    Attributes:
        chain: `[1, V]` after the chain.
        levels: `[V]` before the cuts; top-p may take any of the tokens that tie at its cut.
        margin: how near a sum or a ratio came to falling on the other side of its cut.
    """

    chain: torch.Tensor
    levels: torch.Tensor
    margin: float = INF


def penalised(scores: torch.Tensor, params: SamplingParams, output: list[int]) -> torch.Tensor:
    """What transformers does not have: OpenAI's penalties."""
    scores = scores.clone()
    for token, times in Counter(output).items():
        if token < scores.shape[1]:
            scores[0, token] -= params.frequency_penalty * times
            scores[0, token] -= params.presence_penalty
    return scores


def edited(logits: torch.Tensor, work: Job, count: int) -> torch.Tensor:
    """A row `[1, V]` before the temperature."""
    size = logits.shape[1]
    params = work.params
    tokens = [*work.prompt, *work.output, *work.drafted[:count]]
    ids = torch.tensor([tokens])
    scores = logits
    bias = {(token,): float(value) for token, value in params.logit_bias if token < size}
    if bias:
        scores = hf.SequenceBiasLogitsProcessor(bias)(ids, scores)
    if params.repetition_penalty != 1:
        scores = hf.RepetitionPenaltyLogitsProcessor(float(params.repetition_penalty))(ids, scores)
    scores = penalised(scores, params, tokens[len(work.prompt) :])
    words = [[*word] for word in work.bad_words if max(word) < size]
    if words:
        processor = hf.NoBadWordsLogitsProcessor(words, [*work.stop_ids] or None)
        if processor.sequence_bias:
            scores = processor(ids, scores)
    if params.min_tokens and work.stop_ids:
        scores = hf.MinNewTokensLengthLogitsProcessor(
            len(work.prompt), params.min_tokens, [*work.stop_ids]
        )(ids, scores)
    for token in range(size):
        allowed = params.allowed_token_ids
        if allowed is not None and token not in allowed:
            scores[0, token] = -INF
        if work.masks is not None and not work.masks[count][token]:
            scores[0, token] = -INF
    return scores


def least(values: torch.Tensor) -> float:
    return float(values.min()) if values.numel() else INF


def top_p_margin(scores: torch.Tensor, share: float) -> float:
    reached = scores.sort().values.softmax(-1).cumsum(-1)
    return least((reached - (1 - share)).abs())


def min_p_margin(scores: torch.Tensor, share: float) -> float:
    ratios = (scores - scores.max()).exp()
    return (
        least((ratios[ratios < 1] - share).abs()) if share == 1 else least((ratios - share).abs())
    )


def typical_margin(scores: torch.Tensor, share: float) -> float:
    logprobs = scores.log_softmax(-1)
    probs = logprobs.exp()
    distance, order = (logprobs - (logprobs * probs).nansum(-1)).abs().sort()
    reached = probs[order].cumsum(-1)
    last = min(int((reached < share).sum()), len(scores) - 1)
    # all that tie with the last one stay, so only a tie's end is a place to cut
    is_end = torch.diff(distance, append=torch.tensor([INF])) > 0
    others = scores[order] != scores[order[last]]  # equal by rounding alone, if equal
    return min(
        least((reached[is_end] - share).abs()), least((distance - distance[last])[others].abs())
    )


def shaped(scores: torch.Tensor, params: SamplingParams) -> Reference:
    """A row `[1, V]` after temperature and cuts, and how close each cut was."""
    result = Reference(scores, scores[0])
    if params.temperature == 0 or not scores.isfinite().any():
        return result
    if params.temperature != 1:
        scores = hf.TemperatureLogitsWarper(float(params.temperature))(None, scores)
    result.levels = scores[0]
    if params.top_k:
        scores = hf.TopKLogitsWarper(params.top_k)(None, scores)
    exact = scores[0].double()
    if params.top_p < 1:
        result.margin = min(result.margin, top_p_margin(exact, params.top_p))
        scores = hf.TopPLogitsWarper(params.top_p)(None, scores)
        exact = scores[0].double()
    if params.min_p > 0:
        result.margin = min(result.margin, min_p_margin(exact, params.min_p))
        scores = hf.MinPLogitsWarper(params.min_p)(None, scores)
        exact = scores[0].double()
    if params.typical_p < 1:
        result.margin = min(result.margin, typical_margin(exact, params.typical_p))
        scores = hf.TypicalLogitsWarper(params.typical_p)(None, scores)
    result.chain = scores
    return result


def reference(logits: torch.Tensor, work: Job, count: int) -> Reference:
    return shaped(edited(logits.unsqueeze(0), work, count), work.params)


MARGINS = {torch.float32: 2e-5, torch.float64: 1e-9}
"""Below this the processors' own rounding decides, in the type that they compute in."""


def is_compared(chain: torch.Tensor, wanted: Reference) -> bool:
    """Check one row; False where it is too close to call."""
    if wanted.margin < MARGINS[chain.dtype]:
        return False
    assert chain.isfinite().sum() == wanted.chain.isfinite().sum()
    if wanted.chain.isfinite().any():
        ours = law_of(chain[None])[0].numpy()
        theirs = law_of(wanted.chain)[0].numpy()
        # tokens of one level in ascending order of what became of them
        level = wanted.levels.numpy()
        ours = ours[np.lexsort((ours, level))]
        theirs = theirs[np.lexsort((theirs, level))]
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-6)
    return True


# --- random parameters --------------------------------------------------------------------------


def random_logits(
    seed: int, num_rows: int, size: int, kind: str, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Rows of a kind: `tied` (few levels), `flat`, `steep`; every third has holes of −inf."""
    rng = np.random.default_rng(seed)
    if kind == "tied":
        values = rng.integers(-3, 4, (num_rows, size)) * 0.5
    else:
        values = rng.normal(0, {"flat": 0.3, "steep": 3.0}[kind], (num_rows, size))
    holes = (rng.random((num_rows, size)) < 0.4) & (np.arange(num_rows)[:, None] % 3 == 2)
    return torch.from_numpy(np.where(holes, -np.inf, values)).to(dtype)


SHARES = st.floats(0.01, 0.999)


def eighths(low: int, high: int) -> st.SearchStrategy[float]:
    """Numbers that float32 holds exactly, as transformers keeps a bias."""
    return st.integers(low, high).map(lambda number: number / 8)


def maybe(values: st.SearchStrategy[Any], otherwise: Any) -> st.SearchStrategy[Any]:
    return st.just(otherwise) | values


@st.composite
def jobs(draw: st.DrawFn, size: int) -> Job:
    tokens = st.integers(0, size - 1)
    near = st.integers(0, min(size, 4) - 1)  # few, so that they repeat and words match
    drafted = draw(st.lists(near, max_size=3))
    rng = np.random.default_rng(draw(st.integers(0, 1 << 32)))
    allowed = np.flatnonzero(rng.random(size) < 0.7).tolist() or [0]
    masks = (rng.random((len(drafted) + 1, size)) < 0.7).tolist()
    bias = draw(maybe(st.dictionaries(tokens, eighths(-40, 40), max_size=3), {}))
    word = st.lists(near, min_size=1, max_size=3).map(tuple)
    words = draw(maybe(st.lists(word, min_size=1, max_size=3), []))
    params = SamplingParams(
        temperature=draw(st.sampled_from([0, 1]) | st.floats(0.2, 3)),
        top_k=draw(maybe(st.integers(1, size + 2), 0)),
        top_p=draw(maybe(SHARES, 1)),
        min_p=draw(maybe(SHARES, 0)),
        typical_p=draw(maybe(SHARES, 1)),
        repetition_penalty=draw(maybe(st.floats(0.5, 2), 1)),
        frequency_penalty=draw(maybe(eighths(-16, 16), 0)),
        presence_penalty=draw(maybe(eighths(-16, 16), 0)),
        logit_bias=tuple(sorted(bias.items())),
        bad_words=tuple(words),
        min_tokens=draw(maybe(st.integers(1, 6), 0)),
        allowed_token_ids=draw(st.sampled_from([None, tuple(allowed)])),
    )
    return Job(
        params,
        prompt=draw(st.lists(near, min_size=1, max_size=4)),
        output=draw(st.lists(near, max_size=4)),
        drafted=drafted,
        stop_ids=tuple(draw(st.lists(tokens, max_size=2, unique=True))),
        bad_words=tuple(words),
        masks=draw(st.sampled_from([None, masks])),
    )


def at_work(params: SamplingParams) -> Iterator[str]:
    for name in SamplingParams.__dataclass_fields__:
        if getattr(params, name) != getattr(SamplingParams(), name):
            yield name


PATHS = ["processor", "accelerator"]


@contextmanager
def taking(path: str) -> Iterator[None]:
    """Go one way of the code: that for an accelerator runs here too."""
    with pytest.MonkeyPatch.context() as patch:
        if path == "accelerator":
            patch.setattr(ranking, "is_on_processor", lambda values: False)
        yield


@pytest.fixture(params=PATHS)
def path(request: pytest.FixtureRequest) -> Iterator[str]:
    with taking(request.param):
        yield request.param


KINDS = st.sampled_from(["tied", "flat", "steep"])
DTYPES = st.sampled_from([torch.float32, torch.float64])
SEEDS = st.integers(0, 1 << 32)


def test_any_parameters_give_the_law_of_transformers_processors() -> None:
    seen: Counter[str] = Counter()

    @given(
        size=st.sampled_from([2, 3, 5, 17, 33]),
        kind=KINDS,
        dtype=DTYPES,
        seed=SEEDS,
        data=st.data(),
    )
    @settings(max_examples=80)
    def check(size: int, kind: str, dtype: torch.dtype, seed: int, data: st.DataObject) -> None:
        works = data.draw(st.lists(jobs(size), min_size=1, max_size=2))
        places = [(work, count) for work in works for count in range(len(work.drafted) + 1)]
        rows = [row for work in works for row in work.rows()]
        logits = random_logits(seed, len(rows), size, kind, dtype)
        before = logits.clone()
        results = []
        for path in PATHS:
            with taking(path):
                results.append(apply_chain(logits, rows))
            assert results[-1].dtype == dtype
            assert torch.equal(logits, before)
        for number, (work, count) in enumerate(places):
            wanted = reference(logits[number], work, count)
            is_clear = [is_compared(result[number], wanted) for result in results]
            seen["rows"] += 1
            seen["compared"] += is_clear[0]
            seen.update(at_work(work.params) if is_clear[0] else ())

    check()
    assert seen["compared"] > 0.9 * seen["rows"]
    names = ("temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty")
    names += ("frequency_penalty", "presence_penalty", "logit_bias", "bad_words", "min_tokens")
    for name in (*names, "allowed_token_ids"):
        assert seen[name] > 10, (name, seen)


def test_cuts_equal_transformers_in_vocabularies_beyond_what_is_looked_at_first() -> None:
    seen: Counter[str] = Counter()

    @given(
        size=st.sampled_from([511, 512, 513, 1200, 8191, 9000]),
        kind=KINDS,
        dtype=DTYPES,
        seed=SEEDS,
        temperature=st.floats(0.3, 2),
        cut=st.one_of(
            st.tuples(st.just("top_k"), st.sampled_from([1, 50, 511, 512, 513, 1100, 8900])),
            st.tuples(st.sampled_from(["top_p", "min_p", "typical_p"]), SHARES),
        ),
        further=maybe(st.tuples(st.just("top_p"), SHARES), None),
    )
    @settings(max_examples=60)
    def check(
        size: int,
        kind: str,
        dtype: torch.dtype,
        seed: int,
        temperature: float,
        cut: tuple[str, Any],
        further: tuple[str, Any] | None,
    ) -> None:
        params = SamplingParams(temperature=temperature, **dict([further or cut, cut]))
        logits = random_logits(seed, 3, size, kind, dtype)
        work = Job(params, [0])
        wanted = [reference(row, work, 0) for row in logits]
        for path in PATHS:
            with taking(path):
                result = apply_chain(logits, work.rows() * 3)
            for row, its in zip(result, wanted, strict=True):
                seen[f"rows of {kind}"] += 1
                seen[f"compared of {kind}"] += is_compared(row, its)

    check()
    for kind in ("tied", "flat", "steep"):
        assert seen[f"compared of {kind}"] > 0.6 * seen[f"rows of {kind}"] > 10, seen


# --- one step at a time -------------------------------------------------------------------------


def chain_of(logits: Sequence[float], work: Job) -> list[float]:
    """The row after the last drafted token."""
    rows = torch.tensor([logits] * (len(work.drafted) + 1), dtype=torch.float64)
    chain: list[float] = apply_chain(rows, work.rows())[-1].tolist()
    return chain


FOUR = [3.0, 2.0, 1.0, -1.0]


@pytest.mark.parametrize(
    ("work", "expected"),
    [
        pytest.param(job([0]), FOUR, id="nothing asked for"),
        pytest.param(
            job([0], logit_bias=((1, 2.5), (3, -8.0), (4, 9.0))), [3, 4.5, 1, -9], id="bias"
        ),
        pytest.param(
            job([3], [0], [1], repetition_penalty=2.0),
            [1.5, 1, 1, -2],
            id="repetition: prompt, output and drafted",
        ),
        pytest.param(
            job([0, 2], [2, 2], [1, 2], frequency_penalty=0.5),
            [3, 1.5, -0.5, -1],
            id="frequency: output and drafted, each time",
        ),
        pytest.param(
            job([0, 2], [2, 2], [1, 2], presence_penalty=0.5),
            [3, 1.5, 0.5, -1],
            id="presence: output and drafted, once",
        ),
        pytest.param(
            job([3], [], [0], repetition_penalty=2.0, frequency_penalty=0.25, presence_penalty=1),
            [0.25, 2, 1, -2],
            id="repetition before the others",
        ),
        pytest.param(
            job([0], repetition_penalty=2.0, logit_bias=((0, -4.0),)),
            [-2, 2, 1, -1],
            id="bias before repetition",
        ),
        pytest.param(job([0], bad_words=((2,), (7,))), [3, 2, -INF, -1], id="a bad word"),
        pytest.param(job([0], bad_words=((2,),), stop_ids=(2,)), FOUR, id="an end is no bad word"),
        pytest.param(
            job([0, 1], [], [], bad_words=((1, 2), (0, 1, 3), (2, 0), (1, 1, 0))),
            [3, 2, -INF, -INF],
            id="bad words that begin in the prompt",
        ),
        pytest.param(
            job([3], [0, 1], [2], bad_words=((0, 1, 2, 3), (1, 2, 0), (0, 2, 1))),
            [-INF, 2, 1, -INF],
            id="bad words across committed and drafted tokens",
        ),
        pytest.param(
            job([2], [], [], bad_words=((1, 1, 2, 3), (2, 2, 3))),
            FOUR,
            id="a bad word longer than all that is there",
        ),
        pytest.param(
            job([0], [1], [1], min_tokens=3, stop_ids=(0, 3, 9)),
            [-INF, 2, 1, -INF],
            id="min_tokens not reached",
        ),
        pytest.param(
            job([0], [1], [1, 1], min_tokens=3, stop_ids=(0, 3)), FOUR, id="min_tokens reached"
        ),
        pytest.param(
            job([0], allowed_token_ids=(1, 3, 8)), [-INF, 2, -INF, -1], id="allowed tokens"
        ),
        pytest.param(job([0], masks=[[True, False, True, True]]), [3, -INF, 1, -1], id="structure"),
        pytest.param(job([0], temperature=0.5), [6, 4, 2, -2], id="temperature"),
        pytest.param(
            job([0], top_k=1, top_p=0.1, min_p=0.9, typical_p=0.1),
            FOUR,
            id="no cuts at temperature 0",
        ),
        pytest.param(job([0], temperature=1, top_k=4, top_p=1.0), FOUR, id="as many as there are"),
        pytest.param(job([0], temperature=1, top_k=2), [3, 2, -INF, -INF], id="top_k"),
        pytest.param(job([0], temperature=1, top_p=1e-9), [3, -INF, -INF, -INF], id="one stays"),
        pytest.param(job([0], temperature=1, min_p=0.3), [3, 2, -INF, -INF], id="min_p"),
        pytest.param(
            job([0], temperature=2, min_p=0.3), [1.5, 1, 0.5, -INF], id="temperature before min_p"
        ),
    ],
)
def test_a_step_does_what_it_says(work: Job, expected: list[float]) -> None:
    assert chain_of(FOUR, work) == pytest.approx(expected)


def test_all_that_tie_with_the_kth_stay(path: str) -> None:
    work = job([0], temperature=1, top_k=2)
    assert chain_of([1, 3, 1, 1, 0], work) == [1, 3, 1, 1, -INF]


def test_top_p_counts_among_what_top_k_kept(path: str) -> None:
    # of four equal ones top-k keeps all; 0.7 of their mass are three, of all six it is four
    row = [2.0, 1, 2, 2, 1, 2]
    both = chain_of(row, job([0], temperature=1, top_k=1, top_p=0.7))
    assert both == [-INF, -INF, 2, 2, -INF, 2]
    alone = chain_of(row, job([0], temperature=1, top_p=0.7))
    assert alone == [2, -INF, 2, 2, -INF, 2]


@pytest.mark.parametrize(("size", "top_k"), [(700, 1), (20000, 1), (20000, 600)])
def test_all_that_tie_with_the_kth_weigh_in_top_p_however_many(
    path: str, size: int, top_k: int
) -> None:
    rows = job([0], temperature=1, top_k=top_k, top_p=0.6 - 0.5 / size).rows()
    logits = torch.zeros(1, size)
    logits[0, ::10] = -1.0
    ids = apply_chain(logits, rows).isfinite()[0].nonzero().squeeze(1).tolist()
    tied = [token for token in range(size) if token % 10]
    assert ids == tied[-round(0.6 * len(tied)) :]


@pytest.mark.parametrize(
    ("cuts", "probabilities", "num_kept"),
    [
        # without the last one the first two have 0.77
        pytest.param({"top_p": 0.75, "min_p": 0.4}, [0.4, 0.3, 0.2, 0.1], 3, id="top_p, min_p"),
        # without the last one the two that are nearest to the entropy have 0.84
        pytest.param(
            {"min_p": 0.25, "typical_p": 0.82}, [0.5, 0.3, 0.15, 0.05], 2, id="min_p, typical_p"
        ),
        # at temperature 1 two would have it
        pytest.param(
            {"temperature": 2.0, "top_p": 0.75}, [0.6, 0.2, 0.11, 0.09], 3, id="temperature, top_p"
        ),
    ],
)
def test_cuts_come_in_their_order(
    path: str, cuts: dict[str, float], probabilities: list[float], num_kept: int
) -> None:
    row = [math.log(probability) for probability in probabilities]
    chain = chain_of(row, job([0], **{"temperature": 1.0, **cuts}))
    assert [value > -INF for value in chain] == [place < num_kept for place in range(4)]


@pytest.mark.parametrize("size", [6, 700, 9000])
def test_of_ties_at_top_ps_cut_the_highest_ids_stay(path: str, size: int) -> None:
    row = torch.zeros(1, size)
    row[0, 1] = 1.0
    kept = round(0.5 * size)
    # between the mass of `kept` and `kept + 1` of them, the likelier one being among them
    share = (math.e + kept - 0.5) / (math.e + size - 1)
    result = apply_chain(row, job([0], temperature=1, top_p=share).rows())
    ids = result.isfinite()[0].nonzero().squeeze(1).tolist()
    assert ids == [1, *range(size - kept, size)]


def test_typical_ties_all_stay(path: str) -> None:
    row = [0.0, 5.0, 0.0, 0.0, 0.0, 0.0]  # sure enough that the likeliest is the most typical
    assert chain_of(row, job([0], temperature=1, typical_p=0.5)) == [-INF, 5, *[-INF] * 4]
    assert chain_of(row, job([0], temperature=1, typical_p=0.98)) == row


# --- what drafted tokens change -----------------------------------------------------------------


def test_each_row_sees_the_drafted_tokens_before_it() -> None:
    work = job(
        [3],
        [1],
        [2, 0, 2],
        frequency_penalty=1.0,
        repetition_penalty=2.0,
        min_tokens=3,
        stop_ids=(3,),
        bad_words=((1, 2, 0), (0, 2, 1)),
    )
    logits = torch.full((4, 4), 8.0, dtype=torch.float64)
    assert apply_chain(logits, work.rows()).tolist() == [
        [8, 3, 8, -INF],
        [-INF, 3, 3, -INF],
        [3, 3, 3, 4],
        [3, -INF, 2, 4],
    ]


def test_rows_equal_those_of_plain_decoding_that_committed_the_same_tokens() -> None:
    made = 0

    @given(size=st.sampled_from([4, 9]), seed=SEEDS, data=st.data())
    @settings(max_examples=30)
    def check(size: int, seed: int, data: st.DataObject) -> None:
        nonlocal made
        work = data.draw(jobs(size))
        logits = random_logits(seed, len(work.drafted) + 1, size, "flat", torch.float64)
        together = apply_chain(logits, work.rows())
        for count in range(1, len(work.drafted) + 1):
            committed = Job(
                work.params,
                work.prompt,
                [*work.output, *work.drafted[:count]],
                [],
                work.stop_ids,
                work.bad_words,
                work.masks and [work.masks[count]],
            )
            alone = apply_chain(logits[count : count + 1], committed.rows())
            assert torch.equal(together[count], alone[0])
            made += 1

    check()
    assert made > 10


def test_committed_tokens_count_in_the_next_round() -> None:
    rows = job([0], [], [1], frequency_penalty=1.0).rows()
    logits = torch.zeros(2, 3)
    apply_chain(logits, rows)
    rows[0].sampler.tokens += [2, 2]
    assert apply_chain(logits, rows).tolist() == [[0, 0, -2], [0, -1, -2]]


@pytest.mark.parametrize("unknown", [4, 5, 31, (1 << 31) - 1])
def test_a_drafted_token_that_the_vocabulary_lacks_is_passed_over(unknown: int) -> None:
    known = job(
        [0],
        [1, 2],
        [],
        temperature=0.7,
        top_k=3,
        repetition_penalty=1.5,
        frequency_penalty=0.5,
        presence_penalty=0.5,
        bad_words=((unknown, 2), (2, unknown), (unknown,)),
        logit_bias=((1, 1.0), (unknown, 1.0)),
        allowed_token_ids=(0, 1, 2, unknown),
        stop_ids=(unknown,),
        min_tokens=9,
    )
    also = Job(known.params, known.prompt, known.output, [unknown], known.stop_ids)
    logits = torch.tensor([FOUR, FOUR])
    first = apply_chain(logits[:1], known.rows())
    both = apply_chain(logits, also.rows())
    assert torch.equal(both[0], first[0])
    assert torch.equal(both[1], first[0])
    # but a beginning that holds it is a beginning
    ends = Job(known.params, known.prompt, known.output, [unknown], (), known.bad_words)
    assert apply_chain(logits, ends.rows())[1, 2] == -INF


# --- many rows together -------------------------------------------------------------------------


def mixed(size: int) -> list[ChainRow]:
    """Rows of jobs that have little in common; `size` is at least 1500."""
    even = [[token % 2 == 0 for token in range(size)]]
    fifth = [[token % 5 == 0 for token in range(size)]]
    works = [
        job([0], temperature=0),
        job([0, 1], [2], [3], logit_bias=((1, 2.0), (5, 1.0)), repetition_penalty=1.3),
        job([0], temperature=1),
        job([1], [2], [2, 2], temperature=0.7, top_k=50, frequency_penalty=0.3),
        job([0], temperature=1.4, top_p=0.8),
        job([2], [], [1], temperature=0.9, top_k=700, top_p=0.95, min_p=0.01, bad_words=((2, 1),)),
        job([0], [1], [], temperature=1, typical_p=0.6, min_tokens=4, stop_ids=(7, 8)),
        job([0], temperature=1.1, allowed_token_ids=tuple(range(0, size, 3)), top_p=0.5),
        job([0], temperature=1, min_p=0.1),
        job([0], temperature=0, masks=even),
        job([0], temperature=2.5, typical_p=0.95, top_k=1400, presence_penalty=1.0),
        job([0], temperature=0.4, masks=fifth, top_p=0.9),
        job([0], temperature=1.2, top_p=0.7, typical_p=0.3),
        job([0], temperature=1.2, top_p=0.9, typical_p=0.8),
    ]
    return [row for work in works for row in work.rows()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("kind", ["tied", "flat", "steep"])
@pytest.mark.parametrize("size", [1500, 12001])
def test_rows_together_equal_each_alone_to_the_last_bit(
    path: str, size: int, dtype: torch.dtype, kind: str
) -> None:
    rows = mixed(size)
    logits = random_logits(5, len(rows), size, kind, dtype)
    for order in (range(len(rows)), reversed(range(len(rows)))):
        numbers = [*order]
        together = apply_chain(logits[numbers], [rows[number] for number in numbers])
        for place, number in enumerate(numbers):
            alone = apply_chain(logits[number : number + 1], [rows[number]])
            assert torch.equal(together[place], alone[0]), rows[number]


def test_a_row_that_wants_nothing_keeps_its_logits_among_others() -> None:
    rows = mixed(1500)
    logits = random_logits(6, len(rows), 1500, "steep")
    result = apply_chain(logits, rows)
    plain = [0, 3]
    assert [[*at_work(rows[number].sampler.params)] for number in plain] == [[], ["temperature"]]
    assert torch.equal(result[plain], logits[plain])


def test_where_no_row_wants_anything_nothing_is_copied() -> None:
    logits = random_logits(7, 3, 40, "flat")
    rows = [row for _ in range(3) for row in job([0], temperature=1).rows()]
    assert apply_chain(logits, rows).data_ptr() == logits.data_ptr()


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_in_single(path: str, half: torch.dtype) -> None:
    rows = mixed(1500)
    logits = random_logits(8, len(rows), 1500, "flat").to(half)
    result = apply_chain(logits, rows)
    assert result.dtype == torch.float32
    assert torch.equal(result, apply_chain(logits.float(), rows))


def test_a_view_that_is_not_contiguous_gives_the_same_and_stays_as_it_is(path: str) -> None:
    rows = mixed(1500)
    logits = random_logits(9, len(rows), 1500, "flat")
    across = logits.t().contiguous().t()
    before = across.clone()
    assert torch.equal(apply_chain(across, rows), apply_chain(logits, rows))
    assert torch.equal(across, before)


@pytest.mark.parametrize("size", [1500, 12001])
def test_a_broken_row_harms_no_other(path: str, size: int) -> None:
    rows = mixed(size)
    logits = random_logits(10, len(rows), size, "flat")
    whole = apply_chain(logits, rows)
    for value in (math.nan, INF, -INF):
        for broken in range(0, len(rows), 3):
            harmed = logits.clone()
            harmed[broken, ::2] = value
            if value == -INF:
                harmed[broken] = value
            result = apply_chain(harmed, rows)
            others = [number for number in range(len(rows)) if number != broken]
            assert torch.equal(result[others], whole[others])
            assert value != -INF or not result[broken].isfinite().any()


def test_masks_and_indices_of_a_job_are_built_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from pilotfish_workers.speculative import chain

    built = []
    real = chain._build_fixed
    monkeypatch.setattr(chain, "_build_fixed", lambda *args: built.append(args) or real(*args))
    rows = mixed(1500)
    logits = random_logits(11, len(rows), 1500, "flat")
    first = apply_chain(logits, rows)
    num_built = len(built)
    assert num_built == len({id(sampler) for sampler, *_ in built}) > 0
    assert torch.equal(apply_chain(logits, rows), first)
    assert len(built) == num_built


@pytest.mark.parametrize("num_rows", [0, 1, 3])
def test_rows_and_logits_must_be_as_many(num_rows: int) -> None:
    with pytest.raises(ValueError, match="2 rows of logits"):
        apply_chain(torch.zeros(2, 5), job([0]).rows() * num_rows)


@pytest.mark.parametrize("num_words", [1, 3])
def test_a_mask_of_another_vocabulary_is_refused(num_words: int) -> None:
    row = job([0]).rows()[0]
    masked = ChainRow(row.sampler, (), np.zeros(num_words, np.int32))
    with pytest.raises(ValueError, match="for 40 tokens"):
        apply_chain(torch.zeros(1, 40), [masked])


def test_no_rows_are_no_work() -> None:
    assert apply_chain(torch.zeros(0, 5), []).shape == (0, 5)


# --- cost ---------------------------------------------------------------------------------------

VOCABULARY = 49152
Looks = list[tuple[tuple[int, ...], int]]


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> Looks:
    """What was sorted or selected from: its shape, and how many entries of a row came out."""
    seen: Looks = []

    def watch(owner: Any, name: str, num_kept: Callable[..., int]) -> None:
        real = getattr(owner, name)

        def watched(values: Any, *args: Any, **kw: Any) -> Any:
            shape = tuple(values.shape)
            seen.append((shape, num_kept(shape[-1], *args)))
            return real(values, *args, **kw)

        monkeypatch.setattr(owner, name, watched)

    for owner in (torch, torch.Tensor, np):
        for name in ("sort", "argsort"):
            watch(owner, name, lambda size, *args: size)
    for owner in (torch, torch.Tensor):
        watch(owner, "topk", lambda size, count: count)
    for name in ("partition", "argpartition"):
        watch(np, name, lambda size, first: size - first % size)
    return seen


def like_text(num_rows: int) -> torch.Tensor:
    """Most of the mass on few tokens, as a model has it, and a long flat tail."""
    logits = random_logits(12, num_rows, VOCABULARY, "flat")
    logits[:, 1000:1300] += torch.linspace(12, 8, 300)
    return logits


def test_a_vocabulary_is_not_sorted_to_find_a_cut(path: str, looks: Looks) -> None:
    cuts: list[dict[str, Any]] = [{"top_k": 50}, {"top_p": 0.9}, {"top_k": 400, "top_p": 0.95}]
    cuts += [{"min_p": 0.05}, {"typical_p": 0.9}]
    rows = [row for cut in cuts for row in job([0], temperature=0.8, **cut).rows()]
    result = apply_chain(like_text(len(rows)), rows)
    assert (result.isfinite().sum(-1) < 1000).all()
    assert looks
    assert max(count for _, count in looks) < 2000


def test_only_a_row_that_needs_more_entries_is_looked_at_as_a_whole(
    path: str, looks: Looks
) -> None:
    rows = [row for _ in range(6) for row in job([0], temperature=1, top_p=0.9).rows()]
    logits = like_text(6)
    logits[5, 1000:1300] -= 10
    result = apply_chain(logits, rows)
    assert (result.isfinite().sum(-1) > 8192).tolist() == [False] * 5 + [True]
    assert {shape for shape, count in looks if count > 2000} <= {(1, VOCABULARY), (1, 8192)}
    assert ((1, VOCABULARY), VOCABULARY) in looks


@pytest.mark.parametrize(
    "cut", [{"top_k": 50}, {"top_p": 0.9}, {"typical_p": 0.9}], ids=lambda cut: next(iter(cut))
)
def test_rows_that_need_no_cut_take_no_part_in_one(
    path: str, looks: Looks, cut: dict[str, Any]
) -> None:
    others = [row for _ in range(4) for row in job([0], temperature=0.9).rows()]
    rows = [*others[:2], *job([0], temperature=0.9, **cut).rows(), *others[2:]]
    result = apply_chain(like_text(5), rows)
    assert (result.isfinite().sum(-1) < 2000).tolist() == [False, False, True, False, False]
    # one row's entries at a time, or tables of one row
    assert [shape for shape, _ in looks if len(shape) == 2 and shape[0] != 1] == []
    assert len([shape for shape, _ in looks if len(shape) == 1]) == (path == "processor")
    assert looks
