"""Fixtures of the acceptance tests: fleets of real workers on the shared server."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fleet_kit import Fleet

StartFleet = Callable[..., Fleet]


@pytest.fixture(scope="module")
def start_fleet(valkey: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[StartFleet]:
    """Makes fleets: ``start_fleet("name", verify=[options], draft=[options])``.

    No worker runs until the fleet is asked for some; all end with the module's tests.
    """
    fleets: list[Fleet] = []

    def start(namespace: str, **options: list[str]) -> Fleet:
        folder: Path = tmp_path_factory.mktemp(namespace)
        fleets.append(Fleet(valkey.url, namespace, folder, options))
        return fleets[-1]

    yield start
    for fleet in fleets:
        fleet.close()
