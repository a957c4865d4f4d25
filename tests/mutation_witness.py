"""A pytest plugin of `mutation_check`: what was imported from where, which test failed first."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from hypothesis import Phase, settings

FILE = "witness.json"


class Witness:
    """Collects what happens in a run, and writes it down at its end."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._failure: list[str] = []

    def pytest_collection(self) -> None:
        # that there is a counterexample will do, it need not be a small one
        brief = (Phase.explicit, Phase.generate)
        settings.register_profile("mutation", parent=settings(), phases=brief)
        settings.load_profile("mutation")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and not self._failure:
            crash = getattr(report.longrepr, "reprcrash", None)
            message = crash.message if crash is not None else str(report.longrepr)
            self._failure = [report.nodeid, message.partition("\n")[0]]

    def pytest_sessionfinish(self) -> None:
        files = {
            name: str(module.__file__)
            for name, module in list(sys.modules.items())
            if name.startswith("pilotfish") and getattr(module, "__file__", None)
        }
        seen = {"failure": self._failure, "modules": files}
        (self._root / FILE).write_text(json.dumps(seen), encoding="utf-8")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Witness(config.rootpath), "mutation witness")
