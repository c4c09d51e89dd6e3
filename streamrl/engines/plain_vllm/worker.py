"""Extensions of vLLM's own processes: they die with their parent, keep weights that can be changed, and load versions.
vLLM imports this in each worker of a plain engine before it builds the model (``worker_extension_cls``)."""

from __future__ import annotations

import multiprocessing
import os
from typing import Any

import msgspec

from streamrl.base.errors import WeightError
from streamrl.base.messages import WeightAnnouncement
from streamrl.base.run_process import die_with


class FileWorker:
    """A base that vLLM adds to its worker's class."""

    model_runner: Any  # the worker's own

    def streamrl_load_file(self, encoded_announcement: bytes) -> None:
        """Load a version into the live parameters. Raises ``WeightError`` where one of them is not in the file."""
        from safetensors.torch import load

        from streamrl.engines.file_weights import read_version

        announcement = msgspec.msgpack.decode(encoded_announcement, type=WeightAnnouncement)
        model = self.model_runner.get_model()
        loaded = model.load_weights(load(read_version(announcement)).items())
        parameters = {name for name, _ in model.named_parameters()}
        if missing := sorted(parameters - (parameters if loaded is None else loaded)):
            raise WeightError(f"version {announcement.policy_version} has nothing for {', '.join(missing)}")


def die_with_parent() -> None:
    """Have a child that multiprocessing made (engine core, worker) be killed when its parent dies. Without this a
    killed owner leaves core and worker running for good. The resource tracker is not such a child, and must live on: it
    is what unlinks the shared memory."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        die_with(parent.pid)


def keep_linear_weights(*, packed: bool) -> None:
    """Keep the parameters of linear layers on a CPU, where stock vLLM empties them after packing. ``packed`` False:
    plain ``linear`` on the parameter. True: vLLM's packed kernels beside the parameter (twice the memory); a commit
    must then pack the layers it touched again (``repack_linear_layers``)."""
    from torch.nn.functional import linear
    from vllm.model_executor.layers import utils
    from vllm.platforms import current_platform

    if not current_platform.is_cpu() or hasattr(utils.dispatch_cpu_unquantized_gemm, "streamrl_original"):
        return
    original = utils.dispatch_cpu_unquantized_gemm

    def dispatch(layer: Any, remove_weight: bool) -> None:
        if packed or layer.weight.is_meta or layer.weight.ndim != 2:
            original(layer, remove_weight=False)
        else:
            layer.cpu_linear = linear

    dispatch.streamrl_original = original  # type: ignore[attr-defined]
    utils.dispatch_cpu_unquantized_gemm = dispatch


if os.environ.get("VLLM_PLUGINS") == "":  # a plain engine's: in those of other engines a plugin does this
    die_with_parent()
    keep_linear_weights(packed=False)
