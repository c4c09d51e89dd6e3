"""Error texts for names of a recipe that the Hub does not give, each with the command that mends it. ``fetch`` calls
``sentence`` in the process that asks the Hub."""

from __future__ import annotations

import errno
import re

from huggingface_hub import constants, errors, get_token

from streamrl.recipe.remote_names import HubName

_SHORT_COMMIT = re.compile(r"[0-9a-f]{7,39}")
_LATER = "try again later, or set HF_ENDPOINT to a mirror"


def sentence(error: BaseException, name: HubName) -> str:
    """The reason why ``name`` cannot be downloaded, and the remedy."""
    hub = re.sub(r"(?<=://)[^/@]+@", "", constants.ENDPOINT)  # a password may stand in it
    link = f"{hub}/datasets/{name.repository}" if name.dataset else f"{hub}/{name.repository}"
    login = "run `hf auth login`"
    if get_token():
        login += " with another token"
    causes = [error, *filter(None, (error.__cause__, error.__context__))]
    status = next((cause.response.status_code for cause in causes if isinstance(cause, errors.HfHubHTTPError)), 0)
    absent = f"{name} is {'not' if name.dataset else 'neither a folder nor'} in {constants.HF_HUB_CACHE}"
    if isinstance(error, errors.GatedRepoError):  # a RepositoryNotFoundError, too
        return f"{name.repository} of the Hub is gated: ask for access at {link}, then {login}"
    if isinstance(error, errors.RevisionNotFoundError):
        full = "a commit is written with all its 40 digits" if _SHORT_COMMIT.fullmatch(name.revision) else "correct it"
        return f'{name.repository} of the Hub has no revision "{name.revision}": {full} ({link}/commits/main)'
    if isinstance(error, errors.RepositoryNotFoundError):
        token = "the token that is set may not read it" if get_token() else "it is private and no token is set"
        other = "models stand in model.path" if name.dataset else 'data sets are named "hf:owner/name" in prompts.train'
        return f"{absent}, and the Hub has no {name.kind} of that name, or {token}: correct it ({other}), or {login}"
    if any(isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT) for cause in causes):
        return no_room(name)
    if constants.HF_HUB_OFFLINE or isinstance(error, errors.OfflineModeIsEnabled):
        return f"HF_HUB_OFFLINE is set and {absent}: unset it to ask the Hub, or copy a cache of {name.command}"
    if status == 401:
        return f"the Hub does not know the token that is set: {login}"
    if status == 429:
        return f"the Hub answers 429 (too many requests) and {absent}: {login}, or try again later"
    if status:
        return f"the Hub at {hub} answers {status} and {absent}: {_LATER}"
    if any("Timeout" in type(cause).__name__ for cause in causes):
        return f"the Hub at {hub} does not answer and {absent}: {_LATER}, or give it more seconds (HF_HUB_ETAG_TIMEOUT)"
    if isinstance(error, errors.LocalEntryNotFoundError) or any("Connect" in type(cause).__name__ for cause in causes):
        remedy = f"run {name.command} where there is a network and copy its cache"
        return f"the Hub at {hub} cannot be reached and {absent}: {remedy}, or set HF_ENDPOINT to a mirror"
    first = (str(error).strip().splitlines() or [""])[0][:200]
    return f"{name} cannot be had from the Hub ({type(error).__name__}: {first}): try again, or {name.command}"


def no_room(name: HubName, needed: int = 0, free: int = 0) -> str:
    """The error text for a disk that is full, or would be. ``needed``, ``free``: bytes; 0 where they are not known."""
    problem = f"{constants.HF_HUB_CACHE} has no room for {name.repository} of the Hub"
    if needed:
        problem += f" ({needed / 1e9:.2f} GB are needed, {free / 1e9:.2f} GB are free)"
    return f"{problem}: make room there, or set HF_HOME to another disk; whole files are kept"
