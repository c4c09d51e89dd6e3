"""The page of runs in headless Chromium, on runs whose files are written as a run writes them: what a person reads off
it, that texts of models stay texts, that nobody else is asked, that it goes on with a run, and that a report opens."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from importlib.resources import files
from pathlib import Path
from typing import Any

import msgspec
import pytest

from streamrl.base.line_file import read_lines
from streamrl.cli.compare.comparison import Comparison, comparison_page
from streamrl.cli.compare.measured_run import ComparedRun
from streamrl.cli.main import main
from streamrl.observe.report.trajectory_trace import (
    EnginesLine,
    EventLine,
    StepLine,
    TraceHeader,
    TrajectoryLine,
    TrajectoryTrace,
)

CHROMIUM = Path("/usr/bin/chromium")
UPLOT = {
    "uPlot.iife.min.js": "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f",
    "uPlot.min.css": "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04",
    "uPlot.LICENSE": "8f989229699b4fe2f1a0432d0e9edc338a8a911e250e2d1b01ecd770a5f5b1bd",
}
"""Of ``npm pack uplot@1.6.32``."""
HOSTILE = "<img src=x onerror=\"window.taken='yes'\"><script>window.taken='yes'</script>"
STEPS, PROMPTS, SIZE, SLOW_STEP, UNSOLVED = 12, 8, 4, 7, "prompt-3"
PANELS = [
    "overview", "findings", "curves", "timeline", "waits", "step", "engines", "lengths", "races", "weights",
    "prompts", "samples", "events", "processes", "recipe",
]  # fmt: skip

needs_chromium = pytest.mark.skipif(not CHROMIUM.exists(), reason=f"{CHROMIUM} is missing: apt-get install chromium")


class WrittenRun:
    """The directory of a run of ``STEPS`` steps: engine-1 takes twice the time a token, step 7 has a straggler, one
    prompt has no reward, the last sample of each group loses its race."""

    def __init__(self, directory: Path, rounds: str) -> None:
        self.directory, self.time, self.step = directory, 0.0, 0
        (directory / "logs").mkdir(parents=True)
        (directory / "logs/engine-1.log").write_text(f"a line with {HOSTILE}\n")
        (directory / "recipe.toml").write_text(
            f'[run]\nname = "{rounds}"\nsteps = 20\n[rollout]\nrounds = "{rounds}"\n[engines]\nkind = "simulated"\n'
        )
        header = TraceHeader(
            schema=1, run_id=directory.name, seed=0, max_tokens=512, max_model_len=1024, temperature=1.0,
            prompts_per_batch=PROMPTS, group_size=SIZE, rounds=rounds, max_staleness=0, engines=2, capacity=32,
        )  # fmt: skip
        self._rounds, self._trace = rounds, TrajectoryTrace(directory / "trace.jsonl", header)
        self._trace.append(EventLine(time_s=3.0, kind="alarm", text=f"look at {HOSTILE}", step=1))
        for _ in range(STEPS):
            self.add_step()

    def add_step(self) -> None:
        """Write the next step: its trajectories, its metrics, a sample, an evaluation each fourth."""
        start, self.step = self.time, self.step + 1
        full = start + (9.0 if self.step == SLOW_STEP else 3.0)
        end, lines = full + 1.5, []
        for prompt in range(PROMPTS):
            for sample in range(SIZE):
                engine, lost = (prompt + sample) % 2, sample == SIZE - 1
                tokens = 20 + 7 * prompt + 11 * sample + self.step
                took = tokens * 0.01 * (1 + engine)
                talks = self.step >= STEPS and (prompt, sample) == (1, 1)
                if self.step == SLOW_STEP and (prompt, sample) == (0, 0):
                    tokens, took = 480, 8.9
                lines.append(
                    TrajectoryLine(
                        prompt_id=f"prompt-{prompt}", group=self.step * PROMPTS + prompt, sample=sample, attempt=0,
                        prompt_tokens=8, tokens=tokens, finish_reason="" if lost else "stop",
                        outcome="lost_race" if lost else "trained", round_kind=self._rounds, launched_s=start + 0.01,
                        ended_s=full if lost else end - 0.2, rollout_s=took, reward_s=0.2, queued_s=0.02,
                        reward=None if lost else float(f"prompt-{prompt}" != UNSOLVED and (sample + self.step) % 2),
                        oldest_version=self.step - 1, newest_version=self.step - 1, engine=f"engine-{engine}",
                        turns=((9, 0.02, 2, 0.18), (5, 0.2, 1, 0.1), (0, 0.0, 0, 0.0)) if talks else (),
                    )
                )  # fmt: skip
        self._trace.append(*lines)
        loads = [EnginesLine(time_s=start + at, running=32 >> at, waiting=at, kv_usage=0.5) for at in range(3)]
        self._trace.append(*loads, EventLine(time_s=full, kind="pause", text="commit", step=self.step, seconds=0.3))
        self._trace.append(
            StepLine(
                time_s=end, policy_version=self.step, round_kind=self._rounds, group_size=SIZE, samples=24,
                trained_tokens=900, generated_tokens=1200, step_s=end - start, rollout_s=full - start, training_s=1.0,
                push_s=0.5,
            )
        )  # fmt: skip
        waits = {"sampling": 1.5, "tail": full - start - 1.5, "training": 1.0, "push": 0.5}
        metrics = {
            "reward/mean": 0.02 * self.step, "completion/length_mean": 60.0 + self.step, "time/step_s": end - start,
            "perf/samples_s": 24 / (end - start), "perf/train_tok_s": 900 / (end - start), "async/staleness_mean": 0.0,
            "weights/payload_bytes": 2e6, "weights/changed_ratio": 0.4, "time/weight_sync_s": 0.5,
            "util/free_slot_ratio": 0.6, "util/rollout_bubble_ratio": 0.5, "length/sampled_mean": 66.0,
            "completion/truncated_ratio": 0.0,
        } | {f"util/wait_reason/{name}": seconds / (end - start) for name, seconds in waits.items()}  # fmt: skip
        self.append("metrics.jsonl", {"kind": "step", "time": 1.7e9 + end, "step": self.step} | metrics)
        if self.step % 4 == 0:
            score = {"eval/held_out/avg@1": 0.2 + 0.01 * self.step}
            self.append("metrics.jsonl", {"kind": "evaluation", "time": 1.7e9 + end, "step": self.step} | score)
        texts = ["The answer is ", HOSTILE, " 17."]
        sample_line = {
            "step": self.step, "chosen": "best", "prompt_id": "prompt-1", "prompt": f"{HOSTILE} 8 + 9 =",
            "text": "".join(texts), "reward": 1.0, "rewards": {"exact": 1.0}, "tokens": 3, "finish_reason": "stop",
            "token_texts": texts, "logprobs": [-0.1, -4.0, -0.5],
            "turns": [
                {"role": "user", "text": f"{HOSTILE} 8 + 9 =", "tokens": 9},
                {"role": "assistant", "text": "".join(texts[:2]), "tokens": 2, "sampled": True, "version": 4},
                {"role": HOSTILE, "text": f"wrong {HOSTILE}", "tokens": 5},
                {"role": "assistant", "text": texts[2], "tokens": 1, "sampled": True, "again": True},
            ],
        }  # fmt: skip
        self.append("samples.jsonl", sample_line)
        self.time = end

    def append(self, name: str, line: dict[str, Any]) -> None:
        with (self.directory / name).open("a") as file:
            file.write(json.dumps(line) + "\n")

    def close(self) -> None:
        self._trace.close()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[WrittenRun]]:
    root = tmp_path_factory.mktemp("runs")
    made = [WrittenRun(root / f"{rounds}-run", rounds) for rounds in ("synchronous", "tail_batching")]
    yield made
    for run in made:
        run.close()


@contextmanager
def served(*places: Path) -> Iterator[str]:
    """Address of a dashboard on runs, in its process."""
    command = "import sys; from streamrl.cli.main import main; sys.exit(main())"
    with subprocess.Popen(
        [sys.executable, "-c", command, "dashboard", *map(str, places), "--port", "0"],
        stdout=subprocess.PIPE, text=True,
    ) as server:  # fmt: skip
        assert server.stdout is not None
        try:
            yield next(word for word in server.stdout.readline().split() if word.startswith("http"))
        finally:
            server.terminate()


@pytest.fixture(scope="module")
def address(runs: list[WrittenRun]) -> Iterator[str]:
    with served(*(run.directory for run in runs)) as address:
        yield address


class Visit:
    """A page of the browser with what it asked for and complained about."""

    def __init__(self, page: Any) -> None:
        self.page, self.asked, self.complaints = page, list[str](), list[str]()
        page.on("request", lambda request: self.asked.append(request.url))
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("console", lambda message: self.complaints.append(message.text))

    def text(self, panel: str) -> str:
        return str(self.page.locator(f"#{panel}").inner_text())

    def empty(self) -> list[str]:
        """Panels that say that they have nothing to show."""
        shown = "[...document.querySelectorAll('section .none')].filter(one => one.checkVisibility())"
        found: list[str] = self.page.evaluate(shown + ".map(one => one.closest('section').id)")
        return found

    def until(self, holds: Callable[[], Any], what: str) -> None:
        """Poll: with a content security policy, Playwright's own waiting for an expression is refused."""
        deadline = time.monotonic() + 60
        while not holds():
            assert time.monotonic() < deadline, f"{what}; complaints: {self.complaints}"
            time.sleep(0.05)

    def open(self, address: str) -> None:
        self.page.goto(address)
        self.until(lambda: "rounds" in self.text("recipe") and "answer" in self.text("samples"), "panels are drawn")


@contextmanager
def browsing(**options: Any) -> Iterator[Visit]:
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is missing: pip install playwright")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=str(CHROMIUM), args=["--no-sandbox", "--disable-gpu"])
        with closing(browser):
            yield Visit(browser.new_page(**options))


def complete(visit: Visit, *more: str) -> None:
    """Every panel shows something, nothing was complained about, and no text of a model became more than text."""
    shown = visit.page.evaluate("[...document.querySelectorAll('section')].map(one => one.id)")
    assert shown == [*more, *PANELS]
    assert visit.empty() == []
    assert visit.page.evaluate("[window.taken ?? '', document.images.length]") == ["", 0]
    said = visit.page.locator("#samples article").first.locator(".turn")
    assert [re.split("tokens?", text)[0] for text in said.all_text_contents()] == [
        "user9 ", "assistant2 ", f"{HOSTILE}5 ", "assistant1 ",
    ]  # fmt: skip
    assert said.nth(1).locator("span[title^=logprob]").all_text_contents() == ["The answer is ", HOSTILE]
    assert said.nth(3).text_content() == "assistant1 token, version 0, behind an earlier turn 17."
    assert f"wrong {HOSTILE}" in said.nth(2).text_content()
    lime = "[...timelines][0]?.pixels?.includes([...timelines][0].phases.environment)"
    visit.until(lambda: visit.page.evaluate(lime), "a trajectory in its environment")
    assert "in the environment" in visit.text("timeline")
    assert HOSTILE in visit.page.locator("#events").text_content()
    assert visit.complaints == []


def reads_as_written(visit: Visit) -> None:
    """What was slow, what was never solved, what lost, is said in words."""
    slow = [row for row in visit.text("engines").splitlines() if "slow" in row and row.startswith("engine-")]
    assert [row.split()[0] for row in slow] == ["engine-1"]
    assert f"step {SLOW_STEP}" in visit.text("step") and "tail 6.00 s more" in visit.text("step")
    assert f"1 of {PROMPTS} prompts were never solved" in visit.text("prompts") and UNSOLVED in visit.text("prompts")
    assert f"lost_race\t{STEPS * PROMPTS}\t25 %" in visit.text("races")
    for found in (
        "engine-1 takes 19.7 ms a token, 2.03 times",
        f"Step {SLOW_STEP} took 10.5 s, 2.33 times the median step: tail 6.00 s more; the last completion, of 480",
        f"1 of {PROMPTS} prompts were never solved: {UNSOLVED} in 36 tries",
        ") were not trained: lost_race 96 trajectories",
    ):
        assert found in visit.text("findings"), visit.text("findings")


@needs_chromium
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_panel_of_two_runs(address: str, scheme: str) -> None:
    with browsing(color_scheme=scheme, viewport={"width": 1280, "height": 800}) as visit:
        visit.open(address)
        complete(visit)
        reads_as_written(visit)
        assert "rollout.rounds\tsynchronous\ttail_batching" in visit.text("recipe")
        assert visit.page.locator("#samples article").count() == 2  # the same prompt of both runs
        assert {url.startswith((address, "data:")) for url in visit.asked} == {True}
        visit.page.set_viewport_size({"width": 390, "height": 844})
        visit.until(lambda: visit.page.evaluate("document.documentElement.scrollWidth") <= 390, "it fits a phone")


GAUGE = """async () => {
  const host = document.body.appendChild(document.createElement("div")), figure = new Chart(host, "t");
  const waiting = { label: "w", values: [0, 100, 100], colour: "#ff0000", gauge: GAUGE };
  figure.show([0, 100, 200], [waiting], { xUnit: "s", unit: "s", least: 0, most: 100 });
  await new Promise(requestAnimationFrame);
  const plot = figure.uplot, column = Math.round(plot.valToPos(50, "x", true)), { height } = plot.ctx.canvas;
  const pixels = plot.ctx.getImageData(column, 0, 1, height).data;
  const red = [...Array(height).keys()].find(y => pixels[4 * y] > 200 && pixels[4 * y + 1] < 90);
  const drawn = plot.posToVal((red - plot.bbox.top) / devicePixelRatio, "y");
  figure.show([0, 100], [{ label: "w", values: [80, 200], colour: "#ff0000" }], { unit: "s" });
  await new Promise(requestAnimationFrame);
  const { bbox, axes } = figure.uplot, labels = axes[1]._values;
  return [drawn, labels, bbox.left / devicePixelRatio - widest(labels)];
}"""
"""A gauge of 0 until second 100: its value as drawn at second 50; then the room of the longest label of an axis."""


@needs_chromium
def test_gauges_are_steps_and_labels_are_whole(address: str) -> None:
    """A gauge holds its value until the next one, where a line would ramp; an axis is as wide as its labels."""
    with browsing(viewport={"width": 1280, "height": 800}) as visit:
        visit.open(address)
        value, labels, room = visit.page.evaluate(GAUGE.replace("GAUGE", "true"))
        assert value < 3 and room >= 0 and "2 min 00 s" in labels, (value, labels, room)
        assert visit.page.evaluate(GAUGE.replace("GAUGE", "false"))[0] > 40, "the picture can tell"


@needs_chromium
def test_prompts_have_words_and_advice_has_keys(address: str) -> None:
    """Beside the id of a prompt stand its first words; what is advised against a wait names keys of a recipe."""
    with browsing(viewport={"width": 1280, "height": 800}) as visit:
        visit.open(address)
        assert f"prompt-1 · {HOSTILE} 8 + 9 ="[:40] in visit.text("prompts")
        advices = visit.page.evaluate(
            "Object.fromEntries(Object.entries(REASONS).map(([name, row]) => [name, row[2]]))"
        )
        for name in set(advices) - {"engine_start", "recovery", "paused", "shutdown", "control"}:
            named = re.findall(r"\b[a-z_]+\.[a-z_.]+\b", advices[name])
            assert named, f"{name}: {advices[name]}"
            for key in named:
                assert main(["explain", key]) == 0, key
        remedies = visit.page.evaluate("Object.values(REMEDIES).join(' ')")
        lines = [
            line for line in visit.text("findings").splitlines() if re.search(r"Step \d| prompts were | % of ", line)
        ]
        assert len(lines) >= 3, lines
        for line in (*lines, remedies):
            keys = [key for key in re.findall(r"\b[a-z_]+\.[a-z_]+\b", line) if not key.startswith("prompt-")]
            assert keys, f"advice without a key: {line}"
            for key in keys:
                assert main(["explain", key]) == 0, key


FLAT = """async () => {
  const host = document.body.appendChild(document.createElement("div")), labels = {};
  for (const value of [4e-4, 0.3, 0]) {
    const figure = new Chart(host, "t");
    figure.show([0, 1, 2], [{ label: "w", values: [value, value, value], colour: "#ff0000" }]);
    await new Promise(requestAnimationFrame);
    labels[value] = figure.uplot.axes[1]._values;
  }
  const clocks = [0, 3600, 5400, 43200, 129600, 172800, 180000].map(clock);
  const links = [...document.querySelectorAll("nav a")].map(one => one.getBoundingClientRect().right);
  return [labels, clocks, meansOf([1, 3, null, 5, 9], 2), Math.max(...links) <= innerWidth];
}"""
"""Labels of charts of one value, ticks of time, means of a gauge, and whether each link to a panel is in sight."""


@needs_chromium
def test_labels_differ_and_links_are_in_sight(address: str) -> None:
    """A curve of one value has labels that differ and none below zero; hours are no time of day; all panels are named
    in the head; a gauge of many values is drawn by means."""
    with browsing(viewport={"width": 1280, "height": 800}) as visit:
        visit.open(address)
        labels, clocks, means, in_sight = visit.page.evaluate(FLAT)
        for value, shown in labels.items():
            assert len(shown) == len(set(shown)) and not any(label.startswith("-") for label in shown), value
        assert clocks == ["0 min", "1 h", "1 h 30", "12 h", "36 h", "2 days", "50 h"]
        assert means == [2, 5, 9] and in_sight


@needs_chromium
def test_a_run_with_nothing_is_not_praised(tmp_path: Path) -> None:
    """A run without a step says of each panel why it is empty; a run of equal rewards is not said to be solved."""
    (directory := tmp_path / "begun").mkdir()
    (directory / "recipe.toml").write_text('[run]\nname = "begun"\nsteps = 9\n')
    (equal := tmp_path / "equal").mkdir()
    run = WrittenRun(equal, "synchronous")
    run.close()
    trace = (equal / "trace.jsonl").read_text()
    (equal / "trace.jsonl").write_text(re.sub(r'"reward":[\d.]+', '"reward":0.0', trace))
    with (directory / "lock").open("w") as lock, served(directory) as address, browsing() as visit:
        lock.write(str(os.getpid()))
        lock.flush()
        visit.page.goto(address)
        visit.until(lambda: "No data" in visit.text("findings"), "the panel says why it is empty")
        for panel in ("overview", "findings", "curves", "waits", "engines", "prompts"):
            visit.until(lambda panel=panel: "The run goes on" in visit.text(panel), panel)
        assert "is kept yet" in visit.text("samples")
    with served(equal) as address, browsing(viewport={"width": 1280, "height": 9000}) as visit:
        visit.open(address)
        assert "Every reward is 0: nothing tells which of the 8 prompts were solved" in visit.text("prompts")


@needs_chromium
def test_the_timeline_by_keys_and_pointer(address: str) -> None:
    with browsing(viewport={"width": 1280, "height": 800}) as visit:
        visit.open(address)
        canvas, page = visit.page.locator(".timeline canvas").first, visit.page
        seen: list[list[float]] = []

        def look() -> list[float]:
            span: list[float] = page.evaluate("[view.start, view.stop, [...timelines][0].high ?? 0]")
            seen.append(span)
            return span

        canvas.scroll_into_view_if_needed()
        canvas.focus()
        whole = look()
        for key in ("+", "ArrowRight", "ArrowLeft", "-", "n", "p", "*", "0"):
            page.keyboard.press(key)
            assert look() != seen[-2], key
        assert look() == whole
        for key in ("slot", "group", "prompt", "length"):
            page.locator("#timeline").get_by_role("button", name=key, exact=True).click()
            box = canvas.bounding_box()
            for far in range(8, 300, 2):
                page.mouse.move(box["x"] + 72 + far, box["y"] + 70)
                if "tokens" in (told := page.locator("#tip").text_content()):
                    break
            assert "lost_race" in told or "trained" in told, (key, told)
        page.mouse.click(box["x"] + 72 + far, box["y"] + 70)
        filtered = page.locator("#samples input[name=prompt]")
        visit.until(lambda: filtered.input_value().startswith("prompt-"), "its sample")
        assert visit.complaints == []


@needs_chromium
def test_it_goes_on_with_a_run(address: str, runs: list[WrittenRun]) -> None:
    run = runs[0]
    everything = {"width": 1280, "height": 9000}  # panels out of sight are drawn when they come into it
    with (run.directory / "lock").open("w") as lock, browsing(viewport=everything) as visit:
        lock.write(str(os.getpid()))  # the lock that says that it goes on
        lock.flush()
        visit.open(address)
        state, page = visit.page.locator("#state"), visit.page
        assert "running" in state.text_content()
        page.locator("#processes summary").first.click()
        page.locator("#prompts th", has_text="mean tokens").click()
        page.locator("#samples tbody tr").nth(3).click()
        page.mouse.move(0, 0)  # under a pointer rows stay where they are
        read = f"step {run.step - 3}"
        visit.until(lambda: read in visit.text("samples .compared"), "the fourth sample")
        run.add_step()
        visit.until(lambda: f"step {run.step} of 20" in state.text_content(), "the next step")
        bars = "[...timelines][0].columns.count"
        visit.until(lambda: page.evaluate(bars) == run.step * PROMPTS * SIZE, "the bars of the next step")
        of = "[...timelines][0].columns.outside([...timelines][0].columns.count - {}).turns"
        assert [page.evaluate(of.format(PROMPTS * SIZE - SIZE - at)) for at in range(3)] == [0, 2, 0]
        sample = page.locator("#samples tbody td").first
        visit.until(lambda: sample.inner_text() == str(run.step), "the sample of the next step")
        visit.until(lambda: not page.evaluate("panels.some(one => one.dirty || one.busy)"), "all is drawn")
        assert read in visit.text("samples .compared"), "what a person reads stays"
        assert page.locator("#processes details[open]").count() == 1, "a log that is open stays open"
        assert page.locator("#prompts th[aria-sort=descending]").inner_text() == "mean tokens"
        (run.directory / "lock").unlink()
        visit.until(lambda: "killed; streamrl resume goes on" in visit.text("overview"), "its end is shown")
        assert f"stopped · step {run.step} of 20" in state.inner_text() and visit.complaints == []


@needs_chromium
def test_a_report_is_one_file(tmp_path: Path, runs: list[WrittenRun]) -> None:
    from streamrl.observe.dashboard.report_page import report_page

    (report := tmp_path / "report.html").write_bytes(report_page([run.directory for run in runs]))
    with browsing(viewport={"width": 1280, "height": 800}) as visit:
        visit.open(report.as_uri())
        complete(visit)
        assert [url for url in visit.asked if not url.startswith("data:")] == [report.as_uri()]


@needs_chromium
def test_systems_side_by_side(tmp_path: Path, runs: list[WrittenRun]) -> None:
    compared = [
        ComparedRun(
            system=name, repeat=1, directory=str(run.directory), accuracy=0.5, stragglers=math.nan, warnings=(HOSTILE,),
            steps=[line for line in read_lines(run.directory / "metrics.jsonl") if line["kind"] == "step"][:STEPS],
        )
        for name, run in zip(("synchronous", HOSTILE), runs, strict=True)
    ]  # fmt: skip
    gone = msgspec.structs.replace(compared[0], system="gone", directory=str(tmp_path / "gone"))
    comparison = Comparison(
        recipe=HOSTILE, machine="m", samples=240, repeats=1, systems=("synchronous", HOSTILE, "gone"),
        runs=(*compared, gone), failures=(f"{HOSTILE} broke",),
    )  # fmt: skip
    (report := tmp_path / "comparison.html").write_bytes(comparison_page(comparison))
    with browsing(viewport={"width": 1280, "height": 800}) as visit:
        visit.open(report.as_uri())
        complete(visit, "systems")
        text = visit.text("systems")
        assert f"{HOSTILE} broke" in text and f"{HOSTILE}, repeat 1: {HOSTILE}" in text and "240 trained" in text
        assert [row.split("\t")[1:3] for row in text.splitlines() if "\t1\t" in row] == [["1", "1.00"]] * 3
        seen = visit.page.evaluate(COLOURS, ["#4c8bf5", "#e5604d", "#f2b134"])
        assert len(seen) == 2 and all(map(all, seen)), "trained, lost a race and in the reward: bars of each"
        assert [url for url in visit.asked if not url.startswith("data:")] == [report.as_uri()]


COLOURS = """wanted => [...document.querySelectorAll("#systems figure canvas")].map(one => {
  const { data } = one.getContext("2d").getImageData(0, 0, one.width, one.height), there = new Set();
  for (let i = 0; i < data.length; i += 4) there.add(data[i] << 16 | data[i + 1] << 8 | data[i + 2]);
  return wanted.map(colour => there.has(parseInt(colour.slice(1), 16)));
})"""
"""Which of the colours each picture of the panel has."""


def test_uplot_is_the_published_one() -> None:
    folder = files("streamrl.observe.dashboard").joinpath("page")
    assert {name: hashlib.sha256(folder.joinpath(name).read_bytes()).hexdigest() for name in UPLOT} == UPLOT
