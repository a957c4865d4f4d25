"""Entries of the Celery queues that are no messages are dropped; the workers live on."""

from __future__ import annotations

from typing import Any

import pytest

from pilotfish import SamplingParams
from pilotfish_broker.keys import Keys, draft_queue, verify_queue
from tests.acceptance.conftest import StartFleet
from tests.process_kit import wait_until

pytestmark = pytest.mark.acceptance

RUBBISH = [
    "garbage",
    b"\xff\xfe\x00",
    "{}",
    "[]",
    "null",
    '{"body": 7, "properties": {}}',
    "{" * 999,
]
SIMULATED = ["--target", "simulated:pass_ms=1", "--model", "sim"]


def test_rubbish_in_the_queues_ends_no_worker(start_fleet: StartFleet, redis_client: Any) -> None:
    fleet = start_fleet("rubbish", verify=SIMULATED, draft=[*SIMULATED, "--draft", "ngram"])
    fleet.ensure(verify=1, draft=1)
    keys = Keys(fleet.namespace)
    programs = [*fleet.running("verify"), *fleet.running("draft")]
    for queue in (verify_queue("sim"), draft_queue("sim")):
        for entry in RUBBISH:
            redis_client.lpush(keys.celery_queue(queue), entry)
    for queue in (verify_queue("sim"), draft_queue("sim")):
        wait_until(
            lambda queue=queue: not redis_client.llen(keys.celery_queue(queue)),
            "the queue to be read",
            programs,
        )
    job = fleet.client.submit("after all that", SamplingParams(max_tokens=20))
    assert job.result(timeout=60).completion_tokens == 20
    assert all(program.is_running for program in programs)
    assert "no message" in programs[0].log.read_text()
