"""Two kinds of failure, and nothing else.

*Data went wrong* (a reward raised, a completion was cut): a recorded outcome on the trajectory.
*The system went wrong* (a process died, a stream broke): an exception that ends the nursery.
Every message names the thing, its value and the remedy."""

from __future__ import annotations

import errno
from collections.abc import Iterator

import msgspec

UNDECODABLE = (msgspec.MsgspecError, ValueError, TypeError, OverflowError, RecursionError)
"""What msgspec raises for bytes that are not what was asked for, from any writer: text that is not UTF-8 is a
``UnicodeDecodeError``, which is a ValueError; map keys without a hash are a TypeError; nesting without end is a
RecursionError, also in fields that nobody asked for."""

UNENCODABLE = (TypeError, ValueError, OverflowError, RecursionError)
"""What msgspec raises for a value that cannot be written: of a class that it does not know, half of a character, a
number of too many bits, nesting without end."""


def leaves(error: BaseException) -> Iterator[BaseException]:
    """The error itself, or all errors of a group and of the groups in it, in order."""
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from leaves(inner)
    else:
        yield error


class StreamRLError(Exception):
    """Base of every error that streamrl raises on purpose."""


class RecipeError(StreamRLError):
    """The user's input is wrong; nothing was started. Exit code 2. ``problems`` holds one line each; ``outcome``: the
    outcome, in a few words."""

    def __init__(self, *problems: str, outcome: str = "nothing was started") -> None:
        super().__init__("\n".join(problems))
        self.problems = list(problems)
        self.outcome = outcome


class ProcessDied(StreamRLError):
    """A process of the run ended although it should not have."""


class EngineError(StreamRLError):
    """An engine cannot serve any more."""


class ModelRefused(StreamRLError):
    """No engine or trainer rank can take this model as the recipe says: each one would end the same way."""


class RequestRefused(StreamRLError):
    """An engine could not serve one request; it goes on with the others."""


class WeightError(StreamRLError):
    """A weight delta could not be applied: wrong base, wrong digest, or an unmapped parameter."""


class VersionLeft(WeightError):
    """The trainer holds a newer version than the one that an engine asks for, or none any more: it must wait."""


class CannotContinue(StreamRLError):
    """Control cannot go on: more rewards failed or more groups were dropped than the recipe allows, or nothing is left
    that could fill a batch."""


class DiskFull(StreamRLError):
    """A disk is full. A process that ends by it is not started again."""

    errno = errno.ENOSPC


class StoreError(StreamRLError):
    """An object store refuses what is asked of it, or does not do it in time."""


class EpochLost(StoreError):
    """Another process has taken the place of this one in a store: this one writes nothing any more, and is not
    restarted. A restart would take the place from the other process."""


class RunStalled(StreamRLError):
    """The run makes no progress, and no time limit of its own explains it."""


class StreamClosed(StreamRLError):
    """A stream was used after this side had closed it."""


class StreamEnded(StreamRLError):
    """The sender ended the stream and every item was received."""


class StreamBroken(StreamRLError):
    """The peer is gone, or sent something that the protocol forbids."""


class WireError(StreamRLError):
    """Bytes that are not a message of this schema: unknown kind, wrong version, over a size limit."""
