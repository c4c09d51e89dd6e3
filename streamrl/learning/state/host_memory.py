"""What the C library does with memory that torch frees on a CPU.

glibc moves the limit above which a block is mapped on its own up to the largest block that was freed, to 32 MiB. From
then on activations of every size come from one heap, which does not shrink while something small lies at its end: a
step's peak and the next allocation add up. With fixed limits freed blocks go back to the system at once. Measured on a
30 M-parameter model: 41 MiB less at 256 tokens a micro-batch, 75 MiB at 512, for 5 to 10 % more CPU time.
"""

from __future__ import annotations

import ctypes

MAPPED_BYTES = 256 << 10
"""Blocks from this size on are mapped on their own. Smaller ones, of small models, stay in the heap: mapping costs."""
KEPT_BYTES = 8 << 20
"""So much free memory stays at the end of the heap."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h


def return_freed_memory() -> bool:
    """Fix the limits for this process; whether the C library has them (glibc). Idempotent."""
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is None:
        return False
    return all([set_option(_M_MMAP_THRESHOLD, MAPPED_BYTES), set_option(_M_TRIM_THRESHOLD, KEPT_BYTES)])
