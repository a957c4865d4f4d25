"""An engine that hangs ends its process, and its jobs go on elsewhere."""

from __future__ import annotations

from pathlib import Path

import pytest

from pilotfish import SamplingParams
from tests.acceptance.conftest import StartFleet
from tests.process_kit import Program, pilotfish, wait_until

pytestmark = pytest.mark.acceptance

ENGINE_DIED = 70
COMMON = ["--model", "sim", "--lease-seconds", "1.5"]


def test_a_hanging_engine_ends_its_process_and_the_job_finishes_elsewhere(
    start_fleet: StartFleet, tmp_path: Path
) -> None:
    fleet = start_fleet("hang", verify=["--target", "simulated:pass_ms=1", *COMMON])
    argv = pilotfish(
        "worker", "verify", *fleet.broker, "--target", "simulated:pass_ms=900000", *COMMON
    )
    hanging = Program("hanging", argv, tmp_path / "hanging.log", PILOTFISH_HANG_SECONDS="2")
    try:
        wait_until(lambda: fleet.client.workers(), "the worker to register", [hanging])
        job = fleet.client.submit("whatever", SamplingParams(max_tokens=8))
        assert hanging.wait() == ENGINE_DIED
        assert "hangs" in hanging.log.read_text()
        fleet.ensure(verify=1)
        assert job.result(timeout=60).completion_tokens == 8
        assert job.record().attempts == 1
    finally:
        hanging.kill()
