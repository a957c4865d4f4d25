"""Fixtures of the broker's integration tests."""

from __future__ import annotations

from typing import Any

import pytest

from pilotfish_broker.keys import Keys
from pilotfish_broker.settings import Settings
from tests.broker_kit import Bench


@pytest.fixture
def bench(redis_client: Any, keys: Keys, settings: Settings) -> Bench:
    """Records, workers, dispatcher and reaper on the shared server, emptied for this test."""
    return Bench(redis_client, keys, settings)
