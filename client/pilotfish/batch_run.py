"""Runs a file of requests to its end: submits what is missing, writes what has ended."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from pilotfish.batch_lines import Request
from pilotfish.batch_output import OutputFile, output_line
from pilotfish.client import Client
from pilotfish.patience import Patience
from pilotfish.result import Result
from pilotfish.run_state import job_id
from pilotfish.samples import sample_id
from pilotfish_broker.records import JobRecord
from pilotfish_broker.spec import JobSpec

WAIT_SECONDS = 0.25
LOOK_SECONDS = 1.0
RECONCILE_SECONDS = 15.0
RECONCILE_JOBS = 500  # between two looks at what is to be watched


class Listener(Protocol):
    """Who shows how far a run is."""

    def ended(self, request: Request, result: Result) -> None:
        """A request has ended and its line is written."""

    def running(self, tokens: int) -> None:
        """Committed tokens of the requests that have not ended, about once a second."""

    def note(self, text: str) -> None:
        """Something that somebody watching wants to know."""


@dataclass(frozen=True, slots=True)
class BatchRun:
    """One run of a file.

    Attributes:
        key: name of the run; job ids follow from it, so a continuation finds its jobs again.
        model: served name of the target.
        watch: called a few times a second; raises when the run cannot go on. It may ask the server,
            and raise BrokerUnavailable as long as that is away.
    """

    client: Client
    key: str
    model: str
    requests: Sequence[Request]
    output: OutputFile
    listener: Listener
    watch: Callable[[], None]

    def ids(self) -> list[str]:
        """Ids of all records: each request's samples, in the order of the file."""
        return [
            job
            for request in self.requests
            for job in _sample_ids(job_id(self.key, request.custom_id), request)
        ]

    def records(self) -> Iterator[JobRecord | None]:
        """All of those records, few of them in memory at a time.

        Raises:
            BrokerUnavailable: the server was away for longer than a minute.
            PilotfishError: what `watch` raises.
        """
        ids = self.ids()
        patience = Patience(self.listener.note)
        for start in range(0, len(ids), RECONCILE_JOBS):
            some = ids[start : start + RECONCILE_JOBS]
            yield from patience.call(partial(self._watched_records, some))

    def _watched_records(self, ids: list[str]) -> list[JobRecord | None]:
        self.watch()
        return self.client.records(ids)

    def finish(self) -> None:
        """Submit what is not in the output yet, and stay until all of it is.

        Raises:
            BrokerUnavailable: the server was away for longer than a minute.
            PilotfishError: what `watch` raises.
        """
        finished = self.output.finished
        open_requests = {
            job_id(self.key, request.custom_id): request
            for request in self.requests
            if request.custom_id not in finished
        }
        if open_requests:
            _Loop(self, open_requests).run()


def _sample_ids(job: str, request: Request) -> list[str]:
    return [sample_id(job, sample) for sample in range(request.params.n)]


class _Loop:
    """The state of a run under way: what has not ended, and how far the completions are read.

    A request is open until its line is written, which takes the end of all its samples.
    """

    def __init__(self, run: BatchRun, open_requests: dict[str, Request]) -> None:
        self._run = run
        self._open = open_requests
        self._left = {job: set(_sample_ids(job, item)) for job, item in open_requests.items()}
        self._request_of = {sample: job for job, left in self._left.items() for sample in left}
        self._cursor = "0"
        self._next_look = 0.0
        self._next_reconcile = 0.0

    def run(self) -> None:
        patience = Patience(self._run.listener.note)
        while self._open:
            patience.call(self._step)

    def _step(self) -> None:
        self._run.watch()
        now = time.monotonic()
        if now >= self._next_reconcile:
            self._reconcile()
            self._next_reconcile = now + RECONCILE_SECONDS
        ended = self._run.client.read_completions(
            self._run.key, after=self._cursor, block_seconds=WAIT_SECONDS
        )
        self._note_ends(completion.job_id for completion in ended)
        if ended:
            self._cursor = ended[-1].cursor
            self._next_reconcile = time.monotonic() + RECONCILE_SECONDS
        if self._open and now >= self._next_look:
            self._look()
            self._next_look = time.monotonic() + LOOK_SECONDS

    def _note_ends(self, samples: Iterable[str]) -> None:
        """Write the line of each request of which no sample is left; a repeated end is none."""
        done = []
        for sample in samples:
            job = self._request_of.get(sample)
            if job in self._left and sample in self._left[job]:
                self._left[job].remove(sample)
                if not self._left[job]:
                    done.append(job)
        for job, result in zip(done, self._run.client.results(done), strict=True):
            request = self._open[job]
            if result is None:  # a record has gone since; a later reconciliation sees which
                self._left[job].update(_sample_ids(job, request))
                continue
            self._run.output.write(output_line(request, result))
            del self._open[job], self._left[job]
            self._run.listener.ended(request, result)

    def _reconcile(self) -> None:
        """Submit what has no record (at the start, or because Redis lost it), and collect what
        ended unnoticed."""
        for number, some in enumerate(self._parts()):
            if number:
                self._run.watch()
            self._reconcile_some(some)

    def _parts(self) -> Iterator[list[str]]:
        """Ids of the open requests, as many at a time as have no more than so many samples."""
        some: list[str] = []
        size = 0
        for job, request in list(self._open.items()):
            if some and size + request.params.n > RECONCILE_JOBS:
                yield some
                some, size = [], 0
            some.append(job)
            size += request.params.n
        if some:
            yield some

    def _reconcile_some(self, ids: list[str]) -> None:
        samples = [sample for job in ids for sample in _sample_ids(job, self._open[job])]
        statuses = dict(zip(samples, self._run.client.statuses(samples), strict=True))
        missing = {}
        for sample in samples:
            if statuses[sample] is None:
                job = self._request_of[sample]
                missing[job] = self._spec(self._open[job])
                self._left[job].add(sample)
        if missing:  # submitted whole: what is there stays as it is
            self._run.client.submit_many(missing.values(), ids=missing)
        self._note_ends(s for s, status in statuses.items() if status and status.is_terminal)

    def _spec(self, request: Request) -> JobSpec:
        return JobSpec(
            model=self._run.model,
            prompt=request.prompt,
            params=request.params,
            group=self._run.key,
        )

    def _look(self) -> None:
        # few jobs run at a time, whatever the number of those that wait
        running = self._run.client.running(self._run.model)
        ours = [sample for sample in running if self._request_of.get(sample) in self._open]
        self._run.listener.running(self._run.client.committed(ours))
