"""pilotfish demo: real prompts on the default pair, answers, and what drafting brought."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from pilotfish.cli.demo_prompts import PROMPTS
from pilotfish.cli.options import settings_from, stack_options, without_servers, worker_options
from pilotfish.cli.progress import RunDisplay
from pilotfish.cli.signals import unwinding
from pilotfish.cli.targets import with_named_target, with_prepared_target
from pilotfish.embedded import EmbeddedStack, StackPlan
from pilotfish.result import Result
from pilotfish.run_summary import Summary, summarise
from pilotfish_broker.settings import Settings
from pilotfish_broker.spec import JobSpec, SamplingParams

GROUP = "demo"
WAIT_SECONDS = 0.25


@click.command()
@click.option("--max-tokens", type=click.IntRange(min=1), default=128, show_default=True)
@stack_options
@worker_options
def demo(max_tokens: int, **options: Any) -> int:
    """Answer some prompts of different kinds on this machine, and show what drafting brings.

    It starts Valkey, a verify worker and a draft worker, and leaves nothing behind but the
    prepared model. The first time that is downloaded and converted (93 MB, some 40 s).

    \b
    Example:
      pilotfish demo
      pilotfish demo --speculation off        (the same answers, without drafting)
    """
    settings = with_named_target(settings_from(options, without_servers()))
    with unwinding():
        settings = with_prepared_target(settings)
        with tempfile.TemporaryDirectory(prefix="pilotfish-demo-") as folder:
            plan = StackPlan(
                folder=Path(folder),
                settings=settings,
                verify_workers=options["verify_workers"],
                draft_workers=options["draft_workers"],
            )
            return answer(plan, max_tokens)


def answer(plan: StackPlan, max_tokens: int) -> int:
    """Run the prompts on a stack of their own; gives the exit status."""
    started = time.monotonic()
    console = Console(highlight=False)
    with RunDisplay(len(PROMPTS), console) as display, EmbeddedStack(plan) as stack:
        display.awaiting(stack.await_ready(), plan.wanted)
        startup = time.monotonic() - started
        display.begin(0)
        model, params = plan.settings.served_name, SamplingParams(max_tokens=max_tokens)
        specs = [
            JobSpec(
                model=model,
                prompt=[{"role": "user", "content": text}],
                params=params,
                group=GROUP,
            )
            for text in PROMPTS.values()
        ]
        jobs = [job.id for job in stack.client.submit_many(specs)]
        kinds = dict(zip(jobs, PROMPTS, strict=True))
        results = _collect(stack, display, kinds, console)
        failed = sum(bool(result.error) for result in results.values())
        summary = summarise(
            stack.client.records(jobs), jobs=len(jobs), failed=failed, startup_seconds=startup
        )
        stack.mark_complete()
    console.print(_table(plan.settings, {kinds[job]: results[job] for job in jobs}, summary))
    console.print(f"workers were ready after {startup:.1f} s")
    return 1 if failed else 0


def _collect(
    stack: EmbeddedStack, display: RunDisplay, kinds: dict[str, str], console: Console
) -> dict[str, Result]:
    """Wait for all jobs and print each answer as it comes."""
    results: dict[str, Result] = {}
    cursor = "0"
    while len(results) < len(kinds):
        for name in stack.tick():
            display.note(f"the {name} had died and was started again")
        ended = stack.client.read_completions(GROUP, after=cursor, block_seconds=WAIT_SECONDS)
        for result in stack.client.results(item.job_id for item in ended):
            if result is None or result.job_id in results:
                continue
            results[result.job_id] = result
            kind = kinds[result.job_id]
            console.rule(kind, align="left")
            console.print(PROMPTS[kind], style="dim", markup=False)
            console.print(result.text or result.error, markup=False)
            display.count(result)
        cursor = ended[-1].cursor if ended else cursor
        display.running(stack.client.committed(job for job in kinds if job not in results))
    return results


def _table(settings: Settings, results: dict[str, Result], total: Summary) -> Table:
    title = f"{settings.served_name}, drafts by {settings.draft}, decoding greedy"
    table = Table(title=title, show_footer=True)
    table.add_column("prompt", "all together")
    drafted, accepted = str(total.drafted), str(total.accepted)
    foot = [*_cells(total.completion_tokens, total.seconds, total.rounds), drafted, accepted]
    names = ("tokens", "tokens/s", "rounds", "tokens a round", "drafted", "accepted")
    for name, sum_cell in zip(names, foot, strict=True):
        table.add_column(name, sum_cell, justify="right")
    for kind, result in results.items():
        seconds = (result.finished_ms - result.started_ms) / 1000
        cells = _cells(result.completion_tokens, seconds, result.rounds)
        table.add_row(kind, *cells, str(result.drafted), str(result.accepted))
    return table


def _cells(tokens: int, seconds: float, rounds: int) -> list[str]:
    speed = f"{tokens / seconds:.1f}" if seconds > 0 else ""
    return [str(tokens), speed, str(rounds), f"{tokens / rounds:.2f}" if rounds else ""]
