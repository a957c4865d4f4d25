"""Broker and job records on two servers: the doorbells' trouble is not the jobs'."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pilotfish import Client, SamplingParams
from tests.process_kit import Program, pilotfish, wait_until

pytestmark = pytest.mark.acceptance

LEASE_SECONDS = 1.5


def test_a_frozen_broker_costs_no_lease_and_no_running_job(
    start_valkey: Callable[..., Any], tmp_path: Path
) -> None:
    broker, data = start_valkey(), start_valkey()
    argv = pilotfish(
        *("worker", "verify", "--broker", broker.url, "--model", "sim"),
        *("--target", "simulated:pass_ms=20", "--lease-seconds", str(LEASE_SECONDS)),
    )
    worker = Program("worker", argv, tmp_path / "worker.log", PILOTFISH_DATA_URL=data.url)
    client = Client(broker.url, data_url=data.url)
    try:
        wait_until(client.workers, "the worker to register", [worker])
        job = client.submit("long", SamplingParams(max_tokens=300))
        wait_until(lambda: job.record().committed > 5, "the job to be under way", [worker])
        broker.send(signal.SIGSTOP)
        try:
            ends = time.monotonic() + 4 * LEASE_SECONDS
            while time.monotonic() < ends:
                assert [record.is_alive for record in client.workers()] == [True]
                time.sleep(0.1)
        finally:
            broker.send(signal.SIGCONT)
        assert job.result(timeout=60).completion_tokens == 300
        assert job.record().epoch == 1
        after = client.submit("after", SamplingParams(max_tokens=3))
        assert after.result(timeout=60).completion_tokens == 3
        worker.send(signal.SIGTERM)
        assert worker.wait() == 0
    finally:
        worker.kill()
        client.close()
