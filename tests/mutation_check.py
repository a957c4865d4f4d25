"""Plants faults in the code, one after the other, and expects some test to fail for each.

    python -m tests.mutation_check [PART OF A NAME …] [--jobs N] [--list]

The packages and the tests are copied to a folder of their own for each fault, so that nothing here
is touched. The same tests have to pass there without any fault first. The exit status is 1 where a
fault survives, or where something else than a test's failure ends a run.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
if __package__ in (None, ""):  # run by its path
    sys.path.insert(0, str(ROOT))

from tests.mutation_faults import Fault, faults  # noqa: E402
from tests.mutation_witness import FILE  # noqa: E402

PACKAGES = ("broker_config", "checkpoint", "workers", "client")
RUN_SECONDS = 900
PASSED, FAILED = 0, 1  # pytest's exit codes; all others say that it could not do its work


@dataclass(frozen=True, slots=True)
class Run:
    """How a run of some tests ended.

    Attributes:
        status: pytest's exit code.
        failure: node id and message of the first test that failed.
        modules: the file of each imported module of ours.
        output: what pytest wrote.
    """

    status: int
    failure: tuple[str, str] | None
    modules: dict[str, str]
    output: str


def copy_tree(folder: Path) -> None:
    """What the tests need; no compiled files, whose age would hide a change."""
    for name in (*PACKAGES, "tests"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder)


def plant(fault: Fault, folder: Path) -> None:
    """Change the copy of a file.

    Raises:
        ValueError: the text to change does not stand there exactly once.
    """
    path = folder / fault.file
    text = path.read_text(encoding="utf-8")
    if text.count(fault.old) != 1:
        raise ValueError(f"{fault.file} has {text.count(fault.old)} places for {fault.name!r}")
    path.write_text(text.replace(fault.old, fault.new), encoding="utf-8")


def run_tests(folder: Path, tests: Sequence[str], *options: str) -> Run:
    """Run tests of a copy against the packages of that copy."""
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(str(folder / name) for name in (*PACKAGES, ".")),
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "PASSIVE",
    }
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.mutation_witness"]
    command += ["-p", "no:cacheprovider", "--hypothesis-seed=0", "--rootdir", str(folder)]
    try:
        done = subprocess.run(
            [*command, *options, *tests],
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=RUN_SECONDS,
        )
    except subprocess.TimeoutExpired:
        return Run(-1, None, {}, f"it took more than {RUN_SECONDS} s")
    seen = {"failure": [], "modules": {}}
    if (folder / FILE).exists():
        seen = json.loads((folder / FILE).read_text(encoding="utf-8"))
    first = seen["failure"]
    failure = (first[0], first[1]) if first else None
    return Run(done.returncode, failure, dict(seen["modules"]), done.stdout)


def trouble(run: Run, modules: Sequence[str], folder: Path) -> str:
    """Why a run shows nothing, whether its tests passed or failed; "" where it does."""
    if run.status not in (PASSED, FAILED):
        return f"pytest ended with status {run.status}:\n{run.output}"
    for module in modules:
        file = run.modules.get(module)
        if file is None or not Path(file).is_relative_to(folder):
            return f"its tests took {module} from {file}"
    return ""


def check(fault: Fault) -> tuple[bool, str]:
    """Plant a fault in a copy of its own; returns whether a test saw it, and what to say."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name).resolve()
        copy_tree(folder)
        try:
            plant(fault, folder)
        except ValueError as error:
            return False, f"UNCLEAR   {error}"
        run = run_tests(folder, fault.tests, "-x")
        problem = trouble(run, [fault.module], folder)
    seconds = f"{time.monotonic() - start:5.1f} s"
    if problem:
        return False, f"UNCLEAR   {seconds}  {fault.name}: {problem}"
    if run.status == PASSED:
        return False, f"SURVIVED  {seconds}  {fault.name} ({fault.file})"
    test, message = run.failure or ("?", "")
    return True, f"caught    {seconds}  {fault.name}\n{'':20}{test}: {message[:100]}"


def check_without(tests: Sequence[str]) -> str:
    """Run tests of one file on a copy without any fault; returns what is wrong, "" for nothing."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name).resolve()
        copy_tree(folder)
        run = run_tests(folder, tests)
        problem = trouble(run, [], folder)
    return problem or ("" if run.status == PASSED else run.output)


def by_file(chosen: Sequence[Fault]) -> list[list[str]]:
    """Their tests, those of one file together."""
    files: dict[str, set[str]] = {}
    for test in (test for fault in chosen for test in fault.tests):
        files.setdefault(test.partition("::")[0], set()).add(test)
    # a whole file has its tests in it
    return [[file] if file in tests else sorted(tests) for file, tests in sorted(files.items())]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="faults whose name contains it")
    parser.add_argument("--jobs", type=int, default=min(8, os.cpu_count() or 1))
    parser.add_argument("--list", action="store_true", help="names and tests, nothing is run")
    options = parser.parse_args(arguments)
    names = options.names or [""]
    chosen = [fault for fault in faults() if any(name in fault.name for name in names)]
    if not chosen:
        parser.error("no fault has such a name; see --list")
    if options.list:
        for fault in chosen:
            print(fault.name, *fault.tests, sep="\n    ")
        return 0
    with ThreadPoolExecutor(options.jobs) as pool:
        if problems := [*filter(None, pool.map(check_without, by_file(chosen)))]:
            print("without any fault the tests do not pass:", *problems, sep="\n")
            return 1
        print(f"{'passed':20}the tests of {len(chosen)} faults, without any of them", flush=True)
        num_caught = 0
        for is_caught, line in pool.map(check, chosen):
            num_caught += is_caught
            print(line, flush=True)
    print(f"{num_caught} of {len(chosen)} faults were caught")
    return 0 if num_caught == len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main())
