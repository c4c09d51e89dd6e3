"""Environment of rewards and agents: variables that programs need, and those that the recipe names. No tokens."""

from __future__ import annotations

import os
from collections.abc import Iterable

from streamrl.base.run_process import CUDA_DEVICES, CUDA_ORDER
from streamrl.recipe.judge import JUDGE_MODEL, JUDGE_SOCKET
from streamrl.recipe.rewards import Reward

_NEEDED = frozenset(
    {
        *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LANGUAGE", "TZ", "TMPDIR", "TEMP"),
        *("PYTHONPATH", "PYTHONHASHSEED", "VIRTUAL_ENV", "LD_LIBRARY_PATH", "STREAMRL_RUN_MARKER"),
        *("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"),
        *(JUDGE_SOCKET, JUDGE_MODEL, CUDA_DEVICES, CUDA_ORDER),
    }
)
_PREFIXES = ("LC_",)
# Rewards run side by side in processes; and a numeric library with threads could not be forked after its import.
# A thread's own malloc arena is 64 MiB of addresses, which ``memory_mib`` counts: functions run in threads.
_ARENAS = {"MALLOC_ARENA_MAX": "2"}
_ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS")


def passed_environment(rewards: Iterable[Reward], named: Iterable[str] = ()) -> dict[str, str]:
    """Environment of processes that run ``rewards``, with ``named``: shared, so what one names all of them see."""
    named = {*named, *(name for reward in rewards for name in reward.environment)}
    passed = {
        name: value
        for name, value in os.environ.items()
        if name in _NEEDED or name in named or name.startswith(_PREFIXES)
    }
    return _ARENAS | dict.fromkeys(_ONE_THREAD, "1") | {"TOKENIZERS_PARALLELISM": "false"} | passed
