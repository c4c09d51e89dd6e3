"""A timer that ends this process although Python cannot run.

A regular expression that backtracks, or the power of a huge integer, holds the interpreter lock for as long as it
takes: no other Python thread runs, so a watchdog written in Python would sleep beside it. The POSIX timer calls the
C library's ``_exit`` on a thread that the C library makes (``SIGEV_THREAD``, timer_create(2)), without Python.
"""

from __future__ import annotations

import ctypes
import faulthandler
import sys

_CLOCK_MONOTONIC = 1
_SIGEV_THREAD = 2
_STACKS_LEAD_S = 0.25  # the stacks are written this long before the end


class _SignalEvent(ctypes.Structure):
    """``struct sigevent`` of Linux (64 bytes): ``function(value)`` is called on expiry."""

    _fields_ = (
        ("value", ctypes.c_void_p),
        ("signal_number", ctypes.c_int),
        ("notify", ctypes.c_int),
        ("function", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("padding", ctypes.c_byte * 32),
    )


class _TimeSpec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class _TimerSpec(ctypes.Structure):
    _fields_ = (("interval", _TimeSpec), ("value", _TimeSpec))


class NativeTimer:
    """Calls ``function(value)`` of the C library on a thread of its own, whatever Python does."""

    def __init__(self, function: str, value: int) -> None:
        """Raises ``OSError`` where the C library has no such timer (it is Linux's)."""
        try:
            self._library = ctypes.CDLL(None, use_errno=True)
            called = ctypes.cast(getattr(self._library, function), ctypes.c_void_p).value
            create = self._library.timer_create
        except AttributeError as error:
            raise OSError("the C library has no POSIX timers") from error
        event = _SignalEvent(value=value, notify=_SIGEV_THREAD, function=called)
        self._timer = ctypes.c_void_p()
        if create(_CLOCK_MONOTONIC, ctypes.byref(event), ctypes.byref(self._timer)) != 0:
            raise OSError(ctypes.get_errno(), "timer_create failed")

    def set(self, seconds: float) -> None:
        """It is called so many seconds from now, once, unless this is called before; 0: never."""
        whole = int(seconds)
        value = _TimeSpec(whole, int((seconds - whole) * 1e9))
        if self._library.timer_settime(self._timer, 0, ctypes.byref(_TimerSpec(_TimeSpec(0, 0), value)), None) != 0:
            raise OSError(ctypes.get_errno(), "timer_settime failed")


class ExitTimer:
    """Ends the process with ``exit_code`` unless ``rearm`` or ``disarm`` is called in time.

    Shortly before the end the stacks of all threads go to stderr, so that the log names the function that hung.
    """

    def __init__(self, exit_code: int) -> None:
        """Raises ``OSError`` where the C library has no such timer (it is Linux's)."""
        self._timer = NativeTimer("_exit", exit_code)

    def rearm(self, seconds: float) -> None:
        """The process has ``seconds`` from now until the next call."""
        self._timer.set(seconds)
        if sys.__stderr__ is not None and seconds > _STACKS_LEAD_S:
            faulthandler.dump_traceback_later(seconds - _STACKS_LEAD_S, file=sys.__stderr__)

    def disarm(self) -> None:
        """The process may live."""
        self._timer.set(0.0)
        faulthandler.cancel_dump_traceback_later()
