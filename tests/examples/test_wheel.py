"""The wheel and the source distribution are complete, and no message of the product needs the tree beside it."""

from __future__ import annotations

import ast
import os
import re
import site
import subprocess
import sys
import tarfile
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
OF_THE_TREE = re.compile(
    r"\bmake (venv|test|demo|docs|lock|compare)\b|\b(benchmarks|campaigns|docs|examples|lint|requirements|tests)/"
)
DISTRIBUTIONS = "from setuptools import build_meta as b; b.build_sdist('dist'); b.build_wheel('dist')"


def texts(path: Path) -> Iterator[str]:
    """Texts of a file that a user may see: strings other than docstrings and texts below a name, or all of a page."""
    if path.suffix != ".py":
        yield path.read_text()
        return
    tree = ast.parse(path.read_text())
    unseen = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in unseen:
            yield node.value


def test_no_message_names_a_file_of_the_tree() -> None:
    """A user of the wheel has no Makefile, docs or examples."""
    files = [path for path in (ROOT / "streamrl").rglob("*") if path.suffix in {".py", ".txt", ".part", ".toml", ".js"}]
    assert len(files) > 500
    assert [(path.name, text) for path in files for text in texts(path) if OF_THE_TREE.search(text)] == []
    assert OF_THE_TREE.search((ROOT / "docs" / "recipe.md").read_text()) is None, "`streamrl explain` prints it"


@pytest.mark.parametrize(("name", "lock"), [("Dockerfile", "cpu.lock"), ("Dockerfile.cuda", "cuda.lock")])
def test_images_copy_what_there_is_and_use_the_lock(name: str, lock: str) -> None:
    text = (ROOT / name).read_text()
    sources = [word for line in re.findall(r"^COPY (.+)$", text, re.MULTILINE) for word in line.split()[:-1]]
    assert f"requirements/{lock}" in sources and f"-r /tmp/{lock}" in text
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    for source in sources:
        assert (ROOT / source).exists() and source.split("/")[0] in kept, source
    # Bookworm's Python is 3.11, which both locks are made for.
    assert "FROM debian:bookworm-slim\n" in text
    assert {"gcc", "python3-dev", "python3-venv"} <= set(text.split())


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the distributions, made from a copy of the files that git has."""
    copy = tmp_path_factory.mktemp("tree")
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
    tar = subprocess.run(["tar", "-c", "--null", "-T", "-"], cwd=ROOT, input=names, capture_output=True, check=True)
    subprocess.run(["tar", "-x"], cwd=copy, input=tar.stdout, check=True)
    subprocess.run([sys.executable, "-W", "ignore", "-c", DISTRIBUTIONS], cwd=copy, capture_output=True, check=True)
    return copy / "dist"


@pytest.mark.long
def test_the_source_distribution_is_the_tree(distributions: Path) -> None:
    [archive] = distributions.glob("*.tar.gz")
    with tarfile.open(archive) as members:
        held = {member.name.partition("/")[2] for member in members if member.isfile()}
    made = {name for name in held if name in {"PKG-INFO", "setup.cfg"} or name.startswith("streamrl.egg-info/")}
    tree = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\n")
    assert held - made == set(tree) - {"", ".ci/run"}


@pytest.mark.long
@pytest.mark.vllm
@pytest.mark.seconds(180)
def test_the_wheel_works_in_an_empty_folder(distributions: Path, tmp_path: Path) -> None:
    """The packages of this environment stand behind the wheel, without the tree."""
    environment = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", environment], check=True)
    [wheel] = distributions.glob("*.whl")
    subprocess.run([environment / "bin" / "pip", "install", "-q", "--no-deps", wheel], check=True)
    [packages] = (environment / "lib").glob("python*/site-packages")
    (packages / "others.pth").write_text("\n".join(site.getsitepackages()))
    folder = tmp_path / "empty"
    folder.mkdir()
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def streamrl(*arguments: str) -> str:
        command = [environment / "bin" / "streamrl", *arguments]
        done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, check=False)
        assert done.returncode == 0, (arguments, done.stdout[-2000:], done.stderr[-2000:])
        return done.stdout

    place = [environment / "bin" / "python", "-c", "import streamrl; print(streamrl.__path__[0])"]
    assert subprocess.check_output(place, cwd=folder, text=True).strip() == str(packages / "streamrl")
    streamrl("check")
    streamrl("init", "counting", "--task", "own", "--model", "tiny", "--warm-up-steps", "30")
    recipe = "counting/recipe.toml"
    streamrl("simulate", recipe, "--steps", "2", "--warm-up", "1", "--fleet", "demo")
    streamrl("try", recipe)
    streamrl("train", recipe, "run.steps=1")
    streamrl("report", "runs/latest", "--out", "report.html")
    assert "uPlot" in (folder / "report.html").read_text()
    command = [environment / "bin" / "streamrl", "dashboard", "--port", "0"]
    with subprocess.Popen(command, cwd=folder, env=variables, stdout=subprocess.PIPE, text=True) as dashboard:
        assert dashboard.stdout is not None
        [address] = re.findall(r"http://\S+", dashboard.stdout.readline())
        assert b"<title>" in urllib.request.urlopen(address).read()
        dashboard.terminate()
