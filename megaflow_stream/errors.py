"""The errors of MegaFlow: what was being done, where, what to do next, and whether trying again can help.

`MegaflowError` is the one root. Each class says by `retriable` whether the same call may succeed later, and by
`exit_code` what a command that ends with it returns: 1 failed, 2 wrong use or configuration, 3 a service cannot
be reached.
"""

from __future__ import annotations


class MegaflowError(Exception):
    """Something MegaFlow was asked to do did not happen.

    message: what was being done and what went wrong.
    hint: what the person can do about it, shown on a line of its own.
    where: topic, partition, offset, file, line: anything that tells the place.
    """

    exit_code = 1
    retriable = False

    def __init__(self, message: str, *, hint: str = "", **where: object) -> None:
        self.message, self.hint = message, hint
        self.where = {name: value for name, value in where.items() if value is not None}
        place = ", ".join(f"{name} {value}" for name, value in self.where.items())
        super().__init__(f"{message} ({place})" if place else message)


class SettingError(MegaflowError, ValueError):
    """A setting, a definition or a file of the project is wrong: nothing was started."""

    exit_code = 2


class UsageError(MegaflowError):
    """A command was called wrongly, or is not there yet."""

    exit_code = 2


class ServiceUnreachable(MegaflowError):
    """Kafka or S3 does not answer."""

    exit_code = 3
    retriable = True


class BusError(MegaflowError):
    """Kafka refused or failed an operation. `retriable` is set per instance where the protocol says so."""

    def __init__(self, message: str, *, retriable: bool = False, hint: str = "", **where: object) -> None:
        super().__init__(message, hint=hint, **where)
        self.retriable = retriable


class Fenced(MegaflowError):
    """Another owner has taken over (a newer producer epoch, a newer head): stop, write nothing more."""


class BadRecord(MegaflowError, ValueError):
    """One record is wrong. The others go on; this one is rejected, or goes to the dead-letter topic."""


class RecordsExpired(MegaflowError):
    """A saved offset is older than what the topic still retains: records were lost to retention."""


class Damaged(MegaflowError):
    """Stored bytes do not have the hash or size that the manifest states."""


class NotFound(MegaflowError):
    """The named thing (checkpoint, conversation, topic) does not exist."""
