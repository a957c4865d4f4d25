"""An inbox hands over every frame in order and outlives rubbish and a restarted server."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from pilotfish_broker.codec import decode_all, encode
from pilotfish_broker.inbox import InboxReader, send
from pilotfish_broker.keys import Keys
from pilotfish_broker.messages import Close, Frame, Verdict
from pilotfish_broker.ownership import INBOX_TTL_MS

pytestmark = pytest.mark.integration

INBOX = "pf:inbox:w"
WAIT_SECONDS = 30


@pytest.fixture(autouse=True)
def _readers_stop_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pilotfish_broker.inbox.BLOCK_SECONDS", 0.1)


class Received:
    """Collects what a reader delivers."""

    def __init__(self) -> None:
        self.frames: queue.Queue[Frame] = queue.Queue()

    def __call__(self, frames: list[Frame]) -> None:
        for frame in frames:
            self.frames.put(frame)

    def take(self, count: int) -> list[Frame]:
        return [self.frames.get(timeout=WAIT_SECONDS) for _ in range(count)]


@pytest.fixture
def received(redis_url: str) -> Iterator[Received]:
    received = Received()
    reader = InboxReader(redis_url, INBOX, received)
    reader.start()
    yield received
    reader.stop()
    reader._thread.join(WAIT_SECONDS)
    assert not reader._thread.is_alive()


def verdicts(count: int) -> list[Frame]:
    return [Verdict(number, 0, 0, 1, 1) for number in range(count)]


def test_frames_arrive_in_order_and_once(redis_client: Any, received: Received) -> None:
    frames = verdicts(2000)
    for start in range(0, 2000, 3):
        send(redis_client, {INBOX: frames[start : start + 3]}, 4096)
    assert received.take(2000) == frames
    assert received.frames.empty()


def test_rubbish_is_dropped_and_what_follows_arrives(redis_client: Any, received: Received) -> None:
    last = Close("job", 1, 2, "done")
    for entry in (b"", b"\xc1", b"\x91" * 1000, encode(last)[:-1], encode(last)):
        redis_client.rpush(INBOX, entry)
    assert received.take(1) == [last]


def test_a_key_of_another_type_does_not_end_the_reader(
    redis_client: Any, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = threading.Event()
    monkeypatch.setattr("pilotfish_broker.inbox.RETRY_SECONDS", 0.01)
    monkeypatch.setattr("pilotfish_broker.inbox.log.warning", lambda *_: refused.set())
    redis_client.set(INBOX, "not a list")
    received = Received()
    reader = InboxReader(redis_url, INBOX, received)
    reader.start()
    assert refused.wait(WAIT_SECONDS)
    redis_client.delete(INBOX)
    send(redis_client, {INBOX: verdicts(1)}, 16)
    assert received.take(1) == verdicts(1)
    reader.stop()
    reader._thread.join(WAIT_SECONDS)


def test_what_was_sent_before_the_reader_began_is_read(redis_client: Any, redis_url: str) -> None:
    send(redis_client, {INBOX: verdicts(3)}, 16)
    received = Received()
    reader = InboxReader(redis_url, INBOX, received)
    reader.start()
    assert received.take(3) == verdicts(3)
    reader.stop()
    reader._thread.join(WAIT_SECONDS)


def test_an_inbox_is_bounded_expires_and_gets_no_empty_entry(redis_client: Any) -> None:
    for frame in verdicts(20):
        send(redis_client, {INBOX: [frame], "pf:inbox:none": []}, 16)
    assert redis_client.lindex(INBOX, 0) == encode(verdicts(20)[4])
    assert redis_client.llen(INBOX) == 16
    assert 0 < redis_client.pttl(INBOX) <= INBOX_TTL_MS
    assert not redis_client.exists("pf:inbox:none")


def test_a_reader_outlives_a_restarted_server(start_valkey: Any) -> None:
    server = start_valkey()
    received = Received()
    reader = InboxReader(server.url, INBOX, received)
    reader.start()
    send(server.client(), {INBOX: verdicts(1)}, 16)
    assert received.take(1) == verdicts(1)
    server.stop()
    server.start()
    send(server.client(), {INBOX: verdicts(1)}, 16)
    assert received.take(1) == verdicts(1)
    reader.stop()
    reader._thread.join(WAIT_SECONDS)


def test_an_inbox_that_is_no_list_keeps_no_other_frame_back(redis_client: Any, keys: Keys) -> None:
    redis_client.set(keys.inbox("odd"), "no list")
    frame = Close("j", 1, 2, "over")
    send(redis_client, {keys.inbox("odd"): [frame], keys.inbox("even"): [frame]}, 10)
    assert decode_all(redis_client.lindex(keys.inbox("even"), 0)) == [frame]
