"""Models without weights, for benchmarks and tests of everything around a forward pass.

``simulated:pass_ms=30,token_ms=0.5,vocab=512,agree=80,kv_tokens=65536`` names one. Its next token
is a fixed function of position and last token, so that any two of them agree; a draft model with
``agree`` below 100 drafts a wrong token at that share of positions. It has no logits, so it serves
plain greedy decoding alone. With ``trace=FILE`` each pass adds a line to FILE: its start and end
(monotonic nanoseconds) and the first block of each row's table, which stands for one sequence.
Imports no torch.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Iterable, Sequence
from typing import Any

from pilotfish_broker.errors import ConfigError, UnsupportedParameter
from pilotfish_broker.sampling import SamplingParams
from pilotfish_workers.model.block_pool import BlockPool
from pilotfish_workers.model.interface import ModelInfo, Rows
from pilotfish_workers.speculative.accept import Outcome, draw_plain, verify_plain
from pilotfish_workers.speculative.sampler import Case, Constraint, Draw, Drawn

PREFIX = "simulated:"
DEFAULTS = {
    "pass_ms": 10.0,
    "token_ms": 0.0,
    "vocab": 512.0,
    "agree": 100.0,
    "context": 4096.0,
    "kv_tokens": 65536.0,
}
LEAST = {"vocab": 1.0, "context": 1.0, "kv_tokens": 16.0}  # 0 for the others


class SimulatedModel:
    """A model whose passes take a given time."""

    def __init__(self, description: str) -> None:
        options, trace = _parse(description)
        self._trace = open(trace, "a") if trace else None  # noqa: SIM115 - open as long as we are
        self._pass_seconds = options["pass_ms"] / 1000
        self._token_seconds = options["token_ms"] / 1000
        self._agree = int(options["agree"])
        self.pool = BlockPool(int(options["kv_tokens"]) // 16, 16)
        self.info = ModelInfo(
            name="simulated",
            path=description,
            family="simulated",
            vocab_size=int(options["vocab"]),
            context_length=int(options["context"]),
            num_layers=0,
            dtype="none",
            device="cpu",
            fingerprint=_digest(f"{options['vocab']} {self._agree}"),
            eos_ids=(),
        )

    def greedy(self, rows: Sequence[Rows]) -> list[list[int]]:
        """See `Model.greedy`; sleeps for as long as the pass is to take."""
        started = time.monotonic_ns()
        seconds = self._pass_seconds + self._token_seconds * sum(len(r.tokens) for r in rows)
        if seconds > 0:
            time.sleep(seconds)
        if self._trace is not None:
            sequences = " ".join(str(row.blocks[0]) for row in rows)
            self._trace.write(f"{started} {time.monotonic_ns()} {sequences}\n")
            self._trace.flush()
        return [self._row(row) for row in rows]

    def verify(self, rows: Sequence[Rows], cases: Sequence[Case | None]) -> list[Outcome | None]:
        """See `Model.verify`."""
        return verify_plain(self.greedy(rows), rows, cases)

    def draw(self, rows: Sequence[Rows], draws: Sequence[Draw | None]) -> list[Drawn | None]:
        """See `Model.draw`."""
        return draw_plain(self.greedy(rows), rows, draws)

    def _row(self, row: Rows) -> list[int]:
        end = row.start + len(row.tokens)
        fed = row.tokens[len(row.tokens) - row.num_logits :] if row.num_logits else []
        first = end - len(fed)
        return [self._next(first + offset, token) for offset, token in enumerate(fed)]

    def _next(self, position: int, token: int) -> int:
        mixed = (position * 2654435761 + token * 40503 + 12345) & 0xFFFFFFFF
        mixed ^= mixed >> 15
        right = mixed % self.info.vocab_size
        is_wrong = (mixed >> 8) % 100 >= self._agree
        return (right + 1) % self.info.vocab_size if is_wrong else right


def _letter(token: int) -> str:
    return chr(97 + token % 26)


def _digest(text: str) -> str:
    return hashlib.sha256(f"simulated {text}".encode()).hexdigest()


def _parse(description: str) -> tuple[dict[str, float], str | None]:
    options, trace = dict(DEFAULTS), None
    for part in filter(None, description.removeprefix(PREFIX).split(",")):
        name, _, value = part.partition("=")
        if name == "trace":
            trace = value
            continue
        try:
            if name not in DEFAULTS:
                raise ValueError
            options[name] = float(value)
            if not LEAST.get(name, 0.0) <= options[name] < math.inf:
                raise ValueError
        except ValueError:
            raise ConfigError(
                f"{part!r} is no option of a simulated model: {description}"
            ) from None
    return options, trace


class SimulatedText:
    """A tokenizer with one token a byte; output tokens become letters."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def fingerprint(self) -> str:
        return _digest(str(self.vocab_size))

    def vocabulary(self) -> list[str]:
        return [f"t{index}" for index in range(self.vocab_size)]

    def encode(self, text: str) -> list[int]:
        return [byte % self.vocab_size for byte in text.encode()]

    def chat(self, messages: list[dict[str, Any]]) -> list[int]:
        return self.encode("\n".join(message["content"] for message in messages))

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(map(_letter, ids))

    def token_bytes(self, token_id: int) -> bytes:
        return _letter(token_id).encode()

    def word_ids(self, word: str) -> list[tuple[int, ...]]:
        return [tuple(self.encode(word))]

    def constraint(
        self, params: SamplingParams, *, vocab_size: int, eos_ids: Sequence[int]
    ) -> Constraint | None:
        """None where nothing is constrained.

        Raises:
            UnsupportedParameter: a simulated model follows no schema.
        """
        if params.is_structured:
            raise UnsupportedParameter("a simulated model gives no structured output")
        return None

    def detokenizer(self) -> SimulatedDetokenizer:
        return SimulatedDetokenizer()


class SimulatedDetokenizer:
    """Every token is a whole letter."""

    def push(self, ids: Iterable[int]) -> str:
        return "".join(map(_letter, ids))

    def flush(self) -> str:
        return ""
