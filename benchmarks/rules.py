"""What the three rules accept and cost, by temperature.

Four parts, each with a table of its own:

exact      random pairs of laws, summed up over all drafts and coins: no sampling, no model
proposals  real pairs; what `rejection` and `block` accept of the same proposals, and how often the
           first drafted token stands under `rejection` and `coupled` in the same places
cost       CPU time that judging and drafting take for one sequence's round, beside the passes
stack      the whole system: tokens a round, acceptance, tokens a second, and its ratio to plain
           decoding, which takes turns with the rules

There is no trained draft model for the default target yet. So drafts come from the target's own
first layers (a copy that lacks the rest), from the target at another temperature, and from n-grams.

    python benchmarks/rules.py [PART …] [--temperatures 0 0.7 1] [--layers 15 28] [--jobs 4]
                               [--tokens 48] [--rounds 24] [--repeats 2] [--k 4]
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

from pilotfish import SamplingParams
from pilotfish.embedded.stack import EmbeddedStack, StackPlan
from pilotfish_broker.settings import Settings
from pilotfish_workers.default_pair import resolve
from pilotfish_workers.model.interface import Rows
from pilotfish_workers.model.runner import ModelRunner
from pilotfish_workers.model.text import Text
from pilotfish_workers.speculative.best import best_tokens
from pilotfish_workers.speculative.chain import ChainRow, apply_chain, law_of
from pilotfish_workers.speculative.coins import Coins
from pilotfish_workers.speculative.draw import draw_tokens
from pilotfish_workers.speculative.judge import judge
from pilotfish_workers.speculative.law import SparseLaw
from pilotfish_workers.speculative.sampler import Case, Draw, Sampler
from pilotfish_workers.speculative.target_laws import TargetLaws

RULES = ("rejection", "block", "coupled")
PARTS = ("exact", "proposals", "cost", "stack")
PROMPTS = (
    "Explain in a few sentences how a bicycle stays upright.",
    "Write a short story about a lighthouse keeper and a storm.",
    "Repeat this list three times: red, green, blue, yellow, black, white.",
    "Write a Python function that returns the n-th Fibonacci number, with a docstring.",
    "What are the main differences between cats and dogs?",
    "Translate into French: The weather is nice today and we are going to the beach.",
    "Give me a recipe for a simple tomato soup, step by step.",
    "Summarise: The meeting was moved from Monday to Tuesday. The meeting will be on Tuesday.",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; all")
    parser.add_argument("--target", default="SmolLM2-135M-Instruct")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0, 0.3, 0.7, 1.0, 1.3])
    parser.add_argument("--layers", type=int, nargs="*", default=[15, 28])
    parser.add_argument("--k", type=int, default=4)
    parser.add_argument("--jobs", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--repeats", type=int, default=2)
    options = parser.parse_args()
    parts = options.parts or PARTS
    if unknown := {*parts} - {*PARTS}:
        parser.error(f"there is no part {sorted(unknown)[0]}")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        bench = Bench(options, Path(name))
        for part in parts:
            print(f"\n## {part}\n", flush=True)
            for line in getattr(bench, part)():
                print(line, flush=True)


@dataclass
class Bench:
    """The parts; each yields the lines of its tables."""

    options: argparse.Namespace
    folder: Path
    _cut: dict[int, Path] = field(default_factory=dict)

    def exact(self) -> Iterator[str]:
        """Accepted tokens a round on average over random pairs of laws."""
        yield "| drafter is | K | rejection | block | coupled | block gains | coupled costs |"
        yield "|---|---|---|---|---|---|---|"
        for name, likeness in (("near", 0.95), ("middling", 0.8), ("far", 0.5)):
            for k in (1, 2, 4, 6):
                means = np.mean([exact(seed, k, likeness) for seed in range(20)], 0)
                yield f"| {name} | {k} | {_compared(*means)} |"

    def proposals(self) -> Iterator[str]:
        """The laws of real models on text that the target writes."""
        target = self._load(self._target)
        text = Text(self._target)
        prompts = [text.chat([{"role": "user", "content": prompt}]) for prompt in PROMPTS]
        rounds = self.options.rounds
        yield f"{len(prompts)} outputs of {rounds} rounds, K = {self.options.k}.\n"
        yield (
            "| drafter | temperature | accepted: rejection | block | block gains "
            "| first token stands: rejection | coupled | coupled costs |"
        )
        yield "|---|---|---|---|---|---|---|---|"
        drafters = [(f"{count} layers", self._load(self.layers(count)), 1.0) for count in self._ls]
        drafters.append(("the target, hotter by half", target, 1.5))
        for name, drafter, factor in drafters:
            for temperature in self.options.temperatures:
                if temperature:
                    pair = Pair(target, drafter, temperature, factor, self.options.k)
                    one, other, stands, coupled = pair.accepted(prompts, rounds)
                    yield (
                        f"| {name} | {temperature} | {one:.3f} | {other:.3f} "
                        f"| {other / one - 1:+.1%} | {stands:.3f} | {coupled:.3f} "
                        f"| {1 - coupled / stands:.1%} |"
                    )

    def cost(self) -> Iterator[str]:
        """Time beside the passes, on the target's own logits."""
        target = self._load(self._target)
        text = Text(self._target)
        ids = [text.chat([{"role": "user", "content": prompt}]) for prompt in PROMPTS]
        k = self.options.k
        rows = []
        for prompt in ids:
            blocks = target.pool.allocate(target.pool.num_blocks_for(len(prompt)))
            rows.append(Rows(prompt, 0, blocks, k + 1))
        logits = target.forward(rows).float()
        yield f"One sequence of {len(ids)} in a pass, K = {k}, {logits.shape[1]} tokens, float32.\n"
        yield "| rule | top_p | judging, CPU µs a round | drawing a drafted token, CPU µs |"
        yield "|---|---|---|---|"
        ways = [("greedy", 1.0), *((rule, top_p) for top_p in (1.0, 0.9) for rule in RULES)]
        judged: dict[tuple[str, float], list[float]] = {way: [] for way in ways}
        drawn: dict[tuple[str, float], list[float]] = {way: [] for way in ways}
        for number in range(5 * self.options.repeats):
            for way in ways:
                one, other = cost(logits, *way, k, number)
                judged[way].append(one / len(ids))
                drawn[way].append(other / len(ids))
        for way in ways:
            times = [f"{statistics.median(some[way]):.0f}" for some in (judged, drawn)]
            yield f"| {way[0]} | {way[1]} | {times[0]} | {times[1]} |"

    def stack(self) -> Iterator[str]:
        """Tokens a second through server and worker processes."""
        yield (
            "| drafter | temperature | rule | tokens a round | accepted of drafted | tokens/s "
            "| to plain |"
        )
        yield "|---|---|---|---|---|---|---|"
        drafts = [("n-grams", "ngram")]
        drafts += [(f"{count} layers", str(self.layers(count))) for count in self._ls]
        for name, draft in drafts:
            with Stack(self.folder / name, self._target, draft, self.options) as stack:
                for temperature in self.options.temperatures:
                    for line in stack.compare(temperature):
                        yield f"| {name} | {temperature} | {line} |"

    def layers(self, count: int) -> Path:
        """A folder with the target without the layers from `count` on."""
        if count not in self._cut:
            self._cut[count] = cut_layers(Path(self._target), self.folder / f"{count}", count)
        return self._cut[count]

    @property
    def _target(self) -> str:
        return resolve(self.options.target)

    @property
    def _ls(self) -> list[int]:
        return list(self.options.layers)

    def _load(self, folder: str | Path) -> ModelRunner:
        return ModelRunner.load(str(folder), num_threads=1, kv_tokens=1 << 15, gate=False)


def _compared(rejection: float, block: float, coupled: float) -> str:
    gain, price = block / rejection - 1, 1 - coupled / rejection
    return f"{rejection:.3f} | {block:.3f} | {coupled:.3f} | {gain:+.1%} | {price:.1%}"


# --- exact --------------------------------------------------------------------------------------


def exact(seed: int, k: int, likeness: float, vocab_size: int = 6) -> tuple[float, float, float]:
    """Mean number of accepted tokens of k under the three rules, for one random pair of laws.

    A draft with probability Q is accepted up to its i-th token with probability: under `rejection`
    the product of min(1, p / q); under `block` w, where w = min(1, w of the token before · p / q);
    under `coupled` both sides draw x with probability 1 / Σ_y max(p_y / p_x, q_y / q_x) at each
    position (Daliri et al., arXiv 2408.07978).
    """
    random = np.random.default_rng(seed)
    drafted = by_block = np.ones(1)  # of each prefix: Q, and Q · w
    by_rejection = by_coupling = np.ones(1)
    sums = np.zeros(3)
    for _ in range(k):
        common, own = random.normal(0, 1.5, (2, len(drafted), vocab_size))
        p, q = _softmax(common), _softmax(likeness * common + (1 - likeness**2) ** 0.5 * own)
        share = np.maximum(p[:, None, :] / p[:, :, None], q[:, None, :] / q[:, :, None]).sum(-1)
        drafted = (drafted[:, None] * q).ravel()
        by_rejection = (by_rejection[:, None] * np.minimum(p, q)).ravel()
        by_block = np.minimum(drafted, (by_block[:, None] * p).ravel())
        by_coupling = (by_coupling[:, None] / share).ravel()
        sums += [by_rejection.sum(), by_block.sum(), by_coupling.sum()]
    return float(sums[0]), float(sums[1]), float(sums[2])


def _softmax(x: np.ndarray) -> np.ndarray:
    weights: np.ndarray = np.exp(x - x.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


# --- a real pair --------------------------------------------------------------------------------


def cut_layers(target: Path, folder: Path, count: int) -> Path:
    """Copy a model folder without its layers from `count` on."""
    shutil.copytree(target, folder, ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
    config = json.loads((target / "config.json").read_text(encoding="utf-8"))
    config["num_hidden_layers"] = count
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    tensors = {
        name: tensor
        for name, tensor in load_file(target / "model.safetensors").items()
        if not name.startswith("model.layers.") or int(name.split(".")[2]) < count
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@dataclass
class Cache:
    """What a model has computed of one output.

    Attributes:
        num_computed: committed tokens whose KV is in the blocks.
    """

    model: ModelRunner
    blocks: list[int] = field(default_factory=list)
    num_computed: int = 0

    def rows(self, tokens: Sequence[int], drafted: Sequence[int], num_logits: int) -> Rows:
        """What is to be run for logits at the end of committed and drafted tokens."""
        pool = self.model.pool
        missing = pool.num_blocks_for(len(tokens) + len(drafted)) - len(self.blocks)
        self.blocks += pool.allocate(max(0, missing))
        start = self.num_computed
        self.num_computed = len(tokens) - 1
        return Rows([*tokens[start:], *drafted], start, self.blocks, num_logits)

    def close(self) -> None:
        """Give the blocks back."""
        self.model.pool.release(self.blocks)


@dataclass
class Place:
    """Where one output stands, and what is drafted there.

    Attributes:
        sampler: the target's, with its tokens.
        hot: the drafter's, over the same tokens.
    """

    sampler: Sampler
    hot: Sampler
    target: Cache
    drafter: Cache
    drafted: list[int] = field(default_factory=list)
    laws: list[SparseLaw] = field(default_factory=list)


@dataclass(frozen=True)
class Pair:
    """A target and a drafter of the same vocabulary, without the engines.

    Attributes:
        factor: how much hotter the drafter draws.
    """

    target: ModelRunner
    drafter: ModelRunner
    temperature: float
    factor: float
    k: int

    def accepted(self, prompts: Sequence[list[int]], rounds: int) -> NDArray[np.float64]:
        """Means over all rounds: accepted tokens of k under `rejection` and `block`, on the same
        proposals; probability that the first drafted token stands, under `rejection` and `coupled`.

        All are expected values over the coins, given real laws. Every output goes on for so many
        rounds, by what `judge` decides under `rejection`.
        """
        places = [self._place(prompt, number) for number, prompt in enumerate(prompts)]
        sums = np.zeros(4)
        for _ in range(rounds):
            q = self._draft(places)
            logits = self.target.forward(
                [
                    place.target.rows(place.sampler.tokens, place.drafted, 1 + self.k)
                    for place in places
                ]
            )
            chained = apply_chain(
                logits, [ChainRow(p.sampler) for p in places for _ in range(1 + self.k)]
            )
            laws = TargetLaws(chained)
            for number, place in enumerate(places):
                start = number * (self.k + 1)
                ours = laws.at(np.arange(start, start + self.k), np.array(place.drafted))
                pairs = zip(place.laws, place.drafted, strict=True)
                ratios = ours / [law.probability(token) for law, token in pairs]
                sums[0] += np.minimum(1, ratios).cumprod().sum()
                weight = 1.0
                for ratio in ratios:
                    weight = min(1.0, weight * ratio)
                    sums[1] += weight
                sums[2:] += _first(law_of(chained[start : start + 1])[0], q[number])
            cases = [Case(place.sampler, place.drafted, place.laws) for place in places]
            outcomes = judge(logits, best_tokens(logits), cases, [self.k + 1] * len(places))
            for place, outcome in zip(places, outcomes, strict=True):
                if outcome is not None:
                    place.sampler.tokens += outcome.tokens(place.drafted)
        for place in places:
            place.target.close()
            place.drafter.close()
        means: NDArray[np.float64] = sums / (len(places) * rounds)
        return means

    def _place(self, prompt: Sequence[int], number: int) -> Place:
        tokens = list(prompt)
        cool, hot = (
            Sampler(
                SamplingParams.from_mapping({"temperature": temperature, "rule": "rejection"}),
                Coins(number),
                tokens,
                len(prompt),
            )
            for temperature in (self.temperature, self.temperature * self.factor)
        )
        return Place(cool, hot, Cache(self.target), Cache(self.drafter))

    def _draft(self, places: Sequence[Place]) -> torch.Tensor:
        """Draft k tokens everywhere; float64 `[B, V]`, the whole law at the first of them."""
        for place in places:
            place.drafted, place.laws = [], []
        first = torch.empty(0)
        for index in range(self.k):
            logits = self.drafter.forward(
                [place.drafter.rows(place.sampler.tokens, place.drafted, 1) for place in places]
            )
            if index == 0:
                first = law_of(apply_chain(logits, [ChainRow(place.hot) for place in places]))
            draws = [Draw(place.hot, tuple(place.drafted)) for place in places]
            for place, one in zip(places, draw_tokens(logits, draws), strict=True):
                place.drafted.append(one.token)
                place.laws.append(one.law or SparseLaw.certain(one.token))
        return first


def _first(p: torch.Tensor, q: torch.Tensor) -> tuple[float, float]:
    """Probability that a token drawn from q stands before p: by `rejection`, and by `coupled`.

    The latter is the sum over x of 1 / Σ_y max(p_y / p_x, q_y / q_x). In the order of p / q the
    first argument is the larger one for x itself and all behind it.
    """
    is_there = (p > 0) & (q > 0)
    both = torch.minimum(p, q).sum()
    order = torch.argsort(torch.where(q > 0, p / q, torch.inf))
    p, q, is_there = p[order], q[order], is_there[order]
    before = q.cumsum(0) - q
    behind = p.flip(0).cumsum(0).flip(0)
    shares = 1 / (behind / p + before / q)
    return float(both), float(shares[is_there].sum())


# --- cost ---------------------------------------------------------------------------------------


def cost(logits: torch.Tensor, rule: str, top_p: float, k: int, seed: int) -> tuple[float, float]:
    """Microseconds to judge all rows, and to draw a drafted token for each sequence.

    The target drafts for itself, so that (almost) everything stands and all rows are looked at.

    Args:
        logits: `[B · (K + 1), V]`.
    """
    given = {} if rule == "greedy" else {"temperature": 1.0, "top_p": top_p, "rule": rule}
    params = SamplingParams.from_mapping(given)
    count = len(logits) // (k + 1)
    samplers = [Sampler(params, Coins(seed, number), [1, 2, 3], 2) for number in range(count)]
    drafted: list[list[int]] = [[] for _ in samplers]
    laws: list[list[SparseLaw]] = [[] for _ in samplers]
    drawing = 0.0
    for index in range(k):
        rows = logits[index :: k + 1].contiguous()
        draws = [Draw(one, tuple(ids)) for one, ids in zip(samplers, drafted, strict=True)]
        start = time.process_time()
        drawn = draw_tokens(rows, draws)
        drawing += time.process_time() - start
        for ids, known, one in zip(drafted, laws, drawn, strict=True):
            ids.append(one.token)
            known += [] if one.law is None else [one.law]
    cases = [
        Case(one, ids, known or None)
        for one, ids, known in zip(samplers, drafted, laws, strict=True)
    ]
    start = time.process_time()
    judge(logits, best_tokens(logits), cases, [k + 1] * count)
    return (time.process_time() - start) * 1e6, drawing / k * 1e6


# --- the whole system ---------------------------------------------------------------------------


class Stack:
    """A running stack whose jobs decode plainly and by each rule in turn."""

    def __init__(self, folder: Path, target: str, draft: str, options: argparse.Namespace) -> None:
        settings = Settings.from_env(
            {},
            target=target,
            draft=draft,
            model="bench",
            slots=options.jobs,
            threads=1,
            kv_tokens=1 << 14,
        )
        self._options = options
        self._stack = EmbeddedStack(StackPlan(folder=folder, settings=settings))

    def __enter__(self) -> Stack:
        self._stack.__enter__()
        for _ in self._stack.await_ready():
            pass
        self._run(SamplingParams(max_tokens=8, ignore_eos=True))  # what is built at first use
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.__exit__(None, None, None)

    def compare(self, temperature: float) -> Iterator[str]:
        """A line for each rule; at temperature 0 there is one."""
        rules = RULES if temperature else ("greedy",)
        ratios: dict[str, list[float]] = {rule: [] for rule in rules}
        speeds: dict[str, list[float]] = {rule: [] for rule in rules}
        counts = {rule: np.zeros(4) for rule in rules}
        for _ in range(self._options.repeats):
            plain, _ = self._run(self._params(temperature, speculation="off"))
            for rule in rules:
                named = {} if rule == "greedy" else {"rule": rule}
                params = self._params(temperature, speculation=self._options.k, **named)
                speed, found = self._run(params)
                ratios[rule].append(speed / plain)
                speeds[rule].append(speed)
                counts[rule] += found
        for rule in rules:
            tokens, rounds, drafted, accepted = counts[rule]
            yield (
                f"{rule} | {tokens / rounds:.2f} | {accepted / max(drafted, 1):.1%} "
                f"| {statistics.mean(speeds[rule]):.1f} | {statistics.mean(ratios[rule]):.2f}"
            )

    def _params(self, temperature: float, **more: object) -> SamplingParams:
        return SamplingParams.from_mapping(
            {
                "temperature": temperature,
                "max_tokens": self._options.tokens,
                "ignore_eos": True,
                **more,
            }
        )

    def _run(self, params: SamplingParams) -> tuple[float, np.ndarray]:
        """Tokens a second of all jobs at once; tokens, rounds, drafted, accepted."""
        prompts = [PROMPTS[number % len(PROMPTS)] for number in range(self._options.jobs)]
        client = self._stack.client
        handles = [client.submit([{"role": "user", "content": p}], params) for p in prompts]
        results = []
        for handle in handles:
            while not handle.status().is_terminal:
                self._stack.tick()
                time.sleep(0.02)
            results.append(handle.result(timeout=10))
        begin = min(result.started_ms for result in results)
        seconds = (max(result.finished_ms for result in results) - begin) / 1000
        numbers = [
            (len(result.token_ids), result.rounds, result.drafted, result.accepted)
            for result in results
        ]
        total = np.sum(numbers, 0)
        return total[0] / seconds, total


if __name__ == "__main__":
    main()
