"""pilotfish submit: one job for a deployment."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from pilotfish.cli.options import (
    SAMPLING_DEFAULTS,
    broker_options,
    client_from,
    sampling_options,
)
from pilotfish.cli.results import show_heading, show_result
from pilotfish.job import Job
from pilotfish_broker.errors import InvalidRequest
from pilotfish_broker.spec import Prompt, SamplingParams


@click.command()
@click.argument("text", required=False)
@click.option("--file", "path", metavar="FILE", help="Read the prompt from a file (-: stdin).")
@click.option("--chat", is_flag=True, help="Send it as a user's message, in the model's template.")
@click.option("--model", metavar="NAME", help="Served name; not needed where there is one only.")
@sampling_options()
@click.option("--stop", multiple=True, metavar="TEXT", help="End the output there; repeatable.")
@click.option("-n", "--samples", type=int, default=1, show_default=True, help="Outputs to make.")
@click.option("--json-schema", metavar="FILE", help="The output is JSON by the schema in FILE.")
@click.option(
    "--rule",
    metavar="RULE",
    help="How drafted tokens are judged: rejection, block or coupled.  [default: coupled with a "
    "seed, else rejection]",
)
@click.option("--priority", type=int, default=0, show_default=True, help="-100 to 100.")
@click.option("--wait-for-model", is_flag=True, help="Queue it even if nobody ever served MODEL.")
@click.option("--stream", is_flag=True, help="Print the output as it comes.")
@click.option("--wait", is_flag=True, help="Wait for the end and print the output.")
@click.option("--json", "as_json", is_flag=True, help="With --wait: print all of it as JSON.")
@broker_options
def submit(text: str | None, path: str | None, chat: bool, **options: Any) -> None:
    """Queue one prompt and print the job's id. Without a temperature decoding is greedy.

    \b
    Example:
      pilotfish submit "Why is the sky blue?" --chat --stream --broker redis://host:6379/0
      pilotfish submit "Once upon a time" --temperature 0.8 --seed 7 -n 3 --wait
    """
    prompt: Prompt = read_prompt(text, path)
    if chat:
        prompt = [{"role": "user", "content": str(prompt)}]
    params = read_sampling(options)
    with client_from({name: options[name] for name in ("broker_url", "namespace")}) as client:
        job = client.submit(
            prompt,
            params,
            model=options["model"],
            priority=options["priority"],
            wait_for_model=options["wait_for_model"],
        )
        if options["stream"]:
            click.echo(job.id, err=True)
            show_streams(job, params.n)
        elif options["wait"]:
            click.echo(job.id, err=True)
            show_result(job.wait(), as_json=options["as_json"])
        else:
            click.echo(job.id)


def show_streams(job: Job, num_samples: int) -> None:
    """Print each sample as it comes, one after another."""
    for sample in range(num_samples):
        if num_samples > 1:
            show_heading(sample)
        for chunk in job.stream(sample=sample):
            click.echo(chunk.text, nl=False)
        click.echo()


def read_sampling(options: Mapping[str, Any]) -> SamplingParams:
    """Sampling parameters from the command's options.

    Raises:
        InvalidRequest: one cannot be used.
        OSError: the schema cannot be read.
    """
    given = {name: options[name] for name in SAMPLING_DEFAULTS if options[name] is not None}
    if options["json_schema"] is not None:
        given["json_schema"] = _read_text(options["json_schema"])
    return SamplingParams(**given, stop=options["stop"], n=options["samples"], rule=options["rule"])


def read_prompt(text: str | None, path: str | None) -> str:
    """The prompt from the argument or from a file; exactly one of them is given.

    Raises:
        InvalidRequest: both or neither are given, or the file is not UTF-8.
        OSError: the file cannot be read.
    """
    if (text is None) == (path is None):
        raise InvalidRequest("give the prompt either as an argument or with --file")
    return str(text) if path is None else _read_text(path)


def _read_text(path: str) -> str:
    raw = sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
    try:
        return raw.decode()
    except UnicodeDecodeError:
        raise InvalidRequest(f"{path} is not UTF-8") from None
