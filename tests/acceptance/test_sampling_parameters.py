"""Every parameter through the whole system: with drafts, without them, and side by side.

One target serves nearly all jobs of this file at once, so that all parameters meet in its passes,
and those that fail do so among the others. The drafter is the target itself but for the embedding
of one token: with that in the prompt many drafts are rejected, without it none is.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LogitsProcessorList

from pilotfish import (
    Chunk,
    InvalidRequest,
    JobFailed,
    JobSpec,
    Result,
    SamplingParams,
    Status,
    TokenLogprob,
    UnsupportedParameter,
)
from pilotfish_broker.keys import Keys
from tests.acceptance.conftest import StartFleet
from tests.fleet_kit import Fleet
from tests.plain_kit import Ask, PlainDecoding, counted
from tests.process_kit import LIMIT_SECONDS, run_cli
from tests.reference_kit import Line, read_output, stream
from tests.stops_kit import shown
from tests.tiny_models import build_tiny, build_tokenizer

CONTEXT, POOL, LONG_PROMPT = 2048, 8192, 1900  # the pool holds four such prompts
EOS, POISON, WRONG = 0, 196, 201
VOCABULARY = 288
NUM_TOKENS, LONGEST = 80, 130
TRIES = 4
SPECULATIONS: tuple[str | int, ...] = ("off", 4, 8)
LONG_RUNS = ("stop-one", "stop-several", "stop-inside", "token")  # run with the largest K too
TOLERANCE = 1e-4
PROMPT = [5, 70, 71, 72, 73, 74, 75, 76, 70, 71, 72, 77, 78, 79, 80, 81, 82, 83, 84, 85]
ODD_PROMPT = [WRONG, *PROMPT[1:10], WRONG, *PROMPT[11:]]

pytestmark = [pytest.mark.acceptance, pytest.mark.slow, pytest.mark.integration]

# What the stories are written in; the last three are halves of a character and the whole of it.
WORDS = [*"abcdefghij", "Ġ", "th", "the", "in", "an", "Ġthe", "er", "on", "Ã", "©", "Ã©"]
BYTES = {"Ġ": b" ", "Ġthe": b" the", "Ã": b"\xc3", "©": b"\xa9", "Ã©": b"\xc3\xa9"}


def pieces() -> dict[int, bytes]:
    """The bytes of each token of `WORDS`."""
    ids = build_tokenizer().convert_tokens_to_ids(WORDS)
    return {token: BYTES.get(word, word.encode()) for token, word in zip(ids, WORDS, strict=True)}


PIECES = pieces()
STORY = SamplingParams(
    temperature=1,
    seed=8,
    max_tokens=LONGEST,
    ignore_eos=True,
    allowed_token_ids=tuple(sorted(PIECES)),
    logprobs=2,
)


def greedy(**values: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": NUM_TOKENS, "ignore_eos": True} | values)


# They stand in the greedy output without parameters. Penalties choose among few tokens, so that
# these come again within a round.
BAD_WORDS = ((23,), (165, 41), (17, 273, 270))
GREEDY = {
    "nothing": greedy(),
    "repetition": greedy(repetition_penalty=1.8, allowed_token_ids=tuple(range(100, 130))),
    "frequency": greedy(frequency_penalty=1.2, allowed_token_ids=tuple(range(100, 108))),
    "presence": greedy(presence_penalty=2.0, allowed_token_ids=tuple(range(100, 130))),
    "bias": greedy(logit_bias={70: 4, 71: 3, 72: -100}),
    "min-tokens": greedy(min_tokens=40, ignore_eos=False, logit_bias={EOS: 30}),
    "allowed": greedy(allowed_token_ids=tuple(range(60, 100))),
    "bad-words": greedy(bad_words=BAD_WORDS),
    "all": greedy(
        repetition_penalty=1.2,
        frequency_penalty=0.4,
        presence_penalty=-0.3,
        logit_bias={70: 2, EOS: 9},
        min_tokens=30,
        ignore_eos=False,
        bad_words=BAD_WORDS,
        allowed_token_ids=(EOS, *range(40, 120)),
    ),
}


NUCLEUS = SamplingParams(
    temperature=0.9,
    top_p=0.95,
    frequency_penalty=0.2,
    seed=77,
    max_tokens=NUM_TOKENS,
    ignore_eos=True,
    logprobs=5,
    prompt_logprobs=3,
)
THREE = SamplingParams(temperature=1, seed=5, n=3, max_tokens=NUM_TOKENS, ignore_eos=True)
# An end of the output that comes by itself, within drafts.
ENDING = SamplingParams(
    temperature=1, seed=6, logit_bias={EOS: 5}, min_tokens=60, max_tokens=LONGEST
)
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "size": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"enum": ["x", "y"]}, "maxItems": 3},
        "done": {"type": "boolean"},
    },
    "required": ["name", "size", "tags", "done"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA}}
JSON = SamplingParams(temperature=1, json_schema=SCHEMA, max_tokens=400)  # type: ignore[arg-type]

WORD_IDS = ((261,), (264,))  # "the" and " the"


def asks() -> dict[str, Ask]:
    """What is computed beforehand."""
    found = {name: Ask(ODD_PROMPT, params) for name, params in GREEDY.items()}
    found["story"] = Ask(PROMPT, STORY)
    found["word"] = Ask(PROMPT, replace(STORY, bad_words=WORD_IDS))
    found["nucleus"] = Ask(ODD_PROMPT, NUCLEUS)
    found["ending"] = Ask(PROMPT, ENDING)
    for sample in range(THREE.n):
        found[f"three.{sample}"] = Ask(ODD_PROMPT, THREE, sample)
    return found


def build_pair(folder: Path) -> tuple[Path, Path]:
    """The target, to which the token POISON is poison, and its drafter."""
    paths = []
    for name, token, factor in (("target", POISON, math.nan), ("draft", WRONG, -3.0)):
        path = build_tiny(folder / name, "llama", tie=False, context=CONTEXT)
        weights = load_file(path / "model.safetensors")
        weights["model.embed_tokens.weight"][token] *= factor
        save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
        paths.append(path)
    return paths[0], paths[1]


@dataclass(frozen=True, slots=True)
class Wanted:
    """What an output has to be.

    Attributes:
        after: the text that is to be seen after each of the tokens, where it is known.
    """

    tokens: list[int]
    text: str
    reason: str
    after: list[str] = field(default_factory=list)


class Story:
    """The seeded output that stops are put into."""

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = tokens
        self._pieces = [PIECES[token] for token in tokens]
        self.after = shown(self._pieces, STORY).after

    def find(self, first: int, length: int) -> tuple[int, str]:
        """A text that stands nowhere before, nor do its last letters, and that begins with a
        token from number `first` on; the number of the token that completes it, too."""
        whole = self.after[-1]
        for number in range(first, len(self.tokens)):
            begin = len(self.after[number - 1])
            found = whole[begin : begin + length]
            last = number + sum(len(text) < begin + length for text in self.after[number:])
            if whole.find(found[2:]) == begin + 2 and len(self.after[last]) == begin + length:
                return last + 1, found
        raise AssertionError("the story has no such text: take another seed")

    def inside(self, first: int) -> str:
        """A text that stands nowhere before and ends within a token from number `first` on."""
        whole = self.after[-1]
        for number in range(first, len(self.tokens)):
            begin = len(self.after[number - 1])
            found = whole[begin - 3 : begin + 1]
            if len(self._pieces[number]) > 2 and whole.find(found) == begin - 3:
                return found
        raise AssertionError("the story has no such text: take another seed")

    def latest(self) -> tuple[int, int]:
        """The token whose first occurrence is the latest, and its place."""
        places = {token: self.tokens.index(token) for token in self.tokens}
        return max(places.items(), key=lambda item: item[1])

    def wanted(self, params: SamplingParams) -> Wanted:
        """What stops or a limit make of the story."""
        tokens, pieces = self.tokens[: params.max_tokens], self._pieces[: params.max_tokens]
        ends = [place for place, token in enumerate(tokens) if token in params.stop_token_ids]
        if ends:  # the token stays, and has no text
            tokens = tokens[: ends[0] + 1]
            text = shown(pieces[: ends[0]], params).after[-1]
            return Wanted(tokens, text, "stop")
        found = shown(pieces, params)
        return Wanted(tokens[: found.num_tokens], found.after[-1], found.reason, found.after)


def stops(story: Story) -> dict[str, SamplingParams]:
    """Ways to end the story."""
    number, text = story.find(70, 7)
    _, other = story.find(95, 5)
    token, place = story.latest()
    begun = tuple(f"{story.after[-1][place : place + 4]}zz" for place in range(40, 200, 9))
    cases: dict[str, dict[str, Any]] = {
        "stop-one": {"stop": text},
        "stop-several": {"stop": [other, "zebra", text, other + "z"]},
        "stop-longest": {"stop": [text[2:], text, text[1:]]},
        "stop-included": {"stop": [text[2:], text], "include_stop_str_in_output": True},
        "stop-inside": {"stop": story.inside(70)},
        "stop-begun": {"stop": begun},
        "stop-late": {"stop": [story.after[-1][20:23], other], "min_tokens": number},
        "stop-just": {"stop": [text, other], "min_tokens": number},
        "stop-missed": {"stop": [text, other], "min_tokens": number + 1},
        "stop-limit": {"stop": text, "max_tokens": number},
        "stop-beyond": {"stop": text, "max_tokens": number - 1},
        "token": {"stop_token_ids": [token]},
        "token-limit": {"stop_token_ids": [token], "max_tokens": place + 1},
        "token-beyond": {"stop_token_ids": [token], "max_tokens": place},
    }
    return {name: replace(STORY, **values) for name, values in cases.items()}


# Jobs that fail, and what is said of each.
FAILING: dict[str, tuple[list[int], SamplingParams, str]] = {
    "poison-greedy": ([5, POISON, 6], greedy(), "hold NaN"),
    "poison-sampled": ([5, POISON, 6], replace(STORY, seed=None), "hold NaN"),
    "poison-coupled": ([5, POISON, 6], replace(NUCLEUS, logprobs=1), "hold NaN"),
    "poison-drawn": (PROMPT, replace(STORY, allowed_token_ids=(POISON,)), "hold NaN"),
    "only-end": (
        PROMPT,
        greedy(allowed_token_ids=(EOS,), min_tokens=3, ignore_eos=False),
        "no token at output position 0",
    ),
    "none-left": (
        PROMPT,
        replace(STORY, allowed_token_ids=(70, 71), bad_words=((70, 71), (70, 70), (71,))),
        "no token at output position 1",
    ),
    "dead-end": (
        PROMPT,
        SamplingParams(temperature=1, regex="[ab]{50}c", allowed_token_ids=(68, 69, EOS)),
        "no token at output position 50",
    ),
    "schema": (
        PROMPT,
        replace(JSON, json_schema='{"type":"nothing"}'),
        "JSON schema cannot be used: ",
    ),
    "regex": (PROMPT, SamplingParams(regex="a(b"), "regular expression cannot be used: "),
    "grammar": (PROMPT, SamplingParams(grammar="start: ("), "grammar cannot be used: "),
}


@dataclass(slots=True)
class Served:
    """The fleet, what must come, and what has come of all jobs that ran together."""

    fleet: Fleet
    plain: PlainDecoding
    generated: dict[str, list[int]]
    story: Story
    stops: dict[str, SamplingParams]
    redis: Any
    results: dict[str, Result] = field(default_factory=dict)
    chunks: dict[str, list[Chunk]] = field(default_factory=dict)

    def run(self, jobs: dict[str, tuple[list[int], SamplingParams]]) -> None:
        """Run jobs together. One that should be drafted for and ended before its drafter had
        begun runs once more."""
        for attempt in range(TRIES):
            specs = [JobSpec(model="target", prompt=p, params=q) for p, q in jobs.values()]
            handles = self.fleet.client.submit_many(specs, ids=[f"{n}-{attempt}" for n in jobs])
            for name, job in zip(jobs, handles, strict=True):
                self.chunks[name] = []
                with suppress(JobFailed):
                    self.chunks[name] += job.stream(LIMIT_SECONDS)
                self.results[name] = job.wait(LIMIT_SECONDS)
            jobs = {name: job for name, job in jobs.items() if self.is_idle(name, job[1])}
        assert not jobs, f"never drafted for: {list(jobs)}"

    def is_idle(self, name: str, params: SamplingParams) -> bool:
        """Whether nothing was drafted for a job that was there long enough."""
        result = self.results[name]
        is_meant = params.speculation != "off" and result.completion_tokens >= NUM_TOKENS // 2
        return is_meant and result.drafted == 0

    def of(self, name: str) -> Iterator[tuple[str | int, Result]]:
        """The results of a case, by `speculation`."""
        for speculation in SPECULATIONS:
            result = self.results.get(f"{name}-{speculation}")
            if result is not None:
                yield speculation, result

    def jobs(self) -> dict[str, tuple[list[int], SamplingParams]]:
        """All that run together."""
        cases = {
            **{name: (ODD_PROMPT, params) for name, params in GREEDY.items()},
            **{name: (PROMPT, params) for name, params in self.stops.items()},
            "nucleus": (ODD_PROMPT, NUCLEUS),
            "ending": (PROMPT, ENDING),
            "three": (ODD_PROMPT, THREE),
            "word": (PROMPT, replace(STORY, bad_words=("the",))),
            "echo": (ODD_PROMPT, replace(NUCLEUS, echo=True)),
            "json": (ODD_PROMPT, replace(JSON, seed=4)),
            "one": (PROMPT, greedy(max_tokens=1)),
        }
        jobs = {
            f"{name}-{k}": (prompt, replace(params, speculation=k))
            for name, (prompt, params) in cases.items()
            for k in (SPECULATIONS if name in LONG_RUNS else SPECULATIONS[:2])
        }
        for name, (prompt, params, _) in FAILING.items():
            jobs[name] = (prompt, replace(params, speculation=4))
        for number in range(6):
            jobs[f"json-{number}-free"] = (ODD_PROMPT, replace(JSON, speculation=4))
        return jobs


@pytest.fixture(scope="module")
def served(
    start_fleet: StartFleet, tmp_path_factory: pytest.TempPathFactory, valkey: Any
) -> Served:
    target, draft = build_pair(tmp_path_factory.mktemp("pair"))
    common = ["--target", str(target), "--dtype", "float32", "--kv-tokens", str(POOL)]
    fleet = start_fleet(
        "parameters",
        verify=[*common, "--slots", "40"],
        draft=[*common, "--slots", "40", "--draft", str(draft)],
    )
    fleet.start("verify")
    fleet.start("draft")
    plain = PlainDecoding(target, asks())
    assert not any(POISON in output for output in plain.outputs.values())
    story = Story(plain.outputs["story"])
    served = Served(fleet, plain, generated(target), story, stops(story), valkey.client())
    fleet.await_ready()
    served.run(served.jobs())
    return served


def check_done(result: Result, wanted: Wanted | Line) -> None:
    assert (result.status, result.error) == (Status.SUCCEEDED, "")
    assert result.token_ids == wanted.tokens
    assert result.text == wanted.text
    assert result.finish_reason == wanted.reason


def test_greedy_output_is_that_of_generate(served: Served) -> None:
    outputs = served.generated
    assert served.plain.outputs.items() >= outputs.items()
    assert len({tuple(output) for output in outputs.values()}) == len(GREEDY)
    drafted = accepted = 0
    for name, tokens in outputs.items():
        for speculation, result in served.of(name):
            check_done(result, served.plain.line(name))
            assert result.token_ids == tokens
            assert (result.drafted > 0) is (speculation == 4)
            drafted, accepted = drafted + result.drafted, accepted + result.accepted
    assert 0 < accepted < drafted


def test_sampled_output_is_the_same_with_drafts_and_without(served: Served) -> None:
    for name in ("word", "nucleus", "ending"):
        for _, result in served.of(name):
            check_done(result, served.plain.line(name))
    for _, result in served.of("three"):
        for number, sample in enumerate(result.samples):
            check_done(sample, served.plain.line(f"three.{number}"))
    assert served.plain.outputs["word"] != served.plain.outputs["story"]
    assert served.plain.outputs["ending"][-1] == EOS


def test_stops_end_text_and_tokens_at_the_same_place(served: Served) -> None:
    for name, params in served.stops.items():
        for _, result in served.of(name):
            check_done(result, served.story.wanted(params))
            assert result.accepted == result.drafted, "the drafter knows this story by heart"
    reasons = {name: served.story.wanted(params).reason for name, params in served.stops.items()}
    ended_by_length = {name for name, reason in reasons.items() if reason == "length"}
    assert ended_by_length == {"stop-begun", "stop-beyond", "token-beyond"}
    lengths = {name: len(served.story.wanted(p).tokens) for name, p in served.stops.items()}
    assert lengths["stop-missed"] > lengths["stop-just"] == lengths["stop-one"]


def test_stops_are_found_across_rounds_and_in_the_middle_of_them(served: Served) -> None:
    """Else those that are found would show little."""
    across = within = whole = 0
    for name, params in served.stops.items():
        is_stopped = served.story.wanted(params).reason == "stop"
        for speculation in (4, 8) if name in LONG_RUNS else (4,):
            rounds = [len(c.token_ids) for c in served.chunks[f"{name}-{speculation}"]]
            assert max(rounds) <= 1 + speculation
            whole += max(rounds) == 1 + speculation
            # shorter than the shortest stop string, and not to the end of what was accepted
            across += is_stopped and name.startswith("stop") and rounds[-1] < 3
            within += is_stopped and 1 < rounds[-1] <= speculation
    assert across > 0
    assert within > 0
    assert whole > 0


def test_what_is_streamed_is_shown_as_soon_as_it_can_be_and_never_taken_back(
    served: Served,
) -> None:
    for name, params in served.stops.items():
        wanted = served.story.wanted(params)
        for speculation, result in served.of(name):
            seen, tokens = "", list[int]()
            for chunk in served.chunks[f"{name}-{speculation}"]:
                assert chunk.position == len(tokens)
                seen, tokens = seen + chunk.text, tokens + chunk.token_ids
                assert wanted.text.startswith(seen)
                if wanted.after:
                    assert seen == wanted.after[len(tokens) - 1]
            assert (seen, tokens) == (result.text, result.token_ids)


def test_log_probabilities_are_those_of_the_plain_model(served: Served) -> None:
    names = ["nucleus", "echo", *served.stops]
    for name in names:
        prompt, params = (PROMPT, STORY) if name in served.stops else (ODD_PROMPT, NUCLEUS)
        for _, result in served.of(name):
            check_logprobs(served.plain, prompt, result, params)


def check_logprobs(
    plain: PlainDecoding, prompt: list[int], result: Result, params: SamplingParams
) -> None:
    """Each token has those of the plain model there, and of as many others as were asked for."""
    tokens = prompt + result.token_ids
    rows = plain.logits([tokens])[0].log_softmax(-1)
    items: list[tuple[int, TokenLogprob, int | None]] = [
        (place, item, params.logprobs) for place, item in enumerate(result.logprobs, len(prompt))
    ]
    assert len(items) == len(result.token_ids)
    if params.prompt_logprobs is None:
        assert result.prompt_logprobs == []
    else:
        first, *others = result.prompt_logprobs
        assert first is None
        assert len(others) == len(prompt) - 1
        items += [(place, item, params.prompt_logprobs) for place, item in enumerate(others, 1)]
    for place, item, num_top in items:
        row = rows[place - 1]
        assert item.chosen.token_id == tokens[place]
        assert item.chosen.logprob == pytest.approx(float(row[tokens[place]]), abs=TOLERANCE)
        best = row.topk(num_top or 0)
        assert [one.token_id for one in item.top] == best.indices.tolist()
        assert [one.logprob for one in item.top] == pytest.approx(
            best.values.tolist(), abs=TOLERANCE
        )


def test_an_echo_shows_the_prompt_and_counts_nothing(served: Served) -> None:
    line = served.plain.line("nucleus")
    prompt = AutoTokenizer.from_pretrained(served.plain.folder).decode(ODD_PROMPT)
    for _, result in served.of("echo"):
        check_done(result, replace(line, text=prompt + line.text))


def test_structured_output_at_any_temperature_follows_its_schema(served: Served) -> None:
    results = [result for name, result in served.results.items() if name.startswith("json-")]
    assert len(results) == 8
    for result in results:
        check_thing(result.text)
        assert result.finish_reason == "stop"
    (_, plain), (_, drafted) = served.of("json")
    assert drafted.token_ids == plain.token_ids
    assert len({result.text for result in results}) == 7
    assert sum(result.accepted for result in results) > 0
    assert sum(result.drafted - result.accepted for result in results) > 0


def check_thing(text: str) -> None:
    """It is JSON by `SCHEMA`."""
    thing = json.loads(text)
    assert thing.keys() == {"name", "size", "tags", "done"}
    assert isinstance(thing["name"], str)
    assert len(thing["name"]) <= 8
    assert type(thing["size"]) is int
    assert 0 <= thing["size"] <= 99
    assert len(thing["tags"]) <= 3
    assert set(thing["tags"]) <= {"x", "y"}
    assert type(thing["done"]) is bool


@pytest.mark.parametrize("name", FAILING)
def test_a_job_without_a_next_token_or_a_grammar_fails_alone(served: Served, name: str) -> None:
    result = served.results[name]
    assert result.status is Status.FAILED
    assert FAILING[name][2] in result.error


def test_a_limit_of_one_token_drafts_nothing(served: Served) -> None:
    for _, result in served.of("one"):
        assert result.token_ids == [result.token_ids[0]]
        assert (result.finish_reason, result.drafted) == ("length", 0)


def test_what_is_not_known_is_refused_by_name(served: Served) -> None:
    with pytest.raises(UnsupportedParameter, match="'top_a' is not supported"):
        SamplingParams.from_mapping({"top_a": 0.2})
    with pytest.raises(InvalidRequest, match="max_tokens must lie between 1 and"):
        SamplingParams(max_tokens=0)
    with pytest.raises(InvalidRequest, match="bad_words has the token id 288"):
        served.fleet.client.submit("x", SamplingParams(bad_words=[[4, 288]]))  # type: ignore


def test_samples_share_the_prefill_of_their_prompt(served: Served) -> None:
    """The pool holds four such prompts: were they not shared, the fifth sample would begin only
    after another has ended."""
    draw = random.Random(0)
    prompt = [draw.randrange(4, POISON) for _ in range(LONG_PROMPT)]
    params = replace(THREE, n=5, max_tokens=NUM_TOKENS)
    job = served.fleet.client.submit(prompt, params)
    result = job.result(LIMIT_SECONDS)
    streams = [stream(served.redis, Keys("parameters"), sample) for sample in job.sample_ids()]
    assert max(entries[0][0] for entries in streams) <= min(entries[-1][0] for entries in streams)
    for sample in result.samples:
        ask = Ask(prompt, params, sample.sample)
        assert served.plain.explains(ask, sample.token_ids)
    assert len({tuple(sample.token_ids) for sample in result.samples}) == 5


def test_a_batch_file_gets_its_choices_its_usage_and_its_structure(
    served: Served, tmp_path: Path
) -> None:
    bodies = {
        "three": {"prompt": ODD_PROMPT, "temperature": 1, "seed": 5, "n": 3, "ignore_eos": True},
        "one": {"prompt": PROMPT, "temperature": 1, "seed": 8, "ignore_eos": True, "echo": True},
        "thing": {"prompt": ODD_PROMPT, "temperature": 1, "response_format": FORMAT},
        "chat": {"messages": [{"role": "user", "content": "a thing?"}], "temperature": 1},
    }
    bodies["one"] |= {"allowed_token_ids": STORY.allowed_token_ids, "logprobs": 2}
    bodies["one"] |= {"stop": served.stops["stop-one"].stop}
    bodies["chat"] |= {"response_format": FORMAT, "seed": 1, "logprobs": True, "top_logprobs": 1}
    limits = {"three": NUM_TOKENS, "one": LONGEST, "thing": 400, "chat": 400}
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = []
    for name, body in bodies.items():
        url = "/v1/chat/completions" if name == "chat" else "/v1/completions"
        body |= {"max_tokens": limits[name], "speculation": 4}
        lines.append({"custom_id": name, "method": "POST", "url": url, "body": body})
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    done = run_cli("run", source, "-o", output, *served.fleet.broker)
    assert done.returncode == 0, done.stderr + served.fleet.logs()
    answers = {name: line["response"]["body"] for name, line in read_output(output).items()}
    three = [served.plain.line(f"three.{sample}") for sample in range(3)]
    choices = answers["three"]["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2]
    assert [choice["text"] for choice in choices] == [line.text for line in three]
    assert answers["three"]["usage"] == usage(len(ODD_PROMPT), 3 * NUM_TOKENS)
    wanted = served.story.wanted(served.stops["stop-one"])
    (choice,) = answers["one"]["choices"]
    assert choice["text"].endswith(wanted.text)
    assert len(choice["logprobs"]["tokens"]) == len(PROMPT) + len(wanted.tokens)
    assert answers["one"]["usage"] == usage(len(PROMPT), len(wanted.tokens))
    check_thing(answers["thing"]["choices"][0]["text"])
    (choice,) = answers["chat"]["choices"]
    check_thing(choice["message"]["content"])
    shown = b"".join(bytes(one["bytes"]) for one in choice["logprobs"]["content"][:-1])
    assert shown.decode() == choice["message"]["content"]


def usage(prompt: int, completion: int) -> dict[str, int]:
    """As it stands in an answer."""
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }


def generated(target: Path) -> dict[str, list[int]]:
    """What transformers' own `generate` makes of the same parameters."""
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    return {name: generate(model, params) for name, params in GREEDY.items()}


def generate(model: Any, params: SamplingParams) -> list[int]:
    options: dict[str, Any] = {}
    if params.logit_bias:
        options["sequence_bias"] = {(token,): bias for token, bias in params.logit_bias}
    if params.bad_words:
        options["bad_words_ids"] = [list(word) for word in params.bad_words]
    if params.min_tokens:
        options["min_new_tokens"] = params.min_tokens
    if params.allowed_token_ids is not None:
        others = set(range(VOCABULARY)) - set(params.allowed_token_ids)
        options["suppress_tokens"] = sorted(others)
    if params.frequency_penalty or params.presence_penalty:
        mine = counted(params, len(ODD_PROMPT))
        options["logits_processor"] = LogitsProcessorList([mine])
    ids = torch.tensor([ODD_PROMPT])
    model.generation_config.eos_token_id = None if params.ignore_eos else EOS
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=params.max_tokens,
        pad_token_id=EOS,
        repetition_penalty=params.repetition_penalty,
        **options,
    )
    return output[0, len(ODD_PROMPT) :].tolist()
