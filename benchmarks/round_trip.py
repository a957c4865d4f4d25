"""What a round costs outside the two models' forward passes.

One verify and one draft worker process with simulated models of given pass times exchange
proposals and verdicts through a real Valkey. A job's round runs from the end of one verify pass
with it to the end of the next. Of that time, everything is counted in which neither worker was
inside a forward pass: frames, Redis, commits, detokenising, scheduling, thread switches. Passes
of other jobs count as passes, so with many jobs some of this hides behind them.

    python benchmarks/round_trip.py [--jobs 1 16 64] [--tokens 200] [--verify-ms 20] [--draft-ms 2]
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

from pilotfish import SamplingParams
from pilotfish.embedded.stack import EmbeddedStack, StackPlan
from pilotfish_broker.settings import Settings

Span = tuple[int, int]
WARM_UP_PASSES = 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--verify-ms", type=float, default=20.0)
    parser.add_argument("--draft-ms", type=float, default=2.0)
    parser.add_argument("--k", type=int, default=4)
    arguments = parser.parse_args()
    print("jobs  rounds  tokens/round  outside passes, ms: p50   p95   mean   round, ms: p50")
    for jobs in arguments.jobs:
        print(measure(jobs, arguments))


def measure(jobs: int, arguments: argparse.Namespace) -> str:
    """Run `jobs` jobs at once and return a line of the table."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        traces = {kind: folder / f"{kind}.trace" for kind in ("verify", "draft")}
        settings = Settings.from_env(
            {},
            target=f"simulated:pass_ms={arguments.verify_ms},trace={traces['verify']}",
            draft=f"simulated:pass_ms={arguments.draft_ms},trace={traces['draft']},agree=80",
            model="simulated",
            slots=jobs,
            threads=1,
            speculation=arguments.k,
        )
        with EmbeddedStack(StackPlan(folder=folder, settings=settings)) as stack:
            for _ in stack.await_ready():
                pass
            results = run_jobs(stack, jobs, arguments.tokens)
        costs, rounds = outside_passes(read(traces["verify"]), read(traces["draft"]))
    tokens = sum(result.completion_tokens for result in results)
    num_rounds = sum(result.rounds for result in results)
    return (
        f"{jobs:4d}  {num_rounds:6d}  {tokens / num_rounds:12.2f}"
        f"{percentile(costs, 50):25.2f} {percentile(costs, 95):5.2f} "
        f"{sum(costs) / len(costs):6.2f} {percentile(rounds, 50):16.2f}"
    )


def run_jobs(stack: EmbeddedStack, jobs: int, tokens: int) -> list:
    """Submit all jobs and wait for them."""
    params = SamplingParams(max_tokens=tokens)
    handles = [stack.client.submit(f"prompt {number}", params) for number in range(jobs)]
    results = []
    for handle in handles:
        while not handle.status().is_terminal:
            stack.tick()
            time.sleep(0.05)
        results.append(handle.result(timeout=10))
    return results


def read(trace: Path) -> list[tuple[int, int, list[str]]]:
    """The passes of one worker: start, end (ns), sequences."""
    lines = (line.split() for line in trace.read_text().splitlines())
    return [(int(parts[0]), int(parts[1]), parts[2:]) for parts in lines]


def outside_passes(
    verify: list[tuple[int, int, list[str]]], draft: list[tuple[int, int, list[str]]]
) -> tuple[list[float], list[float]]:
    """For each round: milliseconds outside all passes, and milliseconds in all."""
    busy = merged(sorted([(a, b) for a, b, _ in verify] + [(a, b) for a, b, _ in draft]))
    last: dict[str, int] = {}
    costs, rounds = [], []
    for number, (_, end, sequences) in enumerate(verify):
        for sequence in sequences:
            begin = last.get(sequence)
            last[sequence] = end
            if begin is not None and number >= WARM_UP_PASSES:
                rounds.append((end - begin) / 1e6)
                costs.append((end - begin - overlap(busy, begin, end)) / 1e6)
    return costs, rounds


def merged(spans: list[Span]) -> list[Span]:
    """Union of sorted spans."""
    union: list[Span] = []
    for begin, end in spans:
        if union and begin <= union[-1][1]:
            union[-1] = (union[-1][0], max(union[-1][1], end))
        else:
            union.append((begin, end))
    return union


def overlap(busy: list[Span], begin: int, end: int) -> int:
    """Nanoseconds of [begin, end] inside `busy`."""
    return sum(max(0, min(end, b) - max(begin, a)) for a, b in busy if a < end and b > begin)


def percentile(values: list[float], share: int) -> float:
    """The smallest value that at least `share` percent do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, -(-len(ordered) * share // 100) - 1)]


if __name__ == "__main__":
    main()
