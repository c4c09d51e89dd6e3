"""Exceptions of streamrl, for all rooms and processes. There are two kinds of failure.

A failure of data (a reward raised, a completion was truncated) is recorded as the outcome of its trajectory and raises
nothing. A failure of the system (a process died, a stream broke) is one of these exceptions and ends the task group.
Every message names the thing, its value and the remedy."""

from __future__ import annotations

import errno
from collections.abc import Iterator, Sequence

import msgspec

UNDECODABLE = (msgspec.MsgspecError, ValueError, TypeError, OverflowError, RecursionError)
"""Errors that msgspec raises for bytes that do not decode to the requested type. Text that is not UTF-8 raises
``UnicodeDecodeError``, which is a ValueError; map keys without a hash raise TypeError; endless nesting raises
RecursionError, also in fields that the type does not have."""

UNENCODABLE = (TypeError, ValueError, OverflowError, RecursionError)
"""Errors that msgspec raises for a value that cannot be encoded: an unknown class, a lone surrogate, a number of too
many bits, endless nesting."""


def leaves(error: BaseException) -> Iterator[BaseException]:
    """Yield the error itself, or all errors of an exception group and of the groups in it, in order."""
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from leaves(inner)
    else:
        yield error


class StreamRLError(Exception):
    """Base of every error that streamrl raises on purpose."""


class InputError(StreamRLError):
    """The user's input is wrong: a recipe, a file, a place or a word of the command line; exit code 2."""


class RecipeError(InputError):
    """Several problems of the input, or one; exit code 2. ``problems``: lines, one for each problem; ``outcome``: the
    outcome in a few words."""

    def __init__(self, *problems: str, outcome: str = "nothing was started") -> None:
        super().__init__("\n".join(problems))
        self.problems = list(problems)
        self.outcome = outcome


def raise_problems(problems: Sequence[str]) -> None:
    """Raise a ``RecipeError`` with ``problems``, where there are any."""
    if problems:
        raise RecipeError(*problems)


class ProcessDied(StreamRLError):
    """A process of the run ended unexpectedly."""


class EngineError(StreamRLError):
    """An engine failed and serves no more requests."""


class ModelRefused(StreamRLError):
    """No engine or trainer rank can load this model with this recipe: a restart would end the same way."""


class RequestRefused(StreamRLError):
    """An engine could not serve one request; it serves the others."""


class WeightError(StreamRLError):
    """A weight delta could not be applied: wrong base, wrong digest, or an unmapped parameter."""


class VersionLeft(WeightError):
    """The trainer serves a newer version than an engine requested, or none any more: the engine must wait."""


class CannotContinue(StreamRLError):
    """Control cannot go on: more rewards failed or more groups were dropped than the recipe allows, or too few groups
    remain to fill a batch."""


class DiskFull(StreamRLError):
    """A disk is full. A process that ends with this error is not started again."""

    errno = errno.ENOSPC


class StoreError(StreamRLError):
    """An object store refused a request, or did not answer in time."""


class EpochLost(StoreError):
    """Another process took over this process's place in an object store: this process writes nothing any more, and is
    not restarted, because the restart would take the place back."""


class RunStalled(StreamRLError):
    """The run makes no progress for longer than any of its time limits explains."""


class StreamClosed(StreamRLError):
    """A stream was used after this end had closed it."""


class StreamEnded(StreamRLError):
    """The sender closed the stream, and every item was received."""


class StreamBroken(StreamRLError):
    """The peer is gone, or broke the protocol."""


class WireError(StreamRLError):
    """Bytes are no message of this schema: unknown kind, wrong version, over a size limit."""
