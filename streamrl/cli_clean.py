"""``streamrl clean [RUN|DIRECTORY ...]``: remove what killed runs left."""

from __future__ import annotations

import tempfile
from pathlib import Path

from streamrl.errors import StreamRLError
from streamrl.processes.remains import find_remains

USUAL_PLACE = Path("runs")


def clean(places: tuple[Path, ...], *, dry_run: bool) -> int:
    """Say what is left of dead runs, and remove it. Exit code 1 where something could not be removed."""
    missing = [place for place in places if not place.is_dir()]
    if missing:
        raise StreamRLError(f"{missing[0]}: no such directory; give a run, or a directory of runs")
    found = find_remains(Path(tempfile.gettempdir()), places or ((USUAL_PLACE,) if USUAL_PLACE.is_dir() else ()))
    for text in found.alive:
        print(f"left alone: {text}")
    for text in found.skipped:
        print(f"not judged: {text}")
    problems = []
    for remains in found.left:
        problem = "" if dry_run else remains.remove()
        problems += [problem] if problem else []
        print(f"{'would remove' if dry_run else 'NOT removed' if problem else 'removed'} {remains.what}")
    for problem in problems:
        print(f"error: {problem}")
    if not found.left:
        print("nothing is left of killed runs")
    return 1 if problems else 0
