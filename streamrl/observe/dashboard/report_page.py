"""The page about runs as one HTML file without further requests: it has its scripts, its styles, and the answers that
the page would fetch. ``streamrl report`` and ``streamrl compare`` call ``report_page`` in their process, and the server
of ``streamrl dashboard`` uses ``page_files``."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from types import MappingProxyType

from msgspec import json

from streamrl.base.errors import StreamRLError
from streamrl.base.types import JsonMapping, JsonObject
from streamrl.observe.dashboard.run_view import ANSWERS, RunView, RunViews, recipe_differences
from streamrl.observe.dashboard.sample_rows import SampleFilter

INDEX = "index.html"
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
SAMPLES = 1_000
"""Completions of each run in a report."""
_ASSET = re.compile(r'<link rel="stylesheet" href="/assets/([\w.]+)">|<script src="/assets/([\w.]+)"></script>')


def page_files() -> dict[str, bytes]:
    """Return the files of the page by name."""
    folder = files(__package__).joinpath("page")
    if not folder.is_dir():
        return {}
    return {file.name: file.read_bytes() for file in folder.iterdir() if Path(file.name).suffix in TYPES}


def report_page(places: Sequence[Path], further_answers: JsonMapping = MappingProxyType({})) -> bytes:
    """Return the report on the runs in ``places``. ``further_answers``: further answers of the page, by path. Raises
    ``StreamRLError`` where one of ``places`` has no file of a run."""
    views = RunViews(places).views()
    for view in views:
        view.refresh()
    answers = {"/api/runs": [view.summary() for view in views], **further_answers}
    numbers = ",".join(str(view.number) for view in views)
    comparison = {"recipe_differences": recipe_differences(views)}
    answers["/api/compare"] = comparison
    answers[f"/api/compare?runs={numbers}"] = comparison
    for view in views:
        answers |= _answers(view)
    return _inlined(page_files(), answers)


def _answers(view: RunView) -> JsonObject:
    """Return the answers to all requests of the page about one run, by path."""
    path = f"/api/runs/{view.number}"
    _, parts = view.timeline.block()
    return {
        f"{path}/metrics": view.metrics.answer(-1),
        **{f"{path}/{name}": answer(view) for name, answer in ANSWERS.items()},
        f"{path}/samples": view.samples(SampleFilter(), 0, SAMPLES),
        f"{path}/timeline": base64.b64encode(b"".join(parts)).decode(),
    }


def _inlined(page: dict[str, bytes], answers: JsonObject) -> bytes:
    """Return the page with its files and ``answers`` in it. Its policy allows only the scripts with these hashes."""
    if INDEX not in page:
        raise StreamRLError("the files of the page are not installed: install streamrl again")
    # Without "<" in the data no text of a model can end the script or begin a comment.
    data = json.encode(answers).decode().replace("<", "\\u003c")
    scripts = [f"window.STREAMRL_REPORT = {data};"]

    def inline(match: re.Match[str]) -> str:
        style, script = match.groups()
        text = page[style or script].decode()
        if style:
            return f"<style>{text}</style>"
        scripts.append(text.replace("</script", "<\\/script"))
        return f"<script>{scripts[-1]}</script>"

    html = _ASSET.sub(inline, page[INDEX].decode())
    digests = [hashlib.sha256(script.encode()).digest() for script in scripts]
    hashes = " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)
    policy = f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data:"
    head = f'<meta charset="utf-8">\n<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
    return html.replace("<head>", f"<head>\n{head}<script>{scripts[0]}</script>", 1).encode()
