"""Extensions of vLLM's own processes: they die with their parent, keep weights that can be changed, and load versions.

vLLM imports this file in each worker of an engine without our plugin, before it builds the model
(``worker_extension_cls``). The workers of a run's engine call the same functions from our plugin
(``engines.vllm.plugin``)."""

from __future__ import annotations

import multiprocessing
import os
from typing import Any

import msgspec

from streamrl.base.errors import WeightError
from streamrl.base.messages import WeightAnnouncement
from streamrl.base.run_process import die_with


class FileWorker:
    """A base class that vLLM adds to the class of its worker."""

    model_runner: Any  # set by vLLM's worker

    def streamrl_load_file(self, encoded_announcement: bytes) -> None:
        """Load a version into the live parameters. Raises ``WeightError`` when the file lacks one of them."""
        from safetensors.torch import load

        from streamrl.engines.file_weights import read_version

        announcement = msgspec.msgpack.decode(encoded_announcement, type=WeightAnnouncement)
        model = self.model_runner.get_model()
        loaded = model.load_weights(load(read_version(announcement)).items())
        if loaded is None:  # this model does not report the names of the parameters that it loaded
            return
        parameters = {name for name, _ in model.named_parameters()}
        missing = sorted(parameters - loaded)
        if missing:
            raise WeightError(f"version {announcement.policy_version} has nothing for {', '.join(missing)}")


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent dies, if multiprocessing made it (engine core, worker). Without
    this, core and workers of a killed owner run for ever. The resource tracker is not made in this way, and must live
    on, since it unlinks the shared memory."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        die_with(parent.pid)


def keep_linear_weights(*, packed: bool) -> None:
    """Keep the parameters of linear layers on a CPU, where stock vLLM empties them after packing.

    ``packed``: True keeps vLLM's packed kernels beside the parameter (twice the memory), and a commit must pack the
    changed layers again (``repack_linear_layers``); False computes torch's ``linear`` on the parameter"""
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


if os.environ.get("VLLM_PLUGINS") == "":  # in workers of other engines our plugin does this
    die_with_parent()
    keep_linear_weights(packed=False)
