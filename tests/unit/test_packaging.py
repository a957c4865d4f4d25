"""What is shipped, what importing it costs, and that the development files agree with it."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = {
    "pilotfish_broker": ROOT / "broker_config" / "pilotfish_broker",
    "pilotfish_checkpoint": ROOT / "checkpoint" / "pilotfish_checkpoint",
    "pilotfish_workers": ROOT / "workers" / "pilotfish_workers",
    "pilotfish": ROOT / "client" / "pilotfish",
}
MAY_IMPORT = {
    "pilotfish_broker": set[str](),
    "pilotfish_checkpoint": {"pilotfish_broker"},
    "pilotfish_workers": {"pilotfish_broker", "pilotfish_checkpoint"},
    "pilotfish": {"pilotfish_broker"},
}
MODEL_LIBRARIES = {"torch", "transformers", "safetensors", "gguf", "accelerate"}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def imported(module: Path) -> Iterator[tuple[str, int]]:
    """First part and line of everything that a module imports, inside functions too."""
    for node in ast.walk(ast.parse(module.read_text(encoding="utf-8"))):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names = [node.module or ""]
        for name in names:
            yield name.partition(".")[0], node.lineno


def violations(package: str, forbidden: set[str]) -> list[str]:
    return [
        f"{module.relative_to(ROOT)}:{line} imports {name}"
        for module in sorted(PACKAGES[package].rglob("*.py"))
        for name, line in imported(module)
        if name in forbidden
    ]


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_imports_only_what_lies_below_it(package: str) -> None:
    assert violations(package, set(PACKAGES) - MAY_IMPORT[package] - {package}) == []


@pytest.mark.parametrize("package", sorted(set(PACKAGES) - {"pilotfish_workers"}))
def test_model_libraries_are_imported_under_workers_only(package: str) -> None:
    assert violations(package, MODEL_LIBRARIES) == []


def test_the_import_check_sees_a_forbidden_import(tmp_path: Path) -> None:
    module = tmp_path / "m.py"
    module.write_text("import os.path\ndef f():\n    from torch.nn import Linear\n")
    assert list(imported(module)) == [("os", 1), ("torch", 3)]


def test_importing_the_client_loads_no_model_library() -> None:
    code = (
        "import sys, pilotfish\n"
        f"print(sorted(set(sys.modules) & {MODEL_LIBRARIES | {'numpy', 'pilotfish_workers'}!r}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """The distribution as it would be published, built by the installed hatchling."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder)]
    done = subprocess.run([*command, str(ROOT)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return zipfile.ZipFile(next(folder.glob("*.whl")))


@pytest.mark.parametrize("package", PACKAGES)
def test_the_wheel_holds_each_file_of_each_package(package: str, wheel: zipfile.ZipFile) -> None:
    folder = PACKAGES[package]
    expected = {
        str(path.relative_to(folder.parent))
        for path in folder.rglob("*")
        if path.suffix in (".py", ".lua") or path.name == "py.typed"
    }
    assert f"{package}/py.typed" in expected
    assert expected <= set(wheel.namelist())


def test_the_wheel_holds_the_scripts_and_nothing_beside_the_packages(
    wheel: zipfile.ZipFile,
) -> None:
    names = wheel.namelist()
    assert any(name.endswith(".lua") for name in names)
    roots = {name.partition("/")[0] for name in names}
    version = PROJECT["project"]["version"]
    assert roots == {*PACKAGES, f"pilotfish-{version}.dist-info"}


def test_the_wheel_names_its_licence_and_its_command(wheel: zipfile.ZipFile) -> None:
    info = f"pilotfish-{PROJECT['project']['version']}.dist-info"
    assert "License-Expression: Apache-2.0" in wheel.read(f"{info}/METADATA").decode()
    assert f"{info}/licenses/LICENSE" in wheel.namelist()
    assert "pilotfish = pilotfish.cli:main" in wheel.read(f"{info}/entry_points.txt").decode()


def test_the_wheel_works_without_the_checkout(wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    wheel.extractall(tmp_path)
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "import pilotfish, pilotfish_broker.scripts, pilotfish_workers, pilotfish_checkpoint\n"
        "print(pilotfish.__file__, pilotfish_broker.scripts.__file__)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    assert all(path.startswith(str(tmp_path)) for path in done.stdout.split())


def test_every_dependency_has_its_reason_beside_it() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    listed = [*PROJECT["project"]["dependencies"]]
    for extra in PROJECT["project"]["optional-dependencies"].values():
        listed += extra
    bare = [name for name in listed if not re.search(re.escape(f'"{name}",') + r"\s+# \w", text)]
    assert bare == []


def test_the_base_install_has_no_model_library() -> None:
    names = {re.split(r"[\[<>=!~ ]", item)[0] for item in PROJECT["project"]["dependencies"]}
    assert names.isdisjoint(MODEL_LIBRARIES | {"numpy", "flower"})


def tracked_files() -> list[Path]:
    listing = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if listing.returncode != 0:
        pytest.skip("not a git checkout")
    return [ROOT / name for name in listing.stdout.split("\0") if name]


def test_no_tracked_file_names_a_place_on_somebodys_machine() -> None:
    # in two halves, so that this file does not contain them
    places = [f"/{name}/" for name in ("work", "root")] + ["/tmp/" + "pf", "/home/" + "user"]
    places += ["/Users" + "/", "files.python" + "hosted", "py" + "pi.org"]
    found = []
    for path in tracked_files():
        try:
            text = path.read_text(encoding="utf-8")
        except (UnicodeDecodeError, FileNotFoundError):
            continue
        found += [f"{path.relative_to(ROOT)}: {place}" for place in places if place in text]
    assert found == []


def makefile_targets() -> list[str]:
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    return re.findall(r"^([a-z]+):(?! export)", text, re.MULTILINE)


def test_the_makefile_is_small_and_explains_every_target() -> None:
    targets = makefile_targets()
    assert {"help", "demo", "test", "check", "clean"} <= set(targets)
    assert len(targets) <= 15
    listed = subprocess.run(
        ["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    assert set(re.findall(r"^  ([a-z]+) ", listed, re.MULTILINE)) == set(targets)


@pytest.mark.parametrize(
    ("target", "command"),
    [("demo", ".venv/bin/pilotfish demo"), ("test", ".venv/bin/pytest"), ("check", "mypy")],
)
def test_the_advertised_targets_run_the_advertised_commands(target: str, command: str) -> None:
    done = subprocess.run(
        ["make", "--dry-run", target], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert command in done.stdout


def test_continuous_integration_runs_the_two_developer_commands() -> None:
    lines = (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()
    assert [line for line in lines if line.startswith("make ")] == ["make check", "make test"]


def install(tmp_path: Path, python: Path | str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(ROOT / ".ci" / "install"), str(tmp_path / "venv")],
        env={"PATH": "/usr/bin:/bin", "PYTHON": str(python)},
        capture_output=True,
        text=True,
        check=False,
    )


def test_an_old_python_is_refused_by_name(tmp_path: Path) -> None:
    done = install(tmp_path, "/bin/false")
    assert done.returncode != 0
    assert "Python 3.11 or newer is needed" in done.stderr


def test_a_python_without_venv_gets_advice_and_leaves_nothing(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && echo "Python 3.11.2"\n'
        f'[ "$2" = venv ] && mkdir "{tmp_path}/venv" && exit 1\nexit 0\n'
    )
    python.chmod(0o755)
    done = install(tmp_path, python)
    assert done.returncode != 0
    assert "apt install python3-venv" in done.stderr
    assert not (tmp_path / "venv").exists()


def test_the_torch_version_is_the_same_everywhere() -> None:
    found = {
        name: re.search(pattern, (ROOT / name).read_text(encoding="utf-8"))
        for name, pattern in {
            "Makefile": r"TORCH_VERSION +\?= ([\d.]+)",
            ".ci/install": r"TORCH_VERSION:-([\d.]+)\}",
            "workers/Dockerfile": r"TORCH_VERSION=([\d.]+)",
        }.items()
    }
    assert {match and match[1] for match in found.values()} == {"2.13.0"}
