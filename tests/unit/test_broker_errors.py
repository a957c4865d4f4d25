"""The tree of errors in the module's docstring is the tree of classes."""

from __future__ import annotations

import inspect
import pickle
import re

import pytest

from pilotfish_broker import errors
from pilotfish_broker.errors import (
    DecodeError,
    InvalidRequest,
    JobError,
    JobFailed,
    PilotfishError,
)


def drawn_tree() -> dict[str, str | None]:
    """Class → parent, as drawn in the docstring."""
    tree: dict[str, str | None] = {}
    path: list[str] = []
    for line in inspect.getdoc(errors).splitlines():  # type: ignore[union-attr]
        match = re.match(r"((?:│   |    )*(?:[├└]── )?)([A-Z]\w+)(?:\s\s|$)", line)
        if match and (match[1] or match[2] == "PilotfishError"):
            depth = len(match[1]) // 4
            path[depth:] = [match[2]]
            tree[match[2]] = path[depth - 1] if depth else None
    return tree


def test_the_tree_in_the_docstring_is_the_tree_of_classes() -> None:
    classes = {
        name: cls
        for name, cls in vars(errors).items()
        if inspect.isclass(cls) and issubclass(cls, Exception)
    }
    real = {
        name: None if cls is PilotfishError else cls.__mro__[1].__name__
        for name, cls in classes.items()
    }
    assert drawn_tree() == real


@pytest.mark.parametrize("name", sorted(set(drawn_tree())))
def test_every_error_says_what_happened(name: str) -> None:
    assert len(getattr(errors, name).__doc__) > 20


def test_errors_keep_what_a_handler_needs() -> None:
    assert InvalidRequest("no", field="prompt").field == "prompt"
    assert InvalidRequest("no").field is None
    assert JobError("id", "no").job_id == "id"
    assert DecodeError("no", b"raw").raw == b"raw"


@pytest.mark.parametrize(
    "error",
    [InvalidRequest("no", field="prompt"), JobFailed("id", "no"), DecodeError("no", b"raw")],
    ids=lambda error: type(error).__name__,
)
def test_errors_travel_between_processes(error: PilotfishError) -> None:
    """Celery puts a base class in the place of an exception that cannot be pickled, so that a
    task's `throws` does not know it any more."""
    arrived = pickle.loads(pickle.dumps(error))
    assert type(arrived) is type(error)
    assert str(arrived) == "no"
    assert vars(arrived) == vars(error)
