"""No secret is written where other people read."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.observe.run_files.redaction import Redaction, is_secret_name, run_redaction
from streamrl.recipe.rewards import Reward

RECIPE = """
[sampling]
max_tokens = 64
[[rewards]]
function = "judge"
variables = ["OPINION"]
[rewards.options]
api_key = "swordfish-1234"
api_key_variable = "JUDGE_KEY"
tokens_column = "token_column"
"""
VARIABLES = {
    "HF_TOKEN": "canary-of-the-hub",
    "WANDB_API_KEY": "canary-of-the-tracker",
    "OPINION": "canary-of-a-reward",
    "HOME": "/home/somebody",
    "SSH_AUTH_SOCK": "/run/user/1000/agent",
    "TOKENIZERS_PARALLELISM": "false",
}


def test_values_of_secret_names_are_replaced_by_their_names() -> None:
    clean = run_redaction(VARIABLES, RECIPE).text(
        "canary-of-the-hub canary-of-the-tracker canary-of-a-reward swordfish-1234 false token_column /home/somebody"
    )
    assert clean == (
        "[HF_TOKEN removed] [WANDB_API_KEY removed] [OPINION removed] [rewards.0.options.api_key removed] "
        "false token_column /home/somebody"
    )


def test_secrets_of_unlisted_rewards_are_replaced_too() -> None:
    """Secrets of rewards that the recipe does not have are replaced, too."""
    options = {"headers": [{"access_token": "swordfish-5678"}], "api_key_variable": "LATER_KEY", "style": "terse-style"}
    attached = Reward(function="judges.py:strict", options=options, variables=("OPINION_TOO",))
    variables = VARIABLES | {"LATER_KEY": "canary-of-a-judge", "OPINION_TOO": "canary-of-another"}
    clean = run_redaction(variables, RECIPE, [attached]).text(
        "swordfish-1234 swordfish-5678 canary-of-a-judge canary-of-another terse-style"
    )
    assert clean == (
        "[rewards.0.options.api_key removed] [rewards.strict.headers.0.access_token removed] [LATER_KEY removed] "
        "[OPINION_TOO removed] terse-style"
    )


@pytest.mark.parametrize(
    "leak",
    [
        "hf_abcdefghijklmnopqrstuvwx",
        "sk-proj-abcdefghijklmnop1234",
        "Authorization: Bearer abcdefgh12345678",
        "https://somebody:swordfish@example.org/model",
        "-----BEGIN PRIVATE KEY-----\nabc\n-----END PRIVATE KEY-----",
    ],
)
def test_shapes_of_keys_are_removed_wherever_they_come_from(leak: str) -> None:
    clean = Redaction({}).text(f"before {leak} after")
    assert "[secret removed]" in clean and clean.startswith("before ") and clean.endswith(" after")
    assert not any(part in clean for part in ("abcdefgh", "swordfish", "abc\n"))


def test_a_secret_that_begins_like_another_one_is_removed_whole() -> None:
    assert Redaction({"swordfish": "A", "swordfish-longer": "B"}).text("swordfish-longer") == "[B removed]"


@pytest.mark.parametrize("name", ["OPENAI_API_KEY", "aws_secret_access_key", "DB_PASSWORD", "api_key", "GH_TOKEN"])
def test_names_of_secrets(name: str) -> None:
    assert is_secret_name(name)


@pytest.mark.parametrize("name", ["max_tokens_seen", "KEYBOARD", "MONKEY", "kv_tokens_free", "PATH", "compass"])
def test_names_of_other_things(name: str) -> None:
    assert not is_secret_name(name)


@given(st.lists(st.text(min_size=6, max_size=12), min_size=1, max_size=4), st.text(), st.text())
def test_no_known_secret_survives_anywhere(secrets: list[str], before: str, after: str) -> None:
    """Removed in one pass: what is put in its place is never looked at again."""
    redaction = Redaction(dict.fromkeys(secrets, "S"))
    longest = max(secrets, key=lambda secret: len(secret.encode(errors="replace")))
    content = redaction.clean(f"{before}\0{longest}\0{after}".encode(errors="replace"))
    assert f"\0{longest}\0".encode(errors="replace") not in content
