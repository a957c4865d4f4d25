"""`celery inspect active` and Flower list the jobs of both kinds of worker, one row a job, also
when a doorbell rings twice; and nothing they show holds a prompt.

Two verify workers and one draft worker with simulated models, whose passes take a given time.
"""

from __future__ import annotations

import base64
import json
import socket
import subprocess
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from pilotfish import Job, SamplingParams
from pilotfish.connection import close_app
from pilotfish_broker.celery_app import DRAFT, GENERATE, make_app, ring
from pilotfish_broker.keys import draft_queue, verify_queue
from pilotfish_broker.settings import Settings
from tests.acceptance.conftest import StartFleet
from tests.fleet_kit import Fleet
from tests.process_kit import Program, celery, environment, wait_until

MODEL = "sim"
SECRET = "xyzzy-plugh-42"
CREDENTIALS = "somebody:a-password"
JOBS = 6

pytestmark = [pytest.mark.acceptance, pytest.mark.slow, pytest.mark.integration]


@pytest.fixture(scope="module")
def fleet(start_fleet: StartFleet) -> Fleet:
    common = ["--target", "simulated:pass_ms=20", "--model", MODEL, "--slots", "8"]
    draft = [*common, "--draft", "simulated:pass_ms=1"]
    fleet = start_fleet("tools", verify=common, draft=draft)
    fleet.ensure(verify=2, draft=1)
    return fleet


@dataclass(frozen=True, slots=True)
class Flower:
    """A running Flower and its API."""

    program: Program
    url: str

    def get(self, path: str, credentials: str = CREDENTIALS) -> Any:
        request = urllib.request.Request(self.url + path)
        code = base64.b64encode(credentials.encode()).decode()
        request.add_header("Authorization", f"Basic {code}")
        with urllib.request.urlopen(request, timeout=30) as answer:
            return json.loads(answer.read())

    def tasks(self) -> dict[str, dict[str, Any]]:
        found: dict[str, dict[str, Any]] = self.get("/api/tasks")
        return found

    def is_watching(self, workers: int) -> bool:
        """Whether it has heard of so many workers."""
        try:
            return len(self.get("/api/workers?refresh=1")) >= workers
        except (urllib.error.URLError, ConnectionError):
            return False


@pytest.fixture(scope="module")
def flower(fleet: Fleet, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Flower]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    argv = celery("verify", "flower", "--address=127.0.0.1", f"--port={port}")
    log = tmp_path_factory.mktemp("flower") / "flower.log"
    program = Program("flower", [*argv, f"--basic_auth={CREDENTIALS}"], log, **fleet.variables)
    flower = Flower(program, f"http://127.0.0.1:{port}")
    try:
        wait_until(lambda: flower.is_watching(3), "Flower to see all workers", [program])
        yield flower
    finally:
        program.kill()


def submit(fleet: Fleet, name: str, max_tokens: int) -> list[Job]:
    params = SamplingParams(max_tokens=max_tokens, speculation=1)
    client = fleet.client
    prompts = {f"{name}{number}": f"{SECRET} {number}" for number in range(JOBS)}
    return [client.submit(text, params, model=MODEL, id=job) for job, text in prompts.items()]


def await_drafting(fleet: Fleet, jobs: list[Job]) -> None:
    """Wait until every job runs and is drafted for."""
    ids = [job.id for job in jobs]

    def is_drafting() -> bool:
        return all(r is not None and r.accepted > 0 for r in fleet.client.records(ids))

    wait_until(is_drafting, "drafts for every job", fleet.running("verify"))


def ring_again(fleet: Fleet, jobs: list[Job]) -> None:
    """Deliver every doorbell once more."""
    settings = Settings.from_env({}, broker_url=fleet.url, namespace=fleet.namespace)
    app = make_app(settings)
    for job in jobs:
        ring(app, GENERATE, verify_queue(MODEL), job.id, task_id=job.id)
        ring(app, DRAFT, draft_queue(MODEL), job.id, task_id=f"{job.id}-draft")
    close_app(app)


def await_delivery(fleet: Fleet, valkey: Any) -> None:
    """Wait until no doorbell is left in the queues."""
    with valkey.client() as redis:
        queues = [f"{fleet.namespace}:broker:{name(MODEL)}" for name in (verify_queue, draft_queue)]
        wait_until(lambda: not any(redis.llen(queue) for queue in queues), "empty queues")


def inspect_active(app: str, fleet: Fleet) -> list[dict[str, Any]]:
    """The rows of `celery inspect active` of all workers."""
    workers = ",".join(fleet.node_names())
    done = subprocess.run(
        # where it knows whom to wait for, it does not wait for the time to pass
        celery(app, "inspect", "active", "--json", "--timeout", "20", "--destination", workers),
        env=environment(**fleet.variables),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert SECRET not in done.stdout
    answer = json.loads(done.stdout[done.stdout.index("{") :])
    assert len(answer) == 3, "not all workers answered"
    return [row for rows in answer.values() for row in rows]


def names(rows: list[dict[str, Any]]) -> Counter[tuple[str, str]]:
    return Counter((row["name"], row["id"]) for row in rows)


def expected(jobs: list[Job]) -> Counter[tuple[str, str]]:
    """One row a job and kind."""
    return Counter(
        [(GENERATE, job.id) for job in jobs] + [(DRAFT, f"{job.id}-draft") for job in jobs]
    )


def test_inspect_lists_one_row_a_job_of_each_kind_also_when_doorbells_ring_twice(
    fleet: Fleet, valkey: Any
) -> None:
    jobs = submit(fleet, "inspected", max_tokens=2000)
    await_drafting(fleet, jobs)
    assert names(inspect_active("verify", fleet)) == expected(jobs)
    ring_again(fleet, jobs)
    await_delivery(fleet, valkey)
    assert names(inspect_active("draft", fleet)) == expected(jobs)
    for job in jobs:
        assert job.record().epoch == 1
        assert job.cancel() == "flagged"
    for job in jobs:
        assert job.wait(timeout=60).status == "cancelled"
    wait_until(lambda: not inspect_active("verify", fleet), "free slots", fleet.running("verify"))


def test_flower_lists_one_row_a_job_of_each_kind_and_no_prompt(
    fleet: Fleet, flower: Flower, valkey: Any
) -> None:
    jobs = submit(fleet, "watched", max_tokens=250)
    await_drafting(fleet, jobs)
    ring_again(fleet, jobs)
    await_delivery(fleet, valkey)
    rows = {f"{job.id}": GENERATE for job in jobs} | {f"{job.id}-draft": DRAFT for job in jobs}
    during = wait_until(lambda: started(flower, rows), "a STARTED row for each", [flower.program])
    assert {name: row["name"] for name, row in during.items()} == rows
    for job in jobs:
        assert job.result(timeout=60).completion_tokens == 250
    ring_again(fleet, jobs)  # too late: nothing may start again
    await_delivery(fleet, valkey)
    wait_until(lambda: succeeded(flower, rows), "all rows to succeed", [flower.program])
    found = watched(flower)
    assert {name: row["name"] for name, row in found.items()} == rows
    assert SECRET not in json.dumps(flower.tasks())
    kinds = {(row["name"], row["worker"].split("-")[0]) for row in found.values()}
    assert kinds == {(GENERATE, "verify"), (DRAFT, "draft")}


def watched(flower: Flower) -> dict[str, dict[str, Any]]:
    return {name: row for name, row in flower.tasks().items() if name.startswith("watched")}


def started(flower: Flower, rows: dict[str, str]) -> dict[str, dict[str, Any]]:
    """The rows of Flower if all of `rows` are there and run; else nothing."""
    found = watched(flower)
    is_complete = found.keys() == rows.keys()
    is_running = all(row["state"] == "STARTED" for row in found.values())
    return found if is_complete and is_running else {}


def succeeded(flower: Flower, rows: dict[str, str]) -> bool:
    return [row["state"] for row in watched(flower).values()] == ["SUCCESS"] * len(rows)


def test_flower_wants_the_password(flower: Flower) -> None:
    with pytest.raises(urllib.error.HTTPError) as refusal:
        flower.get("/api/tasks", credentials="somebody:else")
    with refusal.value as answer:
        assert answer.code == 401
