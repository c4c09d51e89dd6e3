"""Code execution as a reward, in a sandbox of namespaces, seccomp, Landlock and limits (docs/rewards_code.md)."""

from streamrl.rewards.code.answers import SandboxError
from streamrl.rewards.code.layers import LayersFound, available_layers
from streamrl.rewards.code.reward import CaseEnd, CaseOutcome, CodeOptions, CodeOutcome, CodeReward, code_reward
from streamrl.rewards.code.sandbox import Sandbox

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
