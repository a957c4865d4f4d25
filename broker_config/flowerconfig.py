"""Flower for pilotfish: `celery --app pilotfish_workers.verify.app flower --conf=THIS FILE`.

Give a user and password as FLOWER_BASIC_AUTH=user:password; without one the dashboard listens on
loopback only. Flower is for looking: nothing in pilotfish depends on what it shows.
"""

import os

port = int(os.environ.get("FLOWER_PORT", "5555"))
address = os.environ.get(
    "FLOWER_ADDRESS", "" if os.environ.get("FLOWER_BASIC_AUTH") else "127.0.0.1"
)
# Worker threads cannot be revoked from outside; jobs are ended by `pilotfish cancel`.
read_only = True
natural_time = True
inspect_timeout = 2000.0

# A task is a job, its uuid is the job's id; its one argument is that id again.
tasks_columns = "name,uuid,state,result,received,started,runtime,worker"
max_tasks = 20_000
# A killed worker would stay "online" for ever.
purge_offline_workers = 60
# Seconds; jobs run from a tenth of a second to hours. Flower takes floats only.
task_runtime_metric_buckets = [0.1, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0, 7200.0]
