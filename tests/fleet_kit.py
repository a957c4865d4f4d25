"""Fleets of real workers that serve one deployment."""

from __future__ import annotations

import socket
from pathlib import Path

import psutil

from pilotfish import Client
from pilotfish_broker.leases import WorkerRecord
from tests.process_kit import Program, pilotfish, wait_until


class Fleet:
    """Workers of one deployment, started by `pilotfish worker …`; nobody starts a dead one again.

    Args:
        url: the server; `namespace` keeps its keys apart from other fleets'.
        options: command line options by kind ("verify", "draft").
    """

    def __init__(
        self, url: str, namespace: str, folder: Path, options: dict[str, list[str]]
    ) -> None:
        self.url = url
        self.namespace = namespace
        self.client = Client(url, namespace=namespace)
        self.programs: dict[str, list[Program]] = {"verify": [], "draft": []}
        self._folder = folder
        self._options = options
        self._started = 0

    @property
    def broker(self) -> list[str]:
        """Options that make a command use this deployment."""
        return ["--broker", self.url, "--namespace", self.namespace]

    @property
    def variables(self) -> dict[str, str]:
        """The same as environment variables."""
        return {"PILOTFISH_BROKER_URL": self.url, "PILOTFISH_NAMESPACE": self.namespace}

    def start(self, kind: str, *more: str) -> Program:
        """Start one worker, with further options; it is not ready when this returns."""
        self._started += 1
        name = f"{kind}-{self._started}"
        argv = pilotfish("worker", kind, *self.broker, "--threads", "1", *self._options[kind])
        program = Program(name, [*argv, *more], self._folder / f"{name}.log")
        self.programs[kind].append(program)
        return program

    def ensure(self, *, verify: int = 0, draft: int = 0) -> None:
        """Start what is missing, all at once, and wait until so many of each serve."""
        for kind, count in (("verify", verify), ("draft", draft)):
            while len(self.running(kind)) < count:
                self.start(kind)
        self.await_ready()

    def running(self, kind: str) -> list[Program]:
        """The workers of a kind that have not ended."""
        return [program for program in self.programs[kind] if program.is_running]

    def await_ready(self) -> None:
        """Wait until all running workers have registered."""
        programs = [*self.running("verify"), *self.running("draft")]
        pids = {str(program.pid) for program in programs}

        def registered() -> bool:
            return pids <= {w.fields.get("pid") for w in self.client.workers() if w.is_alive}

        wait_until(registered, "all workers to register", programs)

    def record(self, program: Program) -> WorkerRecord:
        """What a worker says of itself."""
        found = [w for w in self.client.workers() if w.fields.get("pid") == str(program.pid)]
        assert found, f"{program.name} is not registered:\n{program.tail()}"
        return found[-1]

    def node_names(self) -> list[str]:
        """What Celery calls the running workers."""
        lines = [psutil.Process(p.pid).cmdline() for k in self.programs for p in self.running(k)]
        names = [words[words.index("--hostname") + 1] for words in lines]
        return [name.replace("%h", socket.gethostname()) for name in names]

    def logs(self) -> str:
        """The ends of all logs."""
        return "\n".join(p.tail() for kind in self.programs.values() for p in kind)

    def close(self) -> None:
        """Kill all workers, each by its own process id."""
        for kind in self.programs.values():
            for program in kind:
                program.kill()
        self.client.close()
