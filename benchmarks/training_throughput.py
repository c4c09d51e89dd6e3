"""Trained tokens a second of one training step: streamrl, a loop of length-sorted padded micro-batches, and TRL.

    python benchmarks/make_random_model.py --out random30m
    python benchmarks/training_throughput.py --model examples/sort/model --batch-model examples/sort/model \
        --peer-scripts FOLDER --trl-python trl/bin/python --rounds 5
    python benchmarks/training_throughput.py --model random30m --batch-model examples/sort/model ...

One batch of ``--prompts`` x 8 completions is sampled from ``--batch-model`` with the plain sampler of FOLDER
(``common.py``, ``tasks.py``); rewards are drawn so that every group has a signal. Every competitor is a process of
its own with the same threads; steps are taken in turn, so that all see the same machine. A step: gradient of the
batch, clipping, AdamW (and for streamrl the publishing). TRL's own code path runs with its generation replaced by the
batch; the time of the replacement is subtracted. CPU seconds are what to read on a shared machine; memory is the peak
resident size.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

GROUP, MAX_TOKENS, EOS = 8, 448, 2
LEARNING_RATE, CLIP = 1e-6, 0.2

Batch = list[dict[str, Any]]


def sample_batch(model: Path, peer_scripts: Path, groups: int) -> Batch:
    """Prompts, completions, logprobs and rewards of ``groups`` groups."""
    import torch
    from transformers import AutoModelForCausalLM

    sys.path.insert(0, str(peer_scripts))
    from common import BOS, Sampler, enc  # type: ignore[import-not-found]
    from tasks import TASKS  # type: ignore[import-not-found]

    rng, task = random.Random(7), TASKS["sort"]()
    texts = [task.prompt(rng) for _ in range(groups)]
    prompts = [[BOS, *enc(text)] for text in texts for _ in range(GROUP)]
    sampler = Sampler(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32))
    tokens, logprobs, lengths, _, _ = sampler.generate(prompts, MAX_TOKENS, 1.0, torch.Generator().manual_seed(0))
    return [
        {
            "text": texts[index // GROUP],
            "prompt": prompt,
            "completion": tokens[index, : lengths[index]].tolist(),
            "logprobs": logprobs[index, : lengths[index]].tolist(),
            "reward": float(index % GROUP < 1 + (index // GROUP) % (GROUP - 1)),
        }
        for index, prompt in enumerate(prompts)
    ]


def trained_tokens(batch: Batch) -> int:
    """Completion tokens."""
    return sum(len(sample["completion"]) for sample in batch)


class Turns:
    """A worker's side of the rounds: a step for each line on stdin, its seconds on stdout."""

    def __init__(self) -> None:
        self.out = sys.stdout
        sys.stdout = sys.stderr

    def wait(self) -> bool:
        """Whether another step is wanted. Starts the clocks."""
        go = bool(sys.stdin.readline())
        self.wall, self.cpu, self.away = time.perf_counter(), time.process_time(), (0.0, 0.0)
        return go

    def done(self) -> None:
        """Tell what the step took."""
        # Not ru_maxrss: that begins with what the parent held when it started this process.
        status = Path("/proc/self/status").read_text()
        peak = 1024 * next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))
        wall = time.perf_counter() - self.wall - self.away[0]
        cpu = time.process_time() - self.cpu - self.away[1]
        print(json.dumps({"wall_s": wall, "cpu_s": cpu, "peak": peak}), file=self.out, flush=True)


def streamrl_steps(options: argparse.Namespace, batch: Batch) -> None:
    """``TorchTrainer``, streaming off."""
    from streamrl.base.messages import CloseBatch
    from streamrl.base.types import TrainingGroup, TrainingSample, TrajectoryId, float_array, token_array
    from streamrl.learning.options import TrainerOptions
    from streamrl.learning.trainer import TorchTrainer
    from streamrl.weights.publish.torch_tensors import start_publisher

    def sample(index: int, version: int) -> TrainingSample:
        row, group = batch[index], index // GROUP
        before = len(row["prompt"])
        return TrainingSample(
            id=TrajectoryId(prompt_id=f"p{group}", group_id=group, sample=index % GROUP),
            token_ids=token_array(row["prompt"] + row["completion"]),
            loss_mask=b"\0" * before + b"\1" * len(row["completion"]),
            behavior_logprobs=float_array([0.0] * before + row["logprobs"]),
            reward=row["reward"],
            oldest_version=version,
            newest_version=version,
        )

    with tempfile.TemporaryDirectory() as folder:
        trainer = TorchTrainer(
            TrainerOptions(
                model_path=options.model,
                run_id="throughput",
                weights_endpoint=f"ipc://{folder}/weights",
                threads=options.threads,
                learning_rate=LEARNING_RATE,
                micro_batch_tokens=options.setting,
                streaming=False,
                activation_checkpointing="checkpointing" in options.variant,
                compile="compile" in options.variant,
            ),
            start_publisher,
        )
        trainer.start()
        turns, version = Turns(), 0
        while turns.wait():
            for group in range(len(batch) // GROUP):
                members = tuple(sample(group * GROUP + index, version) for index in range(GROUP))
                trainer.train_group(TrainingGroup(group_id=group, batch_id=version, samples=members))
            close = CloseBatch(
                batch_id=version,
                policy_version=version + 1,
                groups=len(batch) // GROUP,
                samples=len(batch),
                trained_tokens=trained_tokens(batch),
            )
            trainer.close_batch(close)
            version += 1
            trainer.acknowledge(version)
            turns.done()
        trainer.close()


def padded_steps(options: argparse.Namespace, batch: Batch) -> None:
    """The plain loop's training step: sorted by length, padded to at most ``setting`` tokens a micro-batch."""
    import torch
    from torch.nn.functional import linear
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(options.threads)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0)
    rewards = torch.tensor([sample["reward"] for sample in batch]).view(-1, GROUP)
    advantages = ((rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)).flatten().tolist()
    order = sorted(range(len(batch)), key=lambda index: len(batch[index]["completion"]))
    total, turns = trained_tokens(batch), Turns()

    def backward(chosen: list[int]) -> None:
        rows = [batch[index]["prompt"] + batch[index]["completion"] for index in chosen]
        shape = len(chosen), max(map(len, rows))
        tokens, mask = torch.zeros(shape, dtype=torch.long), torch.zeros(shape, dtype=torch.bool)
        old, advantage = torch.zeros(shape), torch.zeros(shape)
        for place, (index, row) in enumerate(zip(chosen, rows, strict=True)):
            own = slice(len(batch[index]["prompt"]), len(row))
            tokens[place, : len(row)] = torch.tensor(row)
            mask[place, own] = True
            old[place, own] = torch.tensor(batch[index]["logprobs"])
            advantage[place, own] = advantages[index]
        trained = mask[:, 1:]
        hidden = model.model(tokens).last_hidden_state[:, :-1][trained]
        logits = linear(hidden, model.get_output_embeddings().weight)
        logprobs = torch.log_softmax(logits, -1).gather(1, tokens[:, 1:][trained][:, None])[:, 0]
        ratio, signal = (logprobs - old[:, 1:][trained]).exp(), advantage[:, 1:][trained]
        loss = -torch.min(ratio * signal, ratio.clamp(1 - CLIP, 1 + CLIP) * signal).sum() / total
        torch.autograd.backward(loss)

    while turns.wait():
        optimizer.zero_grad()
        start = 0
        while start < len(order):
            stop = start + 1
            while (
                stop < len(order)
                and (stop + 1 - start) * (len(batch[order[stop]]["completion"]) + 24) <= options.setting
            ):
                stop += 1
            backward(order[start:stop])
            start = stop
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        turns.done()


def trl_steps(options: argparse.Namespace, batch: Batch) -> None:
    """GRPOTrainer; ``setting``: completions in a micro-batch."""
    import torch
    from datasets import Dataset  # type: ignore[import-not-found]
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer  # type: ignore[import-not-found]

    torch.set_num_threads(options.threads)
    by_prompt: dict[tuple[int, ...], Batch] = {}
    for sample in batch:
        by_prompt.setdefault(tuple(sample["prompt"]), []).append(sample)
    turns = Turns()
    drawn: Batch = []

    def canned(prompt_ids: list[list[int]], *_: Any, **__: Any) -> tuple[list[list[int]], None]:
        wall, cpu = time.perf_counter(), time.process_time()
        left = {key: list(samples) for key, samples in by_prompt.items()}
        drawn[:] = [left[tuple(ids)].pop() for ids in prompt_ids]
        turns.away = time.perf_counter() - wall, time.process_time() - cpu
        return [sample["completion"] for sample in drawn], None

    class Rounds(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            pass

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            turns.done()
            control.should_training_stop = not turns.wait()

    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder, use_cpu=True, bf16=False, learning_rate=LEARNING_RATE, lr_scheduler_type="constant",
            adam_beta2=0.95, max_grad_norm=1.0, per_device_train_batch_size=options.setting,
            gradient_accumulation_steps=len(batch) // options.setting,
            steps_per_generation=len(batch) // options.setting, num_generations=GROUP,
            max_completion_length=MAX_TOKENS, temperature=1.0, beta=0.0, loss_type="dapo", max_steps=100000,
            save_strategy="no", report_to="none", gradient_checkpointing=False, shuffle_dataset=False,
            disable_tqdm=True,
        )  # fmt: skip
        # The tokenizer of the demo adds <bos> by itself.
        rows = [{"prompt": batch[index]["text"]} for index in range(0, len(batch), GROUP)] * 50
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32),
            args=config,
            train_dataset=Dataset.from_list(rows),
            reward_funcs=lambda prompts, completions, **_: [sample["reward"] for sample in drawn],
            processing_class=AutoTokenizer.from_pretrained(options.model, padding_side="left"),
        )
        trainer._generate_single_turn = canned
        trainer.add_callback(Rounds())
        if turns.wait():
            trainer.train()


COMPETITORS = {"streamrl": streamrl_steps, "padded": padded_steps, "trl": trl_steps}


class Competitor:
    """A worker process and the steps that it took."""

    def __init__(self, name: str, setting: int, options: argparse.Namespace, batch: Path) -> None:
        self.label, self.steps = f"{name} {setting}", []
        python = options.trl_python if name == "trl" else sys.executable
        command = [str(python), __file__, "--worker", name, "--setting", str(setting), "--batch", str(batch)]
        command += ["--model", str(options.model), "--threads", str(options.threads), "--variant", options.variant]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    steps: list[dict[str, float]]

    def step(self) -> None:
        """One step; waits for it."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write("step\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.label} ended with exit code {self.process.wait()}")
        self.steps.append(json.loads(line))

    def close(self) -> None:
        """No more steps."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(60)

    def report(self, tokens: int) -> str:
        """Tokens a second over the steps but the first, which warms up."""
        rates = sorted(tokens / step["cpu_s"] for step in self.steps[1:])
        walls = median(tokens / step["wall_s"] for step in self.steps[1:])
        peak = max(step["peak"] for step in self.steps) / 2**20
        return (
            f"{self.label:16} {median(rates):8.0f} trained tokens/CPU second ({rates[0]:.0f} to {rates[-1]:.0f}), "
            f"{walls:8.0f} /second, peak {peak:.0f} MiB"
        )


def compare(options: argparse.Namespace) -> None:
    """All competitors, step by step in turn."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "batch.json"
        if options.batch is None:
            path.write_text(json.dumps(sample_batch(options.batch_model, options.peer_scripts, options.prompts)))
        else:
            shutil.copy(options.batch, path)
        batch: Batch = json.loads(path.read_text())
        print(f"{len(batch)} samples, {trained_tokens(batch)} trained tokens, model {options.model}", flush=True)
        settings = {"streamrl": options.budgets, "padded": options.padded_budgets, "trl": options.trl_micro_batches}
        chosen = [(name, int(v)) for name, listed in settings.items() for v in listed.split(",") if v]
        competitors = [Competitor(name, setting, options, path) for name, setting in chosen]
        try:
            for _ in range(options.rounds + 1):
                for competitor in competitors:
                    competitor.step()
            for competitor in competitors:
                print(competitor.report(trained_tokens(batch)), flush=True)
        finally:
            for competitor in competitors:
                competitor.close()


def main() -> None:
    """Compare, or be a worker."""
    parser = argparse.ArgumentParser(description="Compare training steps.")
    parser.add_argument("--model", required=True)
    parser.add_argument("--batch-model", type=Path)
    parser.add_argument("--batch", type=Path, help="a batch that was written before, instead of sampling one")
    parser.add_argument("--peer-scripts", type=Path)
    parser.add_argument("--trl-python", type=Path)
    parser.add_argument("--prompts", type=int, default=32, help="groups of the batch")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--budgets", default="1024,2048", help="streamrl's micro_batch_tokens")
    parser.add_argument("--padded-budgets", default="512,1024,2048,4096,8192")
    parser.add_argument("--trl-micro-batches", default="16,64")
    parser.add_argument("--variant", default="", help="compile, checkpointing or both, of streamrl")
    parser.add_argument("--worker", choices=COMPETITORS)
    parser.add_argument("--setting", type=int)
    options = parser.parse_args()
    if options.worker:
        COMPETITORS[options.worker](options, json.loads(options.batch.read_text()))
    else:
        compare(options)


if __name__ == "__main__":
    main()
