"""The command that starts one worker, the same for people, containers and the embedded stack."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields
from importlib.util import find_spec
from typing import Literal

from pilotfish_broker.errors import ConfigError
from pilotfish_broker.settings import PREFIX, Settings

Kind = Literal["verify", "draft"]
KINDS: tuple[Kind, ...] = ("verify", "draft")


@dataclass(frozen=True, slots=True)
class Command:
    """A command line, and the whole environment to run it in."""

    argv: list[str]
    environ: dict[str, str]


def worker_command(
    kind: Kind,
    settings: Settings,
    *,
    log_level: str = "INFO",
    environ: Mapping[str, str] | None = None,
) -> Command:
    """How to start a Celery worker of `kind` with `settings`.

    Raises:
        ConfigError: no served name follows from the settings, or packages are missing.
    """
    _ = settings.served_name  # a worker without a name to serve is refused before it starts
    require_worker_packages()
    app = f"pilotfish_workers.{kind}.app"
    name = f"{kind}-{secrets.token_hex(4)}@%h"
    argv = [sys.executable, "-m", "celery", "--app", app, "worker", "--pool", "threads"]
    argv += ["--concurrency", str(settings.slots), "--hostname", name]
    argv += ["--without-gossip", "--without-mingle", "--task-events", "--loglevel", log_level]
    return Command(argv, process_environment(settings, environ))


def process_environment(
    settings: Settings, environ: Mapping[str, str] | None = None
) -> dict[str, str]:
    """An environment in which another process builds exactly `settings`."""
    environ = os.environ if environ is None else environ
    ours = {PREFIX + item.name.upper() for item in fields(Settings)}
    values = {name: value for name, value in environ.items() if name not in ours}
    values |= settings.as_env()
    # Thread pools that spin while they wait slow each other down a hundredfold.
    values.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    values.setdefault("TOKENIZERS_PARALLELISM", "false")
    if settings.threads:
        values["OMP_NUM_THREADS"] = values["MKL_NUM_THREADS"] = str(settings.threads)
    return values


def require_worker_packages() -> None:
    """Say what to install where a worker cannot run.

    Raises:
        ConfigError: torch or transformers is missing.
    """
    missing = [name for name in ("torch", "transformers") if find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"a worker needs {' and '.join(missing)}; run: pip install 'pilotfish[worker]'"
        )
