"""What the output must be: greedy references, input files, and the token streams that came out."""

from __future__ import annotations

import json
import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pilotfish import Client
from pilotfish_broker.keys import Keys
from pilotfish_broker.stream import Entry
from pilotfish_workers.model.interface import Rows
from pilotfish_workers.simulated import SimulatedModel, SimulatedText

LONGEST_PROMPT = 300
VOCAB_SIZE = 288  # of the tiny models
LETTERS = "abcdefgh 0123\né愛🐟"


@dataclass(frozen=True, slots=True)
class Line:
    """One request of an input file and what has to come of it.

    Attributes:
        source: the prompt as it is sent, a text or token ids; `prompt` is its token ids.
        reason: "stop" or "length".
    """

    custom_id: str
    source: str | list[int]
    prompt: list[int]
    max_tokens: int
    tokens: list[int]
    text: str
    reason: str
    speculation: int | str = "auto"
    ignore_eos: bool = False

    def as_json(self) -> str:
        """As a line of input."""
        body: dict[str, Any] = {"prompt": self.source, "max_tokens": self.max_tokens}
        if self.speculation != "auto":
            body["speculation"] = self.speculation
        if self.ignore_eos:
            body["ignore_eos"] = True
        outer = {"method": "POST", "url": "/v1/completions", "body": body}
        return json.dumps({"custom_id": self.custom_id, **outer})


def random_prompts(
    count: int, shortest: int = 1, longest: int = LONGEST_PROMPT, *, seed: int = 0
) -> list[str | list[int]]:
    """Prompts of `shortest` to `longest` tokens, both among them; where those differ, every
    fourth is a text."""
    draw = random.Random(seed)
    lengths = [draw.randint(shortest, longest) for _ in range(count - 2)]
    lengths = [shortest, longest, *lengths]
    return [
        "".join(draw.choices(LETTERS, k=length))
        if number % 4 == 3 and shortest < longest
        else [draw.randrange(4, VOCAB_SIZE) for _ in range(length)]
        for number, length in enumerate(lengths)
    ]


class Greedy:
    """What transformers' own `generate(do_sample=False)` makes of prompts.

    Each prompt is run alone, but for those of equal length and limit, which need no padding and
    are run side by side. It goes on after the end-of-sequence token here; :meth:`line` cuts
    there. Greedy decoding knows no limit in advance, so an output serves for smaller limits too.

    Args:
        folder: the model.
        limits: most tokens for each prompt.
    """

    def __init__(
        self, folder: Path, prompts: Sequence[str | list[int]], limits: Sequence[int]
    ) -> None:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self._tokenizer = AutoTokenizer.from_pretrained(folder)
        self._prompts = prompts
        self._ids = [
            self._tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else prompt
            for prompt in prompts
        ]
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        model.generation_config.eos_token_id = None
        self._outputs: dict[int, list[int]] = {}
        alike: dict[tuple[int, int], list[int]] = defaultdict(list)
        for number, (prompt, limit) in enumerate(zip(self._ids, limits, strict=True)):
            alike[len(prompt), limit].append(number)
        for (length, limit), numbers in alike.items():
            ids = torch.tensor([self._ids[number] for number in numbers])
            mask = torch.ones_like(ids)
            output = model.generate(
                ids, attention_mask=mask, do_sample=False, max_new_tokens=limit, pad_token_id=0
            )
            rows = output[:, length:].tolist()
            self._outputs.update(zip(numbers, rows, strict=True))

    def line(
        self,
        number: int,
        max_tokens: int,
        speculation: int | str = "auto",
        *,
        ignore_eos: bool = False,
    ) -> Line:
        """A request with prompt `number`, and the answer that it must get."""
        tokens, reason = self._outputs[number][:max_tokens], "length"
        assert len(tokens) == max_tokens, "the reference is shorter"
        if not ignore_eos and self._tokenizer.eos_token_id in tokens:
            tokens = tokens[: tokens.index(self._tokenizer.eos_token_id) + 1]
            reason = "stop"
        return Line(
            custom_id=f"r{number}",
            source=self._prompts[number],
            prompt=self._ids[number],
            max_tokens=max_tokens,
            tokens=tokens,
            text=self._tokenizer.decode(
                tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False
            ),
            reason=reason,
            speculation=speculation,
            ignore_eos=ignore_eos,
        )


def simulated_line(number: int, max_tokens: int) -> Line:
    """A request to a simulated model, whose next token follows from position and last token."""
    model = SimulatedModel("simulated:pass_ms=0")
    prompt = [3 + number, 7]
    tokens = list(prompt)
    while len(tokens) < len(prompt) + max_tokens:
        rows = Rows(tokens=tokens[-1:], start=len(tokens) - 1, blocks=[0], num_logits=1)
        tokens.append(model.greedy([rows])[0][0])
    output = tokens[len(prompt) :]
    shown = SimulatedText(model.info.vocab_size).decode(output)
    return Line(f"r{number}", prompt, prompt, max_tokens, output, shown, "length")


def write_input(path: Path, lines: Sequence[Line]) -> Path:
    """Write an input file."""
    path.write_text("".join(line.as_json() + "\n" for line in lines))
    return path


def read_output(path: Path) -> dict[str, dict[str, Any]]:
    """An output file by custom_id; none may stand in it twice."""
    # only \n ends a line; splitlines would also cut at other separators within a text
    lines = [json.loads(raw) for raw in path.read_bytes().split(b"\n") if raw]
    by_id = {line["custom_id"]: line for line in lines}
    assert len(by_id) == len(lines), "a custom_id stands in the output twice"
    return by_id


def check_output(path: Path, lines: Sequence[Line]) -> dict[str, dict[str, Any]]:
    """Every custom_id once, each answer the reference; gives the bodies by custom_id."""
    output = read_output(path)
    assert output.keys() == {line.custom_id for line in lines}
    bodies = {}
    for line in lines:
        found = output[line.custom_id]
        assert found["error"] is None, found
        body = bodies[line.custom_id] = found["response"]["body"]
        choice = body["choices"][0]
        assert (line.custom_id, choice["text"]) == (line.custom_id, line.text)
        assert choice["finish_reason"] == line.reason
        assert body["usage"]["prompt_tokens"] == len(line.prompt)
        assert body["usage"]["completion_tokens"] == len(line.tokens)
    return bodies


def request_ids(output: Path) -> dict[str, str]:
    """custom_id → job id."""
    return {name: line["response"]["request_id"] for name, line in read_output(output).items()}


def check_results(client: Client, wanted: dict[str, Line]) -> None:
    """The jobs (by id) have ended well with exactly the reference's tokens and text."""
    for (job, line), result in zip(wanted.items(), client.results(wanted), strict=True):
        assert result is not None, f"job {job} has not ended"
        assert (result.status, result.error) == ("succeeded", "")
        assert (job, result.token_ids) == (job, line.tokens)
        assert (job, result.text) == (job, line.text)
        assert result.finish_reason == line.reason


def stream(redis: Any, keys: Keys, job: str) -> list[tuple[int, Entry]]:
    """A job's token stream as it stands: (milliseconds, entry)."""
    raw = redis.xrange(keys.tokens(job))
    return [(int(name.split(b"-")[0]), Entry.from_fields(fields)) for name, fields in raw]


def check_stream(redis: Any, keys: Keys, job: str, line: Line) -> None:
    """Each token stands in the stream once, at its own place, and the end once, at the end."""
    entries = [entry for _, entry in stream(redis, keys, job)]
    position = 0
    for entry in entries[:-1]:
        assert entry.end is None
        if entry.tokens:
            assert entry.position == position
        position += len(entry.tokens)
    assert entries[-1].end == "succeeded"
    assert [token for entry in entries for token in entry.tokens] == line.tokens
    assert "".join(entry.text for entry in entries) == line.text
