"""``streamrl launch``: the script of Slurm as bash runs it, manifests against their schemas, what bad input gets, and
ssh. A real Ray is in ``test_real_clusters.py``; no test has a real Slurm."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from shutil import which
from typing import Any

import jsonschema
import pytest
import yaml

from streamrl.cli.main import main
from streamrl.cli.submit.cluster_host import own_address
from streamrl.cli.submit.ray_start import Work, variables_with_ray
from streamrl.cli.submit.ssh import SshJob, host_scripts, ssh_command

RECIPE = Path("examples/sort/recipe.toml").resolve()
SCHEMAS = json.loads((Path(__file__).parent / "manifest_schemas.json").read_text())
POD = ["--image", "registry/streamrl:1", "--pvc", "runs"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a name that needs quotes, with programs in ``bin`` that print what they are given."""
    folder = tmp_path / "a b 'c' \"d\" $e"
    (tmp_path / "bin").mkdir(parents=True)
    folder.mkdir()
    programs = {
        "scontrol": 'case $1 in show) printf "h0\\nh1\\n";; *) echo "NodeName=$4 NodeAddr=addr-$4 State=IDLE";; esac',
        "srun": 'shift $(($# - 2)); SLURM_NODEID=1 SLURM_GPUS_ON_NODE=4 exec "$@"',
        "python": 'printf "%s\\n" "$NOTE" "$@"',
    }
    for name, text in programs.items():
        path = tmp_path / "bin" / name
        path.write_text(f"#!/bin/bash\n{text}\n")
        path.chmod(0o755)
    monkeypatch.chdir(folder)
    return folder


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["launch", *arguments, "--print"]) == 0
    return capsys.readouterr().out


def test_the_script_of_slurm_gives_every_word_as_it_was(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    setup = f"export PATH='{folder.parent}/bin':$PATH"
    setting, note = """prompts.template="it's \\"$HOME\\" `x` {{q}}\"""", "a 'b' $c"
    options = ["--nodes", "2", "--gpus-per-node", "4", "--setup", setup, "--env", f"NOTE={note}", "--set", setting]
    script = printed(capsys, "slurm", str(RECIPE), *options, "--time", "1-0", "--sbatch", "comment=a b", "--requeue")
    directives = [line.removeprefix("#SBATCH ") for line in script.splitlines() if line.startswith("#SBATCH")]
    assert {"--nodes=2", "--time=1-0", "--signal=B:TERM@120", '--comment="a b"', "--requeue"} <= set(directives)
    variables = {"PATH": os.environ["PATH"], "SLURM_JOB_ID": "17", "SLURM_JOB_NODELIST": "h[0-1]"}
    done = subprocess.run(["bash"], input=script, env=variables, capture_output=True, text=True, check=True)
    words = done.stdout.splitlines()
    assert words[:4] == [note, "-m", "streamrl.cli.submit.cluster_host", "--rank"], done
    given = dict(zip(words[3::2], words[4::2], strict=False))
    job = f"{folder}/runs/.launch/17"
    assert (given["--head"], given["--peer"], given["--gpus"]) == ("addr-h0", "addr-h1", "4")
    assert (given["--token"], given["--begun"]) == (f"{job}/token", f"{folder}/runs/sort-slurm-17")
    train = ["python", "-m", "streamrl", "train", str(RECIPE), "--cluster", "{cluster}", "--set", setting]
    assert words[words.index("--") + 1 :] == [*train, "--set", "run.name=sort-slurm-17"]
    again = subprocess.run(["bash"], input=script, env=variables, capture_output=True, text=True, check=True)
    assert again.stdout == "the run of this job has ended\n", "a job that is started again after its clean end"


@pytest.mark.parametrize(
    ("line", "code"), [('[ "$CONDA_BUILD_STATE" = 1 ] && echo building', 0), ("grep -q nothing /dev/null", 1)]
)
def test_lines_of_a_site_are_not_strict(line: str, code: int, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A variable that is not set, or a line that fails without harm, does not end the job; the failure is printed."""
    (folder / "activate.sh").write_text(f"{line}\nexport PATH='{folder.parent}/bin':$PATH NOTE=active\n(exit {code})\n")
    script = printed(capsys, "slurm", str(RECIPE), "--nodes", "2", "--setup", "source ./activate.sh")
    variables = {"PATH": os.environ["PATH"], "SLURM_JOB_ID": "17", "SLURM_JOB_NODELIST": "h[0-1]"}
    done = subprocess.run(["bash"], input=script, env=variables, capture_output=True, text=True)
    assert done.stdout.startswith("active\n-m\nstreamrl.cli.submit.cluster_host\n"), done
    said = "exit code 1 of the line of --setup: source ./activate.sh\n"
    assert done.stderr == (said if code else "")


def test_a_step_has_the_variables_of_its_job(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also on a site whose jobs begin with --export=NONE: srun takes it from SLURM_EXPORT_ENV, as its manual says."""
    (folder.parent / "bin" / "srun").write_text(
        """#!/bin/bash
        for word; do case $word in --export=*) SLURM_EXPORT_ENV=${word#*=};; bash) break;; esac; shift; done
        [ "$SLURM_EXPORT_ENV" != NONE ] || exec env -i PATH=/usr/bin:/bin SLURM_NODEID=0 "$@"
        SLURM_NODEID=0 SLURM_GPUS_ON_NODE=4 exec "$@"
        """
    )
    setup = f"export PATH='{folder.parent}/bin':$PATH"
    script = printed(capsys, "slurm", str(RECIPE), "--nodes", "2", "--setup", setup, "--env", "NOTE=n")
    variables = {
        "PATH": os.environ["PATH"],
        "SLURM_JOB_ID": "17",
        "SLURM_JOB_NODELIST": "x",
        "SLURM_EXPORT_ENV": "NONE",
    }
    done = subprocess.run(["bash"], input=script, env=variables, capture_output=True, text=True)
    assert done.stdout.startswith("n\n-m\n") and "\naddr-h0\n" in done.stdout, done


def test_a_job_that_is_asked_twice_to_drain_waits_for_the_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder.parent / "bin" / "srun").write_text(
        "#!/bin/bash\nkill -TERM $PPID; sleep 0.5; kill -TERM $PPID; sleep 0.5; exit 7"
    )
    setup = f"export PATH='{folder.parent}/bin':$PATH"
    script = printed(capsys, "slurm", str(RECIPE), "--nodes", "2", "--setup", setup)
    variables = {"PATH": os.environ["PATH"], "SLURM_JOB_ID": "17", "SLURM_JOB_NODELIST": "h[0-1]"}
    assert subprocess.run(["bash"], input=script, env=variables, text=True).returncode == 7


def test_a_job_that_may_lose_hosts_outlives_them(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = printed(capsys, "slurm", str(RECIPE), "--nodes", "4", "--set", "cluster.hosts=3")
    assert "#SBATCH --no-kill" in lines and "--no-kill --kill-on-bad-exit=0 --wait=0" in lines
    lines = printed(capsys, "slurm", str(RECIPE), "--nodes", "4")
    assert "#SBATCH --no-kill" not in lines and "--kill-on-bad-exit=1" in lines


@pytest.mark.parametrize("nodes", ["1", "3"])
@pytest.mark.parametrize("kind", ["RayJob", "JobSet"])
def test_manifests_pass_their_schemas(kind: str, nodes: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags = [
        "--gpus",
        "8",
        "--limit",
        "memory=200Gi",
        "--env",
        "A=b",
        "--secret",
        "hub",
        *(["--jobset"] if kind == "JobSet" else []),
    ]
    manifest = yaml.safe_load(printed(capsys, "kubernetes", str(RECIPE), *POD, "--nodes", nodes, *flags))
    schema = jsonschema.Draft7Validator(SCHEMAS[kind])
    schema.validate(manifest)
    assert manifest["kind"] == kind
    pods = list(found(manifest, "containers"))
    assert len(pods) == min(2, int(nodes))
    for (container,) in pods:
        assert {"name": "A", "value": "b"} in container["env"]
        assert {"name": "RAY_worker_niceness", "value": "0"} in container["env"]
        assert container["resources"]["limits"] == {"memory": "200Gi", "nvidia.com/gpu": "8"}
        assert container["envFrom"] == [{"secretRef": {"name": "hub"}}]
    assert list(found(manifest, "automountServiceAccountToken")) == [False] * len(pods)
    assert {"name": "shm", "emptyDir": {"medium": "Memory"}} in next(found(manifest, "volumes"))
    assert set(found(manifest, "restartPolicy")) == {"Never"} and set(found(manifest, "backoffLimit")) == {0}
    assert list(found(manifest, "enableServiceLinks")) == [False] * len(pods), "a service named vllm sets VLLM_PORT"
    wrong = deepcopy(manifest)
    next(found(wrong, "containers"))[0]["volumeMount"] = []
    assert not schema.is_valid(wrong), "a key that is not there"
    wrong = deepcopy(manifest)
    next(found(wrong, "env"))[1]["value"] = 0
    assert not schema.is_valid(wrong), "a number in place of a text"


def found(node: Any, key: str) -> Iterator[Any]:
    """Values of ``key``, at any depth."""
    if isinstance(node, dict):
        yield from (value for name, value in node.items() if name == key)
    for child in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
        yield from found(child, key)


def test_the_manifests_run_the_recipe_of_the_volume(capsys: pytest.CaptureFixture[str]) -> None:
    ray = yaml.safe_load(printed(capsys, "kubernetes", str(RECIPE), *POD, "--nodes", "2"))["spec"]
    settings = "--set run.name=sort --set run.directory=/runs/sort/runs"
    assert ray["entrypoint"] == f"python -m streamrl train /runs/sort/recipe.toml --cluster auto {settings}"
    assert ray["rayClusterSpec"]["authOptions"] == {"mode": "token"}
    one = yaml.safe_load(printed(capsys, "kubernetes", str(RECIPE), *POD, "--nodes", "2", "--jobset"))
    head, node = (jobs["template"]["spec"]["template"]["spec"] for jobs in one["spec"]["replicatedJobs"])
    command = head["containers"][0]["command"]
    assert command[command.index("--head") + 1] == "sort-head-0-0.sort" and "--linger" in command
    assert command[4] == "0" and node["containers"][0]["command"][4] == "1"
    first, others = (jobs["template"]["spec"] for jobs in one["spec"]["replicatedJobs"])
    assert first["backoffLimit"] == 0 and "backoffLimit" not in others, "Kubernetes makes a pod again 6 times"
    evicted, refused = others["podFailurePolicy"]["rules"]
    assert evicted == {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
    assert (refused["action"], refused["onExitCodes"]["values"]) == ("FailJob", [1])
    assert refused["onExitCodes"]["containerName"] == node["containers"][0]["name"]


def test_a_site_fills_its_own_copy_of_a_template(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The copy that is written gives the same text until it is edited."""
    for name, arguments in [
        ("slurm", ["slurm", str(RECIPE), "--nodes", "2"]),
        ("ray_job", ["kubernetes", str(RECIPE), *POD, "--nodes", "2"]),
        ("job_set", ["kubernetes", str(RECIPE), *POD, "--nodes", "2", "--jobset"]),
    ]:
        assert main(["launch", "template", name, name]) == 0
        assert main(["launch", "template", name, name]) == 2, "it is there already"
        capsys.readouterr()
        shipped = printed(capsys, *arguments)
        assert printed(capsys, *arguments, "--template", name) == shipped
        Path(name).write_text(Path(name).read_text() + "# for {{ name }} of this site\n")
        edited = printed(capsys, *arguments, "--template", name)
        assert edited.split() == f"{shipped}# for sort of this site".split()


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("{{ nodes }} {{ partitoin }}", "own: partitoin: there is no such placeholder; there are "),
        ("a\n{% if nodes %}", "own:2: Unexpected end of template"),
        ("{{ nodes + name }}", "own cannot be filled: unsupported operand"),
        ("{{ name.first }}", "own cannot be filled: 'str object' has no attribute 'first'"),
        ("a: [{{ nodes }}", "own does not give YAML"),
        (None, "own: no such file"),
    ],
)
def test_a_template_that_cannot_be_filled_is_refused(
    text: str | None, sentence: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if text is not None:
        Path("own").write_text(text)
    assert main(["launch", "kubernetes", str(RECIPE), *POD, "--nodes", "2", "--template", "own", "--print"]) == 2
    assert sentence in capsys.readouterr().err


BAD = [
    (["slurm", "RECIPE", "--nodes", "0"], "--nodes 0: give 1 or more"),
    (["slurm", "missing.toml", "--nodes", "2"], "missing.toml: no such file"),
    (["slurm", "RECIPE", "--nodes", "2", "--set", "rollout.group_size=0"], "rollout.group_size"),
    (["slurm", "RECIPE", "--nodes", "2", "--set", "cluster.hosts=3"], "cluster.hosts = 3, and 2 are started"),
    (["slurm", "RECIPE", "--nodes", "2"], "sbatch is not on the PATH"),
    (["slurm", "RECIPE", "--nodes", "2", "--partition", "a\nb"], "has a line break"),
    (["slurm", "RECIPE", "--nodes", "2", "--sbatch", "Mem 3"], "--sbatch Mem 3: write"),
    (["slurm", "RECIPE", "--nodes", "2", "--env", "1A=b"], "--env 1A=b: write"),
    (["slurm", "RECIPE", "--nodes", "2", "--env", "NOT_THERE"], "--env NOT_THERE: there is no such variable here"),
    (["slurm", "RECIPE", "--nodes", "2", "--set", 'run.directory="a\\nNODE\\ntouch x"'], "has a line break"),
    (["kubernetes", "RECIPE", *POD, "--nodes", "2", "--env", "HF_TOKEN=x"], "give --secret NAME"),
    (["kubernetes", "RECIPE", *POD, "--nodes", "2", "--secret", "A b"], "--secret 'A b': Kubernetes takes"),
    (["kubernetes", "RECIPE", *POD, "--nodes", "2", "--name", "A_b"], "--name 'A_b': Kubernetes takes small letters"),
    (["kubernetes", "RECIPE", *POD, "--nodes", "2", "--folder", "/data/x"], "not below the mount /runs"),
    (["kubernetes", "RECIPE", *POD, "--nodes", "2", "--set", 'run.project="a b"'], "KubeRay passes commands through"),
    (["kubernetes", "RECIPE", *POD, "--nodes", "2"], "kubectl is not on the PATH"),
    (["ssh", "RECIPE"], "name the hosts by --hosts A,B,C"),
    (["ssh", "RECIPE", "--hosts", ","], "names no host"),
    (["ssh", "RECIPE", "--hosts", "a,-oProxyCommand=x"], "'-oProxyCommand=x' is no name of a host"),
    (["ssh", "RECIPE", "--hosts", "a,b,a"], "a is named twice"),
    (["ssh", "RECIPE", "--hosts", "a,b"], "ssh is not on the PATH"),
]


@pytest.mark.parametrize(("arguments", "sentence"), BAD, ids=[sentence for _, sentence in BAD])
def test_bad_input_gets_a_sentence_and_nothing_is_submitted(
    arguments: list[str], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["launch", *(str(RECIPE) if word == "RECIPE" else word for word in arguments)]) == 2
    complaint = capsys.readouterr().err
    assert sentence in complaint and "1 problem; nothing was started" in complaint
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(which("ssh") is None, reason="needs ssh")
def test_all_hosts_that_ssh_does_not_reach_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", "ssh", str(RECIPE), "--hosts", "localhost,no-1.invalid,no-2.invalid"]) == 2
    complaint = capsys.readouterr().err
    assert "2 problems; nothing was started" in complaint
    assert "  no-1.invalid: " in complaint and "  no-2.invalid: " in complaint


def test_no_script_of_ssh_has_the_value_of_a_variable(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Arguments of ssh can be read by every user of the host: values go over the connection."""
    monkeypatch.setenv("HF_TOKEN", "hf_canary")
    text = printed(capsys, "ssh", str(RECIPE), "--hosts", "a,b", "--env", "HF_TOKEN", "--env", "OTHER=canary")
    assert "canary" not in text and "export HF_TOKEN" not in text


def test_ray_gets_its_variables_and_none_of_a_step() -> None:
    step = {"SLURM_JOB_ID": "1", "PMIX_RANK": "0", "PMI_SIZE": "2", "CUDA_VISIBLE_DEVICES": "10,2,1", "A": "b"}
    variables = variables_with_ray(step, Path("/x/token"))
    assert {"A", "CUDA_VISIBLE_DEVICES"} == {name for name in variables if not name.startswith("RAY_")}
    assert variables["CUDA_VISIBLE_DEVICES"] == "1,2,10"
    assert variables["RAY_AUTH_MODE"] == "token" and variables["RAY_worker_niceness"] == "0"
    assert variables["RAY_memory_monitor_refresh_ms"] == "0", "it would end the daemon of a run, and all below it"
    assert (
        variables_with_ray({"CUDA_VISIBLE_DEVICES": "GPU-b,GPU-a"}, Path("t"))["CUDA_VISIBLE_DEVICES"] == "GPU-b,GPU-a"
    )


def test_the_address_of_a_host_is_that_of_its_network() -> None:
    assert own_address("lo", "") == own_address("127.0.0.0/8", "") == own_address("", "127.0.0.1") == "127.0.0.1"
    assert own_address("::/64", "") == own_address("", "::1") == "::1"


@pytest.mark.parametrize("shell", ["sh", "bash", "zsh", "fish", "tcsh", "busybox sh"])
def test_every_login_shell_runs_the_script_of_a_host(shell: str, tmp_path: Path) -> None:
    """ssh gives its command to the login shell of the user there."""
    if which(shell.split()[0]) is None:
        pytest.skip(f"{shell} is not installed")
    awkward = "it's \\ a \\' \"b\" !x $HOME `c`"
    (tmp_path / awkward).mkdir()
    job = SshJob(
        work=Work(recipe="r"), hosts=["a"], folder=tmp_path / awkward, setup=["python() {", " pwd; exit 3; }"], port=1
    )
    *_, command = ssh_command("a", host_scripts(job)[0].replace("exec python", "python"))
    done = subprocess.run([*shell.split(), "-c", command], capture_output=True, text=True)
    assert (done.stdout, done.returncode) == (f"\nstreamrl-host \n{tmp_path / awkward}\n", 3), done
