"""Calls that fail or hang cost their caller the guard's limit once, and then nothing."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest

from pilotfish_checkpoint.guard import (
    FIRST_PAUSE_SECONDS,
    LONGEST_PAUSE_SECONDS,
    Call,
    Guard,
    Overdue,
    Refused,
)
from tests.checkpoint_kit import Clock

PATIENT = 60.0  # a limit that no test reaches
SHORT = 0.05


def fine(_: Call) -> None:
    pass


def broken(_: Call) -> None:
    raise OSError("broken")


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def stuck() -> Iterator[tuple[Callable[[Call], None], threading.Event]]:
    """Work that hangs until its event is set, and is let go at the end in any case."""
    event = threading.Event()

    def work(_: Call) -> None:
        event.wait(PATIENT)

    yield work, event
    event.set()


def test_the_work_is_done_and_its_error_raised(clock: Clock) -> None:
    guard = Guard(PATIENT, clock)
    done: list[str] = []
    guard.call(lambda _: done.append(threading.current_thread().name))
    assert done == ["pilotfish-kv-call"]
    with pytest.raises(OSError, match="broken"):
        guard.call(broken)


def test_without_a_limit_the_caller_works_itself_and_is_never_refused(clock: Clock) -> None:
    guard = Guard(None, clock)
    done: list[threading.Thread] = []
    for _ in range(3):
        with pytest.raises(OSError, match="broken"):
            guard.call(broken)
    guard.call(lambda _: done.append(threading.current_thread()))
    assert done == [threading.current_thread()]


def test_after_a_failure_nothing_is_asked_for_a_while(clock: Clock) -> None:
    guard = Guard(PATIENT, clock)
    with pytest.raises(OSError, match="broken"):
        guard.call(broken)
    clock.now += FIRST_PAUSE_SECONDS * 0.99
    with pytest.raises(Refused):
        guard.call(fine)
    clock.now += FIRST_PAUSE_SECONDS * 0.02
    guard.call(fine)
    guard.call(fine)


def test_the_pause_doubles_up_to_a_limit_and_is_short_again_after_a_success(clock: Clock) -> None:
    guard = Guard(PATIENT, clock)
    for pause in (1, 2, 4, 8, 16, 30, 30):
        with pytest.raises(OSError, match="broken"):
            guard.call(broken)
        clock.now += pause - 0.01
        with pytest.raises(Refused):
            guard.call(fine)
        clock.now += 0.02
    guard.call(fine)
    with pytest.raises(OSError, match="broken"):
        guard.call(broken)
    clock.now += FIRST_PAUSE_SECONDS + 0.01
    guard.call(fine)


def test_after_the_pause_one_call_tries_for_all(clock: Clock) -> None:
    guard = Guard(PATIENT, clock)
    with pytest.raises(OSError, match="broken"):
        guard.call(broken)
    clock.now += FIRST_PAUSE_SECONDS

    def trial(_: Call) -> None:
        with pytest.raises(Refused):
            guard.call(fine)

    guard.call(trial)
    guard.call(lambda _: guard.call(fine))


def test_calls_that_fail_together_count_once(clock: Clock) -> None:
    guard = Guard(PATIENT, clock)
    together = threading.Barrier(4, timeout=PATIENT)

    def work(_: Call) -> None:
        together.wait()
        raise OSError("broken")

    def attempt() -> None:
        with pytest.raises(OSError, match="broken"):
            guard.call(work)

    threads = [threading.Thread(target=attempt) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    clock.now += FIRST_PAUSE_SECONDS
    guard.call(fine)


def test_who_waits_too_long_goes_on_and_the_work_is_told(
    clock: Clock, stuck: tuple[Callable[[Call], None], threading.Event]
) -> None:
    guard = Guard(SHORT, clock)
    seen: list[Call] = []

    def work(call: Call) -> None:
        seen.append(call)
        stuck[0](call)

    with pytest.raises(Overdue, match=r"0\.05 s"):
        guard.call(work)
    assert seen[0].is_abandoned


def test_nothing_is_asked_while_an_earlier_call_hangs(
    clock: Clock, stuck: tuple[Callable[[Call], None], threading.Event]
) -> None:
    guard = Guard(SHORT, clock)
    calls: list[Call] = []

    def work(call: Call) -> None:
        calls.append(call)
        stuck[0](call)

    with pytest.raises(Overdue):
        guard.call(work)
    for _ in range(100):
        clock.now += LONGEST_PAUSE_SECONDS
        with pytest.raises(Refused):
            guard.call(work)
    assert len(calls) == 1  # so one thread hangs at most, however long it takes
    stuck[1].set()
    assert calls[0].done.wait(PATIENT)
    guard.call(fine)


def test_a_clock_that_was_set_back_does_not_close_it_for_long(clock: Clock) -> None:
    guard = Guard(PATIENT, clock)
    with pytest.raises(OSError, match="broken"):
        guard.call(broken)
    clock.now -= 10_000
    guard.call(fine)
