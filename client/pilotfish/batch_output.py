"""Writes OpenAI batch output lines, one finished request a line, and goes on after a crash."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import TracebackType
from typing import Any

from pilotfish.batch_lines import Request
from pilotfish.result import Result
from pilotfish_broker.errors import InvalidRequest
from pilotfish_broker.spec import Status

LINE_ENDS = "\u0085\u2028\u2029"


def output_line(request: Request, result: Result) -> dict[str, Any]:
    """The output line of a request whose job has ended: a response, or an error."""
    line: dict[str, Any] = {
        "id": f"batch_req_{result.job_id}",
        "custom_id": request.custom_id,
        "response": None,
        "error": None,
    }
    if result.status is Status.SUCCEEDED:
        line["response"] = {
            "status_code": 200,
            "request_id": result.job_id,
            "body": _body(request, result),
        }
    else:
        reason = result.error or f"the job was {result.status}"
        line["error"] = {"code": str(result.status), "message": reason}
    return line


def _body(request: Request, result: Result) -> dict[str, Any]:
    is_chat = request.kind == "chat"
    choice: dict[str, Any] = {"index": 0}
    if is_chat:
        choice["message"] = {"role": "assistant", "content": result.text}
    else:
        choice["text"] = result.text
    choice |= {"logprobs": None, "finish_reason": result.finish_reason}
    return {
        "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{result.job_id}",
        "object": "chat.completion" if is_chat else "text_completion",
        "created": result.finished_ms // 1000,
        "model": result.model,
        "choices": [choice],
        "usage": {
            "prompt_tokens": result.prompt_tokens,
            "completion_tokens": result.completion_tokens,
            "total_tokens": result.prompt_tokens + result.completion_tokens,
        },
        "metrics": {"speculative_decoding": _speculation(result)},
    }


def _speculation(result: Result) -> dict[str, Any]:
    rounds = result.rounds
    return {
        "num_spec_steps": rounds,
        "num_draft_tokens": result.drafted,
        "num_accepted_draft_tokens": result.accepted,
        # committed tokens a round, the target's own token included
        "mean_acceptance_length": round(result.completion_tokens / rounds, 4) if rounds else None,
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
