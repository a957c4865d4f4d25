"""Signals that end a command unwind it, except those that its starter wanted ignored."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from pilotfish.cli.signals import unwinding


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    before = signal.getsignal(signal.SIGHUP)
    yield
    signal.signal(signal.SIGHUP, before)


def hang_up() -> None:
    with unwinding():
        os.kill(os.getpid(), signal.SIGHUP)
        pytest.fail("the command went on")


def test_a_hangup_unwinds_a_command() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    with pytest.raises(SystemExit) as error:
        hang_up()
    assert error.value.code == 128 + signal.SIGHUP
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_DFL


def test_under_nohup_a_command_outlives_its_terminal() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with unwinding():
        os.kill(os.getpid(), signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        assert signal.getsignal(signal.SIGTERM) not in (signal.SIG_DFL, signal.SIG_IGN)
