"""Loads a model and its tokenizer by what a setting names. torch is imported only here, on use."""

from __future__ import annotations

from typing import Protocol

from pilotfish_broker.settings import Settings
from pilotfish_workers import simulated
from pilotfish_workers.model.detokenizer import Detokenizer
from pilotfish_workers.model.interface import Model
from pilotfish_workers.sampling import Words


class Tokens(Words, Protocol):
    """The tokenizer of a model, as the workers use it."""

    @property
    def vocab_size(self) -> int: ...
    def vocabulary(self) -> list[str]: ...
    def fingerprint(self) -> str: ...
    def encode(self, text: str) -> list[int]: ...
    def chat(self, messages: list[dict[str, str]]) -> list[int]: ...
    def decode(self, ids: list[int]) -> str: ...
    def token_bytes(self, token_id: int) -> bytes: ...
    def detokenizer(self) -> Detokenizer: ...


def load(path: str, settings: Settings) -> tuple[Model, Tokens]:
    """A model and its tokenizer.

    Args:
        path: folder, hub id, a name from ``pilotfish models list``, or ``simulated:…``.

    Raises:
        PilotfishError: it cannot be loaded or served; the message says what to do.
    """
    if path.startswith(simulated.PREFIX):
        model = simulated.SimulatedModel(path)
        return model, simulated.SimulatedText(model.info.vocab_size)
    from pilotfish_workers.default_pair import resolve
    from pilotfish_workers.model.runner import ModelRunner
    from pilotfish_workers.model.text import Text

    folder = resolve(path)
    text = Text(folder)
    runner = ModelRunner.load(
        folder,
        device=settings.device,
        dtype=settings.dtype,
        num_threads=settings.threads or None,
        kv_tokens=settings.kv_tokens or None,
    )
    return runner, text
