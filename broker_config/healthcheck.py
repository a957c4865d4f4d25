"""Is the worker of this container alive? `python healthcheck.py verify|draft`, exit status 0 or 1.

Alive means that a worker of that kind on this host holds a live lease. A worker whose engine died
or hangs ends itself (PILOTFISH_HANG_SECONDS), so its lease runs out.
"""

import socket
import sys

from redis import RedisError

from pilotfish_broker.connection import connect
from pilotfish_broker.errors import PilotfishError
from pilotfish_broker.keys import Keys
from pilotfish_broker.leases import list_workers
from pilotfish_broker.settings import Settings


def is_alive(kind: str, host: str, settings: Settings) -> bool:
    """Whether a live worker of `kind` is registered from `host`."""
    client = connect(settings.redis_url, retries=0, answer_seconds=5)
    workers = list_workers(client, Keys(settings.namespace))
    return any(
        worker.is_alive and worker.kind == kind and worker.fields.get("host") == host
        for worker in workers
    )


def main(arguments: list[str]) -> int:
    """Command line."""
    if len(arguments) != 1 or arguments[0] not in ("verify", "draft"):
        print("usage: healthcheck.py verify|draft", file=sys.stderr)
        return 2
    try:
        if is_alive(arguments[0], socket.gethostname(), Settings.from_env()):
            return 0
    except (RedisError, PilotfishError) as error:
        print(error, file=sys.stderr)
        return 1
    print(f"no live {arguments[0]} worker is registered from this host", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
