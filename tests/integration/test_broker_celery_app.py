"""How Celery's transport reaches the server: sockets and certificates."""

from __future__ import annotations

import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pilotfish_broker.celery_app import GENERATE, make_app, ring, transport_url
from pilotfish_broker.connection import check_server, connect
from pilotfish_broker.keys import Keys
from pilotfish_broker.settings import Settings

pytestmark = pytest.mark.integration


def test_a_unix_socket_serves_both_planes(start_valkey: Callable[..., Any], tmp_path: Path) -> None:
    path = tmp_path / "valkey.sock"
    start_valkey(unixsocket=str(path))
    url = f"unix://{path}?db=2"
    client = connect(url)
    check_server(client, url)
    app = make_app(Settings.from_env({}, broker_url=url))
    ring(app, GENERATE, "verify.m", "job-1", task_id="job-1")
    app.pool.force_close_all()
    assert client.llen(Keys().celery_queue("verify.m")) == 1
    client.close()


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("redis://host:1/0", "redis://host:1/0"),
        ("unix:///run/valkey.sock", "redis+socket:///run/valkey.sock"),
        ("unix://:pw@/run/v.sock?db=3", "redis+socket://:pw@/run/v.sock?virtual_host=3"),
    ],
)
def test_urls_are_translated_for_the_transport(url: str, expected: str) -> None:
    assert transport_url(url) == expected


def test_certificates_are_checked_unless_the_url_says_otherwise() -> None:
    plain = make_app(Settings.from_env({}, broker_url="rediss://host:6379/0"))
    assert plain.connection_for_write().ssl == {"ssl_cert_reqs": ssl.CERT_REQUIRED}
    chosen = make_app(
        Settings.from_env({}, broker_url="rediss://host:6379/0?ssl_cert_reqs=required")
    )
    assert chosen.connection_for_write().ssl["ssl_cert_reqs"] == ssl.CERT_REQUIRED
