"""Promise 1, exact: `pilotfish run` answers as the target's own greedy decoding would.

32 prompts of 1 to 300 tokens run together, with one to eight drafted tokens a round, and the
answers are those of transformers' `generate(do_sample=False)`: with the target as its own
drafter, and with an unrelated drafter over a KV pool that holds one and a half jobs.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from pilotfish_broker.keys import Keys
from tests.acceptance.conftest import StartFleet
from tests.fleet_kit import Fleet
from tests.process_kit import run_cli
from tests.reference_kit import (
    LONGEST_PROMPT,
    Greedy,
    Line,
    check_output,
    check_results,
    check_stream,
    random_prompts,
    request_ids,
    stream,
    write_input,
)
from tests.tiny_models import build_tiny

JOBS = 32
SHORT, LONG = 16, 600
# one for each K, so long that drafting has surely begun before they end
NUM_LONG, LONG_PROMPT = 8, 24
BLOCK = 16
# one and a half of the longest short job, in whole blocks
TIGHT_POOL = (LONGEST_PROMPT + SHORT) * 3 // 2 // BLOCK * BLOCK
SUMMARY_KEYS = {
    "jobs",
    "failed",
    "completion_tokens",
    "seconds",
    "tokens_per_second",
    "rounds",
    "drafted",
    "accepted",
    "mean_tokens_per_round",
    "startup_seconds",
}

pytestmark = [pytest.mark.acceptance, pytest.mark.slow, pytest.mark.integration]


@dataclass(frozen=True, slots=True)
class Pair:
    """A target with its references, and a fleet that serves it with an unrelated drafter."""

    target: Path
    greedy: Greedy
    fleet: Fleet


@pytest.fixture(scope="module", params=["llama", "qwen3", "gpt2"])
def pair(
    request: pytest.FixtureRequest,
    start_fleet: StartFleet,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Pair]:
    family = request.param
    folder = tmp_path_factory.mktemp(family)
    target = build_tiny(folder / "target", family, seed=0)
    draft = build_tiny(folder / "draft", family, seed=7)
    common = ["--target", str(target), "--dtype", "float32", "--slots", "32"]
    fleet = start_fleet(
        f"exact-{family}",
        verify=[*common, "--kv-tokens", str(TIGHT_POOL)],
        draft=[*common, "--draft", str(draft)],
    )
    fleet.start("verify")
    fleet.start("draft")
    prompts = [*random_prompts(JOBS), *random_prompts(NUM_LONG, LONG_PROMPT, LONG_PROMPT)]
    greedy = Greedy(target, prompts, [SHORT] * JOBS + [LONG] * NUM_LONG)
    fleet.await_ready()
    yield Pair(target, greedy, fleet)
    fleet.close()


def k_of(number: int) -> int:
    """1 to 8 in turn."""
    return 1 + number % 8


def run(pair: Pair, lines: list[Line], folder: Path, *options: str) -> tuple[Path, dict[str, Any]]:
    """Run the lines; gives the output file and the summary."""
    source, output, summary = (folder / name for name in ("in.jsonl", "out.jsonl", "sum.json"))
    done = run_cli("run", write_input(source, lines), "-o", output, "--summary", summary, *options)
    assert done.returncode == 0, done.stderr + pair.fleet.logs()
    left = {path.name for path in folder.iterdir()}
    assert left == {"in.jsonl", "out.jsonl", "sum.json"}, "something was left behind"
    return output, json.loads(summary.read_text())


def check_summary(summary: dict[str, Any], lines: list[Line], bodies: dict[str, Any]) -> None:
    """The summary has what is promised, and its numbers are those of the output lines."""
    assert summary.keys() >= SUMMARY_KEYS
    assert (summary["jobs"], summary["failed"]) == (len(lines), 0)
    tokens = sum(len(line.tokens) for line in lines)
    assert summary["completion_tokens"] == tokens
    assert summary["seconds"] > 0
    assert summary["tokens_per_second"] == pytest.approx(tokens / summary["seconds"], rel=0.01)
    assert summary["mean_tokens_per_round"] == pytest.approx(tokens / summary["rounds"], rel=0.01)
    metrics = [body["metrics"]["speculative_decoding"] for body in bodies.values()]
    for total, part in (
        ("rounds", "num_spec_steps"),
        ("drafted", "num_draft_tokens"),
        ("accepted", "num_accepted_draft_tokens"),
    ):
        assert summary[total] == sum(metric[part] for metric in metrics)
    # a round commits what it accepted and one token of its own, unless the limit cut that off
    most = summary["rounds"] + summary["accepted"]
    assert most - len(lines) <= tokens <= most


def test_with_itself_as_drafter_all_that_is_drafted_is_accepted(pair: Pair, tmp_path: Path) -> None:
    lines = [pair.greedy.line(number, SHORT, k_of(number)) for number in range(JOBS - NUM_LONG)]
    for number in range(JOBS, JOBS + NUM_LONG):
        lines.append(pair.greedy.line(number, LONG, k_of(number), ignore_eos=True))
    options = ["--target", str(pair.target), "--draft", str(pair.target), "--dtype", "float32"]
    output, summary = run(pair, lines, tmp_path, *options, "--slots", "32")
    bodies = check_output(output, lines)
    check_summary(summary, lines, bodies)
    assert summary["accepted"] == summary["drafted"] > 0
    assert summary["mean_tokens_per_round"] > 1
    assert summary["startup_seconds"] > 0
    drafted: dict[int | str, int] = defaultdict(int)
    for line in lines:
        metric = bodies[line.custom_id]["metrics"]["speculative_decoding"]
        drafted[line.speculation] += metric["num_draft_tokens"]
    assert drafted.keys() == set(range(1, 9))
    assert all(drafted.values()), f"some K never drafted: {dict(drafted)}"


def test_an_unrelated_drafter_and_a_pool_of_one_and_a_half_jobs_change_no_token(
    pair: Pair, tmp_path: Path, valkey: Any
) -> None:
    lines = [pair.greedy.line(number, SHORT, k_of(number)) for number in range(JOBS)]
    output, summary = run(pair, lines, tmp_path, *pair.fleet.broker)
    bodies = check_output(output, lines)
    check_summary(summary, lines, bodies)
    assert summary["drafted"] > 0
    assert summary["startup_seconds"] == 0
    ids = request_ids(output)
    wanted = {ids[line.custom_id]: line for line in lines}
    check_results(pair.fleet.client, wanted)
    redis, keys = valkey.client(), Keys(pair.fleet.namespace)
    for job, line in wanted.items():
        check_stream(redis, keys, job, line)
    most = most_in_progress(redis, keys, wanted)
    assert most > TIGHT_POOL, f"at most {most} tokens were in progress: nobody was preempted"


def most_in_progress(redis: Any, keys: Keys, wanted: dict[str, Line]) -> int:
    """The most tokens, prompts included, that begun and unfinished jobs had at one moment.

    More than the pool holds means that some of them had lost their blocks: were preempted.
    """
    events: list[tuple[int, int, str, int]] = []
    for job, line in wanted.items():
        length = len(line.prompt) - 1  # the last token's KV is not computed yet
        for milliseconds, entry in stream(redis, keys, job):
            length += len(entry.tokens)
            is_going_on = entry.end is None
            # of one millisecond, ends come first
            events.append((milliseconds, int(is_going_on), job, length if is_going_on else 0))
    tokens: dict[str, int] = {}
    most = 0
    for *_, job, length in sorted(events):
        tokens[job] = length
        most = max(most, sum(tokens.values()))
    return most
