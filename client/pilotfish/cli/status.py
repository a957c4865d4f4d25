"""pilotfish status: the deployment, or one job."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import click

from pilotfish.cli.options import broker_options, client_from
from pilotfish.client import Client
from pilotfish.samples import overall, sample_ids
from pilotfish_broker.records import JobRecord


@click.command()
@click.argument("job", required=False, metavar="[JOB]")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@broker_options
def status(job: str | None, as_json: bool, **options: Any) -> None:
    """Show workers and queues, or where one job and each of its samples stands.

    \b
    Example:
      pilotfish status --broker redis://host:6379/0
      pilotfish status 5f0c1d…
    """
    with client_from(options) as client:
        values = _describe_all(client) if job is None else _describe_job(client, job)
    if as_json:
        click.echo(json.dumps(values, ensure_ascii=False, indent=2))
    elif job is not None:
        _show_job(values)
    else:
        _show_tables(values)


def _describe_job(client: Client, job: str) -> dict[str, Any]:
    """What a reader wants to know of a job: its own record, and where its samples stand."""
    record = client.job(job).record()
    values = _describe_record(record)
    ids = sample_ids(job, record.spec)
    if len(ids) == 1:
        return values
    # a sample that ended long ago may be gone already
    others = [found for found in client.records(ids[1:]) if found is not None]
    samples = [record, *others]
    return {
        **values,
        "status": overall(sample.status for sample in samples),
        "samples": [
            {
                "id": sample.id,
                "status": sample.status,
                "committed": sample.committed,
                "finish_reason": sample.finish_reason,
                "error": sample.error,
            }
            for sample in samples
        ],
    }


def _show_job(values: dict[str, Any]) -> None:
    for name, value in values.items():
        if name != "samples":
            click.echo(f"{name:<16}{value}")
    for sample in values.get("samples", ()):
        reason = sample["error"] or sample["finish_reason"]
        words = f"{sample['status']}, {sample['committed']} tokens"
        click.echo(f"{sample['id']:<32}{words}{f', {reason}' if reason else ''}")


def _describe_record(record: JobRecord) -> dict[str, Any]:
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
        "temperature": record.spec.params.temperature,
        "rule": record.spec.params.chosen_rule,
        "sample": record.spec.sample,
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
