import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = sorted((ROOT / "launch").iterdir()) + [ROOT / ".ci" / "run"]


def executable(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/usr/bin/env bash\n" + text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def run(command: list[str | Path], cwd: Path, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        command, cwd=cwd, env=os.environ | environment, capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_scripts_parse_are_executable_and_end_no_process_by_name(script):
    assert run(["bash", "-n", script], ROOT).returncode == 0
    assert os.access(script, os.X_OK)
    assert "pkill" not in script.read_text() and "killall" not in script.read_text()


def test_ci_runs_the_test_script_and_nothing_else():
    commands = [line for line in (ROOT / ".ci" / "run").read_text().splitlines() if not line.startswith("#")]
    assert commands == ["bash launch/test.sh"]


def test_local_names_its_usage_without_a_config():
    result = run(["bash", ROOT / "launch" / "local.sh"], ROOT)
    assert result.returncode == 2 and "CONFIG [key=value ...]" in result.stderr


def test_help_comes_before_anything_is_installed(tmp_path):
    shutil.copytree(ROOT / "launch", tmp_path / "launch")
    for script in ("local.sh", "quickstart.sh", "setup.sh", "test.sh", "torchrun_node.sh"):
        result = run(["bash", tmp_path / "launch" / script, "--help"], tmp_path)
        assert result.returncode == 0 and f"launch/{script}" in result.stdout + result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["launch"]


@pytest.mark.parametrize(
    ("browser", "variables", "installs"),
    [("other", {}, True), ("google-chrome", {}, False), ("chromium", {}, False), ("other", {"CHROMIUM": "/a"}, False)],
)
def test_no_browser_is_installed_where_there_is_one(tmp_path, monkeypatch, browser, variables, installs):
    monkeypatch.delenv("CHROMIUM", raising=False)
    executable(tmp_path / "launch" / "test.sh", (ROOT / "launch" / "test.sh").read_text())
    for name in (f"bin/{browser}", "bin/apt-get", "launch/setup.sh", ".venv/bin/python"):
        executable(tmp_path / name, "")
    for name in ("bash", "dirname"):
        (tmp_path / "bin" / name).symlink_to(shutil.which(name))
    result = run(["bash", tmp_path / "launch" / "test.sh"], tmp_path, PATH=str(tmp_path / "bin"), **variables)
    assert result.returncode == 0, result.stderr
    assert ("chromium" in result.stdout) == installs


def copy_script(name: str, repository: Path) -> Path:
    """The script in another repository, beside what it sources."""
    copy = repository / "launch" / name
    for path in (copy, *(repository / "launch" / name for name in ("environment.sh", "gpus.sh", "waiting.sh"))):
        executable(path, (ROOT / "launch" / path.name).read_text())
    return copy


@pytest.mark.parametrize(
    "devices, remedies",
    [
        ("", ["bash launch/setup.sh"]),
        ("0,1", ["bash launch/setup.sh gpu", "CUDA_VISIBLE_DEVICES= bash launch/local.sh"]),
    ],
)
def test_local_without_its_environment_names_the_remedy(tmp_path, devices, remedies):
    other = ".venv" if devices else ".venv-gpu"
    executable(tmp_path / other / "bin" / "python", "echo the wrong one")
    result = run(["bash", copy_script("local.sh", tmp_path), "c.yaml"], tmp_path, CUDA_VISIBLE_DEVICES=devices)
    assert result.returncode == 1 and "wrong" not in result.stdout
    assert all(remedy in result.stderr for remedy in remedies)


def both_environments(repository: Path) -> None:
    """Stand-ins for the environments' Pythons, which print their name and their arguments."""
    for folder in (".venv", ".venv-gpu"):
        executable(repository / folder / "bin" / "python", f'printf "%s\\n" {folder} "$@"')


@pytest.mark.parametrize(
    "environment, folder, nproc",
    [
        ({"CUDA_VISIBLE_DEVICES": "0,3,5"}, ".venv-gpu", "3"),
        ({"NPROC": "4", "CUDA_VISIBLE_DEVICES": "0"}, ".venv-gpu", "4"),
        ({"NPROC": "1", "CUDA_VISIBLE_DEVICES": ""}, ".venv", "1"),
        ({"CUDA_VISIBLE_DEVICES": ""}, ".venv", "2"),
    ],
)
def test_local_hands_the_command_the_process_count_and_the_overrides(tmp_path, environment, folder, nproc):
    script = copy_script("local.sh", tmp_path)
    both_environments(tmp_path)
    result = run(["bash", script, "my config.yaml", "actor.optim.lr=1e-5"], tmp_path, **environment)
    words = ["-m", "megappo", "train", "--nproc", nproc, "my config.yaml", "actor.optim.lr=1e-5"]
    assert result.stdout.splitlines() == [folder, *words]


def quickstart(tmp_path: Path, num_gpus: int, *arguments: str) -> subprocess.CompletedProcess:
    """The quickstart on a machine with GPUs: stand-ins for nvidia-smi, the set-up and the environments."""
    copy_script("local.sh", tmp_path)
    executable(tmp_path / "launch" / "setup.sh", 'echo "setup $*"')
    executable(tmp_path / "bin" / "nvidia-smi", "".join(f"echo GPU {index}\n" for index in range(num_gpus)))
    both_environments(tmp_path)
    devices = '; echo "devices ${CUDA_VISIBLE_DEVICES-all}"\n'
    for python in tmp_path.glob(".venv*/bin/python"):
        python.write_text(python.read_text() + devices)
    path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    return run(["bash", copy_script("quickstart.sh", tmp_path), *arguments], tmp_path, PATH=path)


@pytest.mark.parametrize(
    "first, setup, folder, devices",
    [([], "setup ", ".venv", "devices "), (["gpu"], "setup gpu", ".venv-gpu", "devices all")],
)
def test_the_quickstart_takes_the_gpus_only_where_asked(tmp_path, monkeypatch, first, setup, folder, devices):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    result = quickstart(tmp_path, 8, *first, "trainer.seed=1")
    words = result.stdout.splitlines()
    assert result.returncode == 0, result.stderr
    assert words[0] == setup and words[-1] == devices
    assert {word for word in words if word.startswith(".venv")} == {folder}
    config = words.index("configs/quickstart.yaml")
    assert words[config - 3 : config] == ["train", "--nproc", "2"] and words[-2] == "trainer.seed=1"


def test_megappo_quickstart_runs_the_script_in_its_own_python(tmp_path):
    """Without the set-up and the environments of launch/."""
    executable(tmp_path / "own" / "python", 'printf "own %s\\n" "$@"')
    own = {"MEGAPPO_PYTHON": str(tmp_path / "own" / "python"), "CUDA_VISIBLE_DEVICES": ""}
    copy_script("local.sh", tmp_path)
    result = run(["bash", copy_script("quickstart.sh", tmp_path), "trainer.seed=1"], tmp_path, **own)
    assert result.returncode == 0, result.stderr
    words = ["-m", "megappo", "train", "--nproc", "2", "configs/quickstart.yaml", "trainer.seed=1"]
    assert result.stdout.splitlines()[-7:] == [f"own {word}" for word in words]


@pytest.mark.parametrize("word", ["--trainer.seed=1", "cpu", "trainer.seed"])
def test_the_quickstart_refuses_what_is_no_setting_before_the_set_up(tmp_path, word):
    result = quickstart(tmp_path, 0, "trainer.seed=1", word)
    assert result.returncode == 2 and not result.stdout
    assert f"found {word}, expected key=value, such as trainer.total_steps=10" in result.stderr


def test_the_quickstart_refuses_too_few_gpus_before_the_set_up(tmp_path):
    result = quickstart(tmp_path, 0, "gpu")
    assert result.returncode == 1 and not result.stdout
    assert "expected 2 visible GPUs, found 0" in result.stderr


@pytest.mark.parametrize(("visible", "nproc"), [(None, "2"), ("5", "1"), ("0,1,2", "2")])
def test_the_quickstart_on_gpus_trains_in_16_bits_on_one_or_two(tmp_path, monkeypatch, visible, nproc):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    words = quickstart(tmp_path, 8, "gpu").stdout.splitlines()
    assert words[words.index("--nproc") + 1] == nproc
    assert "model.dtype=bf16" in words
    assert ("actor.parallel.tensor=1" in words) == (nproc == "1")


HEAD = {"NNODES": "2", "NODE_RANK": "0", "MASTER_ADDR": "here"}
SMI = """case $1 in -L) echo "GPU 0"; echo "GPU 1";; --query-gpu=driver_version) echo {driver}; echo {driver};; esac"""


@pytest.mark.parametrize("script", ["local.sh", "torchrun_node.sh"])
@pytest.mark.parametrize(
    ("driver", "devices", "venv"),
    [
        ("535.183.01", None, None),
        ("570.124.06", "0,1", None),
        ("580.65.06", None, ".venv-gpu"),
        ("610.1", None, ".venv-gpu"),
        ("535.183.01", "", ".venv"),
        ("[N/A]", None, ".venv-gpu"),  # no version: left to torch
    ],
)
def test_a_driver_that_is_too_old_is_refused_before_anything_starts(
    tmp_path, monkeypatch, script, driver, devices, venv
):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    executable(tmp_path / "bin" / "nvidia-smi", SMI.format(driver=driver))
    both_environments(tmp_path)
    variables = HEAD | {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
    variables |= {} if devices is None else {"CUDA_VISIBLE_DEVICES": devices}
    result = run(["bash", copy_script(script, tmp_path), "c.yaml"], tmp_path, **variables)
    if venv is not None:
        assert result.returncode == 0 and venv in result.stdout.splitlines()[:2]
        return
    assert result.returncode == 1 and result.stdout == ""
    assert f"{driver}, but CUDA 13 needs 580 or newer: update it" in result.stderr
    assert f"CUDA_VISIBLE_DEVICES= bash launch/{script}" in result.stderr


REFUSING = """[[ $3 == plan ]] || { echo started; exit 0; }
echo "plan: $*"
echo "warning: odd" >&2
[[ $* == *trainer.seed=1* ]] || exit 0
echo "error: wrong" >&2
exit 2
"""
"""A stand-in for the interpreter whose dry run warns, and refuses a seed."""


def test_train_shows_the_warnings_of_the_dry_run_and_starts_no_rank_of_what_it_refuses(tmp_path):
    variables = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    words = ["train", "--nproc", "3", "configs/quickstart.yaml", f"trainer.output_dir={tmp_path}/run"]
    words += ["actor.use_kl_loss=true", f"model.path={tmp_path}/nowhere"]
    refused = run([sys.executable, "-m", "megappo", *words], ROOT, **variables)
    assert (refused.returncode, refused.stdout) == (2, "")
    note, warning, *errors = refused.stderr.splitlines()
    assert note.startswith("checking the config")
    assert warning.startswith("warning: actor.use_kl_loss true is unusual: ")
    assert errors[0].startswith("error: configs/quickstart.yaml:8: placement: ranks 2 of this run's 3 belong to no ")
    assert all(line.startswith("error: ") for line in errors)


NODE = {"NODE_RANK": "1", "NNODES": "2", "MASTER_ADDR": "head", "CUDA_VISIBLE_DEVICES": ""}


@pytest.mark.parametrize(
    "environment, folder, nproc, port",
    [
        ({"CUDA_VISIBLE_DEVICES": "0,3,5"}, ".venv-gpu", "3", "29500"),
        ({"NPROC": "4", "MASTER_PORT": "1234"}, ".venv", "4", "1234"),
    ],
)
def test_a_node_hands_torchrun_its_place_among_the_others(tmp_path, environment, folder, nproc, port):
    script = copy_script("torchrun_node.sh", tmp_path)
    both_environments(tmp_path)
    python = tmp_path / folder / "bin" / "python"
    python.write_text(python.read_text() + '; [[ $3 != plan ]] || echo "$@" >&2')
    result = run(["bash", script, "my config.yaml", "trainer.seed=1"], tmp_path, **(NODE | environment))
    assert result.returncode == 0 and result.stderr == (
        f"-m megappo plan --download --world-size {2 * int(nproc)} --nodes 2 my config.yaml trainer.seed=1\n"
    )
    checking, used, *words = result.stdout.splitlines()
    assert (checking, used) == ("checking my config.yaml", folder)
    options = ["--nnodes", "2", "--node-rank", "1", "--master-addr", "head", "--master-port", port]
    assert words[:2] == ["-m", "megappo.torchrun"] and words[2:10] == options
    assert words[10:] == ["--nproc-per-node", nproc, "-m", "megappo.train", "my config.yaml", "trainer.seed=1"]


@pytest.mark.parametrize("missing", ["NODE_RANK", "NNODES", "MASTER_ADDR"])
def test_a_node_names_the_variable_that_is_missing(tmp_path, missing):
    result = run(["bash", copy_script("torchrun_node.sh", tmp_path), "c.yaml"], tmp_path, **(NODE | {missing: ""}))
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith(f"torchrun_node.sh: the variable {missing} is not set: ")
    assert result.stderr.count("\n") == 1


def test_a_node_takes_what_a_cluster_sets_for_torchrun(tmp_path):
    script = copy_script("torchrun_node.sh", tmp_path)
    both_environments(tmp_path)
    of_cluster = {"PET_NNODES": "3", "PET_NODE_RANK": "2", "PET_MASTER_ADDR": "head", "PET_MASTER_PORT": "23456"}
    result = run(["bash", script, "c.yaml"], tmp_path, CUDA_VISIBLE_DEVICES="", **of_cluster)
    words = result.stdout.splitlines()[2:10]
    assert words[2:] == ["--nnodes", "3", "--node-rank", "2", "--master-addr", "head"], result.stderr


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"NNODES": "two"}, "the variable NNODES is 'two': expected a whole number from 1 to 100000"),
        ({"NNODES": "0"}, "the variable NNODES is '0': expected"),
        ({"NODE_RANK": "2"}, "the variable NODE_RANK is '2': expected a whole number from 0 to 1"),
        ({"NODE_RANK": "-1"}, "the variable NODE_RANK is '-1': expected"),
        ({"MASTER_PORT": "99999"}, "the variable MASTER_PORT is '99999': expected a whole number from 1 to 65535"),
        ({"MASTER_PORT": "029500"}, "the variable MASTER_PORT is '029500': expected"),
        ({"MASTER_ADDR": "head:29500"}, "the variable MASTER_ADDR is 'head:29500': expected a name or an address"),
        ({"MASTER_ADDR": "tcp://head"}, "the variable MASTER_ADDR is 'tcp://head': expected a name or an address"),
        ({"NPROC": "auto"}, "the variable NPROC is 'auto': expected a whole number from 1 to 100000"),
        (
            {"NNODES": "", "SLURM_JOB_ID": "7"},
            "the variable NNODES is not set: how many nodes the run has (in a job of",
        ),
    ],
)
def test_a_node_names_the_variable_that_is_wrong(tmp_path, wrong, message):
    script = copy_script("torchrun_node.sh", tmp_path)
    both_environments(tmp_path)
    result = run(["bash", script, "c.yaml"], tmp_path, **(NODE | wrong))
    assert (result.returncode, result.stdout) == (2, "") and result.stderr.startswith(f"torchrun_node.sh: {message}")
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("named", "is_reported"), [("all", True), ("cuda:0", True), ("-1", False), ("NoDevFiles", False)]
)
def test_local_reports_a_value_that_names_no_gpu(tmp_path, named, is_reported):
    script = copy_script("local.sh", tmp_path)
    both_environments(tmp_path)
    result = run(["bash", script, "c.yaml"], tmp_path, CUDA_VISIBLE_DEVICES=named)
    message = f"local.sh: CUDA_VISIBLE_DEVICES='{named}' names no GPU: using the CPU\n"
    assert result.returncode == 0 and result.stderr == (message if is_reported else "")


def test_scripts_start_python_safe_from_the_working_folder(tmp_path):
    script = copy_script("local.sh", tmp_path)
    executable(tmp_path / ".venv" / "bin" / "python", 'echo "safe $PYTHONSAFEPATH path ${PYTHONPATH-unset}"')
    for given, left in (("", "unset"), (":", "unset"), (":/a::/b c:", "/a:/b c")):
        result = run(["bash", script, "c.yaml"], tmp_path, CUDA_VISIBLE_DEVICES="", PYTHONPATH=given)
        assert result.stdout.splitlines()[-1] == f"safe 1 path {left}", result.stderr


@pytest.mark.parametrize("number", ["0", "1"])
def test_no_node_waits_for_others_when_the_dry_run_refuses(tmp_path, number):
    script = copy_script("torchrun_node.sh", tmp_path)
    executable(tmp_path / ".venv" / "bin" / "python", REFUSING)
    refused = run(["bash", script, "c.yaml", "trainer.seed=1"], tmp_path, **(NODE | {"NODE_RANK": number}))
    assert (refused.returncode, refused.stdout) == (2, "checking c.yaml\n")
    assert refused.stderr == "warning: odd\nerror: wrong\n"


SCONTROL = """
[[ $1 != requeue ]] || { echo "requeued $2"; exit 0; }
[[ $1 != show || $2 != job ]] || { echo "StartTime=2026-03-02T12:00:00 EndTime=2026-03-03T12:00:00"; exit; }
"""
"""A stand-in for scontrol that knows a job's end."""


def slurm(
    tmp_path: Path, nodes: list[str], python: str = 'printf "%s\\n" "$@"', scontrol: str = "", **environment: str
) -> subprocess.CompletedProcess:
    """Run the batch script as Slurm would, on node 1 of the job, with stand-ins for Slurm's two commands."""
    executable(tmp_path / "bin" / "scontrol", scontrol + "".join(f"echo {node}\n" for node in nodes))
    srun = 'while [[ $1 == -* ]]; do echo "srun $1"; shift; done; SLURM_NODEID=1 "$@"'
    executable(tmp_path / "bin" / "srun", srun)
    executable(tmp_path / ".venv-gpu" / "bin" / "python", python)
    executable(tmp_path / "launch" / "waiting.sh", (ROOT / "launch" / "waiting.sh").read_text())
    variables = {
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        "SLURM_SUBMIT_DIR": str(tmp_path),
        "SLURM_JOB_ID": "123456",
        "SLURM_JOB_NODELIST": "gpu[07-09]",
        "SLURM_NNODES": "3",
        "SLURM_GPUS_ON_NODE": "8",
        "SLURM_CPUS_ON_NODE": "96",
    }
    command = ["bash", ROOT / "launch" / "slurm.sbatch", "configs/x.yaml", "trainer.seed=1"]
    return run(command, tmp_path, **(variables | environment))


def test_slurm_starts_torchrun_on_every_node_towards_the_first(tmp_path):
    result = slurm(tmp_path, ["gpu07", "gpu08", "gpu09"])
    words = [line for line in result.stdout.splitlines()[2:] if not line.startswith("srun ")]
    assert result.returncode == 0, result.stderr
    options = dict(zip(words[2:12:2], words[3:12:2], strict=True))
    assert words[:2] == ["-m", "megappo.torchrun"]
    assert options == {
        "--nnodes": "3",
        "--node-rank": "1",
        "--master-addr": "gpu07",
        "--master-port": "23456",
        "--nproc-per-node": "8",
    }
    assert words[12:] == ["-m", "megappo.train", "configs/x.yaml", "trainer.seed=1"]


def test_slurm_gives_a_nodes_one_task_all_cores_and_all_memory(tmp_path):
    options = {line for line in slurm(tmp_path, ["gpu07"]).stdout.splitlines() if line.startswith("srun ")}
    assert {"srun --cpu-bind=none", "srun --cpus-per-task=96", "srun --mem=0"} <= options
    assert "#SBATCH --mem=0" in (ROOT / "launch" / "slurm.sbatch").read_text().splitlines(), "the step's is the job's"


def test_slurm_starts_no_rank_of_what_the_dry_run_refuses(tmp_path):
    result = slurm(tmp_path, ["gpu07", "gpu08", "gpu09"], REFUSING.replace('echo "plan: $*"', 'echo "$*" >&2'))
    assert (result.returncode, "started" in result.stdout) == (2, False)
    assert result.stderr == (
        "-m megappo plan --download --world-size 24 --nodes 3 configs/x.yaml trainer.seed=1\n"
        "warning: odd\nerror: wrong\n"
    )


def test_slurm_fails_with_the_job_step_and_without_nodes(tmp_path):
    no_nodes = slurm(tmp_path, [])
    assert no_nodes.returncode == 1 and "named no node" in no_nodes.stderr
    no_gpus = slurm(tmp_path, ["gpu07"], SLURM_GPUS_ON_NODE="")
    assert no_gpus.returncode != 0 and "ask for GPUs" in no_gpus.stderr
    executable(tmp_path / "bin" / "false_run", "exit 7")
    script = (ROOT / "launch" / "slurm.sbatch").read_text()
    executable(tmp_path / "failing", script.replace("srun --kill-on-bad-exit=1", "false_run"))
    variables = {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "SLURM_SUBMIT_DIR": str(tmp_path)}
    variables |= {"SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "a", "SLURM_GPUS_ON_NODE": "1", "SLURM_CPUS_ON_NODE": "1"}
    executable(tmp_path / "bin" / "scontrol", "echo a")
    assert run(["bash", tmp_path / "failing", "c.yaml"], tmp_path, **variables).returncode == 7


def test_setup_refuses_an_old_python_with_the_remedy(tmp_path):
    script = copy_script("setup.sh", tmp_path)
    (tmp_path / "megappo" / "runtime").mkdir(parents=True)
    files = [f"requirements{kind}.txt" for kind in ("", "-dev", "-cpu", "-gpu")]
    for name in ("setup.py", "megappo/runtime/torchvision_on_cpu.py", *files):
        (tmp_path / name).write_text((ROOT / name).read_text())
    executable(tmp_path / "old-python", "exit 1")
    result = run(["bash", script, "cpu"], tmp_path, PYTHON=str(tmp_path / "old-python"))
    assert result.returncode == 1
    assert "Python 3.11 or newer" in result.stderr and "PYTHON=" in result.stderr
    assert not (tmp_path / ".venv").exists()


def test_every_requirement_is_an_exact_pin_and_stands_once():
    names = {"cpu": [], "gpu": []}
    for kind in names:
        for file in ("requirements.txt", "requirements-dev.txt", f"requirements-{kind}.txt"):
            for line in (ROOT / file).read_text().splitlines():
                if line and not line.startswith("#"):
                    name, _, version = line.partition("==")
                    assert version and "://" not in line, f"{file}: {line}"
                    names[kind].append(name.lower().replace("_", "-"))
                    assert version.endswith("+cpu") == (kind == "cpu" and name in ("torch", "torchvision")), line
    for kind, found in names.items():
        assert len(found) == len(set(found)), kind


def test_the_environment_is_the_locks():
    """With the set-up's CPU environment: every pin is installed in exactly that version."""
    script = (
        "import importlib.metadata as m, sys; print('\\n'.join(f'{d.name}=={d.version}' for d in m.distributions()))"
    )
    result = run([sys.executable, "-c", script], ROOT)
    installed = {line.lower().replace("_", "-") for line in result.stdout.splitlines()}
    if "torch==2.13.0+cpu" not in installed:
        pytest.skip("not the CPU environment")
    plain = "torchvision==0.28.0"  # taken where pip knows no CPU build of it
    installed |= {f"{plain}+cpu"} if plain in installed else set()
    for file in ("requirements.txt", "requirements-dev.txt", "requirements-cpu.txt"):
        for line in (ROOT / file).read_text().splitlines():
            if line and not line.startswith("#"):
                assert line.split(";")[0].lower().replace("_", "-") in installed, f"{file}: {line}"


def test_slurm_requeues_what_is_asked_to_end_before_its_step_has_started(tmp_path):
    result = slurm(tmp_path, ["gpu07"], 'kill -USR1 "$PPID"', scontrol=SCONTROL)
    assert result.returncode == 75 and "srun" not in result.stdout
    assert result.stdout.splitlines()[-2:] == ["requeueing job 123456", "requeued 123456"]


@pytest.mark.parametrize(("code", "requeued"), [(75, True), (0, False), (1, False)])
def test_slurm_requeues_only_a_job_that_has_saved_its_state(tmp_path, code, requeued):
    """The ranks also get the end of the job's time limit, where Slurm does not set it."""
    python = f'[[ $3 == plan ]] || {{ echo "until $SLURM_JOB_END_TIME"; exit {code}; }}'
    result = slurm(tmp_path, ["gpu07"], python, scontrol=SCONTROL, TZ="UTC")
    assert result.returncode == code
    assert ("requeued 123456" in result.stdout) == requeued
    assert "until 1772539200" in result.stdout


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("trainer.seeed=1", "error: command line: trainer.seeed: unknown key; did you mean trainer.seed?"),
        ("trainer.seed=1", "/tools/make_quickstart.py': [Errno 2] No such file"),  # the next step
    ],
)
def test_the_quickstart_reports_a_wrong_key_before_it_makes_the_model(tmp_path, key, message):
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "quickstart.yaml").write_text((ROOT / "configs" / "quickstart.yaml").read_text())
    own = {"MEGAPPO_PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": ""}
    result = run(["bash", copy_script("quickstart.sh", tmp_path), key], tmp_path, **own)
    assert result.returncode == 2 and result.stderr.count("\n") == 1
    assert message in result.stderr
