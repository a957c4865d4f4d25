"""pilotfish results."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import click

from pilotfish.cli.options import broker_options, client_from
from pilotfish.result import Result


@click.command()
@click.argument("job", metavar="JOB")
@click.option(
    "--wait",
    "seconds",
    type=click.FloatRange(min=0),
    default=0.0,
    metavar="SECONDS",
    help="Wait so long for its end; the exit status is 1 when it has not come by then.",
)
@click.option("--json", "as_json", is_flag=True, help="Print text, token ids and counts as JSON.")
@broker_options
def results(job: str, seconds: float, as_json: bool, **options: Any) -> None:
    """Print the output of a job that has ended.

    \b
    Example:
      pilotfish results 5f0c1d… --wait 60
    """
    with client_from(options) as client:
        show_result(client.job(job).result(timeout=seconds), as_json=as_json)


def show_result(result: Result, *, as_json: bool) -> None:
    """Print a result: its text alone, or all of it."""
    if as_json:
        values = {**asdict(result), "completion_tokens": result.completion_tokens}
        click.echo(json.dumps(values, ensure_ascii=False))
    else:
        click.echo(result.text)
