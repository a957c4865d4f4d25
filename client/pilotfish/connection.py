"""The Redis connections of one client: made on first use, checked once, closed together."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any

import redis

from pilotfish_broker.connection import (
    Redis,
    check_server,
    connect,
    connect_blocking,
    display,
    translated,
)
from pilotfish_broker.errors import BrokerUnavailable, ConfigError
from pilotfish_broker.keys import Keys
from pilotfish_broker.records import JobRecords
from pilotfish_broker.settings import Settings

if TYPE_CHECKING:
    from pilotfish_broker.dispatch import Dispatcher

log = logging.getLogger(__name__)


def close_app(app: Any) -> None:
    """Close a Celery app's connections. Its pool belongs to all apps of the process that use the
    same server, so it is emptied but stays usable."""
    app.pool.resize(app.pool.limit, ignore_errors=True, reset=True)
    app.close()


class Connection:
    """What the parts of the client share.

    Args:
        settings: where the servers are.
        timeout: seconds that one command may take before the server counts as unavailable.
    """

    def __init__(self, settings: Settings, timeout: float) -> None:
        self.settings = settings
        self.keys = Keys(settings.namespace)
        self._timeout = timeout

    @cached_property
    def redis(self) -> Redis:
        """Client for commands, of a server that has been checked.

        Raises:
            BrokerUnavailable, BrokerMisconfigured: it cannot be used.
        """
        client = self._checked(self.settings.redis_url)
        if self.settings.broker_url != self.settings.redis_url:
            try:
                _ = self._other_broker
            except BaseException:
                client.close()
                raise
        return client

    @cached_property
    def records(self) -> JobRecords:
        """Where jobs are submitted, read and cancelled."""
        return JobRecords(self.redis, self.keys, self.settings.result_ttl_seconds)

    @contextmanager
    def answering(self) -> Iterator[None]:
        """Turn what redis-py raises into errors of ours."""
        url = self.settings.redis_url
        try:
            with translated(url):
                yield
        except redis.RedisError as error:  # out of memory, read-only replica, no permission …
            raise BrokerUnavailable(f"Redis at {display(url)} refused: {error}") from error

    @contextmanager
    def blocking(self, block_seconds: float) -> Iterator[Redis]:
        """A connection of its own for reads that block up to `block_seconds` each."""
        _ = self.redis  # the server is checked before the first read
        client = connect_blocking(self.settings.redis_url, block_seconds)
        try:
            yield client
        finally:
            client.close()

    def top_up(self, model: str) -> None:
        """Ring for queued jobs. The jobs are safe already, so a failure is no error: the
        workers' reapers ring as well."""
        from kombu.exceptions import KombuError

        try:
            with self.answering():
                self._dispatcher.top_up(model)
        except (BrokerUnavailable, KombuError, OSError) as error:
            log.warning("no doorbell was rung for %s (%s); workers will", model, error)

    def close(self) -> None:
        """Close every connection. The object can be used again, which opens new ones."""
        opened = self.__dict__
        if "_dispatcher" in opened:
            del opened["_dispatcher"]
            close_app(opened.pop("_app"))
        opened.pop("records", None)
        for name in ("redis", "_other_broker"):
            if (client := opened.pop(name, None)) is not None:
                client.close()

    @cached_property
    def _dispatcher(self) -> Dispatcher:
        # Celery is half of this package's import time, and readers do not need it
        from pilotfish_broker.celery_app import make_app
        from pilotfish_broker.dispatch import Dispatcher

        redis = self.redis
        is_shared = self.settings.broker_url == self.settings.redis_url
        self._app = make_app(self.settings)
        return Dispatcher(self._app, redis if is_shared else self._other_broker, redis, self.keys)

    @cached_property
    def _other_broker(self) -> Redis:
        """Client of Celery's server, where that is another one."""
        return self._checked(self.settings.broker_url)

    def _checked(self, url: str) -> Redis:
        try:
            client = connect(url, answer_seconds=self._timeout, is_patient=False)
        except ValueError as error:
            raise ConfigError(f"{display(url)!r} is no usable Redis URL: {error}") from None
        try:
            check_server(client, url)
        except BaseException:
            client.close()
            raise
        return client
