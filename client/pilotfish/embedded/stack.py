"""Valkey and workers as children of this process: started, awaited, looked after, ended."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import TracebackType

from pilotfish.client import Client
from pilotfish.embedded.lifeline import Lifeline
from pilotfish.embedded.previous import release_previous
from pilotfish.embedded.supervisor import ProcessFailed, Supervisor, tail
from pilotfish.embedded.valkey import EmbeddedValkey
from pilotfish.worker_command import KINDS, Command, Kind, require_worker_packages, worker_command
from pilotfish_broker.errors import BrokerUnavailable, ConfigError
from pilotfish_broker.leases import WorkerRecord
from pilotfish_broker.settings import Settings

POLL_SECONDS = 0.1
LOOK_SECONDS = 2.0
SERVER_SECONDS = 60.0
PORT_TRIES = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class StackPlan:
    """What an embedded stack consists of.

    Attributes:
        folder: for logs and the server's data.
        settings: of the workers, but for the URLs; `threads` 0 shares the cores out.
        verify_workers, draft_workers: how many of each.
        port: of the server; 0 takes a free one.
        keep: descriptors that all children inherit.
    """

    folder: Path
    settings: Settings
    verify_workers: int = 1
    draft_workers: int = 1
    port: int = 0
    keep: tuple[int, ...] = ()

    @property
    def wanted(self) -> dict[str, int]:
        """Workers of each kind; none drafts where drafting is off."""
        drafts = self.settings.draft != "off" and self.settings.speculation != "off"
        return {"verify": self.verify_workers, "draft": self.draft_workers if drafts else 0}


class EmbeddedStack:
    """The running stack of a plan; a context manager. Use it from the main thread."""

    def __init__(self, plan: StackPlan) -> None:
        """Check what can be checked before a process starts.

        Raises:
            ConfigError: a package or a name is missing.
        """
        require_worker_packages()
        _ = plan.settings.served_name
        self._plan = plan
        self._server = EmbeddedValkey(plan.folder / "valkey", plan.port)
        self._lifeline = Lifeline(plan.keep)
        self._supervisor = Supervisor(self._lifeline)
        self._settings = plan.settings
        self._client: Client | None = None
        self._next_look = 0.0
        self._is_complete = False

    def __enter__(self) -> EmbeddedStack:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def settings(self) -> Settings:
        """Settings of the workers and of clients, URLs included."""
        return self._settings

    @property
    def log_folder(self) -> Path:
        """Where the children's logs are."""
        return self._plan.folder / "logs"

    @property
    def client(self) -> Client:
        """A client of the stack."""
        if self._client is None:
            self._client = Client.from_settings(self._settings)
        return self._client

    def start(self) -> None:
        """Start server and workers; the workers are not ready yet when this returns.

        Raises:
            ProcessFailed: the server does not come up.
        """
        self.log_folder.mkdir(parents=True, exist_ok=True)
        self._start_server()
        self._settings = replace(self._plan.settings, broker_url=self._server.url, data_url=None)
        release_previous(self._settings)
        for kind in KINDS:
            count = self._plan.wanted[kind]
            settings = replace(self._settings, threads=self._threads(kind))
            for number in range(1, count + 1):
                name = f"{kind} worker" if count == 1 else f"{kind} worker {number}"
                log = self.log_folder / f"{kind}-{number}.log"
                self._supervisor.start(name, partial(worker_command, kind, settings), log)

    def run_beside(self, name: str, command: Callable[[], Command]) -> None:
        """Keep a further process alive beside the workers."""
        self._supervisor.start(name, command, self.log_folder / f"{name}.log")

    def tick(self) -> list[str]:
        """Look after the children; returns the names of those started again.

        Raises:
            ConfigError: a worker refused its settings, or to work with the others.
            ProcessFailed: a child died too often.
        """
        restarted = self._supervisor.tick()
        now = time.monotonic()
        if self._client is not None and now >= self._next_look:
            self._next_look = now + LOOK_SECONDS
            with suppress(BrokerUnavailable):  # its users will notice by themselves
                refuse_refusals(self._client.workers())
        return restarted

    def await_ready(self) -> Iterator[dict[str, int]]:
        """Wait until all workers are registered; yields how many are, some times a second.

        Raises:
            ConfigError, ProcessFailed: as :meth:`tick`.
        """
        while True:
            self.tick()
            workers = []
            with suppress(BrokerUnavailable):  # a server that died is being started again
                workers = self.client.workers()
            refuse_refusals(workers)  # without waiting for the next look of tick
            ready = {
                kind: sum(worker.kind == kind and worker.is_alive for worker in workers)
                for kind in self._plan.wanted
            }
            yield ready
            if all(ready[kind] >= count for kind, count in self._plan.wanted.items()):
                return
            time.sleep(POLL_SECONDS)

    def mark_complete(self) -> None:
        """All that anybody wanted is done: closing need not let workers take their leave, which
        costs Celery some seconds."""
        self._is_complete = True

    def close(self) -> None:
        """End all children, the server last; interrupted again, it kills them at once."""
        try:
            if self._client is not None:
                self._client.close()
            if not self._is_complete:
                self._supervisor.stop()
        finally:
            self._supervisor.kill()
            self._lifeline.close()

    def _start_server(self) -> None:
        log = self.log_folder / "valkey.log"
        for _ in range(PORT_TRIES):
            self._supervisor.start("server", self._server.command, log)
            deadline = time.monotonic() + SERVER_SECONDS
            while time.monotonic() < deadline and self._supervisor.is_running("server"):
                if self._server.answers():
                    return
                time.sleep(POLL_SECONDS / 4)
            self._supervisor.kill()
            if "Address already in use" not in tail(log):
                break
            self._server.choose_port()  # somebody was faster
        raise ProcessFailed(f"the embedded server does not start:\n{tail(log)}")

    def _threads(self, kind: Kind) -> int:
        """Threads of one worker: the cores, shared by those workers that run a model."""
        settings = self._plan.settings
        if settings.threads:
            return settings.threads
        drafts_by_model = settings.draft not in ("ngram", "off")
        if kind == "draft" and not drafts_by_model:
            return 1
        wanted = self._plan.wanted
        sharing = wanted["verify"] + (wanted["draft"] if drafts_by_model else 0)
        return max(1, usable_cores() // max(1, sharing))


def refuse_refusals(workers: list[WorkerRecord]) -> None:
    """Pass on what a worker reports to be wrong.

    Raises:
        ConfigError: one refuses to work with the others.
    """
    for worker in workers:
        if refusal := worker.fields.get("refused"):
            raise ConfigError(f"the {worker.kind} worker refuses to serve: {refusal}")


def usable_cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
