"""A wire with faults between a host of a laboratory and its bridge, in user space: kernels may be without netem.

    wire.py PORT TAP      # in the network namespace of the bridge; the port is out of the bridge then, the TAP in it

Each line of stdin sets one direction: ``out cut 1``, ``in delay 0.1``, ``out loss 0.05``, ``in rate 20e6``,
``out largest 1400`` (``out``: what the host sends). Ends with its stdin."""

from __future__ import annotations

import fcntl
import heapq
import os
import random
import select
import socket
import struct
import sys
import time
from contextlib import suppress

TUNSETIFF, IFF_TAP, IFF_NO_PI, IFF_VNET_HDR = 0x400454CA, 2, 0x1000, 0x4000
SOL_PACKET, PACKET_VNET_HDR, PACKET_IGNORE_OUTGOING = 263, 15, 23
QUEUE_S = 0.5


class Direction:
    """What happens to frames of one direction. ``delay`` in seconds, ``loss`` of 1, ``rate`` in bit/s; ``largest``:
    bytes of the largest frame that arrives (0: any)."""

    def __init__(self) -> None:
        self.delay = self.loss = self.rate = self.cut = self.largest = self.free_at = 0.0

    def due(self, size: int, now: float) -> float | None:
        """When a frame of ``size`` bytes arrives; None: never."""
        if self.cut or random.random() < self.loss:
            return None
        if self.largest and size > self.largest:
            return None
        at = max(now, self.free_at)
        if at > now + QUEUE_S:
            return None
        if self.rate:
            self.free_at = at = at + 8 * size / self.rate
        return at + self.delay


def main(port: str, tap: str) -> None:
    """Carry frames until stdin ends."""
    host = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
    host.setsockopt(SOL_PACKET, PACKET_VNET_HDR, 1)  # frames larger than the MTU, without checksums yet
    host.setsockopt(SOL_PACKET, PACKET_IGNORE_OUTGOING, 1)
    host.bind((port, 0))
    host.setblocking(False)
    bridge = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(bridge, TUNSETIFF, struct.pack("16sH", tap.encode(), IFF_TAP | IFF_NO_PI | IFF_VNET_HDR))
    directions = {"out": Direction(), "in": Direction()}
    ways = {host.fileno(): ("out", bridge), bridge: ("in", host.fileno())}
    poller = select.epoll()
    for number in (*ways, 0):
        poller.register(number, select.EPOLLIN)
    waiting: list[tuple[float, int, int, bytes]] = []
    print("ready", flush=True)
    count, text = 0, b""
    while True:
        left = waiting[0][0] - time.monotonic() if waiting else -1.0
        for number, _ in poller.poll(max(left, 0.0) if waiting else None):
            if number == 0:
                if not (more := os.read(0, 4096)):
                    return
                *lines, text = (text + more).split(b"\n")
                for line in lines:
                    way, what, value = line.decode().split()
                    setattr(directions[way], what, float(value))
                print("done", flush=True)
                continue
            way, target = ways[number]
            with suppress(BlockingIOError):
                for _ in range(64):
                    frame = os.read(number, 70_000)
                    if (at := directions[way].due(len(frame), time.monotonic())) is not None:
                        count += 1
                        heapq.heappush(waiting, (at, count, target, frame))
        while waiting and waiting[0][0] <= time.monotonic():
            _, _, target, frame = heapq.heappop(waiting)
            with suppress(OSError):
                os.write(target, frame)


if __name__ == "__main__":
    main(*sys.argv[1:])
