"""Writes OpenAI batch output lines, one finished request a line, and goes on after a crash."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from pilotfish.batch_lines import Request
from pilotfish.batch_logprobs import chat_logprobs, completion_logprobs, prompt_logprobs
from pilotfish.result import Result
from pilotfish_broker.errors import InvalidRequest

LINE_ENDS = "\u0085\u2028\u2029"


def output_line(request: Request, result: Result) -> dict[str, Any]:
    """The output line of a request whose job has ended: a response with all samples, or the error
    of one of them."""
    line: dict[str, Any] = {
        "id": f"batch_req_{result.job_id}",
        "custom_id": request.custom_id,
        "response": None,
        "error": None,
    }
    bad = result.unsuccessful
    if bad is None:
        line["response"] = {
            "status_code": 200,
            "request_id": result.job_id,
            "body": _body(request, result),
        }
    else:
        reason = bad.error or f"the job was {bad.status}"
        where = f"sample {bad.sample}: " if result.others else ""
        line["error"] = {"code": str(bad.status), "message": where + reason}
    return line


def _body(request: Request, result: Result) -> dict[str, Any]:
    is_chat = request.kind == "chat"
    samples = result.samples
    num_tokens = sum(sample.completion_tokens for sample in samples)
    body: dict[str, Any] = {
        "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{result.job_id}",
        "object": "chat.completion" if is_chat else "text_completion",
        "created": max(sample.finished_ms for sample in samples) // 1000,
        "model": result.model,
        "choices": [_choice(request, sample) for sample in samples],
        "usage": {
            "prompt_tokens": result.prompt_tokens,
            "completion_tokens": num_tokens,
            "total_tokens": result.prompt_tokens + num_tokens,
        },
        "metrics": {
            "speculative_decoding": _speculation(samples, num_tokens),
            "num_near_ties": sum(sample.near_ties for sample in samples),
        },
    }
    if request.params.prompt_logprobs is not None:  # the samples have the prompt in common
        body["prompt_logprobs"] = prompt_logprobs(result.prompt_logprobs)
    return body


def _choice(request: Request, sample: Result) -> dict[str, Any]:
    choice: dict[str, Any] = {"index": sample.sample}
    if request.kind == "chat":
        choice["message"] = {"role": "assistant", "content": sample.text}
    else:
        choice["text"] = sample.text
    return choice | {
        "logprobs": _logprobs(request, sample),
        "finish_reason": sample.finish_reason,
    }


def _logprobs(request: Request, sample: Result) -> dict[str, Any] | None:
    if request.params.logprobs is None:
        return None
    if request.kind == "chat":
        return chat_logprobs(sample.logprobs)
    prompt = sample.prompt_logprobs if request.params.echo else []
    return completion_logprobs(sample.logprobs, prompt, sample.text)


def _speculation(samples: Sequence[Result], num_tokens: int) -> dict[str, Any]:
    rounds = sum(sample.rounds for sample in samples)
    return {
        "num_spec_steps": rounds,
        "num_draft_tokens": sum(sample.drafted for sample in samples),
        "num_accepted_draft_tokens": sum(sample.accepted for sample in samples),
        # committed tokens a round, the target's own token included
        "mean_acceptance_length": round(num_tokens / rounds, 4) if rounds else None,
    }


class OutputFile:
    """An output file that is appended to line by line.

    A line is written with one call, so a crash leaves at most one torn line, the last; opening
    the file again cuts that off.

    Attributes:
        finished: custom_id of each line in it → whether the request succeeded.
    """

    def __init__(self, path: Path) -> None:
        """Open `path`, made if need be.

        Raises:
            InvalidRequest: it holds lines that are no output lines.
            OSError: it cannot be written.
        """
        self.finished = repair(path)
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)

    def __enter__(self) -> OutputFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        os.close(self._file)

    def write(self, line: dict[str, Any]) -> None:
        """Append one line; it is with the operating system when this returns.

        Raises:
            OSError: there is no room, or the file is gone.
        """
        text = json.dumps(line, ensure_ascii=False)
        for character in LINE_ENDS:  # harmless to JSON, but some readers split lines at them
            text = text.replace(character, f"\\u{ord(character):04x}")
        raw = text.encode() + b"\n"
        while raw:
            raw = raw[os.write(self._file, raw) :]
        failed = line["error"] is not None
        self.finished[line["custom_id"]] = not failed


def repair(path: Path) -> dict[str, bool]:
    """Cut a torn last line off an output file.

    Returns:
        custom_id of each line in it → whether the request succeeded; empty where there is no file.

    Raises:
        InvalidRequest: another line than the last is no output line.
    """
    if not path.exists():
        return {}
    data = path.read_bytes()
    whole, _, torn = data.rpartition(b"\n")
    if torn:
        os.truncate(path, len(data) - len(torn))
    finished: dict[str, bool] = {}
    for number, raw in enumerate(whole.split(b"\n"), start=1):
        if not raw.strip():
            continue
        try:
            line = json.loads(raw)
            finished[line["custom_id"]] = line["error"] is None
        except (ValueError, KeyError, TypeError):
            raise InvalidRequest(f"{path}, line {number}, is no output line of a run") from None
    return finished
