"""pilotfish up: a whole deployment in the foreground."""

from __future__ import annotations

import os
import secrets
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click

from pilotfish.cli.options import settings_from, stack_options, without_servers, worker_options
from pilotfish.cli.progress import RunDisplay
from pilotfish.cli.signals import unwinding
from pilotfish.cli.targets import with_named_target, with_prepared_target
from pilotfish.embedded import EmbeddedStack, StackPlan
from pilotfish.embedded.valkey import free_port
from pilotfish.folder_lock import take_lock
from pilotfish.worker_command import Command, process_environment
from pilotfish_broker.errors import ConfigError
from pilotfish_broker.settings import Settings

TICK_SECONDS = 0.25


@click.command()
@click.option("--port", type=click.IntRange(1, 65535), metavar="N", help="Port of the server.")
@click.option("--flower", is_flag=True, help="Start the Flower dashboard too.")
@click.option(
    "--folder",
    type=click.Path(file_okay=False),
    metavar="DIR",
    help="Keep data and logs there; a temporary folder otherwise.",
)
@stack_options
@worker_options
def up(port: int | None, flower: bool, folder: str | None, **options: Any) -> None:
    """Start Valkey and workers, print the broker's URL, and stay until Ctrl-C.

    \b
    Example:
      pilotfish up --target SmolLM2-135M-Instruct
      export PILOTFISH_BROKER_URL=…            (as it prints)
      pilotfish submit "Why is the sky blue?" --chat --stream
    """
    if flower and find_spec("flower") is None:
        raise ConfigError("--flower needs flower; run: pip install 'pilotfish[monitor]'")
    settings = with_named_target(settings_from(options, without_servers()))
    with unwinding(), ExitStack() as cleanup:
        settings = with_prepared_target(settings)
        if folder is None:
            folder = cleanup.enter_context(tempfile.TemporaryDirectory(prefix="pilotfish-up-"))
        lock = cleanup.enter_context(locked(Path(folder).absolute()))
        plan = StackPlan(
            folder=Path(folder).absolute(),
            settings=settings,
            verify_workers=options["verify_workers"],
            draft_workers=options["draft_workers"],
            port=port or 0,
            keep=(lock,),
        )
        stack = cleanup.enter_context(EmbeddedStack(plan))
        with RunDisplay(0) as display:
            display.awaiting(stack.await_ready(), plan.wanted)
        _announce(stack, flower)
        while True:
            for name in stack.tick():
                click.echo(f"the {name} had died and was started again", err=True)
            time.sleep(TICK_SECONDS)


@contextmanager
def locked(folder: Path) -> Iterator[int]:
    """Make a folder and hold its lock: two servers would write the same files.

    Raises:
        InvalidRequest: another command uses it.
    """

    def make() -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    busy = f"another pilotfish uses {folder}; end it, or choose another --folder"
    lock = take_lock(folder, make, busy)
    try:
        yield lock
    finally:
        os.close(lock)


def _announce(stack: EmbeddedStack, has_flower: bool) -> None:
    click.echo(f"model   {stack.settings.served_name}")
    click.echo(f"logs    {stack.log_folder}")
    click.echo(f"broker  {stack.settings.broker_url}")
    if has_flower:
        password, port = secrets.token_urlsafe(12), free_port()
        settings = stack.settings
        stack.run_beside("flower", lambda: flower_command(settings, password, port))
        click.echo(f"flower  http://127.0.0.1:{port}  user pilotfish, password {password}")
    click.echo("Ctrl-C ends all of it")


def flower_command(settings: Settings, password: str, port: int) -> Command:
    """How to start Flower for a deployment; secrets go by environment, not by argument."""
    app = "pilotfish.embedded.monitor_app"
    argv = [sys.executable, "-m", "celery", "--app", app, "flower"]
    argv += ["--address=127.0.0.1", f"--port={port}", "--purge_offline_workers=8"]
    environ = process_environment(settings)
    environ["FLOWER_BASIC_AUTH"] = f"pilotfish:{password}"
    return Command(argv, environ)
