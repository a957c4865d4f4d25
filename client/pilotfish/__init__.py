"""pilotfish: exact speculative decoding as a distributed batch system; the client side.

>>> from pilotfish import Client, SamplingParams
>>> with Client("redis://localhost:6379/0") as client:  # doctest: +SKIP
...     job = client.submit("Why is the sky blue?", SamplingParams(max_tokens=64))
...     for chunk in job.stream():
...         print(chunk.text, end="")
"""

from pilotfish.client import Client, QueueLengths
from pilotfish.completions import Completion
from pilotfish.job import Job
from pilotfish.result import Chunk, Result
from pilotfish_broker.errors import (
    BrokerMisconfigured,
    BrokerUnavailable,
    ConfigError,
    InvalidRequest,
    JobCancelled,
    JobError,
    JobExpired,
    JobFailed,
    JobNotFound,
    JobTimeout,
    PilotfishError,
    UnknownModel,
    UnsupportedParameter,
)
from pilotfish_broker.leases import WorkerRecord
from pilotfish_broker.logprobs import Alternative, TokenLogprob
from pilotfish_broker.models import ModelRecord
from pilotfish_broker.records import JobRecord
from pilotfish_broker.spec import JobSpec, SamplingParams, Status

__all__ = [
    "Alternative",
    "BrokerMisconfigured",
    "BrokerUnavailable",
    "Chunk",
    "Client",
    "Completion",
    "ConfigError",
    "InvalidRequest",
    "Job",
    "JobCancelled",
    "JobError",
    "JobExpired",
    "JobFailed",
    "JobNotFound",
    "JobRecord",
    "JobSpec",
    "JobTimeout",
    "ModelRecord",
    "PilotfishError",
    "QueueLengths",
    "Result",
    "SamplingParams",
    "Status",
    "TokenLogprob",
    "UnknownModel",
    "UnsupportedParameter",
    "WorkerRecord",
]
