"""pilotfish status: the deployment, or one job."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import click

from pilotfish.cli.options import broker_options, client_from
from pilotfish.client import Client
from pilotfish_broker.records import JobRecord


@click.command()
@click.argument("job", required=False, metavar="[JOB]")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@broker_options
def status(job: str | None, as_json: bool, **options: Any) -> None:
    """Show workers and queues, or where one job stands.

    \b
    Example:
      pilotfish status --broker redis://host:6379/0
      pilotfish status 5f0c1d…
    """
    with client_from(options) as client:
        values = (
            _describe_job(client.job(job).record()) if job is not None else _describe_all(client)
        )
    if as_json:
        click.echo(json.dumps(values, ensure_ascii=False, indent=2))
    elif job is not None:
        for name, value in values.items():
            click.echo(f"{name:<16}{value}")
    else:
        _show_tables(values)


def _describe_job(record: JobRecord) -> dict[str, Any]:
    """What a reader wants to know of a job."""
    shown = asdict(record)
    for name in ("spec", "prompt_ids"):
        del shown[name]
    return {
        **shown,
        "model": record.spec.model,
        "priority": record.spec.priority,
        "group": record.spec.group,
        "prompt_tokens": len(record.prompt_ids or ()),
        "max_tokens": record.spec.params.max_tokens,
    }


def _describe_all(client: Client) -> dict[str, Any]:
    workers = [
        {
            "id": worker.id,
            "kind": worker.kind,
            "model": worker.model,
            "slots": worker.slots,
            "is_alive": worker.is_alive,
            **{k: v for k, v in worker.fields.items() if k not in ("kind", "model", "slots")},
        }
        for worker in client.workers()
    ]
    return {"workers": workers, "models": [asdict(queue) for queue in client.queues()]}


def _show_tables(values: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    workers = Table("worker", "kind", "model", "slots", "host", "pid", "state", title="workers")
    for worker in values["workers"]:
        state = "live" if worker["is_alive"] else "dead"
        cells = [worker["id"], worker["kind"], worker["model"], worker["slots"]]
        cells += [worker.get("host", ""), worker.get("pid", ""), worker.get("refused") or state]
        workers.add_row(*(str(cell) for cell in cells))
    queues = Table("model", "queued", "ringing", "running", title="jobs")
    for queue in values["models"]:
        queues.add_row(*(str(queue[name]) for name in ("model", "queued", "ringing", "running")))
    console.print(workers)
    console.print(queues)
