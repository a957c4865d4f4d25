"""The mutation check's faults can be planted in today's code, and it tells what came of a run."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.mutation_check import FAILED, PASSED, ROOT, Run, by_file, trouble
from tests.mutation_faults import Fault, faults

FAULTS = [*faults()]
FOLDER = Path("/copy")


def test_there_are_many_faults_and_each_has_a_name_of_its_own() -> None:
    assert len(FAULTS) >= 20
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_changes_one_place_and_leaves_a_module(fault: Fault) -> None:
    text = (ROOT / fault.file).read_text(encoding="utf-8")
    assert text.count(fault.old) == 1
    changed = text.replace(fault.old, fault.new)
    assert ast.dump(ast.parse(changed)) != ast.dump(ast.parse(text))


@pytest.mark.parametrize("test", sorted({test for fault in FAULTS for test in fault.tests}))
def test_the_tests_that_have_to_see_it_are_there(test: str) -> None:
    file, *names = test.partition("[")[0].split("::")
    text = (ROOT / file).read_text(encoding="utf-8")
    for name in names:
        assert re.search(rf"^ *(def|class) {name}\b", text, re.M), name


@pytest.mark.parametrize(
    ("status", "file", "told"),
    [
        (PASSED, "/copy/workers/a/b.py", ""),
        (FAILED, "/copy/workers/a/b.py", ""),
        (FAILED, "/elsewhere/workers/a/b.py", "its tests took a.b from /elsewhere"),
        (PASSED, None, "its tests took a.b from None"),
        (2, "/copy/workers/a/b.py", "pytest ended with status 2"),  # no module any more
        (4, "/copy/workers/a/b.py", "pytest ended with status 4"),  # no such test
        (-1, "/copy/workers/a/b.py", "pytest ended with status -1"),
    ],
)
def test_a_run_shows_something_only_with_the_copys_code_and_tests_that_ran(
    status: int, file: str | None, told: str
) -> None:
    run = Run(status, None, {} if file is None else {"a.b": file}, "")
    assert trouble(run, ["a.b"], FOLDER).startswith(told)
    assert bool(trouble(run, ["a.b"], FOLDER)) == bool(told)


def test_tests_of_one_file_run_together() -> None:
    def fault(*tests: str) -> Fault:
        return Fault("", "", "", "", tests)

    some = [fault("b::y", "a::x"), fault("b::z"), fault("a", "a::w")]
    assert by_file(some) == [["a"], ["b::y", "b::z"]]
