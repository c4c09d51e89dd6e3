"""Variables of processes that run user code: variables that programs need, and variables that the recipe names.

The fork server of a reward worker, the process that inspects functions, environment workers, MCP servers and the
processes of external agents get them. Access tokens of the command's own process are not passed on."""

from __future__ import annotations

import os
from collections.abc import Iterable

from streamrl.base.run_process import CUDA_DEVICES, CUDA_ORDER
from streamrl.base.types import TextsByName
from streamrl.recipe.rewards import Reward
from streamrl.recipe.served_models import JUDGE_MODEL, JUDGE_SOCKET

_NEEDED = frozenset(
    {
        *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LANGUAGE", "TZ", "TMPDIR", "TEMP"),
        *("PYTHONPATH", "PYTHONHASHSEED", "VIRTUAL_ENV", "LD_LIBRARY_PATH", "STREAMRL_RUN_MARKER"),
        *("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"),
        *(JUDGE_SOCKET, JUDGE_MODEL, CUDA_DEVICES, CUDA_ORDER),
    }
)
_PREFIXES = ("LC_",)
_OF_WORKERS = ("STREAMRL_", "VLLM_")
# malloc reserves 64 MiB of addresses for each arena, and ``memory_mib`` limits addresses. Functions may start threads,
# each of which would get an arena of its own.
_ARENAS = {"MALLOC_ARENA_MAX": "2"}
# Processes of rewards run side by side; and a process whose numeric library has started threads cannot be forked.
_ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS")


def variables_of_user_code(rewards: Iterable[Reward], variables: Iterable[str] = ()) -> TextsByName:
    """Variables of processes that run ``rewards``. ``variables``: names of further variables to pass on. The processes
    are shared, so every reward sees the variables that any reward names."""
    names = _NEEDED.union(variables, *(reward.variables for reward in rewards))
    passed = {name: value for name, value in os.environ.items() if name in names or name.startswith(_PREFIXES)}
    return _ARENAS | dict.fromkeys(_ONE_THREAD, "1") | {"TOKENIZERS_PARALLELISM": "false"} | passed


def keep_variables_of_user_code(variables: Iterable[str]) -> None:
    """Remove the other variables from this process, which runs user code itself: an environment worker, and the process
    that looks at an environment. ``variables``: names of further variables to keep."""
    remaining = variables_of_user_code((), variables)
    remaining |= {name: value for name, value in os.environ.items() if name.startswith(_OF_WORKERS)}
    os.environ.clear()
    os.environ.update(remaining)
