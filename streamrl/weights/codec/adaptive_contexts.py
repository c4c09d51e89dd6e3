"""What both forms of the adaptive code share: its contexts, and how fast they learn.

After a change here, touch ``adaptive_streams`` too: numba keeps compiled code beside that file, and looks at its time.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from streamrl.base.errors import WeightError

CountArray = npt.NDArray[np.int64]

KNOWN = 254  # events after which a frequency is no longer learned faster than by 1/256 of the difference
INHERITED = 6  # as how many events the class before counts
INHERITED_STEPS = 2  # the same for steps
DOUBT = 4
LARGEST_SHIFT = 31
LEARNED = 1  # upper bits of a remainder; those below are next to fair where gaps are random
LEARNED_STEPS = 3  # upper bits of a step within its power of two
# Contexts of a class: stops after a quotient of 0 and after a larger one, for a shift of 0 and for others; upper bits
# of remainders; directions after either direction; powers of two of a step; the bits below those.
STOP, REMAINDER, DIRECTION, POWER, MANTISSA = 0, 4, 7, 9, 9 + 32
CONTEXTS = MANTISSA + 8 * 32
# Contexts of all classes: whether a shift is the expected one, its direction, how far.
SHIFT_SAME, SHIFT_LESS, SHIFT_FAR = 0, 1, 2

RATES = tuple(65536 // (seen + 2) for seen in range(KNOWN + 1))


def undecodable(tensor: str, size: int, changed: int) -> WeightError:
    """A patch whose streams ended as ``changed`` says: 0 or below."""
    reason = ("lists no change", "has changes that do not fit", "does not end where its changes do")[-changed]
    return WeightError(f"patch of {tensor!r} has {size} bytes of streams and cannot be decoded: it {reason}")
