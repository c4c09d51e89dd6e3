"""The page of runs as one HTML file, which asks nobody for anything: its scripts, its styles, and as data what it would
fetch, are in it."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec

from streamrl.base.errors import StreamRLError
from streamrl.observe.dashboard.run_view import ANSWERS, RunView, RunViews, recipe_differences
from streamrl.observe.dashboard.sample_rows import SampleFilter, sample_rows

INDEX = "index.html"
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
SAMPLES = 1_000
"""Completions of each run that a report has."""
_ASSET = re.compile(r'<link rel="stylesheet" href="/assets/([\w.]+)">|<script src="/assets/([\w.]+)"></script>')


def page_files() -> dict[str, bytes]:
    """Files of the page by name."""
    folder = files(__package__).joinpath("page")
    found = [file for file in folder.iterdir() if Path(file.name).suffix in TYPES] if folder.is_dir() else []
    return {file.name: file.read_bytes() for file in found}


def report_page(places: Sequence[Path], more: Mapping[str, Any] = MappingProxyType({})) -> bytes:
    """The report on the runs in ``places``. ``more``: further answers of the page, by path. Raises
    ``StreamRLError`` where one of ``places`` has nothing of a run."""
    views = RunViews(places).views()
    for view in views:
        view.refresh()
    answers = {"/api/runs": [view.summary() for view in views], **more}
    numbers = ",".join(str(view.number) for view in views)
    answers["/api/compare"] = answers[f"/api/compare?runs={numbers}"] = {
        "recipe_differences": recipe_differences(views)
    }
    for view in views:
        answers |= _answers(view)
    return _inlined(page_files(), answers)


def _answers(view: RunView) -> dict[str, Any]:
    """Answers to all that the page would fetch of one run, by path."""
    path = f"/api/runs/{view.number}"
    _, parts = view.timeline.block()
    return {
        f"{path}/metrics": view.metrics.answer(-1),
        **{f"{path}/{name}": answer(view) for name, answer in ANSWERS.items()},
        f"{path}/samples": sample_rows(view.files, SampleFilter(), 0, SAMPLES),
        f"{path}/timeline": base64.b64encode(b"".join(parts)).decode(),
    }


def _inlined(page: dict[str, bytes], answers: dict[str, Any]) -> bytes:
    """The page with its files and ``answers`` in it. Only these scripts may run: their hashes are in its policy."""
    if INDEX not in page:
        raise StreamRLError("the files of the page are not installed: install streamrl again")
    # No text of a model can end the script that it is data of, or begin a comment.
    data = msgspec.json.encode(answers).decode().replace("<", "\\u003c")
    scripts = [f"window.STREAMRL_REPORT = {data};"]

    def inline(found: re.Match[str]) -> str:
        style, script = found.groups()
        text = page[style or script].decode()
        if style:
            return f"<style>{text}</style>"
        scripts.append(text.replace("</script", "<\\/script"))
        return f"<script>{scripts[-1]}</script>"

    html = _ASSET.sub(inline, page[INDEX].decode())
    hashes = " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(one.encode()).digest()).decode()}'" for one in scripts)
    policy = f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data:"
    head = f'<meta charset="utf-8">\n<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
    return html.replace("<head>", f"<head>\n{head}<script>{scripts[0]}</script>", 1).encode()
