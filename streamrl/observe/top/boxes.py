"""The boxes of the screen as lines of text, and their places. Every line is at most as wide as its box. Pure."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Callable, Collection, Sequence

import msgspec
from rich.text import Text

from streamrl.observe.terminal.curve import Curve, terminal_plot
from streamrl.observe.terminal.step_line import duration, percent, short_count
from streamrl.observe.top.picture import Picture

NARROWEST = 36
LOWEST = 10
TWO_COLUMNS = 72
THREE_COLUMNS = 150
LEVELS = "▁▂▃▄▅▆▇█"
STATES = {
    "racing": "yellow", "ready": "cyan", "batch": "green", "paused": "magenta", "deferred": "blue", "dropped": "red",
}  # fmt: skip
MARKS = {"s": "yellow", "w": "dim", "e": "bright_green", "r": "magenta", "p": "blue", "d": "green", "c": "red"}
REASONS = {
    "sampling": ("S", "black on cyan"), "tail": ("t", "black on yellow"), "reward": ("R", "black on magenta"),
    "training": ("T", "black on green"), "push": ("P", "white on blue"), "evaluation": ("E", "black on white"),
    "checkpoint": ("C", "black on bright_blue"), "prompts": ("q", "black on bright_yellow"),
    "recovery": ("r", "white on red"), "engine_start": ("s", "black on bright_red"),
    "paused": ("-", "black on bright_white"), "shutdown": ("x", "dim"), "environment": ("e", "black on bright_green"),
}  # fmt: skip
OTHER = ("c", "")
Draw = Callable[[Picture, int, int, str], list[Text]]


def bar(share: float, width: int, style: str) -> Text:
    """A bar of ``width`` cells, filled to ``share``."""
    eighths = round(max(0.0, min(share, 1.0)) * width * 8)
    filled = "█" * (eighths // 8) + ("▏▎▍▌▋▊▉"[eighths % 8 - 1] if eighths % 8 else "")
    return Text.assemble((filled, style), ("·" * (width - len(filled)), "dim"))


def spark(values: Sequence[float], width: int) -> str:
    """The last ``width`` values as one line of blocks."""
    shown = values[-width:] if width > 0 else []
    low = min(shown, default=0.0)
    high = max(shown, default=0.0)
    return "".join(LEVELS[round((value - low) / (high - low) * 7)] if high > low else LEVELS[3] for value in shown)


def engines(picture: Picture, width: int, height: int, wanted: str) -> list[Text]:
    """A line an engine: slots in use, waiting requests, KV cache, tokens a second."""
    rows = picture.live.engines if picture.live else []
    name = min(max((len(row.name) for row in rows), default=6), width - 27)
    room = width - name - 27
    lines = [Text(f"{'':{name}}{'slots':>10}{'wait':>5}{'KV':>5}{'tok/s':>6}", "dim")]
    for row in rows:
        used = f"{row.running}/{row.slots or '?'}"
        text = f"{row.name[-name:]:{name}}{used:>10}{row.waiting:>5}{percent(row.kv):>5}{short_count(row.tokens_s):>6} "
        used_bar = bar(row.running / row.slots, room, "cyan") if row.slots and room > 3 else ""
        lines.append(Text.assemble(text, used_bar if row.serves else "freed") if row.serves or room > 4 else Text(text))
        lines[-1].stylize("" if row.serves else "dim")
    return lines


def groups(picture: Picture, width: int, height: int, wanted: str) -> list[Text]:
    """A bar a group: the tokens of its longest member against the budget, members done, their lengths."""
    if (live := picture.live) is None:
        return []
    counts = {state: sum(row.state == state for row in live.groups) for state in STATES}
    head = "  ".join(f"{state} {count}" for state, count in counts.items() if count) or "none under way"
    head += f"  ({live.environment} trajectories in their environments)" if live.environment else ""
    lines = [Text(f"{head}  of {short_count(live.budget)} tok" if live.groups else head, "dim")]
    members = min(max((len(row.marks) for row in live.groups), default=0), 16) if width >= 56 else 0
    room = max(width - 32 - members, 3)
    for row in live.groups:
        style = STATES.get(row.state, "")
        cut = row.size - len(row.marks)
        done = f"{row.marks.count('d') + row.marks.count('c')}/{row.keep}" + (f"-{cut}" if cut else "")
        longest = max(row.tokens, default=0)
        whole = bar(longest / max(live.budget, 1), room, style)
        line = Text.assemble((f"{row.id:>5} ", "dim"), whole, f"{short_count(longest):>5} tok {done:<6} ")
        line.append(f"{row.state:<9}", style)
        for tokens, mark in zip(row.tokens[:members], row.marks, strict=False):
            level = LEVELS[min(int(tokens / max(live.budget, 1) * 8), 7)]
            line.append("·" if mark == "w" else level, MARKS.get(mark, ""))
        lines.append(line)
    return lines


def trainer(picture: Picture, width: int, height: int, wanted: str) -> list[Text]:
    """State of the trainer, what the run waits for and since when, and how full the batch is."""
    if (live := picture.live) is None:
        return []
    doing = "trains" if "step" in live.pending else "idle"
    others = [name for name in live.pending if name != "step"]
    style = REASONS.get(live.waits_for, ("", ""))[1]
    first = Text.assemble(f"{doing}, waits for ", (live.waits_for, style), f" {duration(live.waits_s)}")
    full = f" batch {live.filled}/{live.target}"
    kind = f"round {live.round_kind} x{live.group_size}" if live.round_kind else "no round open"
    last = picture.last
    took = last.get("time/step_s")
    rate = short_count(last.get("perf/train_tok_s") or 0.0)
    speed = f"last step {duration(took)}, {rate} tok/s trained" if took else "no step yet"
    also = Text(f"under way: {', '.join(others)}" if others else f"live version {live.live_version}, {kind}")
    filled = bar(live.filled / max(live.target, 1), max(width - len(full), 3), "green")
    return [first, Text.assemble(filled, full), also, Text(speed)]


def rewards(picture: Picture, width: int, height: int, wanted: str) -> list[Text]:
    """The queue, failures and latencies of rewards."""
    last = picture.last
    live = picture.live
    functions = sorted({name.split("/")[2] for name in last if name.startswith("reward/func/")})
    line = f"{live.scoring if live else 0} waiting"
    if "reward/latency_p95_s" in last:
        line += f"; p50 {duration(last['reward/latency_p50_s'])}, p95 {duration(last['reward/latency_p95_s'])}"
    lines = [Text(line)]
    for name in functions:
        of = f"reward/func/{name}/"
        failed = sum(last.get(f"{of}{kind}_total", 0) for kind in ("raised", "timed_out", "not_finite", "wrong_type"))
        text = f" p95 {duration(last.get(f'{of}latency_p95_s', 0.0)):>6}  failed {failed:.0f}"
        value = f" {last.get(f'{of}mean', float('nan')):.3f}"
        lines.append(Text(f"{name[: width - len(text) - len(value)]}{value}{text}", "red" if failed else ""))
    return lines


def waits(picture: Picture, width: int, height: int, wanted: str) -> list[Text]:
    """A stacked bar a step, as long as the step took: what the run waited for."""
    rows = picture.waits(max(height - 1, 1))
    longest = max((seconds for _, seconds, _ in rows), default=0.0)
    whole = sum(seconds for _, seconds, _ in rows)
    if not longest:
        return [Text("no step yet", "dim")]
    total: dict[str, float] = {}
    lines = []
    for step, seconds, shares in reversed(rows):
        line = Text(f"{step:>5} {duration(seconds):>6} ")
        room = max(width - 13, 1)
        ended = 0.0
        for reason, share in shares.items():
            total[reason] = total.get(reason, 0.0) + share * seconds / whole
            start = ended
            ended = ended + share * seconds / longest
            letter, style = REASONS.get(reason, OTHER)
            line.append(letter * (round(ended * room) - round(start * room)), style)
        lines.append(line)
    legend = [Text()]
    for reason, share in sorted(total.items(), key=lambda one: -one[1]):
        letter, style = REASONS.get(reason, OTHER)
        if len(legend[-1]) + len(reason) + 8 > width:
            legend.append(Text())
        legend[-1].append(letter, style).append(f" {reason} {percent(share)}  ")
    return [*legend[: 1 if height < 4 else 2], *lines][:height]


def curves(picture: Picture, width: int, height: int, wanted: str) -> list[Text]:
    """Curves of the metrics that are ``wanted``: plots where there is room for all, else a line each."""
    names = picture.names(wanted)
    each = height // max(len(names), 1)
    lines = [] if names else [Text(f"no metric has {wanted!r} in its name" if wanted else "no step yet", "dim")]
    for name in names:
        points = picture.points(name)
        value = f"{points[-1][1]:.4g}" if points else "-"
        curve = Curve(name, points, marked=name.startswith("eval/"))
        plot = terminal_plot([curve], width=width - 12, height=each - 4) if each >= 7 else []
        label = min(max(map(len, names)), max(width // 2, 22))
        blocks = "" if plot else spark([value for _, value in points], width - label - 11)
        lines.append(Text.assemble((f"{name[-label:]:{label}}", "bold"), f"{value:>9}  ", (blocks, "cyan")))
        lines += [Text(line, "cyan") for line in plot]
    return lines


def events(picture: Picture, width: int, height: int, wanted: str) -> list[Text]:
    """Events and alarms, the newest at the top, each on up to four lines."""
    lines: list[Text] = []
    for one in list(picture.events)[: -height - 1 : -1]:
        at = time.strftime("%H:%M:%S ", time.localtime(one.time))
        rest = max(width - len(at), 8)
        parts = textwrap.wrap(one.text, rest)[:4] or [""]
        heads = [at, *[" " * len(at)] * (len(parts) - 1)]
        lines += [Text.assemble((start, "dim"), (part, one.style)) for start, part in zip(heads, parts, strict=True)]
    return lines or [Text("nothing yet", "dim")]


class Box(msgspec.Struct, frozen=True):
    """``least``: lines that it has in any case; ``grows``: it takes what is left."""

    title: str
    draw: Draw
    least: int
    grows: bool = False


BOXES = {
    "1": Box("engines", engines, 2), "2": Box("groups", groups, 4, grows=True), "3": Box("trainer", trainer, 4),
    "4": Box("rewards", rewards, 2), "5": Box("waits of the last steps", waits, 3, grows=True),
    "6": Box("curves", curves, 3, grows=True), "7": Box("events and alarms", events, 3, grows=True),
}  # fmt: skip


def head(picture: Picture, width: int) -> Text:
    """The first line: run, step, time left, and what the run does as a whole."""
    status, style = picture.status
    step = picture.live.step if picture.live else max(picture.history, default=0)
    left = picture.left_s()
    done = f" step {step}/{picture.steps} " if picture.steps else " "
    rest = f"{duration(left)} left " if left and not picture.ended and not picture.gone else ""
    line = Text.assemble((f" {status} ", f"{style} reverse"), done, (rest, "dim"))
    room = width - len(line)
    return line.append(picture.run_id[: max(room, 0)], "bold")


def screen(picture: Picture, width: int, height: int, hidden: Collection[str] = (), wanted: str = "") -> list[Text]:
    """The whole screen: exactly ``height`` lines of exactly ``width`` cells."""
    if width < NARROWEST or height < LOWEST:
        text = f"streamrl top needs {NARROWEST} columns and {LOWEST} lines; there are {width} and {height}"
        return [_fitted(Text(text[start : start + width]), width) for start in range(0, len(text), width)][:height]
    if width >= THREE_COLUMNS:
        places = ["12", "345", "67"]
        below = ""
    else:
        places, below = (["12", "3456"], "7") if width >= TWO_COLUMNS else (["3127"], "")
    columns = [kept for place in places if (kept := [key for key in place if key not in hidden])]
    lower = [key for key in below if key not in hidden]
    under = _column(picture, lower, width, height // 4 if columns else height - 1, wanted) if lower else []
    room = height - 1 - len(under)
    shares = len(columns)
    parts = []
    for place, column in enumerate(columns):
        wide = width * (place + 1) // shares - width * place // shares - (place < shares - 1)
        parts.append(_column(picture, column, wide, room, wanted))
    rows = [Text(" ").join(row) for row in zip(*parts, strict=True)]
    empty = [Text()] * (height - 1 - len(rows) - len(under))  # where boxes are hidden
    return [_fitted(line, width) for line in (head(picture, width), *rows, *under, *empty)]


def _column(picture: Picture, keys: Sequence[str], width: int, height: int, wanted: str) -> list[Text]:
    """Boxes under each other, in ``height`` lines of ``width`` cells. What does not fit is left out from the end."""
    keys = [key for place, key in enumerate(keys) if 3 * place + 2 <= height]
    heights = {
        key: max(BOXES[key].least, 0 if BOXES[key].grows else len(BOXES[key].draw(picture, width, height, wanted)))
        for key in keys
    }
    while keys and (over := sum(heights.values()) + len(keys) - height) > 0:
        largest = max(heights, key=lambda key: heights[key])
        heights[largest] = max(heights[largest] - over, heights[largest] // 2)
    growing = [key for key in keys if BOXES[key].grows] or keys[-1:]
    for place in range(height - sum(heights.values()) - len(keys) if keys else 0):
        heights[growing[place % len(growing)]] += 1
    lines: list[Text] = []
    for key in keys:
        inner = BOXES[key].draw(picture, width, heights[key], wanted)
        if len(inner) > heights[key] > 1:
            inner = [*inner[: heights[key] - 1], Text(f"... {len(inner) - heights[key] + 1} more lines", "dim")]
        inner = [*inner, *[Text()] * heights[key]][: heights[key]]
        title = f"── {key} {BOXES[key].title} " + (f"({wanted}) " if key == "6" and wanted else "")
        lines += [Text(f"{title:─<{width}}", "bold blue"), *inner]
    return [_fitted(line, width) for line in lines]


def _fitted(line: Text, width: int) -> Text:
    line = line.copy()
    line.truncate(width, overflow="ellipsis", pad=True)
    return line
