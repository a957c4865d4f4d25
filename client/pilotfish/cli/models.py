"""pilotfish models: the models that need no hub."""

from __future__ import annotations

import click

from pilotfish.cli.targets import run_module


@click.group()
def models() -> None:
    """List or prepare the default pair.

    \b
    Example:
      pilotfish models pull
      pilotfish run prompts.jsonl -o answers.jsonl --target SmolLM2-135M-Instruct
    """


@models.command("list")
def list_models() -> None:
    """List the known models, tab-separated: name, licence, size, folder."""
    click.echo(run_module("list"), nl=False)


@models.command()
@click.option("--force", is_flag=True, help="Make it again.")
def pull(force: bool) -> None:
    """Prepare the default target and print its folder; at once when it is there already."""
    click.echo(run_module("pull", *(["--force"] if force else [])), nl=False)
