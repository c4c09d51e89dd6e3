"""Compare the distillation losses of streamrl with the functions of TRL 1.16 and verl 0.9.1, in float64.

    pip download --no-deps --dest /tmp/peers trl==1.16.0 verl==0.9.1 && cd /tmp/peers && unzip -qo '*.whl' -d src
    python benchmarks/distillation_peers.py /tmp/peers/src

Only the functions are taken from the files, so nothing of the two has to be installed. Prints the relative difference
of losses and of gradients by the logits, for each case; exits 1 above 1e-12."""

from __future__ import annotations

import ast
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.nn import functional

from streamrl.learning.objective.divergence import divergence
from streamrl.learning.objective.logprobs import token_logprobs
from streamrl.learning.objective.objectives import TokenInputs, token_loss
from streamrl.recipe.objective import Objective, OffPolicy, Proximal, RatioLevel, objective_settings

TOLERANCE = 1e-12
TOKENS = 40
VOCABULARY = 300


def functions_of(file: Path, names: set[str], known: Mapping[str, Any]) -> dict[str, Any]:
    """Functions of a source file by name, without their decorators and annotations."""
    namespace = dict(known)
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.FunctionDef) and node.name in names:
            node.decorator_list = []
            node.returns = None
            for argument in (*node.args.args, *node.args.kwonlyargs):
                argument.annotation = None
            exec(compile(ast.Module([node], []), str(file), "exec"), namespace)
    return namespace


def difference(ours: torch.Tensor, theirs: torch.Tensor, logits: torch.Tensor) -> float:
    """Larger of the relative differences of two losses and of their gradients by ``logits``."""
    gradients = [torch.autograd.grad(loss, logits)[0] for loss in (ours, theirs)]
    pairs = [(ours.detach(), theirs.detach()), (gradients[0], gradients[1])]
    return max(float((one - other).norm() / other.norm()) for one, other in pairs)


def main() -> int:
    """Print a line a case; 1 where one differs."""
    source = Path(sys.argv[1])
    trl = functions_of(
        source / "trl/experimental/gkd/gkd_trainer.py", {"generalized_jsd_loss"}, {"torch": torch, "F": functional}
    )["generalized_jsd_loss"]
    masked = functions_of(source / "verl/utils/torch_functional.py", {"masked_sum", "masked_mean"}, {"torch": torch})
    verl = functions_of(
        source / "verl/trainer/ppo/core_algos.py",
        {"agg_loss", "compute_policy_loss_vanilla", "kl_penalty_forward"},
        {"torch": torch, "verl_F": SimpleNamespace(**masked), "AlgoConfig": type(None)},
    )
    torch.manual_seed(0)
    logits = (3 * torch.randn(TOKENS, VOCABULARY, dtype=torch.float64)).requires_grad_()
    teacher = 3 * torch.randn(TOKENS, VOCABULARY, dtype=torch.float64)
    targets = torch.multinomial(logits.detach().softmax(-1), 1)[:, 0]
    found = {}
    for beta in (0.0, 0.1, 0.5, 0.9, 1.0):
        theirs = trl(logits, teacher, beta=beta, reduction="sum") / TOKENS
        found[f"TRL generalized_jsd_loss, beta {beta}"] = difference(
            divergence(logits, teacher, beta).mean(), theirs, logits
        )
    of_peers = logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]
    teacher_logprobs = token_logprobs(teacher, targets)[0].detach()
    behavior = of_peers.detach() + 0.2 * torch.randn(TOKENS, dtype=torch.float64)
    config = SimpleNamespace(clip_ratio=0.2, clip_ratio_low=0.2, clip_ratio_high=0.2, global_batch_info={})
    config.get = lambda name, default: default
    for staleness in (0, 1):
        # verl's k1 as the advantage of each token (use_policy_gradient), with the same "old" policy as here: on policy
        # the trainer's own, otherwise the one that sampled.
        logprobs, entropy = token_logprobs(logits, targets)
        of_peers = logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]
        old = behavior if staleness else of_peers.detach()
        advantages = -verl["kl_penalty_forward"](logprob=old, ref_logprob=teacher_logprobs, kl_penalty="k1")
        theirs, _ = verl["compute_policy_loss_vanilla"](
            old_log_prob=old[None],
            log_prob=of_peers[None],
            advantages=advantages[None],
            response_mask=torch.ones(1, TOKENS, dtype=torch.float64),
            config=config,
        )
        settings = objective_settings(Objective(algorithm="distillation", surrogate="token_clip", dual_clip=3.0))
        count = torch.zeros(TOKENS, dtype=torch.int64)
        nothing = torch.zeros(TOKENS, dtype=torch.float64)
        inputs = TokenInputs(old, nothing, nothing + 1, count + staleness, count, 1, teacher_N=teacher_logprobs)
        off_policy = OffPolicy(proximal=Proximal.BEHAVIOR, truncate=RatioLevel.NONE)
        ours = token_loss(settings, off_policy, logprobs, entropy, inputs).loss_N.mean()
        found[f"verl k1 policy gradient, staleness {staleness}"] = difference(ours, theirs, logits)
    for name, value in found.items():
        print(f"{value:.1e}  {name}")
    return int(max(found.values()) > TOLERANCE)


if __name__ == "__main__":
    sys.exit(main())
