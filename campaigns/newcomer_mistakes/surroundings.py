"""Trackers, ports, addresses, directories and checkpoints."""

from __future__ import annotations

from campaigns.newcomer_mistakes.mistake import Mistake, recipe

TCP = '[transport]\nkind = "tcp"\n'

MISTAKES: dict[str, Mistake] = {
    "an unknown tracker": recipe("", '[metrics]\nreport_to = ["wandbb"]\n', "metrics.report_to:", '"wandbb"', "wandb"),
    "trackers as a text": recipe(
        "", '[metrics]\nreport_to = "wandb"\n', "recipe.toml:30: metrics.report_to:", '"wandb"', "a list of strings"
    ),
    "a tag that is too long for wandb": recipe(
        "steps = 2", f'steps = 2\ntags = ["{"x" * 65}"]\n[metrics]\nreport_to = ["wandb"]',
        "metrics.report_to:", "xxx", "64",
    ),
    "an endpoint without a port": recipe(
        "", '[metrics]\nendpoint = "tcp://127.0.0.1"\n', "recipe.toml:30: metrics.endpoint:", "write", ":5690"
    ),
    "an endpoint of http": recipe(
        "", '[metrics]\nendpoint = "http://127.0.0.1:8000"\n', "recipe.toml:30: metrics.endpoint:", "http:", "tcp://"
    ),
    "a port above 65535": recipe("", f"{TCP}port = 70000\n", "recipe.toml:31: transport.port: 70000", "<= 65000"),
    "a port of the system": recipe("", f"{TCP}port = 80\n", "recipe.toml:31: transport.port: 80", ">= 1024"),
    "every interface": recipe(
        "", f'{TCP}host = "0.0.0.0"\n', 'recipe.toml:31: transport.host: "0.0.0.0"', "name the address"
    ),
    "another host without keys": recipe(
        "", f'{TCP}host = "10.0.0.7"\n', 'recipe.toml:31: transport.host: "10.0.0.7"', "streamrl keys DIRECTORY"
    ),
    "keys that are not there": recipe(
        "", f'{TCP}keys = "keys"\n', "transport.keys: there is no directory", "keys", "make it with `streamrl keys"
    ),
    "a checkpoint that is not there": recipe(
        "", '[checkpoint]\nresume_from = "runs/a/checkpoints/step-2"\n', "checkpoint.resume_from:",
        "step-2", "give a step"
    ),
    "a model for a checkpoint": recipe(
        "", '[checkpoint]\nresume_from = "model"\n', "checkpoint.resume_from:", "model", "give a step directory"
    ),
    "a bucket without a scheme": recipe(
        "", '[checkpoint.advanced]\ncopy_to = "bucket/runs"\n', "checkpoint.advanced.copy_to:", "bucket/runs", "s3://"
    ),
    "a directory that is a file": recipe(
        "steps = 2", 'steps = 2\ndirectory = "train.jsonl"', "run.directory:", "train.jsonl", "set another directory"
    ),
    "a cluster without a port": recipe(
        "", '[cluster]\nkind = "ray"\naddress = "10.0.0.1"\n', 'cluster.address = "10.0.0.1"', "write HOST:PORT"
    ),
    "a cluster that is none": recipe("", '[cluster]\nkind = "slurm"\n', "recipe.toml:30:", '"slurm"', '"local", "ray"'),
}  # fmt: skip
