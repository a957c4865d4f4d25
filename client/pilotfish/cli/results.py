"""pilotfish results."""

from __future__ import annotations

import json
from dataclasses import fields
from typing import Any

import click

from pilotfish.batch_logprobs import chat_logprobs, prompt_logprobs
from pilotfish.cli.options import broker_options, client_from
from pilotfish.result import Result
from pilotfish_broker.spec import Status


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
    """Print the output of a job that has ended; all samples, or that of one sample's id.

    \b
    Example:
      pilotfish results 5f0c1d… --wait 60
    """
    with client_from(options) as client:
        show_result(client.job(job).wait(timeout=seconds), as_json=as_json)


def show_result(result: Result, *, as_json: bool) -> None:
    """Print a result: the text of each sample that succeeded, or all there is.

    Raises:
        JobFailed, JobCancelled, JobExpired: a sample did not succeed; the others are printed.
    """
    if not result.others:
        result.raise_for_status()
    if as_json:
        values = _values(result)
        if result.others:
            values["samples"] = [_values(sample) for sample in result.samples]
        click.echo(json.dumps(values, ensure_ascii=False))
    elif not result.others:
        click.echo(result.text)
    else:
        for sample in result.samples:
            show_heading(sample.sample)
            is_good = sample.status is Status.SUCCEEDED
            click.echo(sample.text if is_good else f"({sample.error or sample.status})")
    result.raise_for_status()


def show_heading(sample: int) -> None:
    """Print the line that stands before the text of one of several samples."""
    click.echo(f"==> sample {sample} <==")


def _values(result: Result) -> dict[str, Any]:
    """One sample as JSON has it."""
    values = {item.name: getattr(result, item.name) for item in fields(result)}
    del values["others"]
    return values | {
        "completion_tokens": result.completion_tokens,
        "logprobs": chat_logprobs(result.logprobs)["content"],
        "prompt_logprobs": prompt_logprobs(result.prompt_logprobs),
    }
