"""Torch on a CPU whose tensors say ``cuda:N``, and that refuses what a GPU refuses.

    with pretended_gpus(cards_of("H100,H100")) as seen: ...

The device of a tensor is a mark on its storage, so that views have that of their base. What torch's Python functions
take (``device=``, ``to``, ``numpy``) is changed in a mode of functions; what operators get is looked at in a mode of
dispatch, which backward passes through, too. Threads that are started inside get both.

Refused, with the sentence of torch where it has one: operands on two devices (except 0-d host tensors, and host tensors
as indices), ``numpy()`` of a device tensor, NCCL collectives of host tensors, a device that is not there, and what the
flash kernel does not take (``flash``). Tests may look at values as they like: what the innermost frame outside of torch
asks is not refused where that frame is a test's."""

from __future__ import annotations

import contextlib
import threading
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from campaigns.pretended_gpu.cards import KNOWN, Card
from campaigns.pretended_gpu.flash import variable_length_attention

HOST = torch.device("cpu")
_MARK = "pretended_device"
_OWN_FOLDER = "/campaigns/pretended_gpu/"
CONTEXT_BYTES = 1 << 30
"""What the context of CUDA and of its libraries takes of a card."""

_COPIES = frozenset({"copy_", "_to_copy", "_copy_from", "_foreach_copy_", "set_", "resize_"})
_INDEXED = frozenset({"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put"})
_NO_HOST_SCALARS = frozenset(
    {"cat", "stack", "index_select", "gather", "scatter_", "index_copy_", "index_add_", "mm", "bmm", "dot"}
)
"""Operators that take no 0-d host tensor beside device tensors."""
_READS_A_VALUE = frozenset({"tolist", "item", "__bool__", "__float__", "__int__", "__index__"})


class Seen:
    """What happened on the pretended GPUs. ``waits``: copies that make the host wait, by the line of the product;
    ``calls``: of kernels that are replaced."""

    def __init__(self) -> None:
        self.refused: list[str] = []
        self.waits: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()


class _Host:
    """The machine that is pretended; one a process."""

    def __init__(self) -> None:
        self.cards: tuple[Card, ...] = ()
        self.nccl = False
        self.seen = Seen()
        self.chosen = threading.local()

    @property
    def current(self) -> int:
        return int(getattr(self.chosen, "index", 0))


_host = _Host()


def seen() -> Seen:
    """What happened since the GPUs were pretended."""
    return _host.seen


def device_of(tensor: torch.Tensor) -> torch.device | None:
    """The device that a tensor says; None where nobody has asked for one (a constant of an operator)."""
    with torch._C.DisableTorchFunction():
        if tensor.device.type == "meta":
            return torch.device("meta")
    found: torch.device | None = getattr(_storage(tensor), _MARK, None)
    return found


def mark(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Put a tensor, with all views of it, on ``device``. Nothing is copied."""
    with torch._C.DisableTorchFunction():
        on_meta = tensor.device.type == "meta"
    if not on_meta:
        setattr(_storage(tensor), _MARK, device)
    return tensor


def _storage(tensor: torch.Tensor) -> Any:
    local = getattr(tensor, "_local_tensor", tensor)  # of a DTensor
    with torch._C.DisableTorchFunction():
        return local.untyped_storage()


def _tensors(*trees: Any) -> list[torch.Tensor]:
    return [leaf for tree in trees for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _named_device(given: Any) -> torch.device:
    """The device that an argument names. Raises as CUDA for one that is not there."""
    device = torch.device("cuda", given) if isinstance(given, int) else torch.device(given)
    if device.type != "cuda":
        return device
    index = _host.current if device.index is None else device.index
    if index >= len(_host.cards):
        raise refusal(RuntimeError, f"CUDA error: invalid device ordinal ({index} of {len(_host.cards)})")
    return torch.device("cuda", index)


def line_of_the_product() -> str:
    """The innermost line of streamrl that is being run."""
    for frame in reversed(traceback.extract_stack()):
        before, _, file = frame.filename.rpartition("/streamrl/")
        if before and "/tests/" not in frame.filename and "/campaigns/" not in frame.filename:
            return f"{file}:{frame.lineno}"
    return "?"


def refusal(kind: type[Exception], sentence: str) -> Exception:
    """Note a refusal, and return what to raise."""
    _host.seen.refused.append(f"{line_of_the_product()}: {sentence}")
    return kind(f"[pretended GPU] {sentence}")


def _asked_by_a_test() -> bool:
    for frame in reversed(traceback.extract_stack()):
        inside = "/torch/" in frame.filename or _OWN_FOLDER in frame.filename or "contextlib" in frame.filename
        if not inside:
            return "/tests/" in frame.filename
    return False


class _Operands(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Looks at the operands of each operator, and marks what comes out."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = _tensors(args, kwargs)
        devices = [device_of(one) for one in given]
        on_gpu = {device for device in devices if device is not None and device.type == "cuda"}
        name = func._schema.name.partition("::")[2]
        if func.namespace == "c10d":
            self._check_collective(name, devices)
        elif name not in _COPIES:
            self._check_operands(func, name, given, args, on_gpu)
        if name == "_local_scalar_dense" and on_gpu:
            _host.seen.waits[line_of_the_product()] += 1
        options = dict(kwargs or {})
        target = _take_device(name, options)
        result = func(*args, **options)
        if target == HOST:  # C++ says it of all that it makes for itself
            target = None
        device = target or next(iter(on_gpu), None) or next((one for one in devices if one is not None), None)
        if device is not None:
            for one in _tensors(result):
                if device_of(one) is None:
                    mark(one, device)
        return result

    @staticmethod
    def _check_collective(name: str, devices: list[torch.device | None]) -> None:
        if _host.nccl and name != "barrier" and HOST in devices:
            raise refusal(RuntimeError, f"No backend type associated with device type cpu ({name}, NCCL)")

    @staticmethod
    def _check_operands(func: Any, name: str, given: list[torch.Tensor], args: Any, on_gpu: set[torch.device]) -> None:
        checked = given
        if name in _INDEXED:  # indices may be on the host
            values = [args[2]] if "put" in name else []
            checked = [given[0], *values]
        on_host = [one for one in checked if device_of(one) == HOST and (one.dim() or name in _NO_HOST_SCALARS)]
        if len(on_gpu) > 1 or (on_gpu and on_host and not _asked_by_a_test()):
            where = ", ".join(f"{tuple(one.shape)} on {device_of(one)}" for one in given)
            raise refusal(RuntimeError, f"Expected all tensors to be on the same device, but {func} got {where}")


def _look_at_operands() -> Any:
    """Context in which operands are looked at."""
    mode: Any = _Operands
    return mode()


class _Functions(TorchFunctionMode):
    """Changes what torch's Python functions are asked about devices."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if isinstance(func, torch._ops.OpOverload):  # as C++ calls it while it differentiates; _Operands sees it
            return func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        if name in ("__get__", "__set__"):
            return _property(func, name, args)
        first = args[0] if args and isinstance(args[0], torch.Tensor) else None
        options = dict(kwargs or {})
        if first is not None and name in _OF_A_TENSOR:
            return _OF_A_TENSOR[name](func, first, args, options)
        if first is not None and name in _READS_A_VALUE and _on_gpu(first):
            _host.seen.waits[line_of_the_product()] += 1
        target = _take_device(name, options)
        result = func(*args, **options)
        self._mark(name, result, target, first, _tensors(args, options))
        return result

    @staticmethod
    def _mark(name: str, result: Any, target: Any, first: Any, given: list[torch.Tensor]) -> None:
        if name == "__setitem__":
            return
        here = device_of(first) if first is not None else None
        for one in _tensors(result):
            if target is not None and not any(_storage(one) is _storage(other) for other in given):
                mark(one, target)
            elif device_of(one) is None:
                mark(one, here if here is not None and here.type != "meta" else HOST)


def _on_gpu(tensor: torch.Tensor) -> bool:
    device = device_of(tensor)
    return device is not None and device.type == "cuda"


def _take_device(name: str, options: dict[str, Any]) -> torch.device | None:
    """Have a function make its result on the host; returns the device that was asked for."""
    options.pop("pin_memory", None)
    if name in ("load", "load_file") and "map_location" in options:
        options["map_location"] = "cpu"
        return None
    asked = options.get("device")
    if asked is None or isinstance(asked, torch.Tensor):
        return None
    device = _named_device(asked)
    if device.type == "cuda":
        options["device"] = "cpu"
    return device if device.type in ("cuda", "cpu") else None


def _property(func: Any, name: str, args: Any) -> Any:
    attribute, first = func.__self__.__name__, args[0]
    if name == "__get__" and attribute == "device":
        return device_of(first) if _on_gpu(first) else func(*args)
    if name == "__get__" and attribute in ("is_cuda", "is_cpu"):
        return _on_gpu(first) == (attribute == "is_cuda")
    if name == "__set__" and attribute == "grad" and args[1] is not None:
        ours, other = (device_of(one) or HOST for one in args)
        if ours != other:
            raise refusal(RuntimeError, f"a gradient on {other} for a tensor on {ours}")
    return func(*args)


def _moved(tensor: torch.Tensor, target: torch.device) -> torch.Tensor:
    if (device_of(tensor) or HOST) == target:
        return tensor
    if target == HOST:
        _host.seen.waits[line_of_the_product()] += 1
    copy = tensor.clone()
    mark(getattr(copy, "_local_tensor", copy), target)
    return copy


def _cuda(func: Any, first: torch.Tensor, args: Any, options: dict[str, Any]) -> torch.Tensor:
    asked = options.get("device", args[1] if len(args) > 1 else None)
    return _moved(first, _named_device("cuda" if asked is None else asked))


def _numpy(func: Any, first: torch.Tensor, args: Any, options: dict[str, Any]) -> Any:
    if _on_gpu(first) and not _asked_by_a_test():
        sentence = f"can't convert {device_of(first)} device type tensor to numpy. Use Tensor.cpu() first"
        raise refusal(TypeError, sentence)
    return func(*args, **options)


def _pin(func: Any, first: torch.Tensor, args: Any, options: dict[str, Any]) -> torch.Tensor:
    if _on_gpu(first):
        raise refusal(RuntimeError, "cannot pin 'torch.cuda.FloatTensor' only dense CPU tensors can be pinned")
    return first


def _type(func: Any, first: torch.Tensor, args: Any, options: dict[str, Any]) -> Any:
    if len(args) > 1 and "cuda" in str(args[1]):
        raise refusal(NotImplementedError, "Tensor.type with a type of CUDA")
    return func(*args, **options)


def _to(func: Any, first: torch.Tensor, args: Any, options: dict[str, Any]) -> torch.Tensor:
    target: torch.device | None = None
    rest: list[Any] = []
    for one in args[1:]:
        if isinstance(one, torch.device | str | int) and not isinstance(one, bool):
            target = _named_device(one)
            rest.append(HOST if target.type == "cuda" else target)
            continue
        if isinstance(one, torch.Tensor):
            target = device_of(one) or HOST
        rest.append(one)
    if options.get("device") is not None:
        target = _named_device(options["device"])
        options["device"] = HOST if target.type == "cuda" else target
    result: torch.Tensor = func(first, *rest, **options)
    here = device_of(first) or HOST
    if target is None or target.type == "meta":
        return result if device_of(result) is not None else mark(result, here)
    if here != target:
        if target == HOST:
            _host.seen.waits[line_of_the_product()] += 1
        if _storage(result) is _storage(first):
            result = result.clone()
        mark(result, target)
    return result


_OF_A_TENSOR: dict[str, Any] = {
    "numpy": _numpy,
    "__array__": _numpy,
    "pin_memory": _pin,
    "is_pinned": lambda func, first, args, options: False,
    "cpu": lambda func, first, args, options: _moved(first, HOST),
    "cuda": _cuda,
    "get_device": lambda func, first, args, options: device_of(first).index if _on_gpu(first) else -1,  # type: ignore[union-attr]
    "type": _type,
    "to": _to,
}


# ---- torch.cuda, autocast, process groups ----------------------------------------------------------------------------


class _DoneAlready:
    """A stream or an event: what is asked of it is done when it is asked."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.device = torch.device("cuda", _host.current)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_, **__: None

    def record_event(self, event: Any = None) -> Any:
        return event or _DoneAlready()

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: Any) -> float:
        return 0.0

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: Any) -> None:
        return


def _choose(device: Any) -> None:
    _host.chosen.index = _named_device(device).index


def _card(device: Any = None) -> Card:
    return _host.cards[_named_device("cuda" if device is None else device).index or 0]


def _properties(device: Any = None) -> SimpleNamespace:
    card, place = _card(device), _named_device("cuda" if device is None else device).index or 0
    major, minor = card.capability
    return SimpleNamespace(
        name=card.name, total_memory=card.memory, major=major, minor=minor, multi_processor_count=108, uuid=str(place)
    )


def _cuda_functions() -> dict[str, Any]:
    return {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "init": lambda: None,
        "_lazy_init": lambda: None,
        "device_count": lambda: len(_host.cards),
        "current_device": lambda: _host.current,
        "set_device": _choose,
        "get_device_properties": _properties,
        "get_device_capability": lambda device=None: _card(device).capability,
        "get_device_name": lambda device=None: _card(device).name,
        "is_bf16_supported": lambda including_emulation=True: including_emulation or _card().capability >= (8, 0),
        "mem_get_info": lambda device=None: (_card(device).memory - CONTEXT_BYTES, _card(device).memory),
        "memory_allocated": lambda *_: 0,
        "memory_reserved": lambda *_: 0,
        "max_memory_allocated": lambda *_: 0,
        "max_memory_reserved": lambda *_: 0,
        "reset_peak_memory_stats": lambda *_: None,
        "empty_cache": lambda: None,
        "synchronize": lambda *_: _host.seen.waits.update([line_of_the_product()]),
        "current_stream": lambda *_: _DoneAlready(),
        "default_stream": lambda *_: _DoneAlready(),
        "Stream": _DoneAlready,
        "Event": _DoneAlready,
        "stream": lambda *_: contextlib.nullcontext(),
        "device": lambda *_: contextlib.nullcontext(),
        "get_rng_state": lambda *_: torch.get_rng_state(),
        "set_rng_state": lambda *_, **__: None,
    }


def _replacements() -> Iterator[tuple[Any, str, Any]]:
    """(owner, name, value) of everything that is replaced."""
    import torch.distributed as dist
    from torch.nn.attention import varlen
    from torch.utils import checkpoint

    for name, value in _cuda_functions().items():
        yield torch.cuda, name, value
    # vLLM's worker of a CPU engine has a stand-in, which refuses nothing.
    yield torch.Tensor, "pin_memory", torch._C.TensorBase.pin_memory
    # FSDP2 waits by this name for parameters that it has gathered too early.
    yield torch.accelerator, "current_stream", lambda *_: _DoneAlready()
    for name in ("from_numpy", "frombuffer"):  # modes do not see them
        yield torch, name, partial(_on_the_host, getattr(torch, name))
    yield torch.cuda.nccl, "version", lambda: (2, 29, 7)
    for owner, name in (
        (torch, "is_autocast_enabled"),
        (torch, "get_autocast_dtype"),
        (torch.amp, "is_autocast_available"),
    ):
        yield owner, name, partial(_of_the_host, getattr(owner, name))
    autocast = torch.amp.autocast_mode.autocast
    begin_autocast = autocast.__init__

    def begin(self: Any, device_type: str, *args: Any, **options: Any) -> None:
        begin_autocast(self, "cpu" if device_type == "cuda" else device_type, *args, **options)

    yield autocast, "__init__", begin
    initialise, backend_of = dist.init_process_group, dist.get_backend

    def init_process_group(backend: str | None = None, *args: Any, **options: Any) -> None:
        _host.nccl = backend == "nccl"
        options.pop("device_id", None)
        initialise("gloo" if _host.nccl else backend, *args, **options)

    yield dist, "init_process_group", init_process_group
    yield dist, "get_backend", lambda group=None: "nccl" if _host.nccl else backend_of(group)
    yield varlen, "varlen_attn", variable_length_attention(varlen.varlen_attn, _host, device_of, refusal)
    engine: Any = torch.autograd
    run_backward = engine._engine_run_backward

    def backward(*args: Any, **options: Any) -> Any:
        with _Functions():  # ``torch.autograd.backward`` has left the mode
            return run_backward(*args, **options)

    yield engine, "_engine_run_backward", backward
    extract = checkpoint._default_meta_extractor

    def metadata(tensor: torch.Tensor) -> Any:
        with _Functions():  # it is called where the mode was left in a forward, and where it was not in its repetition
            return extract(tensor)

    checks = checkpoint._allowed_determinism_checks_to_fns
    yield checkpoint, "_allowed_determinism_checks_to_fns", checks | {"default": metadata}
    run_thread = threading.Thread.run

    def run(thread: threading.Thread) -> None:
        with _Functions(), _look_at_operands():
            run_thread(thread)

    yield threading.Thread, "run", run


def _on_the_host(function: Any, *args: Any, **options: Any) -> torch.Tensor:
    return mark(function(*args, **options), HOST)


def _of_the_host(function: Any, *args: Any) -> Any:
    return function(*("cpu" if one == "cuda" else one for one in args))


@contextlib.contextmanager
def pretended_gpus(cards: Sequence[Card] = (KNOWN["H100"],)) -> Iterator[Seen]:
    """Context in which torch of this process has ``cards``."""
    _host.cards, _host.nccl, _host.seen = tuple(cards), False, Seen()
    with contextlib.ExitStack() as stack:
        for owner, name, value in list(_replacements()):
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, value)
        stack.enter_context(_Functions())
        stack.enter_context(_look_at_operands())
        yield _host.seen
