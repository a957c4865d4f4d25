"""Every error that pilotfish raises on purpose.

PilotfishError
├── ConfigError            a setting is wrong; the message names its variable
├── BrokerUnavailable      Redis cannot be reached, or did not answer in time
├── BrokerMisconfigured    Redis answers, but may lose jobs the way it is set up
├── InvalidRequest         refused at submit; nothing was written
│   ├── UnsupportedParameter   a sampling parameter that is not honoured
│   └── UnknownModel           no worker has ever served that name
├── JobError               about one job
│   ├── JobNotFound            no such id, or its results have expired
│   ├── JobFailed              it ended with an error
│   ├── JobCancelled           somebody cancelled it
│   ├── JobExpired             its deadline passed before it was done
│   └── JobTimeout             the caller's own deadline passed; the job goes on
├── DecodeError            bytes that are no message of ours; the raw bytes are kept
└── Fenced                 this worker no longer owns the job it tried to change
"""

from __future__ import annotations


class PilotfishError(Exception):
    """Base of all errors that pilotfish raises on purpose."""


class ConfigError(PilotfishError):
    """A setting has a value that cannot be used. Correct the variable that the message names."""


class BrokerUnavailable(PilotfishError):
    """Redis cannot be reached or did not answer in time. Check the URL and that it runs."""


class BrokerMisconfigured(PilotfishError):
    """Redis answers but is set up in a way that loses jobs. The message says what to change."""


class InvalidRequest(PilotfishError):
    """The request was refused before anything was written.

    Attributes:
        field: name of the offending field, or None where the request as a whole is wrong.
    """

    def __init__(self, message: str, *, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class UnsupportedParameter(InvalidRequest):
    """A sampling parameter that this version does not honour. Leave it out."""


class UnknownModel(InvalidRequest):
    """No worker has ever served that model name. Start one, or ask to wait for it."""


class JobError(PilotfishError):
    """Something about one job.

    Attributes:
        job_id: the job's id.
    """

    def __init__(self, job_id: str, message: str) -> None:
        super().__init__(message)
        self.job_id = job_id

    def __reduce__(self) -> tuple[type[JobError], tuple[str, str]]:
        # Celery replaces an exception that cannot be pickled, and then logs it as unexpected
        return type(self), (self.job_id, str(self))


class JobNotFound(JobError):
    """There is no record of that job: the id is wrong, or its results have expired."""


class JobFailed(JobError):
    """The job ended with an error, which is the message."""


class JobCancelled(JobError):
    """The job was cancelled before it was done."""


class JobExpired(JobError):
    """The job's own deadline passed before it was done."""


class JobTimeout(JobError):
    """The caller's deadline passed first. The job itself goes on."""


class DecodeError(PilotfishError):
    """Bytes that are no message of this version.

    Attributes:
        raw: the bytes as they came.
    """

    def __init__(self, message: str, raw: bytes) -> None:
        super().__init__(message)
        self.raw = raw

    def __reduce__(self) -> tuple[type[DecodeError], tuple[str, bytes]]:
        return type(self), (str(self), self.raw)


class Fenced(PilotfishError):
    """This worker does not own the job any more. It must drop it without a further write."""
