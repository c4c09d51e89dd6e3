"""The process group of one trainer's ranks: ``torch.distributed``, also with one rank.

Ranks meet over TCP on one named interface, because neither torch's store nor gloo nor NCCL authenticates a peer. By
itself torch's store listens on every interface whatever address it is given, and gloo on the one that the host's name
resolves to."""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
from collections.abc import Iterator
from datetime import timedelta
from urllib.parse import urlsplit

import psutil
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, Store, TCPStore

from streamrl.base.errors import StreamBroken, StreamRLError
from streamrl.base.run_process import usable_cores
from streamrl.learning.options import TrainerOptions

LEAVE_TIMEOUT = timedelta(seconds=10)
TORCHRUN = "env://"
"""Rendezvous of ranks that torchrun started: torch reads MASTER_ADDR and MASTER_PORT."""
PEER_IS_GONE = ("closed by peer", "reset by peer", "Broken pipe", "Timed out", "timeout")
"""How gloo, whose errors have no class of their own, says that another rank died or hangs."""

MAPPED_BYTES = 256 << 10
"""Blocks from this size on are mapped on their own. Smaller ones, of small models, stay in the heap: mapping costs."""
KEPT_BYTES = 8 << 20
"""So much free memory stays at the end of the heap."""
# malloc.h
M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3


def choose_device(options: TrainerOptions) -> torch.device:
    """The device of this rank; ``auto`` is CUDA if available. A rank of a run sees its own GPU only.
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
            f"{options.ranks} trainer ranks have no rendezvous: give one, tcp://host:port or file:///path, "
            "or start them with torchrun"
        )
    backend = "nccl" if device.type == "cuda" else "gloo"
    timeout = timedelta(seconds=options.collective_timeout_s)
    if options.rendezvous != TORCHRUN:
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
    gloo notices a dead process at once; one that hangs, and anything under NCCL, after ``collective_timeout_s``."""
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, dist.DistError) and not any(text in str(error) for text in PEER_IS_GONE):
            raise
        rank = dist.get_rank()
        ranks = dist.get_world_size()
        others = f"rank {1 - rank}" if ranks == 2 else f"one of the other {ranks - 1} ranks"
        raise StreamBroken(
            f"trainer rank {rank} of {ranks} was {doing} when {others} ended or stopped to answer; the log of that "
            f"rank says why ({error})"
        ) from error


def leave() -> None:
    """Wait for the other ranks, for a while, and leave. Call it after the model and the optimizer are gone. Leaving
    without the barrier aborted a rank in 2 of 5 runs. When a peer is dead there is nobody to wait for."""
    if not dist.is_initialized():
        return
    with contextlib.suppress(RuntimeError):
        if dist.get_backend() == "gloo":
            dist.monitored_barrier(timeout=LEAVE_TIMEOUT)
        else:
            dist.barrier()
    dist.destroy_process_group()


def peak_device_bytes() -> int:
    """Most bytes that tensors took of the device at once; 0 on a CPU."""
    return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0


def use_threads(threads: int) -> None:
    """Torch's threads for this process; 0: every core. In the thread that computes: OpenMP keeps it per thread."""
    torch.set_num_threads(threads or usable_cores())


def return_freed_memory() -> None:
    """Let glibc, where this is the C library, give freed blocks back to the system at once. Idempotent.

    By itself glibc moves the limit above which a block is mapped on its own up to the largest block that was freed, to
    32 MiB. From then on activations of every size come from one heap, which does not shrink while something small lies
    at its end: a step's peak and the next allocation add up. Measured with fixed limits on a 30 M-parameter model:
    41 MiB less at 256 tokens a micro-batch, 75 MiB at 512, for 5 to 10 % more CPU time."""
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is not None:
        set_option(M_MMAP_THRESHOLD, MAPPED_BYTES)
        set_option(M_TRIM_THRESHOLD, KEPT_BYTES)


def all_reduce(
    values: list[float],
    device: torch.device,
    operation: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
    *,
    copies: int = 1,
) -> list[float]:
    """Reduce float64 values over the ranks. ``copies``: so many ranks have the same rows, and count once in a sum."""
    if dist.get_world_size() == 1:
        return values
    tensor = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(tensor, op=operation)
    result: list[float] = (tensor / copies).tolist()
    return result


def all_gather_bytes(mine: bytes) -> list[bytes]:
    """Gather the bytes of each rank, by rank. Tensors travel, never objects: torch would pickle those."""
    if dist.get_world_size() == 1:
        return [mine]
    device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")
    lengths = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(dist.get_world_size())]
    dist.all_gather(lengths, torch.tensor([len(mine)], dtype=torch.int64, device=device))
    longest = max(1, *(int(length) for length in lengths))
    own = torch.frombuffer(bytearray(mine.ljust(longest, b"\0")), dtype=torch.uint8).to(device)
    gathered = [torch.empty_like(own) for _ in lengths]
    dist.all_gather(gathered, own)
    return [part.cpu().numpy().tobytes()[: int(length)] for part, length in zip(gathered, lengths, strict=True)]


LOOPBACK = "127.0.0.1"
INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
"""Variables that say where gloo and NCCL listen; a value that the user has set stays."""


def meet_at(rendezvous: str, rank: int, ranks: int, timeout: timedelta) -> Store:
    """The store at ``tcp://host:port``; rank 0 listens at that address only. Raises ``OSError`` and torch's errors."""
    place = urlsplit(rendezvous)
    if not place.hostname or not place.port:
        raise StreamRLError(f"the rendezvous {rendezvous!r} has no host or no port; write tcp://HOST:PORT")
    if rank:
        return TCPStore(place.hostname, place.port, ranks, is_master=False, timeout=timeout)
    family = socket.AF_INET6 if ":" in place.hostname else socket.AF_INET
    listener = socket.create_server((place.hostname, place.port), family=family, backlog=ranks + 16)
    return TCPStore(
        place.hostname, place.port, ranks, is_master=True, timeout=timeout, master_listen_fd=listener.detach()
    )


def stay_on_interface(rendezvous: str) -> None:
    """Let gloo and NCCL listen where ``rendezvous`` is reached, on loopback for a file or none. Before they start."""
    place = urlsplit(rendezvous)
    host, port = (place.hostname or LOOPBACK, place.port or 9) if place.scheme == "tcp" else (LOOPBACK, 9)
    name = interface_towards(host, port)
    for variable in INTERFACES:
        if name:
            os.environ.setdefault(variable, name)


def interface_towards(host: str, port: int) -> str:
    """Name of the interface by which packets leave for ``host``; empty where it cannot be known. Nothing is sent."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, port))
        except OSError:
            return ""
        own = probe.getsockname()[0]
    # A packet to an address of this host goes through loopback, which no other host reaches: whose address is it?
    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address.partition("%")[0] == own for address in addresses):
            return str(name)
    return ""
