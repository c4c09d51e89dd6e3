"""What a run writes into its journal: a real journal, read again."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from oracle.control_world import control_settings

from streamrl.base.types import Prompt, token_array
from streamrl.control.events import CheckpointDone, RunBegan
from streamrl.journal import run_journal
from streamrl.journal.journal_records import JournalCodec, JournalPrompts
from streamrl.journal.log import Journal, read_journal
from streamrl.journal.run_journal import RunJournal
from streamrl.policies.round_policies import make_control


@pytest.mark.asyncio
@pytest.mark.parametrize("again", [False, True])
async def test_prompts_of_any_size_are_kept_in_records_of_bounded_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, again: bool
) -> None:
    """As they are drawn, and where the journal begins anew. A prompt that alone is larger has a record of its own."""
    monkeypatch.setattr(run_journal, "_PROMPT_BYTES_IN_RECORD", 10_000)
    sizes = [1_000] * 300 + [50_000] + [10] * 300
    drawn = [
        Prompt(prompt_id=f"p{number}", token_ids=token_array([1]), columns={"tests": "x" * size})
        for number, size in enumerate(sizes)
    ]
    file = Journal(tmp_path / "journal", fsync=False)
    writing = asyncio.get_running_loop().create_task(file.run())
    shelf: list[Prompt] = []
    control = make_control(control_settings())
    journal = RunJournal(file, lambda: shelf)
    journal.told(RunBegan(), control, 0.0)
    control.handle(RunBegan())
    await journal.handled(RunBegan(), control)
    if again:
        shelf += drawn
        journal.told(CheckpointDone(policy_version=0), control, 1.0)
    else:
        journal.drawn(drawn)
    await file.close()
    writing.cancel()

    codec = JournalCodec()
    encoded = list(read_journal(tmp_path / "journal").records())
    kept = [(len(body), record) for body in encoded if isinstance(record := codec.decode(body), JournalPrompts)]
    assert [prompt.prompt_id for _, record in kept for prompt in record.prompts] == [p.prompt_id for p in drawn]
    assert all(size <= 10_000 or len(record.prompts) == 1 for size, record in kept)
    assert len(kept) < 100, "small prompts share records"
