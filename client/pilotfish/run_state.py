"""The folder beside an output file that lets the same command continue after a kill."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Mapping
from pathlib import Path

from pilotfish.folder_lock import take_lock
from pilotfish_broker.errors import InvalidRequest

FORMAT = 2
IDENTITY = "run.json"


def run_key(identity: Mapping[str, str], nonce: str) -> str:
    """A name for a run: a hash of its input, of the arguments that shape its output, and of a
    random text, so that a new run never takes the results of an older one for its own."""
    text = json.dumps([dict(identity), nonce], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def job_id(key: str, custom_id: str) -> str:
    """The id of the same request's job in every continuation of a run."""
    return hashlib.sha256(f"{key}\n{custom_id}".encode()).hexdigest()[:24]


def input_digest(path: Path) -> str:
    """SHA-256 of the input file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


class RunState:
    """The state folder of one run, held by a lock for as long as any process of the run lives.

    The lock is an open file that the run's processes inherit: a command that follows a killed
    one waits until the last of that one's processes is gone.

    Attributes:
        folder: where logs and the embedded server keep their files.
        key: name of the run, see :func:`run_key`.
        is_new: whether there was nothing to continue.
    """

    def __init__(self, output: Path, identity: Mapping[str, str]) -> None:
        """Take the folder of `output`.

        Raises:
            InvalidRequest: another run owns the output, or it exists without a run to continue.
        """
        output = output.absolute()
        self.folder = output.with_name(output.name + ".pilotfish")
        self.is_new = True
        self._output = output
        self._had_output = os.path.lexists(output)
        busy = f"another run is writing {output}; wait for it or end it"
        self._lock = take_lock(self.folder, self._make_folder, busy)
        try:
            self.key = run_key(identity, self._check(identity))
        except BaseException:
            self.release()
            raise

    @property
    def lock(self) -> int:
        """File descriptor of the lock, for the processes of the run to inherit."""
        return self._lock

    def release(self) -> None:
        """Let go of the folder and leave it for a continuation."""
        os.close(self._lock)

    def remove(self) -> None:
        """Delete the folder: all of the run is in its output."""
        shutil.rmtree(self.folder)
        self.release()

    def remove_new_output(self) -> None:
        """Delete the output if this run made it; what was there before it stays, and so does
        whatever is no ordinary file."""
        if not self._had_output and self._output.is_file() and not self._output.is_symlink():
            self._output.unlink()

    def _make_folder(self) -> None:
        if not self._output.absolute().parent.is_dir():
            raise InvalidRequest(f"there is no folder {self._output.parent}")
        if self._output.exists() and not self._output.is_file():
            raise InvalidRequest(f"{self._output} is no ordinary file; choose another -o")
        has_output = self._output.exists() and self._output.stat().st_size > 0
        if has_output and not self.folder.is_dir():
            raise InvalidRequest(
                f"{self._output} exists and there is no run to continue; "
                "choose another -o, or delete it"
            )
        self.folder.mkdir(mode=0o700, exist_ok=True)

    def _check(self, identity: Mapping[str, str]) -> str:
        """Compare with what the folder was made for; gives the run's random text."""
        path = self.folder / IDENTITY
        mine = {"format": str(FORMAT), **identity}
        if not path.exists():
            nonce = secrets.token_hex(8)
            _write_durably(path, json.dumps({**mine, "nonce": nonce}, indent=2) + "\n")
            return nonce
        self.is_new = False
        theirs, nonce = self._read(path)
        changed = sorted(k for k in {*mine, *theirs} if mine.get(k) != theirs.get(k))
        if changed:
            raise InvalidRequest(
                f"{self._output} belongs to an unfinished run with other arguments "
                f"(different: {', '.join(changed)}); repeat that command to continue it, "
                f"choose another -o, or delete {self._remains()}"
            )
        return nonce

    def _read(self, path: Path) -> tuple[dict[str, str], str]:
        """What the folder was made for, and the run's random text."""
        try:
            theirs = json.loads(path.read_text())
            if theirs["format"] != str(FORMAT):
                raise ValueError("another format")
            nonce = theirs.pop("nonce")
        except (ValueError, KeyError, TypeError):  # torn by a power cut, or of another version
            raise InvalidRequest(
                f"{path} is damaged or of another version, so that run cannot be continued; "
                f"choose another -o, or delete {self._remains()}"
            ) from None
        return theirs, str(nonce)

    def _remains(self) -> str:
        """What has to go before a new run can have this output."""
        return f"{self.folder}" + (f" and {self._output}" if self._output.exists() else "")


def _write_durably(path: Path, text: str) -> None:
    """Write a file that is whole or missing after a power cut."""
    partial = path.with_suffix(".partial")
    with partial.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.rename(path)
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
