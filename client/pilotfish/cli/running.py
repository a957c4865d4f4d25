"""What `run` does once its input is read: on a stack of its own, or on a deployment."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click

from pilotfish.batch_lines import Request, check_each
from pilotfish.batch_output import OutputFile, repair
from pilotfish.batch_run import BatchRun
from pilotfish.cli.options import SAMPLING_DEFAULTS
from pilotfish.cli.progress import RunDisplay
from pilotfish.cli.targets import with_named_target, with_prepared_target
from pilotfish.client import Client
from pilotfish.embedded import EmbeddedStack, StackPlan
from pilotfish.run_clock import RunClock
from pilotfish.run_state import RunState, input_digest
from pilotfish.run_summary import Summary, summarise, write_json
from pilotfish.served import check_request
from pilotfish_broker.connection import display as display_url
from pilotfish_broker.errors import ConfigError, InvalidRequest
from pilotfish_broker.models import ModelRecord
from pilotfish_broker.settings import Settings

LIVE_LOOK_SECONDS = 5.0
# a run that was stopped may be continued a month later
RESULT_TTL_SECONDS = 30 * 86_400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    """A run as it was asked for, its input checked as far as the file alone allows.

    Attributes:
        defaults: sampling parameters for the requests that do not give them.
    """

    source: Path
    output: Path
    summary: Path | None
    requests: Sequence[Request]
    settings: Settings
    defaults: Mapping[str, Any]
    is_embedded: bool
    verify_workers: int = 1
    draft_workers: int = 1

    def identity(self, where: str) -> dict[str, str]:
        """What has to be equal for a command to continue a run: all that shapes the output."""
        settings = self.settings
        identity = {
            "input": input_digest(self.source),
            "broker": where,
            "namespace": settings.namespace,
            "target": str(settings.target),
            "model": str(settings.model),
            "speculation": str(settings.speculation),
        }
        for name in SAMPLING_DEFAULTS:
            identity[name.replace("_", "-")] = str(self.defaults.get(name))
        if self.is_embedded:  # else the deployment has its own
            identity |= {
                "draft": settings.draft,
                "dtype": settings.dtype,
                "device": settings.device,
            }
        return identity

    def shape(self) -> dict[str, str | None]:
        """What ran, for the summary; None where that was the deployment's choice."""
        settings = self.settings
        speculation = str(settings.speculation)
        if not self.is_embedded:
            asked = None if speculation == "auto" else speculation
            return {"target": settings.target, "draft": None, "speculation": asked}
        target = with_named_target(settings).target
        return {"target": target, "draft": settings.draft, "speculation": speculation}

    def check_names(self, served: str) -> None:
        """Refuse requests for another model than the one that is served.

        Raises:
            InvalidBatch: some name another.
        """

        def check(request: Request) -> None:
            if request.model not in (None, served, self.settings.target):
                raise InvalidRequest(
                    f"model {request.model!r} is not served here; this run serves {served!r}"
                )

        check_each(self.source, self.requests, check)

    def check_tokens(self, record: ModelRecord) -> None:
        """Refuse requests with token ids that the model cannot take.

        Raises:
            InvalidBatch: there are some.
        """
        check_each(
            self.source,
            self.requests,
            lambda item: check_request(item.prompt, item.params, record),
        )


def run_embedded(plan: RunPlan) -> int:
    """Run with a server and workers of our own; gives the exit status."""
    started = time.monotonic()
    settings = with_named_target(plan.settings)
    plan.check_names(settings.served_name)
    state = RunState(plan.output, plan.identity("embedded"))
    progress = _Progress()
    try:
        stack_plan = StackPlan(
            folder=state.folder,
            settings=replace(with_prepared_target(settings), result_ttl_seconds=RESULT_TTL_SECONDS),
            verify_workers=plan.verify_workers,
            draft_workers=plan.draft_workers,
            keep=(state.lock,),
        )
        with RunDisplay(len(plan.requests)) as display, EmbeddedStack(stack_plan) as stack:
            display.awaiting(stack.await_ready(), stack_plan.wanted)
            model = stack.client.model(settings.served_name)
            plan.check_tokens(model)
            progress.is_begun = True
            clock = RunClock(state.folder)
            clock.begin()

            def watch() -> None:
                clock.tick()
                for name in stack.tick():
                    display.note(f"the {name} had died and was started again")

            startup = time.monotonic() - started
            timing = _Timing(startup, clock.pauses())
            failed = _finish(plan, state, stack.client, model.name, display, watch, timing)
            stack.mark_complete()
    except BaseException as error:
        _leave(plan, state, is_begun=progress.is_begun and not isinstance(error, ConfigError))
        raise
    state.remove()
    return 1 if failed else 0


def run_deployed(plan: RunPlan) -> int:
    """Run on a deployment; gives the exit status."""
    with Client.from_settings(plan.settings) as client:
        name = plan.settings.model
        if name is None and plan.settings.target is not None:
            name = plan.settings.served_name
        model = client.model(client.choose_model(name))
        plan.check_names(model.name)
        plan.check_tokens(model)
        state = RunState(plan.output, plan.identity(display_url(plan.settings.redis_url)))
        try:
            with RunDisplay(len(plan.requests)) as display:
                watch = _live_watch(client, model.name, display)
                # the deployment went on while no command of this run lived: no pauses
                failed = _finish(plan, state, client, model.name, display, watch, _Timing())
        except BaseException:
            _leave(plan, state, is_begun=True)
            raise
        state.remove()
    return 1 if failed else 0


@dataclass(slots=True)
class _Progress:
    is_begun: bool = False


@dataclass(frozen=True, slots=True)
class _Timing:
    """What no job record knows: how long starting took, and from when to when nothing ran."""

    startup_seconds: float = 0.0
    pauses: Sequence[tuple[int, int]] = ()


def _leave(plan: RunPlan, state: RunState, *, is_begun: bool) -> None:
    """Keep the state of a run that can be continued; one that never did anything must not block
    the corrected command."""
    if is_begun or not state.is_new or (plan.output.exists() and repair(plan.output)):
        state.release()
        click.echo("the run has stopped; the same command continues it", err=True)
        return
    state.remove_new_output()
    state.remove()


def _finish(
    plan: RunPlan,
    state: RunState,
    client: Client,
    model: str,
    display: RunDisplay,
    watch: Callable[[], None],
    timing: _Timing,
) -> int:
    """Run all requests to their end; gives how many failed."""
    with OutputFile(plan.output) as output:
        display.begin(len(output.finished))
        batch = BatchRun(
            client=client,
            key=state.key,
            model=model,
            requests=plan.requests,
            output=output,
            listener=display,
            watch=watch,
        )
        batch.finish()
        failed = sum(not succeeded for succeeded in output.finished.values())
    summary = summarise(
        batch.records(),
        jobs=len(plan.requests),
        failed=failed,
        startup_seconds=timing.startup_seconds,
        pauses=timing.pauses,
    )
    display.note(describe(summary, plan.output))
    if plan.summary is not None:
        write_json(plan.summary, {**summary.as_json(), "model": model, **plan.shape()})
    return failed


def describe(summary: Summary, output: Path) -> str:
    """A run in one sentence."""
    text = (
        f"{summary.jobs} jobs, {summary.completion_tokens} tokens in {summary.seconds:.1f} s "
        f"({summary.tokens_per_second:.0f} tokens/s), "
        f"{summary.mean_tokens_per_round:.2f} tokens a round: {output}"
    )
    if summary.failed:
        text += f"\n{summary.failed} of {summary.jobs} jobs failed; see the error lines in it"
    return text


def _live_watch(client: Client, model: str, display: RunDisplay) -> Callable[[], None]:
    """Says so when nobody serves the model at the moment; the jobs wait for somebody who does."""
    next_look, was_served = 0.0, True

    def watch() -> None:
        nonlocal next_look, was_served
        if (now := time.monotonic()) < next_look:
            return
        next_look = now + LIVE_LOOK_SECONDS
        is_served = client.is_served(model)
        if was_served and not is_served:
            display.note(f"no live verify worker serves {model}; waiting for one")
        was_served = is_served

    return watch
