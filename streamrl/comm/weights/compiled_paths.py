"""When the compiled forms are worth their compiler."""

from __future__ import annotations

import sys

_FROM_ELEMENTS = 1 << 15
_FROM_ELEMENTS_WHEN_LOADED = 1 << 6
_LOADED_WITH = "streamrl.comm.weights.compiled_split"


def worth_compiling(elements: int) -> bool:
    """Whether work on so many elements should be done by numba, which takes 70 MiB and a second to load: a process with
    small tensors only is spared it. The first use on a machine compiles for 15 s more, and keeps the result beside the
    source; so it does not matter whether something else (vLLM, say) has loaded numba."""
    return elements >= (_FROM_ELEMENTS_WHEN_LOADED if _LOADED_WITH in sys.modules else _FROM_ELEMENTS)
