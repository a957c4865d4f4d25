"""Options that several commands share: the same words everywhere, defined once.

Values go to :class:`Settings` as they were typed, which checks them in one place for options and
environment variables alike.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import click

from pilotfish.client import Client
from pilotfish_broker.errors import ConfigError
from pilotfish_broker.settings import Settings

F = TypeVar("F", bound=Callable[..., Any])

FROM_ENVIRONMENT = "env"
SERVERS = ("PILOTFISH_BROKER_URL", "PILOTFISH_DATA_URL")
BROKER_SETTINGS = ("broker_url", "namespace")
#: Sampling parameters that `run` takes for lines that do not give them, and `submit` for its job.
SAMPLING_DEFAULTS = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "seed")
WORKER_SETTINGS = (
    "target",
    "draft",
    "model",
    "dtype",
    "device",
    "threads",
    "slots",
    "speculation",
    "kv_tokens",
    "lease_seconds",
)


def _stack(options: list[Callable[[Any], Any]]) -> Callable[[F], F]:
    def decorate(function: F) -> F:
        decorated: Any = function
        for option in reversed(options):
            decorated = option(decorated)
        result: F = decorated
        return result

    return decorate


def broker_options(function: F) -> F:
    """--broker and --namespace."""
    text = "Redis URL of the deployment; env: the one in PILOTFISH_BROKER_URL."
    return _stack([_broker(text), _NAMESPACE])(function)


def embeddable_broker_options(function: F) -> F:
    """--broker of a command that starts its own broker where none is given."""
    text = (
        "Use this deployment and start nothing; env: the one in PILOTFISH_BROKER_URL, which "
        "keeps a password out of the process list."
    )
    return _stack([_broker(text), _NAMESPACE])(function)


def worker_options(function: F) -> F:
    """What a worker loads, and how it runs."""
    return _stack(_WORKER_OPTIONS)(function)


def sampling_options(when: str = "") -> Callable[[F], F]:
    """How tokens are chosen; left out means "not given". `when` follows each explanation."""

    def option(word: str, kind: type, metavar: str, text: str, default: str) -> Any:
        shown = f"{text}{when}.  [default: {default}]"
        return click.option(word, type=kind, metavar=metavar, help=shown)

    return _stack(
        [
            option("--max-tokens", int, "N", "Most tokens of an output", "256"),
            option("--temperature", float, "T", "0 takes the likeliest token", "0"),
            option("--top-p", float, "P", "Draw from the likeliest with P of the mass", "1"),
            option("--top-k", int, "K", "Draw from the K likeliest; 0: from all", "0"),
            option("--min-p", float, "P", "Drop what is below P times the likeliest", "0"),
            option("--seed", int, "N", "The same seed, the same tokens", "none"),
        ]
    )


def stack_options(function: F) -> F:
    """How many workers a command starts for itself."""
    workers = click.IntRange(1, 64), click.IntRange(0, 64)
    return _stack(
        [
            click.option("--verify-workers", type=workers[0], default=1, show_default=True),
            click.option("--draft-workers", type=workers[1], default=1, show_default=True),
        ]
    )(function)


def without_servers() -> dict[str, str]:
    """The environment for a command that starts its own server: it names no other."""
    return {name: value for name, value in os.environ.items() if name not in SERVERS}


def settings_from(options: Mapping[str, Any], environ: Mapping[str, str] | None = None) -> Settings:
    """Settings from the shared options among `options`, and the environment.

    Raises:
        ConfigError: a value cannot be used.
    """
    names = (*BROKER_SETTINGS, *WORKER_SETTINGS)
    given = {name: options[name] for name in names if options.get(name) is not None}
    if given.get("broker_url") == FROM_ENVIRONMENT:
        del given["broker_url"]
        if not (os.environ if environ is None else environ).get("PILOTFISH_BROKER_URL"):
            raise ConfigError(
                "--broker env means the URL in PILOTFISH_BROKER_URL, which is not set"
            )
    return Settings.from_env(environ, **given)


def client_from(options: Mapping[str, Any]) -> Client:
    """A client of the deployment that the options and the environment name.

    Raises:
        ConfigError: a value cannot be used.
    """
    return Client.from_settings(settings_from(options))


def _broker(text: str) -> Callable[[F], F]:
    return click.option("--broker", "broker_url", metavar="URL|env", help=text)


_NAMESPACE = click.option(
    "--namespace", metavar="NAME", help="Prefix of all keys in Redis.  [default: pf]"
)
_WORKER_OPTIONS: list[Callable[[Any], Any]] = [
    click.option(
        "--target",
        metavar="MODEL",
        help="Model whose output is wanted: a folder, a hub id, or a name from `models list`.",
    ),
    click.option(
        "--draft",
        metavar="MODEL|ngram|off",
        help="What drafts: a small model with the target's tokenizer, n-gram lookup in the text "
        "so far, or nothing.  [default: ngram]",
    ),
    click.option(
        "--model",
        metavar="NAME",
        help="Name under which the target is served.  [default: the last part of --target]",
    ),
    click.option(
        "--dtype",
        metavar="TYPE",
        help="auto, float32, bfloat16 or float16.  [default: auto]",
    ),
    click.option("--device", metavar="DEVICE", help="auto, cpu, cuda or cuda:N.  [default: auto]"),
    click.option("--threads", metavar="N", help="Processor threads of a worker.  [default: all]"),
    click.option("--slots", metavar="N", help="Jobs that a worker runs at once.  [default: 16]"),
    click.option(
        "--speculation",
        metavar="auto|off|K",
        help="Tokens drafted a round: as many as pay off, none, or always K.  [default: auto]",
    ),
    click.option(
        "--kv-tokens",
        metavar="N",
        help="Tokens that a worker's KV pool holds.  [default: by memory]",
    ),
    click.option(
        "--lease-seconds",
        metavar="SECONDS",
        help="Silence after which a worker counts as dead.  [default: 10]",
    ),
]
