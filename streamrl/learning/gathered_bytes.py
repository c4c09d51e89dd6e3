"""Bytes of all ranks of a process group, by rank.

Trainer ranks gather by it, and the workers of an engine (``weights.vllm``). Payloads travel as tensors: torch would
pickle objects."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


def gather_bytes(payload: bytes, device: torch.device, group: Any = None) -> list[bytes]:
    """Gather the payload of each rank of ``group`` (None: all ranks) through ``device``. Collective."""
    lengths = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(dist.get_world_size(group))]
    dist.all_gather(lengths, torch.tensor([len(payload)], dtype=torch.int64, device=device), group=group)
    longest = max(1, *(int(length) for length in lengths))
    padded = torch.frombuffer(bytearray(payload.ljust(longest, b"\0")), dtype=torch.uint8).to(device)
    payloads = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather(payloads, padded, group=group)
    return [tensor.cpu().numpy().tobytes()[: int(length)] for tensor, length in zip(payloads, lengths, strict=True)]
