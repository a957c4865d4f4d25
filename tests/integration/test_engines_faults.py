"""Whatever happens to frames, drafters and the server: exact output, and nobody is stuck."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import redis

from pilotfish_broker.keys import Keys
from pilotfish_broker.messages import Close, Frame, Open, Proposal, Sync
from pilotfish_broker.ownership import Commit, Ending, Ownership, Tail
from pilotfish_broker.settings import Settings
from pilotfish_workers.draft import engine as draft_engine
from pilotfish_workers.draft.model_source import ModelSource
from pilotfish_workers.verify import committer as committer_module
from tests.engines_kit import Drafter, Faults, HeldModel, Stage, Verifier, until
from tests.worker_kit import FunctionModel, plain

pytestmark = pytest.mark.integration

TOKENS = 40
SMALL = {"num_blocks": 400, "context": 2000}


@pytest.fixture
def stage(redis_client: Any, keys: Keys, settings: Settings) -> Iterator[Stage]:
    stage = Stage(redis_client, keys, settings)
    yield stage
    stage.close()


def self_draft() -> ModelSource:
    return ModelSource(FunctionModel(**SMALL), 64)


def begin(stage: Stage, verifier: Verifier, count: int = 8, **params: Any) -> list[Any]:
    """Jobs of different lengths."""
    futures = []
    for number in range(count):
        job = f"j{number}"
        stage.submit(job, prompt(number), **{"max_tokens": TOKENS, "speculation": 4, **params})
        futures.append(verifier.run(job))
    return futures


def prompt(number: int) -> list[int]:
    return [number, *range(3 * number)]


def check(stage: Stage, count: int = 8, tokens: int = TOKENS) -> None:
    reference = FunctionModel(**SMALL)
    for number in range(count):
        assert stage.output(f"j{number}") == plain(reference, prompt(number), tokens), number


def accepted(stage: Stage, count: int = 8) -> int:
    return sum(stage.record(f"j{number}").accepted for number in range(count))


@pytest.mark.parametrize(
    "faults",
    [
        pytest.param({"lose": 0.3}, id="lost"),
        pytest.param({"double": 0.4}, id="doubled"),
        pytest.param({"delay": 0.4}, id="late and out of order"),
        pytest.param({"lose": 0.2, "double": 0.2, "delay": 0.2}, id="all of it"),
    ],
)
@pytest.mark.parametrize("seed", [1, 2])
def test_frames_that_go_astray_change_no_token(
    stage: Stage, faults: dict[str, float], seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draft_engine, "OPEN_AGAIN_SECONDS", 0.05)
    verifier = stage.verifier(FunctionModel(**SMALL), line=Faults(seed, **faults))
    drafter = stage.drafter(self_draft(), line=Faults(seed + 50, **faults))
    stage.finish(verifier, begin(stage, verifier), [drafter])
    check(stage)
    assert accepted(stage) > 0, "drafting never came about"


def test_a_drafter_that_vanishes_is_replaced_by_another(
    stage: Stage,
) -> None:
    model = HeldModel(hold_at=12, **SMALL)
    verifier = stage.verifier(model)
    first = stage.drafter(self_draft(), "d1")
    futures = begin(stage, verifier, max_tokens=200)
    for number in range(8):
        first.draft(f"j{number}")
    model.wait()
    first.vanish()
    verifier.engine.draft_workers_alive({stage.unique("d2")})
    before = accepted(stage)
    model.go()
    second = stage.drafter(self_draft(), "d2")
    stage.finish(verifier, futures, [second])
    check(stage, tokens=200)
    assert accepted(stage) > before, "the second drafter never drafted"


def test_a_drafter_that_vanishes_for_ever_leaves_plain_decoding(stage: Stage) -> None:
    model = HeldModel(hold_at=12, **SMALL)
    verifier = stage.verifier(model)
    drafter = stage.drafter(self_draft())
    futures = begin(stage, verifier)
    for number in range(8):
        drafter.draft(f"j{number}")
    model.wait()
    drafter.vanish()
    model.go()
    stage.finish(verifier, futures)
    check(stage)


def test_a_drafter_that_leaves_says_so_and_another_takes_over(stage: Stage) -> None:
    model = HeldModel(hold_at=12, **SMALL)
    verifier = stage.verifier(model)
    first, second = stage.drafter(self_draft(), "d1"), stage.drafter(self_draft(), "d2")
    futures = begin(stage, verifier, max_tokens=200)
    sessions = [first.draft(f"j{number}") for number in range(8)]
    model.wait()
    first.engine.stop()
    until(lambda: all(session.done() for session in sessions), "sessions of a leaving drafter end")
    # its lease ends with it, which tells of those sessions whose Open was not answered yet
    verifier.engine.draft_workers_alive({second.name})
    model.go()
    stage.finish(verifier, futures, [second])
    check(stage, tokens=200)
    assert {type(session.exception()).__name__ for session in sessions} <= {
        "NoneType",
        "SessionRefused",
    }


class Forgetful(Drafter):
    """Does not say when it closes a session, as a lost Close frame would have it."""

    def forget(self, job: str) -> None:
        engine = self.engine

        def without_a_word() -> None:
            session = engine._sessions.get(job)
            if session is not None:
                engine._close(session, "forgotten")

        engine._events.put(without_a_word)


def test_a_session_that_the_drafter_forgot_is_opened_anew(stage: Stage) -> None:
    model = HeldModel(hold_at=12, **SMALL)
    verifier = stage.verifier(model)
    drafter = Forgetful(stage, "d1", self_draft())
    stage._open.append(drafter)
    stage.submit("j0", prompt(0), max_tokens=700, speculation=4)
    future = verifier.run("j0")
    session = drafter.draft("j0")
    model.wait()
    drafter.forget("j0")
    until(session.done, "the session is forgotten")
    before = accepted(stage, 1)
    model.go()
    stage.finish(verifier, [future], [drafter])
    check(stage, 1, tokens=700)
    assert accepted(stage, 1) > before + 100, "the job was never drafted for again"


def test_a_session_that_the_verifier_forgot_is_opened_anew(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The drafter asks after a silence, although it does not know that its Close was lost."""
    monkeypatch.setattr(draft_engine, "SILENCE_SECONDS", 0.05)
    monkeypatch.setattr(draft_engine, "IDLE_SECONDS", 0.02)

    def no_close(frames: list[Frame]) -> list[Frame]:
        return [frame for frame in frames if not isinstance(frame, Close)]

    model = HeldModel(hold_at=12, **SMALL)
    verifier = stage.verifier(model)
    drafter = stage.drafter(self_draft(), line=no_close)
    stage.submit("j0", prompt(0), max_tokens=1200, speculation=4)
    future = verifier.run("j0")
    drafter.draft("j0")
    model.wait()
    verifier.engine.draft_workers_alive(set())  # its lease lapsed; it lives
    before = accepted(stage, 1)
    model.go()
    stage.finish(verifier, [future])
    check(stage, 1, tokens=1200)
    assert accepted(stage, 1) > before + 100, "the drafter never found out"


def test_a_drafter_with_wrong_tokens_is_healed_by_a_sync(stage: Stage) -> None:
    """One Sync reaches it with another token: its next proposal betrays it."""
    forged: list[Frame] = []
    synced: list[Sync] = []

    def forge(frames: list[Frame]) -> list[Frame]:
        result: list[Frame] = []
        for frame in frames:
            if isinstance(frame, Sync):
                synced.append(frame)
                if frame.tokens and not forged:
                    frame = dataclasses.replace(frame, tokens=[99] * len(frame.tokens))
                    forged.append(frame)
            result.append(frame)
        return result

    model = HeldModel(hold_at=4, **SMALL)
    verifier = stage.verifier(model)
    drafter = stage.drafter(self_draft(), line=forge)
    stage.submit("j0", prompt(0), max_tokens=300, speculation=4)
    future = verifier.run("j0")
    drafter.draft("j0")
    model.wait()
    until(lambda: any(s.last_open for s in drafter.engine.sessions()), "it opens")
    model.go()
    stage.finish(verifier, [future])
    check(stage, 1, tokens=300)
    assert forged, "no Sync carried tokens: the test shows nothing"
    assert any(sync.base == 0 for sync in synced[1:]), "it was never given all tokens"
    assert accepted(stage, 1) > 100, "its drafts were never right again"


def test_a_drafter_of_another_prompt_never_helps_and_never_hinders(stage: Stage) -> None:
    verifier = stage.verifier(FunctionModel(**SMALL))
    drafter = stage.drafter(self_draft())
    futures = begin(stage, verifier, 1, max_tokens=300)

    def spoil() -> bool:
        for session in drafter.engine.sessions():
            session.digests[:] = [digest + 1 for digest in session.digests]
            return True
        return False

    drafter.draft("j0")
    until(spoil, "there is a session to spoil")
    stage.finish(verifier, futures)
    check(stage, 1, tokens=300)


def test_a_flood_of_senseless_frames_changes_nothing(stage: Stage) -> None:
    verifier = stage.verifier(FunctionModel(**SMALL))
    drafter = stage.drafter(self_draft())
    futures = begin(stage, verifier, 4)
    for number in range(300):
        verifier.engine.deliver(
            [
                Proposal(number, 0, 0, [1]),
                Open("j0", 7, "pf:inbox:x", 0),
                Open("nobody", 1, "pf:inbox:x", 0),
                Close("j1", 1, number, "x"),
                Sync("j2", 1, number, 0, [], 1),
            ]
        )
    stage.finish(verifier, futures, [drafter])
    check(stage, 4)


def test_a_pause_of_the_server_is_waited_out(stage: Stage) -> None:
    model = HeldModel(hold_at=8, **SMALL)
    verifier = stage.verifier(model)
    drafter = stage.drafter(self_draft())
    futures = begin(stage, verifier)
    for number in range(8):
        drafter.draft(f"j{number}")
    model.wait()
    stage.client.client_pause(2000, all=True)
    model.go()
    stage.finish(verifier, futures, [drafter])
    check(stage)


class LostAnswers(Ownership):
    """The server does what it is told, and its answer gets lost, twice out of three times."""

    calls = 0

    def commit(self, commits: Any) -> list[str]:
        answer = super().commit(commits)
        self._maybe_lose()
        return answer

    def finish(self, tail: Tail, ending: Ending, group: str) -> str:
        answer = super().finish(tail, ending, group)
        self._maybe_lose()
        return answer

    def _maybe_lose(self) -> None:
        type(self).calls += 1
        if type(self).calls % 3:
            raise redis.ConnectionError("the answer was lost")


def test_rounds_whose_answers_were_lost_are_repeated_and_count_once(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(committer_module, "RETRY_SECONDS", 0.001)
    verifier = stage.verifier(FunctionModel(**SMALL), ownership=LostAnswers)
    drafter = stage.drafter(self_draft())
    futures = begin(stage, verifier, 4)
    stage.finish(verifier, futures, [drafter])
    check(stage, 4)
    for number, future in enumerate(futures):
        record = stage.record(f"j{number}")
        assert record.committed == TOKENS
        assert record.rounds == future.result()["rounds"]
    assert accepted(stage, 4) > 0


def test_a_server_without_memory_is_waited_out(stage: Stage) -> None:
    class NoMemory(Ownership):
        refusals = 5

        def commit(self, commits: Any) -> list[str]:
            if type(self).refusals > 0:
                type(self).refusals -= 1
                raise redis.exceptions.OutOfMemoryError("command not allowed")
            return super().commit(commits)

    verifier = stage.verifier(FunctionModel(**SMALL), ownership=NoMemory)
    stage.finish(verifier, begin(stage, verifier, 2))
    check(stage, 2)


def test_a_commit_that_was_applied_before_is_known_as_such(stage: Stage) -> None:
    verifier = stage.verifier(FunctionModel())
    stage.submit("j", [1, 2], max_tokens=5)
    sequence = verifier.claim("j")
    commit = Commit(Tail("j", sequence.epoch, 0, [7], "h", 2, 1))
    assert verifier.own.commit([commit]) == ["ok"]
    assert verifier.own.commit([commit]) == ["already"]


def test_a_late_proposal_is_dropped_and_the_next_sync_brings_the_drafter_along(
    stage: Stage,
) -> None:
    model = HeldModel(hold_at=6, **SMALL)
    late: list[Frame] = []

    def delay_first(frames: list[Frame]) -> list[Frame]:
        """The first proposal arrives after the second."""
        arriving: list[Frame] = []
        for frame in frames:
            if isinstance(frame, Proposal) and not late:
                late.append(frame)
                continue
            arriving.append(frame)
            if isinstance(frame, Proposal) and len(late) == 1:
                arriving.append(late[0])
                late.append(frame)
        return arriving

    verifier = stage.verifier(model, line=delay_first)
    drafter = stage.drafter(self_draft())
    stage.submit("j0", prompt(0), max_tokens=200, speculation=4)
    future = verifier.run("j0")
    drafter.draft("j0")
    model.wait()
    model.go()
    stage.finish(verifier, [future])
    check(stage, 1, tokens=200)
    assert len(late) == 2, "nothing was late"
    assert accepted(stage, 1) > 50
