"""pilotfish submit: one job for a deployment."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from pilotfish.cli.options import broker_options, client_from
from pilotfish.cli.results import show_result
from pilotfish_broker.errors import InvalidRequest
from pilotfish_broker.spec import Prompt, SamplingParams


@click.command()
@click.argument("text", required=False)
@click.option("--file", "path", metavar="FILE", help="Read the prompt from a file (-: stdin).")
@click.option("--chat", is_flag=True, help="Send it as a user's message, in the model's template.")
@click.option("--model", metavar="NAME", help="Served name; not needed where there is one only.")
@click.option("--max-tokens", type=int, default=256, show_default=True, metavar="N")
@click.option("--priority", type=int, default=0, show_default=True, help="-100 to 100.")
@click.option("--wait-for-model", is_flag=True, help="Queue it even if nobody ever served MODEL.")
@click.option("--stream", is_flag=True, help="Print the output as it comes.")
@click.option("--wait", is_flag=True, help="Wait for the end and print the output.")
@click.option("--json", "as_json", is_flag=True, help="With --wait: print all of it as JSON.")
@broker_options
def submit(text: str | None, path: str | None, chat: bool, **options: Any) -> None:
    """Queue one prompt and print the job's id. Decoding is greedy.

    \b
    Example:
      pilotfish submit "Why is the sky blue?" --chat --stream --broker redis://host:6379/0
    """
    prompt: Prompt = read_prompt(text, path)
    if chat:
        prompt = [{"role": "user", "content": str(prompt)}]
    with client_from({name: options[name] for name in ("broker_url", "namespace")}) as client:
        job = client.submit(
            prompt,
            SamplingParams(max_tokens=options["max_tokens"]),
            model=options["model"],
            priority=options["priority"],
            wait_for_model=options["wait_for_model"],
        )
        if options["stream"]:
            click.echo(job.id, err=True)
            for chunk in job.stream():
                click.echo(chunk.text, nl=False)
            click.echo()
        elif options["wait"]:
            click.echo(job.id, err=True)
            show_result(job.result(), as_json=options["as_json"])
        else:
            click.echo(job.id)


def read_prompt(text: str | None, path: str | None) -> str:
    """The prompt from the argument or from a file; exactly one of them is given.

    Raises:
        InvalidRequest: both or neither are given, or the file is not UTF-8.
        OSError: the file cannot be read.
    """
    if (text is None) == (path is None):
        raise InvalidRequest("give the prompt either as an argument or with --file")
    if path is None:
        return str(text)
    raw = sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
    try:
        return raw.decode()
    except UnicodeDecodeError:
        raise InvalidRequest(f"{path} is not UTF-8") from None
