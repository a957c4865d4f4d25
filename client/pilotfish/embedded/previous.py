"""Takes the jobs of an earlier, killed stack back before the next one's workers start.

Every process of the earlier stack is gone by then, so nobody has to wait for a lease to end.
"""

from __future__ import annotations

import time
from dataclasses import replace

from pilotfish.connection import close_app
from pilotfish_broker.celery_app import make_app
from pilotfish_broker.connection import connect
from pilotfish_broker.dispatch import Dispatcher
from pilotfish_broker.keys import Keys
from pilotfish_broker.leases import list_workers
from pilotfish_broker.reaper import Reaper
from pilotfish_broker.settings import Settings

SHORT_LEASE_SECONDS = 0.5
# being killed together with everything else speaks against no job
MANY_ATTEMPTS = 1000


def release_previous(settings: Settings) -> int:
    """Re-queue what workers of an earlier stack owned, and forget those workers.

    Only for a server that no live worker uses. Returns how many workers there were.
    """
    keys = Keys(settings.namespace)
    client = connect(settings.redis_url)
    try:
        workers = list_workers(client, keys)
        if not workers:
            return 0
        client.zadd(keys.leases, {worker.id: 0 for worker in workers}, xx=True)
        settings = replace(settings, lease_seconds=SHORT_LEASE_SECONDS, max_attempts=MANY_ATTEMPTS)
        app = make_app(settings)
        try:
            reaper = Reaper(client, keys, settings, Dispatcher(app, client, client, keys))
            time.sleep(SHORT_LEASE_SECONDS)  # it begins with the wait of one lease
            while list_workers(client, keys):
                reaper.tick()
                time.sleep(SHORT_LEASE_SECONDS / 10)
        finally:
            close_app(app)
        return len(workers)
    finally:
        client.close()
