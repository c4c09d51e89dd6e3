"""S5: key files are for their owner alone, are never printed, and are refused when they are not as they should be."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
from builders.recipe import small_recipe

from streamrl.base.errors import StreamRLError
from streamrl.cli.main import main
from streamrl.comm.transport_keys import (
    KEY_ROLE,
    KEYS_DIRECTORY,
    OPEN_TO_ALL,
    KeyRole,
    make_keys,
    process_keys,
    public_keys,
    read_role_keys,
    transport_variables,
)
from streamrl.recipe.rules.load_recipe import dump_recipe
from streamrl.recipe.sections import Recipe, Reward, Transport, TransportSecurity
from streamrl.recipe.topology import Role
from streamrl.rewards.calls.inspect import inspect_in_subprocess


def recipe(**transport: object) -> Recipe:
    return small_recipe(transport=Transport(**transport))  # type: ignore[arg-type]


def test_key_files_are_private_and_never_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The command makes files that only their owner can read, and prints no key."""
    previous = os.umask(0)  # whatever the umask is
    try:
        assert main(["keys", str(tmp_path / "new" / "keys")]) == 0
    finally:
        os.umask(previous)
    directory = tmp_path / "new" / "keys"
    files = sorted(directory.iterdir())
    assert [file.name for file in files] == sorted(f"{r}.{k}" for r in KeyRole for k in ("secret", "public"))
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}
    contents = [file.read_text().strip() for file in files]
    assert len(set(contents)) == 8, "all are different"
    printed = "".join(capsys.readouterr())
    assert not [key for key in contents if key in printed]
    assert main(["keys", str(directory)]) == 2
    assert "is there already" in capsys.readouterr().err
    assert [file.read_text().strip() for file in files] == contents, "nothing was written over"


def test_keys_do_not_show_in_a_repr_or_a_recipe(keys: Path) -> None:
    pair = read_role_keys(keys, KeyRole.ENGINE)
    assert repr(pair) == f"RoleKeys(engine in {keys})" == str(pair)
    assert pair.secret.decode() not in dump_recipe(recipe(keys=str(keys)))


@pytest.mark.parametrize(
    ("file", "fault", "said"),
    [
        ("engine.secret", 0o640, "engine.secret is open to other users .mode 640.: chmod go="),
        (".", 0o750, "is open to other users .mode 750."),
        ("engine.secret", None, "engine.secret cannot be read"),
        ("engine.public", None, "engine.public cannot be read"),
        ("engine.public", "\n", "holds no key: nobody could be let in"),
        ("engine.secret", "abc\n", "a line of 3 characters: a key has 40"),
        ("engine.secret", "{engine.secret}" * 2, "holds 2 keys: one is expected"),
        ("engine.secret", "~" * 40, "holds no CURVE key"),
        ("engine.public", "{trainer.public}", "does not name the public half"),
    ],
)
def test_keys_that_are_not_as_they_should_be_are_refused(
    keys: Path, file: str, fault: int | str | None, said: str
) -> None:
    """``fault``: the mode of the file, its content (``{NAME}``: that of another file), or None: it is gone."""
    match fault:
        case int():
            (keys / file).chmod(fault)
        case None:
            (keys / file).unlink()
        case str():
            for other in keys.iterdir():
                fault = fault.replace(f"{{{other.name}}}", other.read_text())
            (keys / file).write_text(fault)
    with pytest.raises(StreamRLError, match=said):
        read_role_keys(keys, KeyRole.ENGINE)


def test_each_role_gets_its_own_keys_and_others_get_none(keys: Path) -> None:
    given = recipe(keys=str(keys))
    for role in Role:
        told = transport_variables(given, role)
        if role in (Role.REWARD, Role.ENVIRONMENT, Role.JUDGE, Role.TEACHER):
            assert not any(told.values())
            assert set(told) == {KEYS_DIRECTORY, KEY_ROLE, OPEN_TO_ALL}, "and what was inherited is taken away"
        else:
            assert told == {KEYS_DIRECTORY: str(keys), KEY_ROLE: role.value, OPEN_TO_ALL: ""}
    assert transport_variables(recipe(security=TransportSecurity.NONE), Role.ENGINE)[OPEN_TO_ALL] == "none"
    with pytest.raises(StreamRLError, match="streamrl keys DIRECTORY"):
        transport_variables(recipe(keys=str(keys / "nowhere")), Role.TRAINER)


def test_a_reward_that_is_looked_at_sees_no_tokens_and_no_keys(
    keys: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S15: before a run its functions are imported in a process of their own, with what they will find later."""
    for name, value in {
        KEYS_DIRECTORY: str(keys),
        KEY_ROLE: "controller",
        "HF_TOKEN": "x",
        "WANDB_API_KEY": "x",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("NAMED_IN_THE_RECIPE", "1")
    module = tmp_path / "curious.py"
    module.write_text(
        "import os\n"
        f"seen = {{'{KEYS_DIRECTORY}', '{KEY_ROLE}', 'HF_TOKEN', 'WANDB_API_KEY'}} & set(os.environ)\n"
        "assert not seen, seen\n"
        "assert os.environ['NAMED_IN_THE_RECIPE'] == '1'\n"
        "def score(completion): return 1.0\n"
    )
    reward = Reward(function=f"{module}:score", variables=("NAMED_IN_THE_RECIPE",))
    (inspection,) = inspect_in_subprocess([reward])
    assert inspection.problems == ()


def test_a_role_that_nobody_has_is_refused(keys: Path) -> None:
    with pytest.raises(StreamRLError, match="must be one of controller, engine, trainer, observer"):
        process_keys({KEYS_DIRECTORY: str(keys), KEY_ROLE: "reward"})
    assert process_keys({KEY_ROLE: "engine"}) is None


def test_a_host_may_have_a_pair_of_its_own(keys: Path, tmp_path: Path) -> None:
    """As the documentation says to give a host its own pair: its public key is one more line."""
    host = tmp_path / "host"
    make_keys(host)
    own = public_keys(host, KeyRole.ENGINE)[0]
    shared = (keys / "engine.public").read_bytes() + own + b"\n"
    (keys / "engine.public").write_bytes(shared)
    for role in KeyRole:
        (host / f"{role}.public").write_bytes((keys / f"{role}.public").read_bytes())
    assert read_role_keys(host, KeyRole.ENGINE).public == own == public_keys(keys, KeyRole.ENGINE)[1]
