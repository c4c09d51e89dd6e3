"""The page of runs with 500,000 trajectories in headless Chromium: seconds until its timeline is painted (the issue
allows 1.5), and frames of pan and zoom (34 ms for 95 of 100), on a machine that does nothing else."""

import random
import subprocess
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright

from streamrl.observe.report.trajectory_trace import StepLine, TraceHeader, TrajectoryLine, TrajectoryTrace

FRAMES = """async share => {  // 0: zoom
  const [one] = timelines, span = one.columns.end * (share || 1), left = one.columns.end - span, times = [];
  for (let at = 0; at < 1; at += 1 / 120) {
    if (share || !at) one.look(at * left, at * left + span); else one.zoom(at < 0.5 ? 0.93 : 1 / 0.93, 0.4);
    times.push(await new Promise(requestAnimationFrame));
  }
  return times.slice(1).map((time, place) => time - times[place]).sort((a, b) => a - b); }"""


def write_run(directory: Path, steps: int, rounds: str = "synchronous") -> None:
    """Write the trace of ``steps`` steps of 32 groups of 8 on eight engines."""
    chance, begin = random.Random(0), 0.0
    trace = TrajectoryTrace(directory / "trace.jsonl", TraceHeader(
        schema=1, run_id="big", seed=0, max_tokens=2048, max_model_len=4096, temperature=1.0, rounds=rounds,
        prompts_per_batch=32, group_size=8, max_staleness=0, engines=8, capacity=1024,
    ))  # fmt: skip
    for step in range(1, steps + 1):
        tokens = [min(int(chance.lognormvariate(5.0, 0.8)), 2048) for _ in range(256)]
        took = max(tokens) * 0.01
        trace.append(*(TrajectoryLine(
            prompt_id=f"prompt-{chance.randrange(4000)}", group=step * 32 + at // 8, sample=at % 8, attempt=0,
            prompt_tokens=100, tokens=length, finish_reason="stop", round_kind=rounds, reward=float(at % 3 == 0),
            launched_s=begin, outcome="trained" if at % 8 else "lost_race", ended_s=begin + took + 3,
            rollout_s=length * 0.01, reward_s=0.2, engine=f"engine-{at % 8}",
        ) for at, length in enumerate(tokens)), StepLine(
            time_s=begin + took + 4, policy_version=step, round_kind=rounds, group_size=8, samples=256, push_s=1,
            trained_tokens=1, generated_tokens=1, step_s=took + 4, rollout_s=took, training_s=3,
        ))  # fmt: skip
        begin += took + 4


with tempfile.TemporaryDirectory() as place, sync_playwright() as driver:
    write_run(Path(place), 1953)
    page = driver.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"]).new_page()
    command = [sys.executable, "-m", "streamrl", "dashboard", place, "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        address = next(word for word in next(iter(server.stdout or ())).split() if word.startswith("http"))
        for visit in ("as soon as the server listens", "later"):
            page.goto(address)
            while not (painted := page.evaluate("[...timelines][0]?.frames.length && performance.now()")):
                page.wait_for_timeout(20)
            print(f"opened {visit}: the timeline is painted after {painted / 1e3:.2f} s")
            page.wait_for_timeout(3000)
        for share in (0.9, 0.1, 0.01, 0):
            took = page.evaluate(FRAMES, share)
            print(f"{f'pan, {share:.0%} in view' if share else 'zoom'}: p50 {took[60]:.0f} ms, p95 {took[113]:.0f} ms")
        server.terminate()
