"""``streamrl export`` and ``push``: the model of a run as a folder, and on the Hub. Runs in the command's own process;
the run may go on meanwhile."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated

from streamrl.cli.command import Argument, Command, RunPath
from streamrl.cli.trained_models.exported_model import export_model
from streamrl.cli.trained_models.saved_model import saved_model
from streamrl.cli.trained_models.upload import authenticated, upload

Version = Annotated[str, Argument("a number, latest, or best (default: latest)", metavar="VERSION")]


class Export(Command, frozen=True):
    """Write the model of a run to a directory that transformers and vLLM load: LoRA merged, tokenizer and templates, a
    card of what trained it. No optimizer state and no prompts."""

    run_directory: RunPath
    destination: Annotated[Path, Argument("a directory that is not there, or empty", metavar="DEST", positional=True)]
    version: Version = ""
    shard_size: Annotated[str, Argument("of a file of weights, such as 2GB (default: as saved)", metavar="SIZE")] = ""

    def run(self) -> int:
        """Write the model. Raises ``StreamRLError`` and ``OSError``: then no directory is left behind."""
        saved = saved_model(self.run_directory, self.version)
        files = export_model(saved, self.destination, self.shard_size)
        result = {"directory": str(self.destination), "version": saved.version, "files": files}
        return self.print(result, f"{self.destination}: version {saved.version}, {sum(files.values()) / 1e6:,.1f} MB")


class Push(Command, frozen=True):
    """Export the model of a run and upload it to a repository of the Hub, which is made where it is not there: private,
    unless --public. No optimizer state and no prompts."""

    run_directory: RunPath
    name: Annotated[str, Argument("owner/name, or a name of your own", metavar="NAME", positional=True)]
    version: Version = ""
    public: Annotated[bool, Argument("everybody may see it")] = False

    def run(self) -> int:
        """Upload the model. Raises ``StreamRLError`` that names the remedy."""
        saved = saved_model(self.run_directory, self.version)
        name = authenticated(self.name)
        with tempfile.TemporaryDirectory(prefix="streamrl-push-") as directory:
            files = export_model(saved, model := Path(directory) / "model")
            message = f"Version {saved.version} of the run {saved.run.resolve().name}"
            url, commit = upload(model, name, private=not self.public, message=message)
        pushed = {"url": url, "commit": commit, "version": saved.version, "files": files}
        return self.print(pushed, f"{url}: version {saved.version}, commit {commit}")
