"""``streamrl top`` on what a simulated run published (``top_stream.jsonl``), by Textual's Pilot, and in a terminal."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
from textual.pilot import Pilot
from textual.widgets import Input

from streamrl.base.errors import StreamRLError
from streamrl.observe.run_files.run_reader import MetricLine
from streamrl.observe.telemetry import Telemetry, TelemetryPublisher, TelemetrySubscriber
from streamrl.observe.top.application import ORDERS, TopApplication
from streamrl.observe.top.displayed_run import SILENT_S, Picture
from streamrl.observe.top.screen_lines import BOXES, screen

MESSAGES = [
    msgspec.json.decode(line, type=Telemetry)
    for line in Path(__file__).with_name("top_stream.jsonl").read_bytes().splitlines()
]
ENDED = [message for message in MESSAGES if message.topic == "run"][-1]
SIZES = [(80, 24), (200, 50), (72, 16), (40, 24), (36, 10)]


def picture_of(messages: list[Telemetry], **options: object) -> Picture:
    picture = Picture(**options)  # type: ignore[arg-type]
    for message in messages:
        picture.take(message)
    return picture


def text_of(picture: Picture, width: int = 80, height: int = 24, wanted: str = "") -> str:
    return "\n".join(line.plain for line in screen(picture, width, height, (), wanted))


class Shown:
    """The application on a socket that publishes the recorded messages."""

    def __init__(self, endpoint: str) -> None:
        self.publisher = TelemetryPublisher(endpoint, run_id="sort-1")
        self.orders: list[str] = []
        self.log = ["controller: hello"]
        self.refusal = ""

    async def steer(self, order: str) -> str:
        self.orders.append(order)
        if self.refusal:
            raise StreamRLError(self.refusal)
        return "it is done"

    def publish(self, messages: list[Telemetry]) -> None:
        for message in messages:
            self.publisher.publish(message.topic, message.fields)

    @asynccontextmanager
    async def run(self, width: int, height: int, *, steers: bool = True) -> AsyncIterator[Pilot[None]]:
        with TelemetrySubscriber(self.publisher.endpoint) as subscriber:
            picture = Picture(lambda: True)
            self.app = TopApplication(
                picture, subscriber, steer=self.steer if steers else None, why_not="no key file", logs=self.new_lines
            )
            async with self.app.run_test(size=(width, height)) as pilot:
                self.publish(MESSAGES[:-1])
                await self.until(pilot, lambda: len(picture.history) > 5)
                yield pilot

    def new_lines(self) -> list[str]:
        lines, self.log = self.log, []
        return lines

    async def until(self, pilot: Pilot[None], condition: Callable[[], bool]) -> None:
        while not condition():
            await pilot.pause(0.05)

    def text(self) -> str:
        lines = ["".join(piece.text for piece in strip) for strip in self.app.screen._compositor.render_strips()]
        assert len(lines) == self.app.size.height and {len(line) for line in lines} == {self.app.size.width}
        return "\n".join(lines)


@pytest.fixture
def shown(tmp_path: Path) -> Iterator[Shown]:
    shown = Shown(f"ipc://{tmp_path}/m")
    yield shown
    shown.publisher.close()


@pytest.mark.parametrize(("width", "height"), SIZES)
@pytest.mark.parametrize("count", [0, 1, 11, 22, 45, len(MESSAGES)])
def test_every_line_has_the_width_and_values_keep_their_units(width: int, height: int, count: int) -> None:
    picture = picture_of(MESSAGES[:count])
    lines = screen(picture, width, height)
    assert [line.cell_len for line in lines] == [width] * height
    assert [line.cell_len for line in screen(picture, width, height, set(BOXES))] == [width] * height
    if picture.live and width >= 72:
        text = text_of(picture, width, height)
        for row in picture.live.engines:
            assert re.search(rf"{row.name} +{row.running}/{row.slots} +{row.waiting} +\d+% +[\d.]+[kM]?", text)
        assert re.search(r"waits for [a-z_]+ [\d.hmd]+( s|m\d\ds)?\b", text)


@pytest.mark.parametrize("width", [20, 35])
def test_a_terminal_that_is_too_small_is_told_what_is_needed(width: int) -> None:
    lines = text_of(picture_of(MESSAGES[:60]), width, 12).splitlines()
    assert f"streamrl top needs 36 columns and 10 lines; there are {width} and 12" in "".join(lines)
    assert all(len(line) == width for line in lines)


def test_groups_race_with_bars_counts_and_their_lengths() -> None:
    racing = next(
        m
        for m in MESSAGES
        if m.topic == "live" and any(g["state"] == "racing" and "s" in g["marks"] for g in m.fields["groups"])
    )
    text = text_of(picture_of([racing]), 200, 50)
    row = next(g for g in racing.fields["groups"] if g["state"] == "racing" and "s" in g["marks"])
    assert re.search(
        rf"{row['id']} [█▏▎▍▌▋▊▉·]+ +{max(row['tokens'])} tok {row['marks'].count('d')}/{row['keep']}", text
    )
    assert f"of {racing.fields['budget']} tok" in text


@pytest.mark.long
async def test_every_key(shown: Shown) -> None:
    async with shown.run(80, 24) as pilot:
        for key, box in BOXES.items():
            assert f"── {key} {box.title}" in shown.text()
            await pilot.press(key)
            assert f"── {key} {box.title}" not in shown.text()
            await pilot.press(key)
        await pilot.press("slash", *"LENGTH_P")
        assert "completion/length_p95" in shown.text() and "reward/mean" not in shown.text()
        await pilot.press("enter")
        assert not shown.app.query_one(Input).display
        await pilot.press("l")
        await shown.until(pilot, lambda: "controller: hello" in shown.text())
        assert "── 1 engines" not in shown.text()
        await pilot.press("l", "question_mark")
        assert "these keys" in shown.text()
        await pilot.press("x")
        for key, (name, _) in ORDERS.items():
            await pilot.press(key)
            assert f"{name} sort-1" in shown.text() and name not in shown.orders
            await pilot.press("n")
            assert name not in shown.orders
            await pilot.press(key, "y")
            await shown.until(pilot, lambda name=name: f"{name}: it is done" in shown.text())
        assert shown.orders == [name for name, _ in ORDERS.values()]
        shown.refusal = "its key is another"
        await pilot.press("d", "y")
        await shown.until(pilot, lambda: "drain: its key is another" in shown.text())
        await pilot.press("q")
    assert shown.app.return_code == 0


async def test_without_the_key_file_it_says_so_and_only_looks(shown: Shown) -> None:
    async with shown.run(200, 50, steers=False) as pilot:
        await pilot.press("p", "y")
        assert "pause: no key file" in shown.text() and shown.orders == []


async def test_the_end_of_a_run_is_said_and_its_last_picture_stays(shown: Shown) -> None:
    async with shown.run(80, 24) as pilot:
        shown.publish([ENDED])
        await shown.until(pilot, lambda: "finished after step" in shown.text())
        assert "── 2 groups" in shown.text() and "reward/mean" in shown.text()


def test_starts_and_lost_engines_are_said_in_words() -> None:
    lost = {"event": "EngineLost", "fields": {"engine": "engine-1", "reason": "killed", "requests": 3}}
    text = text_of(picture_of([*MESSAGES[:2], msgspec.structs.replace(MESSAGES[0], fields=lost)]), 200, 50)
    assert "engine lost: engine-1, killed, requests 3" in text and "start: engine-0, engine-1, ready, 0.9 s" in text


def test_a_run_that_ends_keeps_its_last_picture() -> None:
    """A run that dies or is stopped is reported, and its last picture stays."""
    now, listens = [0.0], [True]
    picture = picture_of(MESSAGES[:-1], listens=lambda: listens[0], clock=lambda: now[0])
    before = text_of(picture).splitlines()[1:]
    assert " running " in text_of(picture)
    now[0] = SILENT_S + 1
    picture.look()
    assert "SILENT for 6.0 s; the picture is of" in text_of(picture)
    listens[0] = False
    picture.look()
    assert "DIED: no process publishes any more; the picture is of" in text_of(picture)
    assert text_of(picture).splitlines()[1:] == before
    picture.take(MESSAGES[-2])
    assert " running " in text_of(picture), "it was resumed"


def test_curves_go_on_from_the_files_and_are_filtered() -> None:
    picture = Picture()
    for step in (1, 2):
        picture.remember(MetricLine("step", step, 1.0, {"reward/mean": step / 4}))
    assert picture.points("reward/mean") == ((1.0, 0.25), (2.0, 0.5))
    for message in MESSAGES:
        picture.take(message)
    assert len(picture.history) == len([m for m in MESSAGES if m.topic == "step"])
    assert "no metric has 'nonsense' in its name" in text_of(picture, 200, 50, "nonsense")
