"""The command line. Each command has a file of its own."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

import click

from pilotfish.cli.cancel import cancel
from pilotfish.cli.demo import demo
from pilotfish.cli.models import models
from pilotfish.cli.results import results
from pilotfish.cli.run import run
from pilotfish.cli.status import status
from pilotfish.cli.submit import submit
from pilotfish.cli.up import up
from pilotfish.cli.worker import worker
from pilotfish_broker.errors import (
    BrokerMisconfigured,
    BrokerUnavailable,
    ConfigError,
    InvalidRequest,
    PilotfishError,
)

FAILED = 1
BAD_INPUT = 2
NO_BROKER = 3
INTERRUPTED = 130


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="pilotfish")
def cli() -> None:
    """Exact speculative decoding as a distributed batch system.

    \b
    A file of prompts, on this machine:
      pilotfish run prompts.jsonl -o answers.jsonl --target MODEL
    The same on a deployment:
      pilotfish run prompts.jsonl -o answers.jsonl --broker redis://host:6379/0
    To see it work:
      pilotfish demo

    \b
    Every setting is also an environment variable, PILOTFISH_ and the option's name in capitals
    (PILOTFISH_TARGET for --target); PILOTFISH_BROKER_URL stands for --broker, except in run, demo
    and up, which start a broker of their own; `run --broker env` uses it.

    \b
    Exit status:
      0    all is done
      1    something failed, some jobs of a run for instance
      2    wrong input, option or setting; no job was submitted, unless it was a worker that
           refused its settings later
      3    the broker does not answer, or is set up in a way that loses jobs
      130  interrupted (143: terminated)
    """


for command in (run, demo, up, worker, submit, status, results, cancel, models):
    cli.add_command(command)


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and exit."""
    sys.exit(run_command(arguments))


def run_command(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; gives the exit status. Errors of ours become one line each."""
    # what the broker side logs is for workers' logs; people get the lines that commands print
    logging.getLogger("pilotfish_broker").addHandler(logging.NullHandler())
    try:
        outcome = cli.main(arguments, prog_name="pilotfish", standalone_mode=False)
        return outcome if isinstance(outcome, int) else 0
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        return _complain("interrupted", INTERRUPTED)
    except (BrokerUnavailable, BrokerMisconfigured) as error:
        return _complain(str(error), NO_BROKER)
    except (ConfigError, InvalidRequest) as error:
        return _complain(str(error), BAD_INPUT)
    except PilotfishError as error:
        return _complain(str(error), FAILED)
    except BrokenPipeError:
        # whoever read our output has had enough; keep the interpreter from flushing into it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        return _complain(f"{where}{error.strerror or error}", FAILED)


def _complain(text: str, status: int) -> int:
    click.echo(f"pilotfish: {text}", err=True)
    return status
