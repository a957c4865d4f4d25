"""Loads the Lua scripts by name. Each file's header states its KEYS, ARGV and reply."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import Any

from pilotfish_broker.connection import Redis


@cache
def source(name: str) -> str:
    """Text of one script, with the shared functions before it."""
    folder = files("pilotfish_broker") / "lua"
    return "\n".join((folder / f"{part}.lua").read_text() for part in ("shared", name))


class Scripts:
    """The scripts as methods of one Redis client: ``scripts.run("claim", keys, args)``.

    The server's script cache is volatile; the client sends a script again when it is missing.
    """

    def __init__(self, client: Redis) -> None:
        self._client = client
        self._registered: dict[str, Any] = {}

    def run(self, name: str, keys: list[str], args: list[Any], *, client: Any = None) -> Any:
        """Run a script, or queue it where `client` is a pipeline. Byte strings come back."""
        script = self._registered.get(name)
        if script is None:
            script = self._registered[name] = self._client.register_script(source(name))
        return script(keys=keys, args=args, client=client)
