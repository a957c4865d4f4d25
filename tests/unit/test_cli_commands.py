"""The command line: one clear line for each error, and the exit status that belongs to it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from pilotfish.cli import cli, run_command
from pilotfish.cli.options import SAMPLING_DEFAULTS, WORKER_SETTINGS
from pilotfish.cli.submit import read_sampling
from pilotfish.cli.targets import is_hub_id, with_named_target, with_served_name
from pilotfish.cli.up import locked
from pilotfish_broker.errors import ConfigError
from pilotfish_broker.sampling import SamplingParams
from pilotfish_broker.settings import Settings

NOBODY = "redis://127.0.0.1:1/0"
WORKER_WORDS = {f"--{name.replace('_', '-')}" for name in WORKER_SETTINGS}


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("BROKER_URL", "DATA_URL", "TARGET", "MODEL", "DRAFT", "SLOTS", "SPECULATION"):
        monkeypatch.delenv(f"PILOTFISH_{name}", raising=False)


def file_of(tmp_path: Path, *lines: str) -> str:
    path = tmp_path / "in.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return str(path)


@pytest.mark.parametrize(
    "arguments",
    [
        ["status", "--broker", NOBODY],
        ["submit", "hi", "--broker", NOBODY],
        ["results", "a", "--broker", NOBODY],
        ["cancel", "a", "--broker", NOBODY],
    ],
)
def test_an_unreachable_broker_is_status_3_and_one_line(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(arguments) == 3
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("pilotfish: no answer from Redis at redis://127.0.0.1:1/0")
    assert said.err.count("\n") == 1


def test_a_run_on_an_unreachable_broker_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, output = file_of(tmp_path, '{"prompt": "x"}'), tmp_path / "out.jsonl"
    assert run_command(["run", source, "-o", str(output), "--broker", NOBODY]) == 3
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "line 1: malformed JSON"),
        ('{"prompt": ""}', "line 1: the prompt is empty"),
        ('{"prompt": "x", "max_tokens": 0}', "max_tokens must lie between 1"),
        ('{"prompt": "x", "best_of": 4}', "'best_of'"),
        ('{"prompt": "x", "top_p": 0}', "line 1: top_p must be above 0"),
        ('{"prompt": "x", "model": "gpt-9"}', "model 'gpt-9' is not served here"),
    ],
)
def test_a_file_that_cannot_be_served_starts_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str, said: str
) -> None:
    (tmp_path / "model").mkdir()
    source, output = file_of(tmp_path, line), tmp_path / "out.jsonl"
    target = str(tmp_path / "model")
    assert run_command(["run", source, "-o", str(output), "--target", target]) == 2
    assert said in capsys.readouterr().err
    assert {path.name for path in tmp_path.iterdir()} == {"in.jsonl", "model"}


@pytest.mark.parametrize(
    ("option", "said"),
    [
        (["--slots", "0"], "PILOTFISH_SLOTS='0' cannot be used"),
        (["--speculation", "99"], "PILOTFISH_SPECULATION='99'"),
        (["--dtype", "int4"], "PILOTFISH_DTYPE='int4'"),
        (["--device", "tpu"], "PILOTFISH_DEVICE='tpu'"),
        (["--target", "./nowhere"], "there is no model folder './nowhere'"),
        (["--draft", "/no/where"], "there is no model folder '/no/where'"),
        (["--summary", "/no/where/s.json"], "there is no folder /no/where"),
        (["--verify-workers", "0"], "--verify-workers"),
        (["--top-p", "1.5"], "pilotfish: top_p must be above 0 and at most 1, not 1.5"),
        (["--temperature", "warm"], "--temperature"),
        (["--seed", str(1 << 70)], "pilotfish: seed must lie between"),
        (["--frobnicate"], "--frobnicate"),
    ],
)
def test_a_wrong_option_is_status_2_and_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], option: list[str], said: str
) -> None:
    source = file_of(tmp_path, '{"prompt": "x"}')
    assert run_command(["run", source, "-o", str(tmp_path / "out"), *option]) == 2
    assert said in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


@pytest.mark.parametrize(
    "typed",
    [
        ["--draft", "ngram"],
        ["--dtype", "float32"],
        ["--device", "cpu"],
        ["--threads", "1"],
        ["--slots", "4"],
        ["--kv-tokens", "4096"],
        ["--lease-seconds", "10"],
        ["--verify-workers", "1"],
        ["--draft-workers", "1", "--draft", "off"],
    ],
)
def test_what_a_deployment_decides_is_refused_beside_broker_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], typed: list[str]
) -> None:
    source = file_of(tmp_path, '{"prompt": "x"}')
    arguments = ["run", source, "-o", str(tmp_path / "out"), "--broker", NOBODY, *typed]
    assert run_command(arguments) == 2
    said = capsys.readouterr().err
    assert all(word in said for word in typed if word.startswith("--"))
    assert said.count("\n") == 1


def test_variables_that_a_deployment_decides_are_not_typed_and_not_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PILOTFISH_SLOTS", "4")
    source = file_of(tmp_path, '{"prompt": "x"}')
    assert run_command(["run", source, "-o", str(tmp_path / "out"), "--broker", NOBODY]) == 3


@pytest.mark.parametrize("command", [["run", "IN", "-o", "OUT"], ["status"], ["submit", "hi"]])
def test_broker_env_means_the_url_in_the_variable(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    command: list[str],
) -> None:
    names = {"IN": file_of(tmp_path, '{"prompt": "x"}'), "OUT": str(tmp_path / "out")}
    arguments = [*(names.get(word, word) for word in command), "--broker", "env"]
    assert run_command(arguments) == 2
    said = "--broker env means the URL in PILOTFISH_BROKER_URL, which is not set"
    assert said in capsys.readouterr().err
    monkeypatch.setenv("PILOTFISH_BROKER_URL", "redis://:secret@127.0.0.1:1/0")
    assert run_command(arguments) == 3
    said = capsys.readouterr().err
    assert "no answer from Redis at redis://127.0.0.1:1/0" in said
    assert "secret" not in said


def test_a_missing_input_is_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["run", "nowhere.jsonl", "-o", "out.jsonl"]) == 2
    assert "nowhere.jsonl" in capsys.readouterr().err


def test_an_output_of_something_else_is_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "model").mkdir()
    source, output = file_of(tmp_path, '{"prompt": "x"}'), tmp_path / "out.jsonl"
    output.write_text("precious\n")
    target = str(tmp_path / "model")
    assert run_command(["run", source, "-o", str(output), "--target", target]) == 2
    assert "choose another -o" in capsys.readouterr().err
    assert output.read_text() == "precious\n"


@pytest.mark.parametrize("name", ["in.jsonl", "out.jsonl"])
def test_a_summary_over_another_file_of_the_run_is_status_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    source, output = file_of(tmp_path, '{"prompt": "x"}'), tmp_path / "out.jsonl"
    arguments = ["run", source, "-o", str(output), "--broker", NOBODY]
    assert run_command([*arguments, "--summary", str(tmp_path / name)]) == 2
    assert "the summary would overwrite" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


@pytest.mark.parametrize("kind", ["verify", "draft"])
@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--target", "t", "--slots", "many"], "PILOTFISH_SLOTS='many' cannot be used"),
        (["--target", "t", "--broker", "host:1"], "PILOTFISH_BROKER_URL"),
        ([], "PILOTFISH_MODEL or PILOTFISH_TARGET must be set"),
    ],
)
def test_a_worker_with_wrong_settings_never_starts(
    capsys: pytest.CaptureFixture[str], kind: str, options: list[str], said: str
) -> None:
    assert run_command(["worker", kind, *options]) == 2
    assert said in capsys.readouterr().err


def test_a_wrong_variable_is_named_like_a_wrong_option(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PILOTFISH_SLOTS", "-4")
    assert run_command(["worker", "verify", "--target", "t"]) == 2
    assert "PILOTFISH_SLOTS='-4' cannot be used" in capsys.readouterr().err


def test_a_prompt_comes_from_one_place(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["submit"]) == 2
    assert run_command(["submit", "hi", "--file", "x"]) == 2
    assert run_command(["submit", "--file", "/no/where"]) == 1
    assert "/no/where: No such file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--temperature", "-1"], "temperature must lie between 0"),
        (["-n", "0"], "n must lie between 1 and 128"),
        (["--rule", "guess"], "rule must be one of rejection, block, coupled, not 'guess'"),
        (["--stop", ""], "stop holds an empty text"),
        (["--top-k", "few"], "--top-k"),
    ],
)
def test_a_wrong_sampling_option_is_named_before_the_broker_is_asked(
    capsys: pytest.CaptureFixture[str], options: list[str], said: str
) -> None:
    assert run_command(["submit", "hi", "--broker", NOBODY, *options]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "said"),
    [("{", "json_schema is no valid JSON"), ("[]", "json_schema must be a JSON object")],
)
def test_a_file_that_is_no_schema_is_status_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, said: str
) -> None:
    path = tmp_path / "schema.json"
    path.write_text(text)
    assert run_command(["submit", "hi", "--json-schema", str(path), "--broker", NOBODY]) == 2
    assert said in capsys.readouterr().err
    assert run_command(["submit", "hi", "--json-schema", "/no/where", "--broker", NOBODY]) == 1
    assert "/no/where: No such file" in capsys.readouterr().err


def test_submit_reads_every_sampling_option(tmp_path: Path) -> None:
    path = tmp_path / "schema.json"
    path.write_text('{"type": "integer"}')
    typed = "--max-tokens 9 --temperature 0.5 --top-p 0.9 --top-k 7 --min-p 0.1 --seed -3 -n 2"
    typed += " --stop a --stop b --rule block"
    submit = cli.commands["submit"]
    context = submit.make_context("submit", [*typed.split(), "--json-schema", str(path), "hi"])
    assert read_sampling(context.params) == SamplingParams(
        max_tokens=9,
        temperature=0.5,
        top_p=0.9,
        top_k=7,
        min_p=0.1,
        seed=-3,
        n=2,
        stop=("a", "b"),
        rule="block",
        json_schema='{"type":"integer"}',
    )
    assert read_sampling(submit.make_context("submit", ["hi"]).params) == SamplingParams()


def test_the_sampling_options_of_run_are_those_of_submit() -> None:
    for name in ("run", "submit"):
        words = {word for parameter in cli.commands[name].params for word in parameter.opts}
        assert {f"--{option.replace('_', '-')}" for option in SAMPLING_DEFAULTS} <= words, name


def test_worker_options_are_the_same_words_everywhere() -> None:
    commands = [cli.commands[name] for name in ("run", "demo", "up")]
    worker = cli.commands["worker"]
    commands += list(worker.commands.values())  # type: ignore[attr-defined]
    for command in commands:
        words = {word for parameter in command.params for word in parameter.opts}
        assert words >= WORKER_WORDS, command.name


def test_a_second_up_on_the_same_folder_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pilotfish.folder_lock.LOCK_SECONDS", 0.0)
    (tmp_path / "model").mkdir()
    arguments = ["up", "--target", str(tmp_path / "model"), "--folder", str(tmp_path / "data")]
    with locked(tmp_path / "data"):
        assert run_command(arguments) == 2
    assert f"another pilotfish uses {tmp_path / 'data'}" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "data").iterdir()] == ["lock"]


def test_each_command_explains_itself_with_an_example() -> None:
    for name, command in cli.commands.items():
        assert command.help, name
        assert "Example:" in command.help, name
        assert f"pilotfish {name}" in command.help, name


def test_help_names_the_exit_statuses(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["--help"]) == 0
    said = capsys.readouterr().out
    for status in ("0 ", "1 ", "2 ", "3 ", "130 "):
        assert f"\n    {status}" in said


def test_an_interrupt_is_status_130(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys; from pilotfish.cli import cli, main\n"
        "cli.commands['status'].callback = lambda **_: os.kill(os.getpid(), signal.SIGINT)\n"
        "main(['status'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.strip()) == (130, "pilotfish: interrupted")


def test_a_closed_pipe_is_no_traceback() -> None:
    command = f"{sys.executable} -c 'from pilotfish.cli import main; main()' --help | head -c 1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("given", "target", "name"),
    [
        ({}, "SmolLM2-135M-Instruct", "SmolLM2-135M-Instruct"),
        ({"target": "default"}, "default", "SmolLM2-135M-Instruct"),
        ({"target": "default", "model": "x"}, "default", "x"),
        ({"target": "org/name"}, "org/name", "name"),
    ],
)
def test_a_target_has_a_name_to_be_served_by(given: dict[str, str], target: str, name: str) -> None:
    settings = with_named_target(Settings.from_env({}, **given))
    assert (settings.target, settings.model) == (target, name)


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ({"target": "./nothere"}, "nothere"),
        ({"target": "/no/such/model/"}, "model"),
        ({"target": "./nothere", "model": "x"}, "x"),
        ({"target": "default"}, "SmolLM2-135M-Instruct"),
        ({"model": "x"}, "x"),
        ({}, None),
    ],
)
def test_a_draft_worker_needs_the_name_of_its_target_only(
    given: dict[str, str], name: str | None
) -> None:
    assert with_served_name(Settings.from_env({}, **given)).model == name


def test_a_draft_worker_starts_without_its_target_and_not_without_its_draft(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started: list[dict[str, str]] = []
    monkeypatch.setattr("os.execve", lambda _path, _argv, environ: started.append(environ))
    for target in ("./nothere", "default"):
        assert run_command(["worker", "draft", "--target", target, "--draft", "ngram"]) == 0
    names = [environ["PILOTFISH_MODEL"] for environ in started]
    assert names == ["nothere", "SmolLM2-135M-Instruct"]
    assert capsys.readouterr().err == ""
    assert run_command(["worker", "draft", "--target", "t", "--draft", "./nowhere"]) == 2
    assert "there is no model folder './nowhere'" in capsys.readouterr().err


def test_a_target_without_a_usable_name_is_refused(tmp_path: Path) -> None:
    (tmp_path / "my model").mkdir()
    with pytest.raises(ConfigError, match="set PILOTFISH_MODEL"):
        with_named_target(Settings.from_env({}, target=str(tmp_path / "my model")))


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("ngram", False),
        ("off", False),
        ("default", False),
        ("simulated:pass_ms=1", False),
        (".", False),
        ("gpt2", True),
        ("someone/some-model", True),
    ],
)
def test_what_can_only_come_from_a_hub_is_known(model: str, expected: bool) -> None:
    assert is_hub_id(model) is expected
