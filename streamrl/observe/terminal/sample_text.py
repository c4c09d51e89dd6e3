"""Completions for people: one line on the terminal of a run, and a block for ``streamrl samples``. Pure."""

from __future__ import annotations

from streamrl.base.run_events import CompletionSampled
from streamrl.observe.terminal.printable import one_line

LINE_TEXT = 160
"""Characters of the prompt and of the completion on a line."""


def _figures(sample: CompletionSampled) -> str:
    """``reward 0.730 (exact 1.000, length -0.270), 22 tokens, stop``."""
    several = len(sample.rewards) > 1
    each = f" ({', '.join(f'{name} {value:.3f}' for name, value in sample.rewards.items())})" if several else ""
    return f"reward {sample.reward:.3f}{each}, {sample.tokens} tokens, {sample.finish_reason}"


def sample_line(sample: CompletionSampled) -> str:
    """All of it on one line, with long texts shortened."""
    short = sample.shortened(LINE_TEXT)
    return f'sample at step {sample.step}: {_figures(sample)}: "{one_line(short.prompt)}" -> "{one_line(short.text)}"'


def sample_block(title: str, sample: CompletionSampled) -> list[str]:
    """Title, figures and whole texts, whose further lines are indented: none looks like a line of another sample."""
    prompt, text = (text.replace("\n", f"\n{'':<10}") for text in (sample.prompt, sample.text))
    return [f"{title}: {_figures(sample)}" if title else _figures(sample), f"  prompt  {prompt}", f"  text    {text}"]
