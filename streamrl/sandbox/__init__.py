"""Code execution as a reward, in a sandbox of namespaces, seccomp, Landlock and limits (docs/rewards_code.md)."""

from streamrl.sandbox.answers import SandboxError
from streamrl.sandbox.layers import LayersFound, available_layers
from streamrl.sandbox.reward import CaseEnd, CaseOutcome, CodeOptions, CodeOutcome, CodeReward, code_reward
from streamrl.sandbox.sandbox import Sandbox

__all__ = [
    "CaseEnd",
    "CaseOutcome",
    "CodeOptions",
    "CodeOutcome",
    "CodeReward",
    "LayersFound",
    "Sandbox",
    "SandboxError",
    "available_layers",
    "code_reward",
]
