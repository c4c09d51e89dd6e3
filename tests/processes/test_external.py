"""What torchrun's environment makes of ``streamrl serve trainer``. A real one: ``tests/learning/test_ranks.py``."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest
from builders import small_recipe

from streamrl.base.errors import RecipeError
from streamrl.cli.main import main
from streamrl.launch import external
from streamrl.processes.child import ChildContext
from streamrl.learning.state.durable_files import flush_and_digest, write_digests
from streamrl.recipe.sections import Training, Transport, TransportKind
from streamrl.recipe.topology import RENDEZVOUS, Role

TORCHRUN = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
RECIPE = small_recipe(training=Training(ranks=2), transport=Transport(kind=TransportKind.TCP))


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[ChildContext]:
    """What would be run, under torchrun as rank 1 of 2."""
    contexts: list[ChildContext] = []
    monkeypatch.setattr(external, "run_role", lambda context, main: contexts.append(context))
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    return contexts


def test_torchrun_gives_rank_and_rendezvous(served: list[ChildContext], monkeypatch: pytest.MonkeyPatch) -> None:
    external.serve_external(Role.TRAINER, RECIPE)
    external.serve_external(Role.TRAINER, RECIPE, 1)  # said twice, equally
    external.serve_external(Role.ENGINE, RECIPE)  # an engine is nobody's rank
    monkeypatch.delenv("MASTER_ADDR")  # a RANK that some scheduler left behind does not make it torchrun
    external.serve_external(Role.TRAINER, RECIPE)
    assert [context.plan.name for context in served] == ["trainer-1", "trainer-1", "engine-0", "trainer-0"]
    meeting = [context.topology.endpoints[RENDEZVOUS] for context in served]
    assert meeting[:2] == ["env://"] * 2
    assert all(place.startswith("tcp://127.0.0.1:") for place in meeting[2:])


def test_a_rank_of_a_run_that_goes_on_begins_from_its_newest_checkpoint(
    served: list[ChildContext], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one that is whole, of that very run: ``latest`` may name another one before the trainer has read it."""
    pytest.importorskip("torch")
    from streamrl.launch import roles
    from streamrl.learning import trainer as trainer_module
    from streamrl.learning.options import TrainerOptions

    begun: list[str] = []

    class Begun(Exception):
        pass

    def begin(options: TrainerOptions, *_: Any) -> None:
        begun.append(options.resume_from)
        raise Begun

    monkeypatch.setattr(trainer_module, "TorchTrainer", begin)
    run, latest = tmp_path / "run-1", tmp_path / "latest"
    for name, damaged in (("step-000002", False), ("step-000004", True)):
        checkpoint = run / "checkpoints" / name
        checkpoint.mkdir(parents=True)
        (checkpoint / "trainer.msgpack").write_bytes(b"state")
        write_digests(checkpoint, [flush_and_digest(checkpoint, ["trainer.msgpack"])])
        if damaged:
            (checkpoint / "trainer.msgpack").write_bytes(b"torn")
    latest.symlink_to(run.name)
    external.serve_external(Role.TRAINER, RECIPE, None, latest)
    external.serve_external(Role.TRAINER, RECIPE, None, None)
    for context in served:
        with pytest.raises(Begun):
            anyio.run(roles.run_trainer, context)
    assert begun == [str(run / "checkpoints" / "step-000002"), ""]
    assert served[0].run_directory == run


def test_torchrun_that_contradicts_the_recipe_is_refused(served: list[ChildContext]) -> None:
    with pytest.raises(RecipeError, match=re.escape("--index 0, but torchrun made this process rank 1")):
        external.serve_external(Role.TRAINER, RECIPE, 0)
    with pytest.raises(RecipeError, match=re.escape("training.ranks: 4, but torchrun starts 2")):
        external.torchrun_rank(TORCHRUN, 4)
    assert served == []


def test_a_rank_on_another_host_is_refused_and_an_engine_is_not(served: list[ChildContext]) -> None:
    elsewhere = msgspec.structs.replace(RECIPE, transport=Transport(kind=TransportKind.TCP, host="192.0.2.7", keys="k"))
    with pytest.raises(RecipeError, match=r"trainer rank 1 is for 192.0.2.7, no address of this host"):
        external.serve_external(Role.TRAINER, elsewhere)
    external.serve_external(Role.ENGINE, elsewhere)
    here = msgspec.structs.replace(elsewhere.transport, training_hosts=("192.0.2.8", "127.0.0.2"))
    external.serve_external(Role.TRAINER, msgspec.structs.replace(elsewhere, transport=here))
    assert [context.plan.name for context in served] == ["engine-0", "trainer-1"]


def test_the_command_line_hands_on_what_was_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether there was an index, and whether it was the recipe or the directory of a run."""
    asked: list[tuple[int | None, Path | None]] = []
    monkeypatch.setattr("streamrl.cli.serve.serve_external", lambda role, recipe, *given: asked.append(given))
    monkeypatch.setattr("streamrl.cli.serve.load_recipe", lambda path, overrides: RECIPE)
    assert main(["serve", "trainer", "recipe.toml"]) == main(["serve", "trainer", "recipe.toml", "--index", "0"]) == 0
    assert main(["serve", "trainer", str(tmp_path)]) == 0
    assert asked == [(None, None), (0, None), (None, tmp_path)]
