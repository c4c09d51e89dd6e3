"""The process group of one trainer's ranks: ``torch.distributed``, also with one rank. Runs in each trainer rank.

Ranks meet over TCP on one named interface, because neither torch's store nor gloo nor NCCL authenticates a peer.
Without a setting, torch's store listens on every interface whatever its address is, and gloo listens on the interface
that the host's name resolves to."""

from __future__ import annotations

import contextlib
import ctypes
import socket
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from os import environ
from socket import AF_INET, AF_INET6
from urllib.parse import urlsplit

import psutil
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, Store, TCPStore
from torch.distributed import ReduceOp, get_rank, get_world_size

from streamrl.base.errors import StreamBroken, StreamRLError
from streamrl.base.run_process import usable_cores
from streamrl.learning.gathered_bytes import gather_bytes
from streamrl.learning.options import TrainerOptions

LEAVE_TIMEOUT = timedelta(seconds=10)
PEER_IS_GONE = ("closed by peer", "reset by peer", "Broken pipe", "Timed out", "timeout")
"""Texts of gloo's errors when another rank died or hangs: gloo's errors have no class of their own."""

MAPPED_BYTES = 256 << 10
"""Size from which on a block is mapped on its own. Smaller blocks, of small models, stay in the heap: mapping costs."""
HEAP_TAIL_BYTES = 8 << 20
"""Free memory that stays at the end of the heap."""
# malloc.h
M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3


def choose_device(options: TrainerOptions) -> torch.device:
    """Return the device of this rank; ``auto`` is CUDA if available. A rank of a run sees its own GPU only.
    Raises ``StreamRLError``."""
    name = options.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda":
        if not torch.cuda.is_available():
            raise StreamRLError(
                'training.device is "cuda" and this machine has no CUDA device: set it to "cpu" or "auto"'
            )
        device = torch.device("cuda", options.rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
        return device
    return torch.device(name)


def join(options: TrainerOptions, device: torch.device) -> None:
    """Become rank ``options.rank`` of ``options.ranks``: gloo on CPU, NCCL on CUDA. Raises ``StreamRLError``."""
    if options.ranks > 1 and not options.rendezvous:
        raise StreamRLError(
            f"{options.ranks} trainer ranks have no rendezvous: give one, tcp://host:port or file:///path"
        )
    backend = "nccl" if device.type == "cuda" else "gloo"
    timeout = timedelta(seconds=options.collective_timeout_s)
    stay_on_interface(options.rendezvous)
    try:
        store: Store | None = None if options.rendezvous else HashStore()
        if options.rendezvous.startswith("tcp://"):
            store = meet_at(options.rendezvous, options.rank, options.ranks, timeout)
        dist.init_process_group(
            backend,
            init_method=None if store else options.rendezvous,
            store=store,
            rank=options.rank,
            world_size=options.ranks,
            timeout=timeout,
        )
    except (RuntimeError, ValueError, OSError) as error:
        raise StreamRLError(
            f"trainer rank {options.rank} of {options.ranks} did not meet the others at "
            f"{options.rendezvous or 'its own store'}: {error}"
        ) from error


@contextlib.contextmanager
def needs_peers(doing: str) -> Iterator[None]:
    """Context of collectives, also a decorator: raises ``StreamBroken`` when another rank is gone or does not answer.

    gloo notices a dead process at once. A process that hangs, and any failure under NCCL, is noticed after
    ``collective_timeout_s``."""
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, dist.DistError) and not any(text in str(error) for text in PEER_IS_GONE):
            raise
        rank = get_rank()
        ranks = get_world_size()
        peers = f"rank {1 - rank}" if ranks == 2 else f"one of the other {ranks - 1} ranks"
        raise StreamBroken(
            f"trainer rank {rank} of {ranks} was {doing} when {peers} ended or stopped to answer; the log of that "
            f"rank says why ({error})"
        ) from error


def leave() -> None:
    """Wait up to ``LEAVE_TIMEOUT`` for the other ranks, and leave. Call it after the model and the optimizer are gone.

    Leaving without the barrier aborted a rank in 2 of 5 runs. The barrier's error is suppressed: a peer may be dead."""
    if not dist.is_initialized():
        return
    with suppress(RuntimeError):
        if dist.get_backend() == "gloo":
            dist.monitored_barrier(timeout=LEAVE_TIMEOUT)
        else:
            dist.barrier()
    dist.destroy_process_group()


def peak_device_bytes() -> int:
    """Peak of the device memory that tensors took; 0 on a CPU."""
    return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0


def use_threads(threads: int) -> None:
    """Set the number of torch's threads; 0: one for every core. Call it in the thread that computes: OpenMP keeps the
    number per thread."""
    torch.set_num_threads(threads or usable_cores())


def return_freed_memory() -> None:
    """Let glibc, where it is the C library, give freed blocks back to the system at once. Idempotent.

    Without fixed limits, glibc raises the size from which on a block is mapped on its own to the largest block that was
    freed, up to 32 MiB. From then on activations of every size come from one heap, which does not shrink while a small
    block lies at its end: a step's peak and the next allocation add up. Measured with fixed limits on a 30 M-parameter
    model: 41 MiB less at 256 tokens a micro-batch, 75 MiB at 512, for 5 to 10 % more CPU time."""
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is not None:
        set_option(M_MMAP_THRESHOLD, MAPPED_BYTES)
        set_option(M_TRIM_THRESHOLD, HEAP_TAIL_BYTES)


def empty_cache(device: torch.device) -> None:
    """Give freed blocks of a GPU back to the driver: an engine on the same GPU asks the driver what is free."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def all_reduce(
    values: list[float], device: torch.device, operation: ReduceOp.RedOpType = ReduceOp.SUM, *, copies: int = 1
) -> list[float]:
    """Reduce float64 values over the ranks. ``copies``: number of ranks that have the same rows; they count once in a
    sum. Collective."""
    if get_world_size() == 1:
        return values
    tensor = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(tensor, op=operation)
    result: list[float] = (tensor / copies).tolist()
    return result


def all_gather_bytes(payload: bytes) -> list[bytes]:
    """Gather the payload of each rank, by rank. Collective."""
    if get_world_size() == 1:
        return [payload]
    device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")
    return gather_bytes(payload, device)


LOOPBACK = "127.0.0.1"
INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
"""Variables that name the interface where gloo and NCCL listen; a value that the user has set stays."""
ANY_PORT = 9
"""Port for ``interface_towards`` where the rendezvous has none: no packet is sent to it."""


def meet_at(rendezvous: str, rank: int, ranks: int, timeout: timedelta) -> Store:
    """Open the store at ``tcp://host:port``; rank 0 listens at this address only. Raises ``OSError`` and torch's
    errors."""
    address = urlsplit(rendezvous)
    if not address.hostname or not address.port:
        raise StreamRLError(f"the rendezvous {rendezvous!r} has no host or no port; write tcp://HOST:PORT")
    if rank:
        return TCPStore(address.hostname, address.port, ranks, is_master=False, timeout=timeout)
    family = AF_INET6 if ":" in address.hostname else AF_INET
    listener = socket.create_server((address.hostname, address.port), family=family, backlog=ranks + 16)
    return TCPStore(
        address.hostname, address.port, ranks, is_master=True, timeout=timeout, master_listen_fd=listener.detach()
    )


def stay_on_interface(rendezvous: str) -> None:
    """Let gloo and NCCL listen on the interface towards ``rendezvous``; on loopback for a file or no rendezvous. Only
    before gloo and NCCL start."""
    host = LOOPBACK
    port = ANY_PORT
    address = urlsplit(rendezvous)
    if address.scheme == "tcp":
        host = address.hostname or host
        port = address.port or port
    name = interface_towards(host, port)
    for variable in INTERFACES:
        if name:
            environ.setdefault(variable, name)


def interface_towards(host: str, port: int) -> str:
    """Return the name of the interface by which packets leave for ``host``; empty where there is no route. Nothing is
    sent."""
    family = AF_INET6 if ":" in host else AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, port))
        except OSError:
            return ""
        source_address = probe.getsockname()[0]
    # Looked up by address and not by route: the route to an address of this host is loopback, which other hosts do not
    # reach.
    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address.partition("%")[0] == source_address for address in addresses):
            return str(name)
    return ""
