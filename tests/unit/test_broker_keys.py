"""Keys stay within their namespace and never mean two things."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from itertools import product

import pytest

from pilotfish_broker import keys as module
from pilotfish_broker.keys import Keys, draft_queue, verify_queue

NAMES = ("m", "tokens", "jobs", "vocab", "verify", "job", "worker", "a.b-c_d")


def builders() -> dict[str, Callable[..., str]]:
    return {
        name: function
        for name, function in inspect.getmembers(Keys, inspect.isfunction)
        if not name.startswith("_")
    }


def all_keys(namespace: str) -> list[str]:
    """Every key that can be built from NAMES, once for each way of building it."""
    keys = Keys(namespace)
    built = [keys.models, keys.leases, keys.sequence, keys.reaper]
    for name, function in builders().items():
        arity = len(inspect.signature(function).parameters) - 1
        choices = [("verify", "draft"), NAMES] if name == "workers" else [NAMES] * arity
        built += [function(keys, *arguments) for arguments in product(*choices)]
    return built


@pytest.mark.parametrize("namespace", ["pf", "pf2", "a_b"])
def test_every_key_starts_with_its_namespace(namespace: str) -> None:
    assert all(key.startswith(f"{namespace}:") for key in all_keys(namespace))


def test_no_two_keys_collide() -> None:
    built = all_keys("pf")
    assert len(built) == len(set(built)) > 100


def test_namespaces_do_not_overlap() -> None:
    assert not set(all_keys("pf")) & set(all_keys("pf2"))


def test_celerys_keys_are_apart_from_ours() -> None:
    keys = Keys()
    ours = [key for key in all_keys("pf") if not key.startswith(keys.broker_prefix)]
    assert keys.celery_queue(verify_queue("m")) == "pf:broker:verify.m"
    assert len(ours) == len(all_keys("pf")) - len(NAMES)


def test_queues_of_both_kinds_and_of_all_models_differ() -> None:
    names = [queue(model) for queue in (verify_queue, draft_queue) for model in NAMES]
    assert len(set(names)) == len(names)


def test_every_key_stands_in_the_table() -> None:
    table = inspect.getdoc(module)
    assert table is not None
    keys = Keys("<ns>")
    rows = [
        keys.job("<id>"),
        keys.tokens("<id>"),
        keys.pending("<model>"),
        keys.dispatched("<model>"),
        keys.running("<model>"),
        keys.workers("<kind>", "<model>"),
        keys.worker("<id>"),
        keys.worker_jobs("<id>"),
        keys.model("<name>"),
        keys.vocabulary("<name>"),
        keys.inbox("<worker>"),
        keys.done("<group>"),
        keys.models,
        keys.leases,
        keys.sequence,
        keys.reaper,
        keys.celery_queue("*"),
    ]
    assert [row for row in rows if f"| {row}" not in table] == []
    assert len(rows) == table.count("| <ns>:")
