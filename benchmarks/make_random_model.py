"""Make a Qwen2 of about 30 M random parameters with the demo's tokenizer: for throughput only, it knows nothing.

    python benchmarks/make_random_model.py --out random30m

Its output is near uniform over 32 tokens, so completions end after 32 tokens on average, the longest of 256 after
about 200: a geometric tail, without the demo's completions at the cap.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

DEMO_MODEL = Path(__file__).parents[1] / "examples" / "sort" / "model"


def make_random_model(folder: Path, *, seed: int = 0) -> int:
    """Write the model and the demo's tokenizer to ``folder``; returns the number of parameters."""
    torch.manual_seed(seed)
    config = Qwen2Config.from_pretrained(DEMO_MODEL)
    config.update(
        {
            "hidden_size": 512,
            "intermediate_size": 1920,
            "num_hidden_layers": 8,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "layer_types": ["full_attention"] * 8,
        }
    )
    model = Qwen2ForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(DEMO_MODEL / name, folder / name)
    return sum(parameter.numel() for parameter in model.parameters())


def main() -> None:
    """Make it."""
    arguments = argparse.ArgumentParser(description="Make a random model for throughput measurements.")
    arguments.add_argument("--out", type=Path, required=True)
    arguments.add_argument("--seed", type=int, default=0)
    options = arguments.parse_args()
    print(f"{options.out}: {make_random_model(options.out, seed=options.seed):,} parameters")


if __name__ == "__main__":
    main()
