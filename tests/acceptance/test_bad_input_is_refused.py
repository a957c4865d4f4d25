"""Bad input through the command line: one clear message, no traceback, an exit status that is not
0, and nothing half-written."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.acceptance.conftest import StartFleet
from tests.fleet_kit import Fleet
from tests.process_kit import run_cli
from tests.reference_kit import read_output
from tests.tiny_models import build_tiny

CONTEXT = 64
SIMULATED = ["--target", f"simulated:pass_ms=1,context={CONTEXT}", "--model", "sim"]
BAD_INPUT, NO_BROKER = 2, 3

pytestmark = [pytest.mark.acceptance, pytest.mark.integration]


def check_refused(folder: Path, lines: str, options: list[str], status: int, *words: str) -> str:
    """Run lines that must be refused; each of `words` stands in the one message. Gives it."""
    source, output = folder / "in.jsonl", folder / "out.jsonl"
    source.write_text(lines)
    done = run_cli("run", source, "-o", output, "--summary", folder / "s.json", *options)
    assert done.returncode == status, done.stderr
    assert done.stdout == ""
    complaints = [line for line in done.stderr.splitlines() if line.startswith("pilotfish: ")]
    assert len(complaints) == 1, done.stderr
    assert "Traceback" not in done.stderr
    for word in words:
        assert word in done.stderr
    assert [path.name for path in folder.iterdir()] == ["in.jsonl"], "something was left behind"
    return done.stderr


BAD_LINES = [
    ('{"prompt": ""}', "empty"),
    ('{"prompt": []}', "empty"),
    ('{"prompt": "x", "top_p": 1.5}', "top_p must be above 0 and at most 1"),
    ('{"prompt": "x", "temperature": -0.7}', "temperature must lie between 0"),
    ('{"prompt": "x", "n": 129}', "n must lie between 1 and 128"),
    ('{"prompt": "x", "best_of": 2}', "'best_of'"),
    ('{"prompt": "x", "suffix": "y", "stream": true}', "'suffix', 'stream'"),
    ('{"messages": [{"role": "user", "content": "x"}], "tools": []}', "'tools'"),
    ('{"messages": [{"role": "user", "content": "x"}], "echo": true}', "'echo'"),
    ('{"messages": [{"role": "user", "content": "x"}], "top_logprobs": 3}', "needs logprobs"),
    ('{"prompt": "x", "response_format": {"type": "xml"}}', "response_format: it must have"),
    ('{"prompt": "x", "regex": "a", "grammar": "b"}', "regex and grammar cannot be combined"),
    ('{"prompt": "x", "max_tokens": 0}', "max_tokens must lie between 1 and"),
    ('{"prompt": "x", "speculation": 99}', "speculation must lie between 1 and"),
    ('{"prompt": "x"', "malformed JSON"),
    ('{"prompt": "x", "custom_id": "a"}', "'a' was used before, on line 1"),
]


def test_all_lines_that_cannot_be_served_are_named_at_once(tmp_path: Path) -> None:
    lines = ['{"custom_id": "a", "prompt": "x"}', *(line for line, _ in BAD_LINES)]
    done = check_refused(tmp_path, "\n".join(lines), SIMULATED, BAD_INPUT)
    complaints = [line.strip() for line in done.splitlines() if line.startswith("  line ")]
    assert len(complaints) == len(BAD_LINES)
    for number, (complaint, (_, words)) in enumerate(zip(complaints, BAD_LINES, strict=True), 2):
        assert complaint.startswith(f"line {number}: ")
        assert words in complaint


def test_a_line_for_another_model_is_named(tmp_path: Path) -> None:
    line = '{"prompt": "x", "model": "other"}'
    words = "line 1", "'other' is not served here", "'sim'"
    check_refused(tmp_path, line, SIMULATED, BAD_INPUT, *words)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--target", "./no/such/folder"], ["no model folder './no/such/folder'"]),
        ([*SIMULATED, "--slots", "0"], ["PILOTFISH_SLOTS='0'", "between 1 and"]),
        ([*SIMULATED, "--speculation", "17"], ["PILOTFISH_SPECULATION='17'"]),
        ([*SIMULATED, "--top-k", "-2"], ["top_k must lie between -1 and"]),
        ([*SIMULATED, "--broker", "http://127.0.0.1"], ["PILOTFISH_BROKER_URL", "redis://"]),
    ],
)
def test_an_option_that_cannot_be_used_is_named(
    options: list[str], words: list[str], tmp_path: Path
) -> None:
    check_refused(tmp_path, '{"prompt": "x"}\n', options, BAD_INPUT, *words)


def test_a_broker_that_does_not_answer_is_named(tmp_path: Path) -> None:
    with socket.socket() as held:  # bound, but nobody listens
        held.bind(("127.0.0.1", 0))
        url = f"redis://somebody:secret@127.0.0.1:{held.getsockname()[1]}/0"
        shown = url.replace("somebody:secret@", "")
        check_refused(tmp_path, '{"prompt": "x"}\n', ["--broker", url], NO_BROKER, shown)


def test_a_broker_that_evicts_keys_is_refused(
    tmp_path: Path, start_valkey: Callable[..., Any]
) -> None:
    server = start_valkey(maxmemory_policy="allkeys-lru")
    options = ["--broker", server.url]
    check_refused(tmp_path, '{"prompt": "x"}\n', options, NO_BROKER, "allkeys-lru", "noeviction")


@pytest.fixture(scope="module")
def fleet(start_fleet: StartFleet) -> Fleet:
    fleet = start_fleet("bad", verify=SIMULATED, draft=SIMULATED)
    fleet.ensure(verify=1)
    return fleet


def test_a_model_that_nobody_ever_served_is_named(fleet: Fleet, tmp_path: Path) -> None:
    options = [*fleet.broker, "--model", "other"]
    words = "'other'", "served so far: sim"
    check_refused(tmp_path, '{"prompt": "x"}\n', options, BAD_INPUT, *words)


def test_token_ids_beyond_the_context_or_vocabulary_are_refused(
    fleet: Fleet, tmp_path: Path
) -> None:
    long = json.dumps({"prompt": [1] * CONTEXT})
    strange = json.dumps({"prompt": [1, 512]})
    biased = json.dumps({"prompt": "x", "logit_bias": {"512": 1}})
    words = f"{CONTEXT} tokens", f"context of {CONTEXT}", "line 2", "token id 512", "line 3"
    lines = f"{long}\n{strange}\n{biased}\n"
    check_refused(tmp_path, lines, fleet.broker, BAD_INPUT, *words, "logit_bias has the token id")


def test_a_text_beyond_the_context_fails_alone_with_the_reason_in_its_line(
    fleet: Fleet, tmp_path: Path
) -> None:
    """What takes a tokenizer to see is seen by the worker; the other lines are answered."""
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = [{"custom_id": "long", "prompt": "x" * CONTEXT}, {"custom_id": "short", "prompt": "x"}]
    source.write_text("".join(json.dumps({**line, "max_tokens": 4}) + "\n" for line in lines))
    done = run_cli("run", source, "-o", output, *fleet.broker)
    assert done.returncode == 1
    assert "1 of 2 jobs failed" in done.stderr
    assert "Traceback" not in done.stderr
    answers = read_output(output)
    assert answers["long"]["response"] is None
    assert f"{CONTEXT} tokens" in answers["long"]["error"]["message"]
    assert answers["short"]["error"] is None


def test_a_drafter_with_another_tokenizer_is_refused_with_the_first_difference(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    models = tmp_path_factory.mktemp("models")
    target = build_tiny(models / "target", "llama")
    draft = build_tiny(models / "draft", "llama", vocab_size=300)
    options = ["--target", str(target), "--draft", str(draft), "--threads", "1"]
    words = "draft has 300 tokens", "target 288", "first difference is id 288", "'filler"
    # enough to do that the refusal comes before the first answer
    lines = '{"prompt": "x", "ignore_eos": true, "max_tokens": 1000}\n' * 64
    check_refused(tmp_path, lines, [*options, "--slots", "64"], BAD_INPUT, *words)
