"""pilotfish worker: becomes one Celery worker."""

from __future__ import annotations

import os
import sys
from typing import Any

import click

from pilotfish.cli.options import broker_options, settings_from, worker_options
from pilotfish.cli.targets import (
    note_hub_ids,
    with_named_target,
    with_prepared_target,
    with_served_name,
)
from pilotfish.worker_command import Kind, worker_command

LOG_LEVEL = click.option(
    "--log-level",
    type=click.Choice(["DEBUG", "INFO", "WARNING", "ERROR"], case_sensitive=False),
    default="INFO",
    show_default=True,
)


@click.group()
def worker() -> None:
    """Start one worker of either kind; start as many as you like.

    \b
    Example:
      pilotfish worker verify --target MODEL --broker redis://host:6379/0
      pilotfish worker draft  --target MODEL --draft ngram --broker redis://host:6379/0
    """


@worker.command()
@worker_options
@broker_options
@LOG_LEVEL
def verify(log_level: str, **options: Any) -> None:
    """Run the target model: verify drafted tokens, commit output.

    This replaces itself by `celery --app pilotfish_workers.verify.app worker …`.
    """
    become("verify", log_level, options)


@worker.command()
@worker_options
@broker_options
@LOG_LEVEL
def draft(log_level: str, **options: Any) -> None:
    """Draft tokens for the verify workers of one model.

    --target or --model names the model whose jobs it drafts for; the target itself need not be
    on this machine. This replaces itself by
    `celery --app pilotfish_workers.draft.app worker …`.
    """
    become("draft", log_level, options)


def become(kind: Kind, log_level: str, options: dict[str, Any]) -> None:
    """Replace this process by a Celery worker, so that signals and exit status are its own."""
    settings = settings_from(options)
    if kind == "draft":
        settings = with_served_name(settings)
        note_hub_ids(settings.draft)
    elif settings.target is not None:
        settings = with_prepared_target(with_named_target(settings))
    command = worker_command(kind, settings, log_level=log_level.upper())
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(command.argv[0], command.argv, command.environ)
