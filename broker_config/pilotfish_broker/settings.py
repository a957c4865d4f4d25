"""One frozen settings object, built once from environment and arguments and passed down.

Every field can be set by the environment variable ``PILOTFISH_<FIELD>`` or by a keyword of
:meth:`Settings.from_env`; the keyword wins. A value that cannot be used raises
:class:`~pilotfish_broker.errors.ConfigError` naming the variable.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any
from urllib.parse import urlsplit

from pilotfish_broker.errors import ConfigError

PREFIX = "PILOTFISH_"
MODEL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
MAX_DRAFT_TOKENS = 16


def _integer(low: int, high: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise ValueError("a whole number is needed") from None
        if not low <= value <= high:
            raise ValueError(f"it must lie between {low} and {high}")
        return value

    return parse


def _seconds(low: float, high: float) -> Callable[[str], float]:
    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise ValueError("a number of seconds is needed") from None
        if not low <= value <= high:
            raise ValueError(f"it must lie between {low:g} and {high:g} seconds")
        return value

    return parse


def _pattern(pattern: str, advice: str) -> Callable[[str], str]:
    compiled = re.compile(pattern)

    def parse(text: str) -> str:
        if not compiled.fullmatch(text):
            raise ValueError(advice)
        return text

    return parse


def _redis_url(text: str) -> str:
    if not re.match(r"(rediss?|unix)://", text):
        raise ValueError("a URL is needed that starts with redis://, rediss:// or unix://")
    try:
        parts = urlsplit(text)
        parts.port  # noqa: B018 - reading it parses it
    except ValueError:
        raise ValueError("its port is no number (is the password percent-encoded?)") from None
    if parts.scheme != "unix" and not re.fullmatch(r"/?|/\d+", parts.path):
        raise ValueError("what follows the host must be the number of a database, as in /0")
    return text


def _without_password(url: str) -> str:
    _, at, rest = url.rpartition("@")
    return ("…@" if at else "") + rest.partition("?")[0]


def _optional(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    return lambda text: parse(text) if text else None


def _speculation(text: str) -> str | int:
    if text in ("auto", "off"):
        return text
    try:
        return _integer(1, MAX_DRAFT_TOKENS)(text)
    except ValueError:
        raise ValueError(
            f"it must be auto, off, or a number of drafted tokens from 1 to {MAX_DRAFT_TOKENS}"
        ) from None


def _setting(default: Any, parse: Callable[[str], Any], *, is_shown: bool = True) -> Any:
    return field(default=default, repr=is_shown, metadata={"parse": parse})


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What a process of pilotfish needs to know. Build it with :meth:`from_env`."""

    # where things are; the URLs may hold passwords, which belong into no log or traceback
    broker_url: str = _setting("redis://127.0.0.1:6379/0", _redis_url, is_shown=False)
    data_url: str | None = _setting(None, _optional(_redis_url), is_shown=False)
    namespace: str = _setting("pf", _pattern(r"[A-Za-z0-9_-]{1,32}", "letters, digits, _ and -"))

    # what a worker serves; `model` is the served name, `target` and `draft` are what is loaded
    target: str | None = _setting(None, _optional(str))
    model: str | None = _setting(
        None, _optional(_pattern(MODEL_NAME.pattern, "letters, digits, dot, _ and -"))
    )
    draft: str = _setting("ngram", str)
    dtype: str = _setting(
        "auto",
        _pattern("auto|float32|bfloat16|float16", "it must be auto, float32, bfloat16 or float16"),
    )
    device: str = _setting(
        "auto", _pattern(r"auto|cpu|cuda(:\d+)?", "it must be auto, cpu, cuda or cuda:N")
    )
    threads: int = _setting(0, _integer(0, 1024))  # 0: all cores of the machine
    slots: int = _setting(16, _integer(1, 1024))  # jobs (or sessions) at once
    speculation: str | int = _setting("auto", _speculation)
    kv_tokens: int = _setting(0, _integer(0, 1 << 30))  # tokens in the KV pool; 0: by memory
    prefill_tokens: int = _setting(512, _integer(16, 1 << 20))  # prompt tokens in one pass

    # life cycle
    lease_seconds: float = _setting(10.0, _seconds(0.5, 3600))
    hang_seconds: float = _setting(300.0, _seconds(1, 86_400))  # longest iteration of an engine
    max_attempts: int = _setting(3, _integer(1, 1000))
    result_ttl_seconds: float = _setting(86_400.0, _seconds(1, 365 * 86_400))
    inbox_frames: int = _setting(4096, _integer(16, 1 << 20))

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None, **overrides: Any) -> Settings:
        """Settings from ``PILOTFISH_*`` variables, then keywords (None means "not given").

        Raises:
            ConfigError: a variable or keyword has a value that cannot be used, or a
                ``PILOTFISH_*`` keyword does not exist.
        """
        environ = os.environ if environ is None else environ
        known = {item.name: item for item in fields(cls)}
        if unknown := set(overrides) - set(known):
            raise ConfigError(f"there is no setting named {sorted(unknown)[0]}")
        values: dict[str, Any] = {}
        for name, item in known.items():
            given = overrides.get(name)
            text = environ.get(PREFIX + name.upper()) if given is None else str(given)
            if text is None or (text == "" and given is None):
                continue
            try:
                values[name] = item.metadata["parse"](text)
            except ValueError as error:
                source = PREFIX + name.upper()
                shown = _without_password(text) if name.endswith("_url") else text
                raise ConfigError(f"{source}={shown!r} cannot be used: {error}") from None
        return cls(**values)

    @property
    def redis_url(self) -> str:
        """URL of the server with job records and inboxes."""
        return self.data_url or self.broker_url

    @property
    def served_name(self) -> str:
        """Name under which clients ask for the target: `model`, or the target's last part.

        Raises:
            ConfigError: neither is set, or the target's last part is no usable name.
        """
        if self.model:
            return self.model
        if not self.target:
            raise ConfigError("PILOTFISH_MODEL or PILOTFISH_TARGET must be set for a worker")
        name = self.target.rstrip("/").rsplit("/", 1)[-1]
        if not MODEL_NAME.fullmatch(name):
            raise ConfigError(
                f"PILOTFISH_TARGET ends in {name!r}, which cannot serve as a name; "
                "set PILOTFISH_MODEL to letters, digits, dot, _ and -"
            )
        return name

    def as_env(self) -> dict[str, str]:
        """The variables that make another process build the same settings."""
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        return {PREFIX + k.upper(): str(v) for k, v in values.items() if v is not None}
