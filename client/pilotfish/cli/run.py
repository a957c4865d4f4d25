"""pilotfish run: a file of requests in, a file of answers out."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from pilotfish.batch_lines import read_requests
from pilotfish.cli.options import (
    SAMPLING_DEFAULTS,
    embeddable_broker_options,
    sampling_options,
    settings_from,
    stack_options,
    without_servers,
    worker_options,
)
from pilotfish.cli.running import RunPlan, run_deployed, run_embedded
from pilotfish.cli.signals import unwinding
from pilotfish.run_summary import check_place
from pilotfish_broker.errors import InvalidRequest
from pilotfish_broker.sampling import SamplingParams

#: What the workers of a deployment were started with; `run --broker` cannot change it.
WORKERS_CHOICE = (
    "draft",
    "dtype",
    "device",
    "threads",
    "slots",
    "kv_tokens",
    "lease_seconds",
    "verify_workers",
    "draft_workers",
)


@click.command()
@click.argument("source", metavar="IN.jsonl", type=click.Path(exists=True, dir_okay=False))
@click.option("-o", "--output", required=True, metavar="OUT.jsonl", type=click.Path(dir_okay=False))
@click.option("--summary", metavar="FILE", help="Write counts and speed to FILE, as JSON.")
@sampling_options("; for requests that set none")
@stack_options
@worker_options
@embeddable_broker_options
def run(source: str, output: str, summary: str | None, **options: Any) -> int:
    """Answer every request of IN.jsonl into OUT.jsonl.

    Without --broker it starts Valkey and workers of its own and ends them again; what they keep
    lies in OUT.jsonl.pilotfish until the run is complete. The same command again continues a run
    that was stopped, whatever stopped it. With --broker the workers of that deployment answer;
    options that only a starting worker can honour (--draft, --dtype, --slots …) are refused then.

    \b
    A line of IN.jsonl is either short
      {"prompt": "Once upon a time", "max_tokens": 64}
      {"messages": [{"role": "user", "content": "Why is the sky blue?"}]}
    or an OpenAI batch line
      {"custom_id": "a1", "method": "POST", "url": "/v1/chat/completions",
       "body": {"messages": […], "max_completion_tokens": 64}}

    Lines without custom_id are called line-1, line-2 and so on. A line may set any sampling
    parameter, in OpenAI's words or in ours; what is not honoured is refused by name. Without a
    temperature decoding is greedy. A line of OUT.jsonl is an OpenAI batch output line; the order
    is that of completion.

    \b
    Example:
      pilotfish run prompts.jsonl -o answers.jsonl --target ./model --draft ./small-model
    """
    is_embedded = options["broker_url"] is None
    if not is_embedded:
        refuse_given(click.get_current_context(), WORKERS_CHOICE)
    settings = settings_from(options, without_servers() if is_embedded else os.environ)
    defaults = {name: options[name] for name in SAMPLING_DEFAULTS if options[name] is not None}
    SamplingParams.from_mapping(defaults)  # a wrong one is named once, not for each line
    if not is_embedded:  # workers of our own have it as their setting
        defaults["speculation"] = settings.speculation
    requests = read_requests(Path(source), defaults)
    path = Path(summary) if summary else None
    if path is not None:
        check_place(path, (Path(source), Path(output)))
    plan = RunPlan(
        source=Path(source),
        output=Path(output),
        summary=path,
        requests=requests,
        settings=settings,
        defaults=defaults,
        is_embedded=is_embedded,
        verify_workers=options["verify_workers"],
        draft_workers=options["draft_workers"],
    )
    with unwinding():
        return run_embedded(plan) if is_embedded else run_deployed(plan)


def refuse_given(context: click.Context, names: Iterable[str]) -> None:
    """Refuse options of a command that were typed although they cannot be honoured.

    Raises:
        InvalidRequest: naming all of them.
    """
    typed = [
        name for name in names if context.get_parameter_source(name) is ParameterSource.COMMANDLINE
    ]
    if typed:
        words = ", ".join(f"--{name.replace('_', '-')}" for name in typed)
        raise InvalidRequest(
            f"{words}: --broker uses workers that run already, with settings of their own; "
            "leave that out"
        )
