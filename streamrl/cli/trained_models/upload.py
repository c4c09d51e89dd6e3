"""Uploads an exported model to the Hub through ``huggingface_hub``. Called by ``streamrl push`` in the command's own
process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from streamrl.base.errors import InputError, StreamRLError

ANSWER_S = 2.5
"""Time limit of the request for the account that is logged in."""
_WEIGHTS = ["*.safetensors", "*.safetensors.index.json"]
"""Files of earlier pushes to delete: loaders would read them beside the new ones."""


def authenticated(name: str) -> str:
    """Return the full name of the repository: ``name``, with the logged-in account as owner where it has none. Called
    before anything is created or uploaded. Raises ``StreamRLError`` where nobody is logged in, or the Hub cannot be
    reached."""
    from huggingface_hub import HfApi, get_session
    from huggingface_hub.utils._validators import validate_repo_id

    with _explained(name):
        validate_repo_id(name)
        get_session().timeout = ANSWER_S
        user = HfApi().whoami()["name"]  # create_repo succeeds without a token where the repository is there
        get_session().timeout = None
    return name if "/" in name else f"{user}/{name}"


def upload(folder: Path, name: str, *, private: bool, message: str) -> tuple[str, str]:
    """Create the repository if it is missing, and upload the folder as one commit. Returns the repository's address and
    the commit. Raises ``StreamRLError``, also for a public repository where ``private`` is set."""
    from huggingface_hub import HfApi

    api = HfApi()
    with _explained(name):
        api.create_repo(name, private=private, exist_ok=True)
        if private and not api.model_info(name).private:
            raise InputError(f"{name} is public: push to another name, or say that it may be: --public")
        commit = api.upload_folder(
            repo_id=name, folder_path=folder, commit_message=message, delete_patterns=_WEIGHTS, run_as_future=False
        )
    return f"{api.endpoint}/{name}", commit.oid


@contextmanager
def _explained(name: str) -> Iterator[None]:
    """Replace exceptions of the Hub's client by a ``StreamRLError`` with the remedy."""
    from huggingface_hub import constants, errors

    refusals = {
        401: "the Hub does not know the token: `hf auth login` with one that may write (HF_TOKEN goes before it)",
        403: f"the account may not write to {name}: push to a name of your own, or take a token that may write",
    }
    try:
        yield
    except errors.LocalTokenNotFoundError as error:
        raise StreamRLError("nobody is logged in to the Hub: `hf auth login` with a token that may write") from error
    except errors.HFValidationError as error:
        raise InputError(f"{name!r} is no name on the Hub: write owner/name ({error})") from error
    except errors.HfHubHTTPError as error:
        message = error.server_message or str(error).partition("\n")[0]
        text = refusals.get(error.response.status_code, f"the Hub refuses {name}: {message}")
        raise StreamRLError(text) from error
    except (errors.HTTPError, OSError) as error:  # type: ignore[attr-defined]  # no response
        remedy = "look at the network, HF_ENDPOINT and HF_HUB_OFFLINE"
        raise StreamRLError(f"the Hub cannot be reached at {constants.ENDPOINT} ({error}): {remedy}") from error
