"""A reward worker as a process: ``python worker_process.py RECIPE.json ORDERS RESULTS``."""

import sys
from pathlib import Path

import anyio
import msgspec

from streamrl.comm.zmq_stream import zmq_receiver, zmq_sender
from streamrl.pretrained.tokenizer import load_tokenizer
from streamrl.recipe.sections import Recipe
from streamrl.rewards.calls.worker import run_reward_worker
from streamrl.rewards.reward_messages import RewardOrder, RewardResult


async def main(recipe: Recipe, orders_at: str, results_at: str) -> None:
    async with (
        zmq_sender(RewardResult, results_at, bind=False, name="results") as results,
        zmq_receiver(RewardOrder, orders_at, bind=False, name="orders") as orders,
    ):
        await run_reward_worker(recipe, load_tokenizer(recipe.model.path), 3, orders, results)


if __name__ == "__main__":
    given = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=Recipe)
    anyio.run(main, given, *sys.argv[2:], backend_options={"use_uvloop": True})
