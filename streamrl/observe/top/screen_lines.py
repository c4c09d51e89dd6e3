"""The boxes of ``streamrl top`` as lines of text, and their places on the screen. ``application`` calls ``screen`` in
the process of the command. Every line is at most as wide as its box. No I/O."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Callable, Collection, Sequence

from msgspec import Struct
from rich.text import Text

from streamrl.observe.terminal.curve import Curve, terminal_plot
from streamrl.observe.terminal.step_line import duration, percent, short_count
from streamrl.observe.top.displayed_run import Picture
from streamrl.observe.top.live_figures import EngineRow

NARROWEST = 36
"""Least width of the screen, in cells."""
LOWEST = 10
"""Least height of the screen, in lines."""
TWO_COLUMNS = 72
"""Least width for two columns of boxes."""
THREE_COLUMNS = 150
"""Least width for three columns of boxes."""
LEVELS = "▁▂▃▄▅▆▇█"
STATES = {
    "racing": "yellow", "ready": "cyan", "batch": "green", "paused": "magenta", "deferred": "blue", "dropped": "red",
}  # fmt: skip
"""Styles of the states of a group."""
MARKS = {"s": "yellow", "w": "dim", "e": "bright_green", "r": "magenta", "p": "blue", "d": "green", "c": "red"}
"""Styles of the marks of a group's members (``GroupRow``)."""
REASONS = {
    "sampling": ("S", "black on cyan"), "tail": ("t", "black on yellow"), "reward": ("R", "black on magenta"),
    "training": ("T", "black on green"), "push": ("P", "white on blue"), "evaluation": ("E", "black on white"),
    "checkpoint": ("C", "black on bright_blue"), "prompts": ("q", "black on bright_yellow"),
    "recovery": ("r", "white on red"), "engine_start": ("s", "black on bright_red"),
    "paused": ("-", "black on bright_white"), "shutdown": ("x", "dim"), "environment": ("e", "black on bright_green"),
}  # fmt: skip
"""Letter and style of each reason that a run waits for."""
OTHER = ("c", "")
Draw = Callable[[Picture, int, int, str], list[Text]]
"""Draws a box from the picture, its width, its height, and the text that the names of plotted metrics contain."""


def bar(share: float, width: int, style: str) -> Text:
    """Return a bar of ``width`` cells, filled to ``share``."""
    full_cells, eighths = divmod(round(max(0.0, min(share, 1.0)) * width * 8), 8)
    filled = "█" * full_cells
    if eighths:
        filled += "▏▎▍▌▋▊▉"[eighths - 1]
    return Text.assemble((filled, style), ("·" * (width - len(filled)), "dim"))


def spark(values: Sequence[float], width: int) -> str:
    """Return the last ``width`` values as a line of blocks."""
    if width <= 0:
        return ""
    last_values = values[-width:]
    low = min(last_values, default=0.0)
    high = max(last_values, default=0.0)
    if not high > low:
        return LEVELS[3] * len(last_values)
    return "".join(LEVELS[round((value - low) / (high - low) * 7)] for value in last_values)


def engines(picture: Picture, width: int, height: int, name_part: str) -> list[Text]:
    """Return a line for each engine: slots in use, waiting requests, KV cache, tokens a second."""
    rows: Sequence[EngineRow] = ()
    if picture.live:
        rows = picture.live.engines
    name_width = min(max((len(row.name) for row in rows), default=6), width - 27)
    room = width - name_width - 27
    lines = [Text(f"{'':{name_width}}{'slots':>10}{'wait':>5}{'KV':>5}{'tok/s':>6}", "dim")]
    for row in rows:
        slots = f"{row.running}/{row.slots or '?'}"
        figures = f"{slots:>10}{row.waiting:>5}{percent(row.kv):>5}{short_count(row.tokens_s):>6}"
        line = Text(f"{row.name[-name_width:]:{name_width}}{figures} ")
        if not row.serves:
            if room > 4:
                line.append("freed")
            line.stylize("dim")
        elif row.slots and room > 3:
            line.append_text(bar(row.running / row.slots, room, "cyan"))
        lines.append(line)
    return lines


def groups(picture: Picture, width: int, height: int, name_part: str) -> list[Text]:
    """Return a line for each group: a bar of the tokens of its longest member, of the budget; finished members; lengths
    of the members."""
    live = picture.live
    if live is None:
        return []
    counts = {state: sum(row.state == state for row in live.groups) for state in STATES}
    head = "  ".join(f"{state} {count}" for state, count in counts.items() if count) or "none under way"
    if live.environment:
        head += f"  ({live.environment} trajectories in their environments)"
    if live.groups:
        head += f"  of {short_count(live.budget)} tok"
    lines = [Text(head, "dim")]
    members = min(max((len(row.marks) for row in live.groups), default=0), 16) if width >= 56 else 0
    room = max(width - 32 - members, 3)
    for row in live.groups:
        style = STATES.get(row.state, "")
        finished = f"{row.marks.count('d') + row.marks.count('c')}/{row.keep}"
        stopped = row.size - len(row.marks)
        if stopped:
            finished += f"-{stopped}"
        longest = max(row.tokens, default=0)
        length_bar = bar(longest / max(live.budget, 1), room, style)
        line = Text.assemble((f"{row.id:>5} ", "dim"), length_bar, f"{short_count(longest):>5} tok {finished:<6} ")
        line.append(f"{row.state:<9}", style)
        for tokens, mark in zip(row.tokens[:members], row.marks, strict=False):
            level = LEVELS[min(int(tokens / max(live.budget, 1) * 8), 7)]
            line.append("·" if mark == "w" else level, MARKS.get(mark, ""))
        lines.append(line)
    return lines


def trainer(picture: Picture, width: int, height: int, name_part: str) -> list[Text]:
    """Return lines about the trainer: its state, the reason and the duration of the current wait, the filled share of
    the batch, other pending orders or the round, and the speed of the last step."""
    live = picture.live
    if live is None:
        return []
    state = "trains" if "step" in live.pending else "idle"
    _, style = REASONS.get(live.waits_for, ("", ""))
    wait = Text.assemble(f"{state}, waits for ", (live.waits_for, style), f" {duration(live.waits_s)}")

    batch_text = f" batch {live.filled}/{live.target}"
    batch_bar = bar(live.filled / max(live.target, 1), max(width - len(batch_text), 3), "green")

    other_orders = [name for name in live.pending if name != "step"]
    if other_orders:
        orders = f"under way: {', '.join(other_orders)}"
    else:
        open_round = f"round {live.round_kind} x{live.group_size}" if live.round_kind else "no round open"
        orders = f"live version {live.live_version}, {open_round}"

    speed = "no step yet"
    if step_s := picture.last.get("time/step_s"):
        rate = short_count(picture.last.get("perf/train_tok_s") or 0.0)
        speed = f"last step {duration(step_s)}, {rate} tok/s trained"
    return [wait, Text.assemble(batch_bar, batch_text), Text(orders), Text(speed)]


def rewards(picture: Picture, width: int, height: int, name_part: str) -> list[Text]:
    """Return lines about rewards: waiting trajectories, latencies, and the mean and the failures of each function."""
    last = picture.last
    live = picture.live
    functions = sorted({name.split("/")[2] for name in last if name.startswith("reward/func/")})
    summary = f"{live.scoring if live else 0} waiting"
    if "reward/latency_p95_s" in last:
        summary += f"; p50 {duration(last['reward/latency_p50_s'])}, p95 {duration(last['reward/latency_p95_s'])}"
    lines = [Text(summary)]
    for name in functions:
        prefix = f"reward/func/{name}/"
        kinds = ("raised", "timed_out", "not_finite", "wrong_type")
        failures = sum(last.get(f"{prefix}{kind}_total", 0) for kind in kinds)
        figures = f" p95 {duration(last.get(f'{prefix}latency_p95_s', 0.0)):>6}  failed {failures:.0f}"
        mean = f" {last.get(f'{prefix}mean', float('nan')):.3f}"
        line = Text(f"{name[: width - len(figures) - len(mean)]}{mean}{figures}")
        if failures:
            line.stylize("red")
        lines.append(line)
    return lines


def waits(picture: Picture, width: int, height: int, name_part: str) -> list[Text]:
    """Return a stacked bar for each step, as long as the step took, with the reasons that the run waited for."""
    rows = picture.waits(max(height - 1, 1))
    longest = max((seconds for _, seconds, _ in rows), default=0.0)
    total_s = sum(seconds for _, seconds, _ in rows)
    if not longest:
        return [Text("no step yet", "dim")]
    shares_of_all: dict[str, float] = {}
    lines = []
    for step, seconds, shares in reversed(rows):
        line = Text(f"{step:>5} {duration(seconds):>6} ")
        room = max(width - 13, 1)
        end = 0.0
        for reason, share in shares.items():
            shares_of_all[reason] = shares_of_all.get(reason, 0.0) + share * seconds / total_s
            start = end
            end = start + share * seconds / longest
            letter, style = REASONS.get(reason, OTHER)
            line.append(letter * (round(end * room) - round(start * room)), style)
        lines.append(line)
    legend = [Text()]
    for reason, share in sorted(shares_of_all.items(), key=lambda item: -item[1]):
        letter, style = REASONS.get(reason, OTHER)
        if len(legend[-1]) + len(reason) + 8 > width:
            legend.append(Text())
        legend[-1].append(letter, style).append(f" {reason} {percent(share)}  ")
    return [*legend[: 1 if height < 4 else 2], *lines][:height]


def curves(picture: Picture, width: int, height: int, name_part: str) -> list[Text]:
    """Return the curves of the metrics whose names contain ``name_part``: plots where there is room for all, else a
    line for each metric."""
    names = picture.names(name_part)
    if not names:
        return [Text(f"no metric has {name_part!r} in its name" if name_part else "no step yet", "dim")]
    curve_height = height // len(names)
    lines = []
    for name in names:
        points = picture.points(name)
        value = f"{points[-1][1]:.4g}" if points else "-"
        curve = Curve(name, points, marked=name.startswith("eval/"))
        plot = []
        if curve_height >= 7:
            plot = terminal_plot([curve], width=width - 12, height=curve_height - 4)
        label_width = min(max(map(len, names)), max(width // 2, 22))
        line = Text.assemble((f"{name[-label_width:]:{label_width}}", "bold"), f"{value:>9}  ")
        if not plot:
            line.append(spark([value for _, value in points], width - label_width - 11), "cyan")
        lines.append(line)
        lines += [Text(plot_line, "cyan") for plot_line in plot]
    return lines


def events(picture: Picture, width: int, height: int, name_part: str) -> list[Text]:
    """Return events and alarms, the newest at the top, each on up to four lines."""
    lines = []
    for event in list(picture.events)[: -height - 1 : -1]:
        at = time.strftime("%H:%M:%S ", time.localtime(event.time))
        text_width = max(width - len(at), 8)
        parts = textwrap.wrap(event.text, text_width)[:4] or [""]
        heads = [at, *[" " * len(at)] * (len(parts) - 1)]
        lines += [Text.assemble((start, "dim"), (part, event.style)) for start, part in zip(heads, parts, strict=True)]
    return lines or [Text("nothing yet", "dim")]


class Box(Struct, frozen=True):
    """A box of the screen. ``least_lines``: lines that it has in any case. ``grows``: whether it takes spare lines."""

    title: str
    draw: Draw
    least_lines: int
    grows: bool = False


BOXES = {
    "1": Box("engines", engines, 2), "2": Box("groups", groups, 4, grows=True), "3": Box("trainer", trainer, 4),
    "4": Box("rewards", rewards, 2), "5": Box("waits of the last steps", waits, 3, grows=True),
    "6": Box("curves", curves, 3, grows=True), "7": Box("events and alarms", events, 3, grows=True),
}  # fmt: skip


def head(picture: Picture, width: int) -> Text:
    """Return the first line: state of the run, step, remaining time, and id of the run."""
    status, style = picture.status
    step = picture.live.step if picture.live else max(picture.history, default=0)
    progress = f" step {step}/{picture.steps} " if picture.steps else " "
    line = Text.assemble((f" {status} ", f"{style} reverse"), progress)
    remaining_s = picture.remaining_s()
    if remaining_s and not picture.end_text and not picture.gone:
        line.append(f"{duration(remaining_s)} left ", "dim")
    room = width - len(line)
    return line.append(picture.run_id[: max(room, 0)], "bold")


def screen(picture: Picture, width: int, height: int, hidden: Collection[str] = (), name_part: str = "") -> list[Text]:
    """Return the screen: exactly ``height`` lines of exactly ``width`` cells. ``hidden``: keys of hidden boxes."""
    if width < NARROWEST or height < LOWEST:
        text = f"streamrl top needs {NARROWEST} columns and {LOWEST} lines; there are {width} and {height}"
        return [_fitted(Text(text[start : start + width]), width) for start in range(0, len(text), width)][:height]
    # Keys of the boxes in each column, and of the boxes below the columns.
    below_keys = ""
    if width >= THREE_COLUMNS:
        column_keys = ["12", "345", "67"]
    elif width >= TWO_COLUMNS:
        column_keys = ["12", "3456"]
        below_keys = "7"
    else:
        column_keys = ["3127"]
    columns = [[key for key in keys if key not in hidden] for keys in column_keys]
    columns = [column for column in columns if column]
    below = [key for key in below_keys if key not in hidden]
    below_lines = []
    if below:
        below_height = height // 4 if columns else height - 1
        below_lines = _column(picture, below, width, below_height, name_part)
    room = height - 1 - len(below_lines)
    count = len(columns)
    parts = []
    for index, column in enumerate(columns):
        column_width = width * (index + 1) // count - width * index // count
        if index < count - 1:
            column_width -= 1  # a space separates it from the next column
        parts.append(_column(picture, column, column_width, room, name_part))
    rows = [Text(" ").join(row) for row in zip(*parts, strict=True)]
    empty_lines = [Text()] * (height - 1 - len(rows) - len(below_lines))  # where boxes are hidden
    return [_fitted(line, width) for line in (head(picture, width), *rows, *below_lines, *empty_lines)]


def _column(picture: Picture, keys: Sequence[str], width: int, height: int, name_part: str) -> list[Text]:
    """Return boxes one below the other, in ``height`` lines of ``width`` cells. The last boxes are omitted where they
    do not fit."""
    keys = [key for index, key in enumerate(keys) if 3 * index + 2 <= height]
    heights = {key: BOXES[key].least_lines for key in keys}
    for key in keys:
        box = BOXES[key]
        if not box.grows:
            heights[key] = max(box.least_lines, len(box.draw(picture, width, height, name_part)))
    while keys and (over := sum(heights.values()) + len(keys) - height) > 0:
        largest = max(heights, key=lambda key: heights[key])
        heights[largest] = max(heights[largest] - over, heights[largest] // 2)
    growing = [key for key in keys if BOXES[key].grows] or keys[-1:]
    spare_lines = height - sum(heights.values()) - len(keys)
    for index in range(spare_lines if keys else 0):
        heights[growing[index % len(growing)]] += 1
    lines = []
    for key in keys:
        box_height = heights[key]
        box_lines = BOXES[key].draw(picture, width, box_height, name_part)
        if len(box_lines) > box_height > 1:
            hidden_lines = len(box_lines) - box_height + 1
            box_lines = [*box_lines[: box_height - 1], Text(f"... {hidden_lines} more lines", "dim")]
        box_lines = [*box_lines, *[Text()] * box_height][:box_height]
        title = f"── {key} {BOXES[key].title} "
        if key == "6" and name_part:
            title += f"({name_part}) "
        lines += [Text(f"{title:─<{width}}", "bold blue"), *box_lines]
    return [_fitted(line, width) for line in lines]


def _fitted(line: Text, width: int) -> Text:
    line = line.copy()
    line.truncate(width, overflow="ellipsis", pad=True)
    return line
