"""A process that writes a journal until it is killed or the disk fails: ``writer_process.py DIRECTORY SEED [RECORDS]``.

On its output: ``opened EPOCH LAST`` once what was recovered is as it was written, then the sequence number of each
record that is durable, at last ``failed MESSAGE`` or ``done``.
"""

from __future__ import annotations

import asyncio
import os
import random
import sys
from collections.abc import Iterable
from pathlib import Path

from streamrl.journal.journal import Journal, JournalFailed, Record, Recovered, open_journal

RUN = "killed-run"


def payload_of(sequence: int) -> bytes:
    """What record ``sequence`` holds, in every process."""
    return random.Random(sequence).randbytes(sequence * 7919 % 3001)


def say(line: str) -> None:
    os.write(1, line.encode() + b"\n")


def check(records: Iterable[Record], last: int) -> None:
    """Every record from the base on is there and as it was written."""
    due = 1
    for record in records:
        if record.base:
            assert record.payload == b"state after %d" % record.sequence
            due = record.sequence + 1
        else:
            assert (record.sequence, record.payload) == (due, payload_of(due)), f"record {due} is wrong"
            due += 1
    assert due == last + 1, f"records end at {due - 1}, the journal says {last}"


async def write(journal: Journal, recovered: Recovered, rng: random.Random, records: int) -> None:
    sequence = recovered.last_sequence
    segment = 0
    while sequence < records:
        await journal.room()
        for _ in range(rng.randrange(1, 8)):
            sequence += 1
            journal.append(sequence % 256, payload_of(sequence))
        if rng.random() < 0.2:
            segment = journal.begin_segment([(0, b"state after %d" % sequence)])
        elif segment and rng.random() < 0.2:
            await journal.forget_before(segment)
            segment = 0
        await journal.durable(sequence)
        say(str(sequence))
    await journal.close()


def main() -> None:
    directory, rng = Path(sys.argv[1]), random.Random(int(sys.argv[2]))
    records = int(sys.argv[3]) if len(sys.argv) > 3 else 10**9
    try:
        journal, recovered = open_journal(directory, run_id=RUN, interval_s=rng.choice([0, 0.001]))
        check(recovered.records(), recovered.last_sequence)
        say(f"opened {recovered.epoch} {recovered.last_sequence}")
        asyncio.run(write(journal, recovered, rng, records))
    except JournalFailed as failure:
        say(f"failed {failure}")
        sys.exit(3)
    say("done")


if __name__ == "__main__":
    main()
