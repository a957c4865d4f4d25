"""pilotfish cancel."""

from __future__ import annotations

from typing import Any

import click

from pilotfish.cli.options import broker_options, client_from

WORDS = {
    "cancelled": "cancelled",
    "flagged": "its worker drops it within a round",
    "ended": "had ended before",
}


@click.command()
@click.argument("jobs", nargs=-1, required=True, metavar="JOB…")
@broker_options
def cancel(jobs: tuple[str, ...], **options: Any) -> None:
    """Cancel jobs by their ids.

    \b
    Example:
      pilotfish cancel 5f0c1d…
    """
    with client_from(options) as client:
        for job in jobs:
            click.echo(f"{job}  {WORDS[client.cancel(job)]}")
