"""Takes the jobs of an earlier, killed stack back before the next one's workers start.

Every process of the earlier stack is gone by then, so nobody has to wait for a lease to end. Being
killed together with everything else speaks against no job, so each is given back as its owner would
have done it, which counts no attempt.
"""

from __future__ import annotations

from pilotfish_broker.connection import Redis, connect
from pilotfish_broker.keys import Keys
from pilotfish_broker.leases import WorkerRecord, forget_keys, list_workers
from pilotfish_broker.ownership import Identity, Ownership
from pilotfish_broker.scripts import Scripts
from pilotfish_broker.settings import Settings


def release_previous(settings: Settings) -> int:
    """Queue again what workers of an earlier stack owned, and forget those workers.

    Only for a server that no live worker uses. Returns how many workers there were.
    """
    keys = Keys(settings.namespace)
    client = connect(settings.redis_url)
    try:
        workers = list_workers(client, keys)
        served = {model.decode() for model in client.smembers(keys.models)}
        for model in served | {worker.model for worker in workers}:
            _release_running(client, keys, settings, model)
        for worker in workers:
            _forget(client, keys, worker)
        return len(workers)
    finally:
        client.close()


def _release_running(client: Redis, keys: Keys, settings: Settings, model: str) -> None:
    for raw in client.smembers(keys.running(model)):
        job = raw.decode()
        fields = client.hmget(keys.job(job), "worker", "owner", "epoch")
        worker, nonce, epoch = ((value or b"").decode() for value in fields)
        owner = Ownership(
            client,
            keys,
            Identity(worker, nonce),
            model,
            result_ttl_seconds=settings.result_ttl_seconds,
            inbox_frames=settings.inbox_frames,
        )
        owner.release(job, int(epoch or 0))


def _forget(client: Redis, keys: Keys, worker: WorkerRecord) -> None:
    client.delete(keys.worker_jobs(worker.id))  # whatever it still lists is none of its jobs
    client.zadd(keys.leases, {worker.id: 0}, xx=True)
    names = forget_keys(keys, worker.id, worker.kind, worker.model)
    Scripts(client).run("forget", names, [worker.id, ""])
