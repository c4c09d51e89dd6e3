"""The terminal application of ``streamrl top``, in the process of the command: draws the picture four times a second,
and asks before a key changes the run. ``cli/views/top.py`` starts it."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable

from rich.text import Text
from textual.app import App, ComposeResult, RenderResult
from textual.binding import Binding
from textual.geometry import Region
from textual.screen import ModalScreen
from textual.widget import Widget
from textual.widgets import Input, RichLog, Static

from streamrl.base.errors import StreamRLError
from streamrl.base.printable import one_line
from streamrl.observe.telemetry import TelemetrySubscriber
from streamrl.observe.top.displayed_run import Picture, ShownEvent
from streamrl.observe.top.screen_lines import BOXES, screen

LOOK_S = 0.25
"""Seconds between two reads of the socket."""
MOST_AT_ONCE = 500
"""Messages that are read before the keyboard is read again."""
ORDERS = {
    "p": ("pause", "launch nothing more until `continue`; what runs is finished"),
    "P": ("continue", "let a paused run go on"),
    "d": ("drain", "finish the open step, save and END the run"),
    "c": ("checkpoint", "write a checkpoint now"),
    "e": ("evaluate", "score all held-out prompts now"),
}
KEYS = """any key goes back

{boxes}
/  metrics whose name has a text in it (empty: the usual three)
l  the log of the run, and back
{orders}
?  these keys       q  leave; the run goes on

groups: a bar is the longest member, of the budget; small bars are members:
yellow sampled, dim waits, magenta rewarded, blue paused, green done, red at
the limit. Tokens of what is sampled: those of its engine, shared out evenly.""".format(
    boxes="\n".join(f"{key}  hide or show {box.title}" for key, box in BOXES.items()),
    orders="\n".join(f"{key}  {name}: {text}" for key, (name, text) in ORDERS.items()),
)

SendOrder = Callable[[str], Awaitable[str]]
"""Sends an order to the run and returns its answer."""


class Question(ModalScreen[bool]):
    """A text over the screen. It closes with True for ``y``, with False for any other key."""

    CSS = "Question { align: center middle; } Question Static { width: auto; max-width: 100%; border: round $primary; }"

    def __init__(self, text: str) -> None:
        super().__init__()
        self._text = text

    def compose(self) -> ComposeResult:
        yield Static(Text(self._text))

    def on_key(self, event: object) -> None:
        self.dismiss(getattr(event, "key", "") == "y")


class Board(Widget):
    """The boxes of the screen. ``hidden``: keys of hidden boxes. ``name_part``: text that the names of plotted metrics
    contain (empty: the default metrics)."""

    hidden: set[str] = set()
    name_part = ""

    def __init__(self, picture: Picture) -> None:
        super().__init__()
        self._picture = picture
        self._lines: list[Text] = []

    def draw(self) -> None:
        """Draw only the lines that have changed, which a slow connection needs."""
        if not self.size:  # before the first layout, or behind the log
            return
        before = self._lines
        width = self.size.width
        self._lines = screen(self._picture, width, self.size.height, self.hidden, self.name_part)
        changed = [y for y, line in enumerate(self._lines) if y >= len(before) or line != before[y]]
        if changed:
            self.refresh(*(Region(0, y, width, 1) for y in changed))

    def render(self) -> RenderResult:
        return Text("\n").join(screen(self._picture, self.size.width, self.size.height, self.hidden, self.name_part))


class TopApplication(App[None]):
    """The application. ``steer``: sends an order to the run and returns its answer; None where orders are not possible.
    ``why_not``: reason for which they are not. ``logs``: returns the new lines of the logs of the run."""

    CSS = "#filter, #log { display: none; } Board { height: 1fr; } #foot { height: 1; background: $panel; }"
    ENABLE_COMMAND_PALETTE = False
    BINDINGS = [
        *(Binding(key, f"hide('{key}')") for key in BOXES),
        *(Binding(key, f"ask('{key}')") for key in ORDERS),
        Binding("slash", "filter"),
        Binding("question_mark", "keys"),
        Binding("l", "log"),
        Binding("q", "quit"),
    ]

    def __init__(
        self,
        picture: Picture,
        subscriber: TelemetrySubscriber,
        *,
        steer: SendOrder | None,
        why_not: str,
        logs: Callable[[], list[str]],
    ) -> None:
        super().__init__()
        self.picture = picture
        self._subscriber = subscriber
        self._steer = steer
        self._why_not = why_not
        self._logs = logs
        # Kept here: a timer may still call while the screens of an application that ends are gone.
        self._board = Board(picture)
        self._log_view = RichLog(id="log", max_lines=5000, wrap=True)
        self._filter_line = Input(placeholder="part of a metric's name; Enter", id="filter")

    def compose(self) -> ComposeResult:
        yield self._board
        yield self._log_view
        yield self._filter_line
        yield Static(Text(" ? keys  1-7 boxes  / metrics  l log  p P d c e steer  q leave", no_wrap=True), id="foot")

    def on_mount(self) -> None:
        self.set_interval(LOOK_S, self._look)
        self._look()

    def _look(self) -> None:
        """Read the new messages and lines of logs, and draw."""
        for _ in range(MOST_AT_ONCE):
            try:
                message = self._subscriber.receive(0)
            except StreamRLError as error:  # a message of another version
                self._add_event("bold red", str(error))
                break
            if message is None:
                break
            self.picture.take(message)
        self.picture.look()
        if self._log_view.display:
            lines = self._logs()
            if not lines and not self._log_view.lines:
                lines = ["no process has written to its log so far"]
            for line in lines:
                self._log_view.write(Text(one_line(line)))
        self._board.draw()

    def _add_event(self, style: str, text: str) -> None:
        self.picture.events.append(ShownEvent(time.time(), style, one_line(text)))
        self._board.draw()

    def action_hide(self, key: str) -> None:
        self._board.hidden = self._board.hidden ^ {key}
        self._board.draw()

    def action_keys(self) -> None:
        self.push_screen(Question(KEYS))

    def action_log(self) -> None:
        self._board.display = self._log_view.display
        self._log_view.display = not self._log_view.display
        if self._log_view.display:
            self._log_view.focus()
        else:
            self.set_focus(None)
        self._look()

    def action_filter(self) -> None:
        self._filter_line.display = True
        self._filter_line.focus()

    def on_input_changed(self, event: Input.Changed) -> None:
        self._board.name_part = event.value.strip()
        self._board.draw()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        event.input.display = False
        self.set_focus(None)

    def action_ask(self, key: str) -> None:
        """Ask before an order is sent; where orders are not possible, show the reason."""
        name, text = ORDERS[key]
        if self._steer is None:
            self._add_event("bold yellow", f"{name}: {self._why_not}")
            return

        def answered(yes: bool | None) -> None:
            if yes:
                self.run_worker(self._order(name))
            else:
                self._add_event("dim", f"{name}: not asked for")

        self.push_screen(Question(f"{name} {self.picture.run_id}: {text}\n\ny: do it   any other key: no"), answered)

    async def _order(self, name: str) -> None:
        assert self._steer is not None
        try:
            self._add_event("bold green", f"{name}: {await self._steer(name)}")
        except StreamRLError as error:
            self._add_event("bold red", f"{name}: {error}")
