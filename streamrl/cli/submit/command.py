"""``streamrl launch slurm | kubernetes | ssh RECIPE``: start Ray on the hosts of a cluster, and the run on them."""

from __future__ import annotations

import os
import posixpath
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import anyio
import yaml

from streamrl.base.errors import RecipeError
from streamrl.base.host_addresses import wrong_port
from streamrl.base.types import Texts, TextsByName
from streamrl.cli.command import Argument, Command, Overrides, RecipePath, recipe_file
from streamrl.cli.submit.job_template import TEMPLATES, filled
from streamrl.cli.submit.ray_start import DRAIN_S, RAY_PORT, STORE_BYTES, Work, ray_variables, ray_version
from streamrl.cli.submit.ssh import HERE, SshJob, host_scripts, local_setup, run_over_ssh, ssh_command
from streamrl.launch.pipeline import recipe_of_run
from streamrl.observe.run_files.redaction import is_secret_name
from streamrl.recipe.rules.load_recipe import read_recipe
from streamrl.recipe.rules.run_rules import LONGEST_RUN_NAME
from streamrl.recipe.sections import Recipe

_VARIABLE = r"[A-Za-z_]\w*"
_LABEL = r"[a-z]([a-z0-9-]*[a-z0-9])?"
_LONGEST_LABEL = 40
_WITHOUT_QUOTES = r"[\w@%+=:,./\[\]-]+"
_START_S = 1800
"""Seconds in which pods have to be placed and their images pulled."""

PrintOnly = Annotated[bool, Argument("print it and start nothing", flag="--print")]
Resume = Annotated[bool, Argument("RECIPE is the directory of a run: go on with it")]
Variables = Annotated[Texts, Argument("variable of every host (default: its value here)", "NAME[=VALUE]", "--env")]
Setup = Annotated[
    str, Argument("shell line on each host before the rest (default: the programs of this one)", metavar="LINE")
]
Port = Annotated[int, Argument(f"of Ray's head ({RAY_PORT})", metavar="PORT")]
Gpus = Annotated[int | None, Argument("of each host", metavar="N")]
Template = Annotated[Path | None, Argument("your copy of what `launch template` writes", metavar="FILE")]


class _Launch(Command, frozen=True, kw_only=True):
    recipe: RecipePath
    overrides: Overrides = ()
    print_only: PrintOnly = False
    resume: Resume = False
    env: Variables = ()

    def read(self, hosts: int) -> Recipe:
        """The recipe, checked as the run checks it. Raises ``RecipeError``."""
        if hosts < 1:
            raise RecipeError(f"--nodes {hosts}: give 1 or more")
        if self.resume:
            recipe = recipe_of_run(self.recipe, self.overrides)
        else:
            recipe, _ = read_recipe(recipe_file(self.recipe), self.overrides)
        if recipe.cluster.hosts > hosts:
            raise RecipeError(f"cluster.hosts = {recipe.cluster.hosts}, and {hosts} are started: start as many or more")
        names = (recipe.run.directory, recipe.run.name, recipe.cluster.interface)
        refuse_control(self.recipe.absolute(), Path.cwd(), *self.overrides, *self.env, *names)
        return recipe

    def variables(self) -> TextsByName:
        """Variables of ``--env``. A name without a value has the value that it has here. Raises ``RecipeError``."""
        variables = {}
        for text in self.env:
            name, value = pair(text, "--env", _VARIABLE)
            if "=" not in text:
                if name not in os.environ:
                    raise RecipeError(f"--env {name}: there is no such variable here: write --env {name}=VALUE")
                value = os.environ[name]
            variables[name] = value
        refuse_control(*variables.values())
        return variables

    def work(self) -> Work:
        """The work of the first host, on the file system of this one."""
        recipe = self.recipe if self.resume else recipe_file(self.recipe)
        return Work(recipe=str(recipe.absolute()), overrides=self.overrides, resume=self.resume)


class _OnHosts(_Launch, frozen=True, kw_only=True):
    gpus_per_node: Gpus = None
    setup: Setup = ""
    port: Port = RAY_PORT

    def lines(self) -> list[str]:
        """Shell lines before everything else. Raises ``RecipeError`` for a port that is none."""
        if problem := wrong_port(str(self.port)):
            raise RecipeError(f"--port: {problem}")
        if self.setup:
            return [self.setup]
        return local_setup()


class Slurm(_OnHosts, frozen=True, kw_only=True):
    """Submit a run to Slurm: Ray on the nodes of one job, and the run on its first. Two minutes before the end of its
    time the run drains; `scancel --batch --signal=TERM JOB` drains it at any time."""

    nodes: Annotated[int, Argument("of the job", metavar="N")]
    time: Annotated[str, Argument("limit of the job, as Slurm writes it: 2-12:00:00")] = ""
    partition: Annotated[str, Argument("of Slurm")] = ""
    account: Annotated[str, Argument("of Slurm")] = ""
    requeue: Annotated[bool, Argument("after a lost node, preemption or its time: go on with the run")] = False
    sbatch: Annotated[Texts, Argument("another option of sbatch; may be repeated", "KEY[=VALUE]")] = ()
    template: Template = None

    def run(self) -> int:
        """Print the number of the job."""
        recipe = self.read(self.nodes)
        own_options = {"time": self.time, "partition": self.partition, "account": self.account}
        options = [(key, value) for key, value in own_options.items() if value]
        options += [pair(text, "--sbatch", r"[a-z][a-z-]*") for text in self.sbatch]
        refuse_control(*(value for _, value in options))
        runs = self.recipe.absolute().parent if self.resume else Path(recipe.run.directory).absolute()
        values = {
            "name": recipe.run.name,
            "run_name": recipe.run.name[: LONGEST_RUN_NAME - 20].rstrip("-._"),
            "recipe": self.work().recipe,
            "settings": self.overrides,
            "nodes": self.nodes,
            "folder": str(Path.cwd()),
            "runs": str(runs),
            "setup": self.lines(),
            "variables": self.variables(),
            "least_hosts": recipe.cluster.hosts or self.nodes,
            "port": self.port,
            "gpus_per_node": self.gpus_per_node,
            "interface": recipe.cluster.interface,
            "requeue": self.requeue,
            "resume": self.resume,
            "options": options,
            "drain_s": DRAIN_S,
        }
        script = filled(self.template or TEMPLATES["slurm"], values)
        if self.print_only:
            return self.print({"script": script}, script.rstrip())
        number = given_to(["sbatch", "--parsable"], script).partition(";")[0]
        log = Path.cwd() / f"slurm-{number}.log"
        return self.print({"job": number, "log": str(log)}, f"job {number}; what it prints: {log}")


class Kubernetes(_Launch, frozen=True, kw_only=True):
    """Submit a run to Kubernetes. The folder of RECIPE has to be in the volume already, and streamrl with Ray in the
    image (for a RayJob: ray[default])."""

    image: Annotated[str, Argument("of every pod")]
    nodes: Annotated[int, Argument("pods; the first has Ray's head", metavar="N")]
    gpus: Annotated[int, Argument("of each pod (0)", metavar="N")] = 0
    pvc: Annotated[str, Argument("claim of a volume that all pods may write", metavar="CLAIM")]
    mount: Annotated[str, Argument("its place in the pods (/runs)", metavar="PATH")] = "/runs"
    folder: Annotated[str, Argument("of RECIPE there (default: of the same name, in the mount)", metavar="PATH")] = ""
    secret: Annotated[Texts, Argument("a Secret with variables of all pods; repeatable")] = ()
    limit: Annotated[Texts, Argument("of a pod: cpu=16, memory=200Gi; may be repeated", "NAME=SIZE")] = ()
    name: Annotated[str, Argument("of the job (default: run.name)")] = ""
    namespace: Annotated[str, Argument("of the job (default)", metavar="NS")] = "default"
    jobset: Annotated[bool, Argument("a JobSet in place of a RayJob")] = False
    template: Template = None

    def run(self) -> int:
        """Print what kubectl says."""
        recipe = self.read(self.nodes)
        name = self.name or re.sub(r"[^a-z0-9-]+", "-", recipe.run.name.lower()).strip("-")
        label_flags = [("--name", name), ("--namespace", self.namespace), ("--pvc", self.pvc)]
        label_flags += [("--secret", secret) for secret in self.secret]
        for flag, label in label_flags:
            if not re.fullmatch(_LABEL, label) or len(label) > _LONGEST_LABEL:
                text = f"small letters, digits and hyphens, from a letter, at most {_LONGEST_LABEL}"
                raise RecipeError(f"{flag} {label!r}: Kubernetes takes {text}: give another")
        folder = posixpath.normpath(posixpath.join(self.mount, self.folder or self.recipe.absolute().parent.name))
        if not f"{folder}/".startswith(f"{self.mount.rstrip('/')}/"):
            raise RecipeError(f"--folder {folder}: it is not below the mount {self.mount}: other pods would not see it")
        place = posixpath.join(folder, self.recipe.name)
        runs = posixpath.join(folder, recipe.run.directory)
        work = Work(recipe=place, overrides=self.overrides, name=name, resume=self.resume)
        template = self.template or TEMPLATES["job_set" if self.jobset else "ray_job"]
        command = work.command("{cluster}")
        if not self.jobset:
            command = work.command("auto", f"run.directory={runs}")
            refuse_quotes(command)
        variables = self.variables()
        if secrets := sorted(filter(is_secret_name, variables)):
            raise RecipeError(
                f"--env {secrets[0]}: readers of the job read its manifest, too: put the value into a Secret "
                f"(kubectl create secret generic NAME --from-literal={secrets[0]}=...) and give --secret NAME"
            )
        limits = dict(pair(text, "--limit", r"[\w./-]+") for text in self.limit)
        if self.gpus:
            limits["nvidia.com/gpu"] = str(self.gpus)
        values = {
            "name": name,
            "namespace": self.namespace,
            "image": self.image,
            "nodes": self.nodes,
            "gpus": self.gpus,
            "pvc": self.pvc,
            "mount": self.mount.rstrip("/"),
            "limits": limits,
            "resume": self.resume,
            "recipe": place,
            "folder": folder,
            "runs": runs,
            "interface": recipe.cluster.interface,
            "start_s": _START_S,
            "drain_s": DRAIN_S,
            "command": command,
            "variables": ray_variables() | {"RAY_JOB_STOP_WAIT_TIME_S": str(DRAIN_S)} | variables,
            "secrets": self.secret,
            "store_bytes": STORE_BYTES,
            "ray_version": ray_version(),
        }
        text = filled(template, values)
        try:
            manifest = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise RecipeError(f"{template} does not give YAML: {error}") from error
        if self.print_only:
            return self.print(manifest, text.rstrip())
        message = given_to(["kubectl", "apply", "-f", "-"], text)
        return self.print({"manifest": manifest, "kubectl": message}, message)


class WriteTemplate(Command, frozen=True, kw_only=True):
    """Write the template of a job into a file to edit, for --template of `streamrl launch slurm` or `kubernetes`."""

    template: Annotated[Literal["slurm", "ray_job", "job_set"], Argument("which one", positional=True)]
    file: Annotated[Path, Argument("a file that is not there yet", metavar="FILE", positional=True)]

    def run(self) -> int:
        """Write the file. Raises ``RecipeError`` where it is there."""
        if self.file.exists():
            raise RecipeError(f"{self.file} is there already: name another file")
        shutil.copyfile(TEMPLATES[self.template], self.file)
        return self.print({"file": str(self.file)}, f"{self.file}: edit it, and give it to --template")


class Ssh(_OnHosts, frozen=True, kw_only=True):
    """Run on hosts that ssh reaches without a password: Ray on each, the run on the first (localhost: this one). It
    lasts as long as this command. Ctrl-C drains; twice ends."""

    follows_a_run = True
    hosts: Annotated[str, Argument("as ssh names them", metavar="A,B,C")] = ""
    hostfile: Annotated[Path | None, Argument("one host a line", metavar="FILE")] = None

    def run(self) -> int:
        """The exit code of the run."""
        hosts = self._hosts()
        recipe = self.read(len(hosts))
        job = SshJob(
            work=self.work(),
            hosts=hosts,
            folder=Path.cwd(),
            setup=self.lines(),
            variables=self.variables(),
            port=self.port,
            gpus=self.gpus_per_node,
            interface=recipe.cluster.interface,
        )
        if self.print_only:
            scripts = host_scripts(job)
            commands = list(map(ssh_command, hosts, scripts))
            return self.print(
                {"commands": commands}, *(f"{host}:\n{text}" for host, text in zip(hosts, scripts, strict=True))
            )
        if set(hosts) - set(HERE):
            program("ssh")
        code = anyio.run(run_over_ssh, job)
        return self.print({"code": code}) or code if self.json else code

    def _hosts(self) -> list[str]:
        if bool(self.hosts) == (self.hostfile is not None):
            raise RecipeError("name the hosts by --hosts A,B,C or by --hostfile FILE")
        text = self.hosts.replace(",", "\n")
        if self.hostfile is not None:
            if not self.hostfile.is_file():
                raise RecipeError(f"--hostfile {self.hostfile}: there is no such file: correct it")
            text = self.hostfile.read_text()
        lines = (line.partition("#")[0].strip() for line in text.splitlines())
        hosts = [line for line in lines if line]
        for number, host in enumerate(hosts):
            if not re.fullmatch(r"[A-Za-z0-9_][\w.@:%-]*", host):
                raise RecipeError(f"{host!r} is no name of a host: write it as for ssh, such as user@gpu-3")
            if host in hosts[:number] or (host in HERE and number):
                raise RecipeError(f"{host} is named twice, or is this host and not the first: name each once")
        if not hosts:
            raise RecipeError(f"{self.hostfile or '--hosts'} names no host: write one a line")
        return hosts


def pair(text: str, flag: str, key: str) -> tuple[str, str]:
    """Key and value of an option. Raises ``RecipeError`` where the key does not match."""
    name, _, value = text.partition("=")
    if not re.fullmatch(key, name):
        raise RecipeError(f"{flag} {text}: write {flag} NAME=VALUE")
    return name, value


def refuse_quotes(command: Sequence[str]) -> None:
    """Raise ``RecipeError`` for a word of ``command`` that the two shells of KubeRay would change."""
    for word in command:
        if not re.fullmatch(_WITHOUT_QUOTES, word):
            raise RecipeError(
                f"{word!r}: KubeRay passes commands through two shells, and quotes and blanks do not survive: "
                "write it into the recipe, or use --jobset"
            )


def refuse_control(*texts: object) -> None:
    """Raise ``RecipeError`` for a text that would end a line of a script."""
    for text in map(str, texts):
        if not text.isprintable():
            raise RecipeError(f"{text!r} has a line break or another control character: choose another name or value")


def program(name: str) -> str:
    """Path of a program. Raises ``RecipeError`` where it is not installed."""
    path = shutil.which(name)
    if path is None:
        raise RecipeError(f"{name} is not on the PATH: run this where it is, or add --print and submit it by hand")
    return path


def given_to(command: Sequence[str], text: str) -> str:
    """Output of a program that reads ``text`` from stdin. Raises ``RecipeError`` with its complaint."""
    words = [program(command[0]), *command[1:]]
    result = subprocess.run(words, input=text, capture_output=True, text=True, check=False)
    if result.returncode:
        raise RecipeError(f"{' '.join(command)}: {result.stderr.strip() or f'exit code {result.returncode}'}")
    return result.stdout.strip()
