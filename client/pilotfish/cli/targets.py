"""Which model a command means, and how a known one is prepared: by the workers' package, in a
process of its own."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import click

from pilotfish.worker_command import require_worker_packages
from pilotfish_broker.errors import ConfigError, PilotfishError
from pilotfish_broker.settings import Settings

DEFAULT_TARGET = "SmolLM2-135M-Instruct"
KNOWN = (DEFAULT_TARGET, "default")
DRAFT_WORDS = ("ngram", "off")
SIMULATED = "simulated:"
MODULE = "pilotfish_workers.default_pair"


class ModelNotPrepared(PilotfishError):
    """A known model could not be prepared; what is wrong has been printed."""


def with_named_target(settings: Settings) -> Settings:
    """`settings` with the default target where none is set, and with a name to serve.

    Raises:
        ConfigError: the target or draft is a folder that does not exist, or has no usable name.
    """
    target = _existing(settings.target or DEFAULT_TARGET)
    settings = replace(settings, target=target, draft=_existing(settings.draft))
    return replace(settings, model=_served_name(settings, target))


def with_served_name(settings: Settings) -> Settings:
    """`settings` of a draft worker, which needs the name of its target and not the target itself.

    Raises:
        ConfigError: the target has no usable name, or the draft is a folder that does not exist.
    """
    target = str(Path(settings.target).expanduser()) if settings.target else None
    settings = replace(settings, target=target, draft=_existing(settings.draft))
    if target is None:
        return settings  # and so it has a model, or is refused when it starts
    return replace(settings, model=_served_name(settings, target))


def with_prepared_target(settings: Settings) -> Settings:
    """`settings` with a known target's folder in place of its name; pulled when it is missing.

    Says so where a model can only be had from a hub, see :func:`note_hub_ids`.

    Raises:
        ConfigError: packages of a worker are missing.
        ModelNotPrepared: it could not be prepared.
    """
    note_hub_ids(settings.target or "", settings.draft)
    target = settings.target
    if target not in KNOWN or Path(target).is_dir():
        return settings
    require_worker_packages()
    return replace(settings, target=run_module("pull").strip())


def note_hub_ids(*models: str) -> None:
    """Say which models can only be had from a hub, which may take long to give or refuse them."""
    for model in dict.fromkeys(models):
        if is_hub_id(model):
            click.echo(f"{model} is no folder here; taking it for a Hugging Face id", err=True)


def is_hub_id(model: str) -> bool:
    """Whether a model has to come from a hub, or from what was downloaded from one before."""
    is_other = model in (*KNOWN, *DRAFT_WORDS) or model.startswith(SIMULATED)
    return not is_other and not Path(model).is_dir()


def run_module(*arguments: str) -> str:
    """Run the workers' model command; its messages go to the terminal, its output comes back.

    Raises:
        ModelNotPrepared: it failed.
        KeyboardInterrupt: it was interrupted.
    """
    command = [sys.executable, "-m", MODULE, *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode == 130:
        raise KeyboardInterrupt
    if done.returncode != 0:
        raise ModelNotPrepared("the model is not ready; the reason stands above")
    return done.stdout


def _served_name(settings: Settings, target: str) -> str:
    if settings.model is None and target in KNOWN and not Path(target).is_dir():
        return DEFAULT_TARGET
    return settings.served_name


def _existing(model: str) -> str:
    """A model as given; one that can only be meant as a folder has to be there."""
    path = Path(model).expanduser()
    if path.is_dir():
        return str(path)
    if model.startswith((".", "/", "~")) or model.count("/") > 1:
        raise ConfigError(f"there is no model folder {model!r}")
    return model
