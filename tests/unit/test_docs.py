"""The documentation against the code: what it names exists, and what exists is named."""

from __future__ import annotations

import ast
import inspect
import json
import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import click
import pytest

import pilotfish
from pilotfish.batch_lines import read_request
from pilotfish.cli import BAD_INPUT, FAILED, INTERRUPTED, NO_BROKER, cli
from pilotfish_broker import celery_app
from pilotfish_broker.codec import TAGS, decode_all, encode
from pilotfish_broker.digest import extend
from pilotfish_broker.keys import Keys
from pilotfish_broker.messages import Proposal
from pilotfish_broker.settings import PREFIX, Settings

ROOT = Path(__file__).parents[2]
PACKAGES = {
    "pilotfish_broker": ROOT / "broker_config" / "pilotfish_broker",
    "pilotfish_checkpoint": ROOT / "checkpoint" / "pilotfish_checkpoint",
    "pilotfish_workers": ROOT / "workers" / "pilotfish_workers",
    "pilotfish": ROOT / "client" / "pilotfish",
}
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]
README = (ROOT / "README.md").read_text(encoding="utf-8")
ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
PROTOCOL = (ROOT / "docs" / "protocol.md").read_text(encoding="utf-8")
OPERATIONS = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
LUA = PACKAGES["pilotfish_broker"] / "lua"
# read beside Settings, by the models' cache, its download and the installer
OTHER_VARIABLES = {"PILOTFISH_CACHE", "PILOTFISH_INDEX_URL", "PILOTFISH_TORCH"}
# of other programs that the pages show
FOREIGN_OPTIONS = {"--profile", "--build", "--scale", "--app", "--conf", "--pool", "--concurrency"}


def rows(text: str) -> Iterator[list[str]]:
    """Cells of every table row; a | inside code that is escaped or not stays in its cell."""
    for line in text.splitlines():
        if line.startswith("| ") and not line.startswith("|--"):
            yield [cell.strip() for cell in re.split(r"(?<= )\|(?= )", line.strip("| "))]


def section(text: str, heading: str) -> str:
    """What stands between a heading and the next one of any level."""
    found = re.search(rf"^#+ {re.escape(heading)}.*?$(.*?)(?=^#|\Z)", text, re.M | re.S)
    assert found is not None, f"there is no heading {heading!r}"
    return found[1]


def code_blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.M | re.S)


def has_code(module: Path) -> bool:
    """Whether a module is more than a docstring, imports and __all__."""
    for node in ast.parse(module.read_text(encoding="utf-8")).body:
        is_all = isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
        is_plain = isinstance(node, ast.Expr | ast.Import | ast.ImportFrom)
        if not (is_all or is_plain):
            return True
    return False


def commands(group: click.Group, prefix: str = "pilotfish") -> Iterator[tuple[str, click.Command]]:
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from commands(command, f"{prefix} {name}")
        else:
            yield f"{prefix} {name}", command


# --- architecture --------------------------------------------------------------------------------


@pytest.mark.parametrize("package", PACKAGES)
def test_architecture_gives_every_module_one_line_and_no_other(package: str) -> None:
    folder = PACKAGES[package]
    modules = {
        str(path.relative_to(folder))
        for path in folder.rglob("*.py")
        if path.name != "__init__.py" or has_code(path)
    }
    table = section(ARCHITECTURE, f"`{package}` (in")
    named = [row[0].strip("`") for row in rows(table) if row[0].startswith("`")]
    assert sorted(named) == sorted(modules)


# --- README --------------------------------------------------------------------------------------


def test_readme_gives_every_setting_with_its_default() -> None:
    table = {row[0].strip("`"): row[1] for row in rows(section(README, "Settings"))}
    for item in fields(Settings):
        shown = table[PREFIX + item.name.upper()]
        if item.default is not None and item.name != "model":
            assert shown == f"`{item.default}`", item.name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_variable_that_a_page_names_exists(page: Path) -> None:
    known = {PREFIX + item.name.upper() for item in fields(Settings)} | OTHER_VARIABLES
    named = set(re.findall(r"PILOTFISH_[A-Z]\w+", page.read_text(encoding="utf-8")))
    assert named <= known


def test_readme_names_every_command() -> None:
    missing = [name for name, _ in commands(cli) if name not in README]
    assert missing == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_option_that_a_page_names_exists(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    known = {o for _, command in commands(cli) for p in command.params for o in p.opts}
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", text))
    assert named - FOREIGN_OPTIONS <= known


def test_readme_gives_every_exit_status_that_is_used() -> None:
    table = section(README, "Commands").partition("exit status")[2]
    given = {row[0] for row in rows(table)}
    assert {str(status) for status in (0, FAILED, BAD_INPUT, NO_BROKER, INTERRUPTED)} <= given


def test_lines_shown_in_the_readme_are_read_as_requests() -> None:
    block = code_blocks(section(README, "Lines in, lines out"), "json")[0]
    lines = [line for line in README.splitlines() if line.startswith(('{"messages', '{"custom_id'))]
    assert len(lines) >= 3
    for number, line in enumerate([*block.splitlines(), *lines], start=1):
        read_request(number, line.encode())


def test_the_output_line_shown_in_the_readme_is_json_of_the_right_shape() -> None:
    block = code_blocks(section(README, "Lines in, lines out"), "json")[1]
    line = json.loads(block.replace("\n", ""))
    assert set(line) == {"id", "custom_id", "response", "error"}
    counts = line["response"]["body"]["metrics"]["speculative_decoding"]
    tokens = line["response"]["body"]["usage"]["completion_tokens"]
    assert counts["mean_acceptance_length"] == round(tokens / counts["num_spec_steps"], 4)


def test_python_shown_in_the_readme_parses_and_imports_what_exists() -> None:
    blocks = code_blocks(README, "python")
    assert blocks
    for block in blocks:
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and node.module == "pilotfish":
                assert {alias.name for alias in node.names} <= set(pilotfish.__all__)


def test_readme_stays_short() -> None:
    assert len(README.splitlines()) < 250


# --- protocol ------------------------------------------------------------------------------------


def built_keys() -> dict[str, str]:
    """Every builder of Keys, called with its parameters' names in angle brackets."""
    keys = Keys("<ns>")
    built = {}
    for name, member in inspect.getmembers(Keys):
        if name.startswith("_") or name == "namespace":
            continue
        if isinstance(member, property):
            built[name] = getattr(keys, name)
        elif inspect.isfunction(member):
            parameters = list(inspect.signature(member).parameters)[1:]
            built[name] = member(keys, *(f"<{parameter}>" for parameter in parameters))
    return built


def test_protocol_names_every_key_that_is_built() -> None:
    keys = built_keys()
    assert len(keys) > 15
    given = {row[0].strip("`").rstrip("…") for row in rows(section(PROTOCOL, "Keys"))}
    assert {name: key for name, key in keys.items() if key not in given} == {}


def test_protocol_names_every_script_with_its_outcomes() -> None:
    table = {row[0].strip("`"): row[2] for row in rows(section(PROTOCOL, "Scripts"))}
    scripts = {path.name for path in LUA.glob("*.lua")} - {"shared.lua"}
    assert {name for name in table if name.endswith(".lua")} == scripts
    for name in scripts:
        text = (LUA / name).read_text(encoding="utf-8")
        returned = set(re.findall(r"(?:return|and|or) \{?'(\w+)'", text))
        assert returned <= set(re.findall(r"`(\w+)`", table[name])), name


def test_protocol_names_every_field_of_a_job_record() -> None:
    given = set(re.findall(r"\w+", section(PROTOCOL, "Job record")))
    text = "\n".join(path.read_text(encoding="utf-8") for path in LUA.glob("*.lua"))
    written = set(re.findall(r"HINCRBY', \w+(?:\[1\])?, '(\w+)'", text))
    for call in re.findall(r"'HSET', (?:KEYS\[1\]|job|k\.job), (.*?)\)", text, re.S):
        written |= set(re.findall(r"'([a-z_]+)',", call))
    assert {"spec", "seen_ms", "committed", "finished_ms"} <= written
    values = {"running", "queued"}
    assert written - values <= given


def test_protocol_gives_tag_and_fields_of_every_frame() -> None:
    table = {row[1].strip("`"): row for row in rows(section(PROTOCOL, "Frames")) if len(row) == 5}
    for tag, kind in TAGS.items():
        row = table[kind.__name__]
        assert row[0] == str(tag)
        assert row[3].strip("`").split() == [item.name for item in fields(kind)]


def test_the_bytes_in_the_protocol_are_what_the_codec_makes() -> None:
    example = [row for row in rows(section(PROTOCOL, "One round in bytes")) if "(" in row[0]]
    assert len(example) == len(TAGS)
    for shown, raw in example:
        (frame,) = decode_all(bytes.fromhex(raw.strip("`")))
        assert repr(frame) == shown.strip("`")
        assert encode(frame).hex(" ") == raw.strip("`")
        if isinstance(frame, Proposal):
            assert frame.digest == extend(0, [504, 2262, 314, 260])


def test_protocol_gives_a_reason_for_every_celery_setting() -> None:
    source = inspect.getsource(celery_app.make_app)
    updates = [
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "app.conf.update"
    ]
    names = {keyword.arg for keyword in updates[0].keywords}
    names |= set(re.findall(r"app\.conf\.(\w+) = ", source))
    given = set(re.findall(r"`(\w+)`", section(PROTOCOL, "Celery")))
    assert names - given == set()


# --- operations ----------------------------------------------------------------------------------


def messages() -> list[str]:
    """Every text in the code, with a zero byte where a value is put in."""
    found = []
    for folder in PACKAGES.values():
        for path in folder.rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.JoinedStr):
                    parts = [p.value if isinstance(p, ast.Constant) else "\0" for p in node.values]
                    found.append("".join(str(part) for part in parts))
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    found.append(node.value.replace("%s", "\0"))
    text = (LUA / "requeue.lua").read_text(encoding="utf-8")
    found.append(re.sub(r"' \.\. \w+ \.\. '", "\0", text))
    return found


def test_every_message_explained_to_operators_is_one_that_the_code_has() -> None:
    known = messages()
    shown = [row[0] for row in rows(section(OPERATIONS, "What it says"))][1:]
    assert len(shown) > 20
    for cell in shown:
        message = cell.removeprefix("log: ").strip("`")
        parts = [re.escape(part.strip()) for part in message.split("…") if part.strip()]
        pattern = re.compile(r"[\s\S]*".join(parts))
        assert any(pattern.search(text) for text in known), message


# --- links ---------------------------------------------------------------------------------------


def anchor(heading: str) -> str:
    """The name that a heading gets as a link's target, as common renderers build it."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_relative_links_lead_somewhere(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    links = re.findall(r"\]\(([^)\s]+)\)", text)
    for link in links:
        if link.startswith(("http://", "https://")):
            continue
        path, _, name = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        if name:
            headings = re.findall(r"^#+ (.*)$", target.read_text(encoding="utf-8"), re.M)
            assert name in {anchor(heading) for heading in headings}, link
