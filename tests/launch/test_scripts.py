import os
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


def copy_script(name: str, repository: Path) -> Path:
    copy = repository / "launch" / name
    executable(copy, (ROOT / "launch" / name).read_text())
    return copy


def test_local_without_setup_says_what_to_run(tmp_path):
    result = run(["bash", copy_script("local.sh", tmp_path), "c.yaml"], tmp_path)
    assert result.returncode == 1 and "bash launch/setup.sh" in result.stderr


@pytest.mark.parametrize(
    "environment, nproc",
    [
        ({"CUDA_VISIBLE_DEVICES": "0,3,5"}, "3"),
        ({"NPROC": "4", "CUDA_VISIBLE_DEVICES": "0"}, "4"),
        ({"NPROC": "1"}, "1"),
    ],
)
def test_local_hands_torchrun_the_process_count_and_the_overrides(tmp_path, environment, nproc):
    script = copy_script("local.sh", tmp_path)
    executable(tmp_path / ".venv" / "bin" / "python", 'printf "%s\\n" "$@"')
    result = run(["bash", script, "my config.yaml", "actor.optim.lr=1e-5"], tmp_path, **environment)
    words = result.stdout.splitlines()
    assert words[words.index("--nproc-per-node") + 1] == nproc
    assert words[-4:] == ["-m", "megappo.train", "my config.yaml", "actor.optim.lr=1e-5"]


REFUSING = """[[ $2 == megappo.plan ]] || { echo started; exit 0; }
echo "plan: $*"
echo "warning: odd" >&2
[[ $* == *trainer.seed=1* ]] || exit 0
echo "error: wrong" >&2
exit 2
"""
"""A stand-in for the interpreter whose dry run warns, and refuses a seed."""


def test_local_starts_no_rank_of_what_the_dry_run_refuses_and_shows_its_words(tmp_path):
    script = copy_script("local.sh", tmp_path)
    executable(tmp_path / ".venv" / "bin" / "python", REFUSING)
    refused = run(["bash", script, "c.yaml", "trainer.seed=1"], tmp_path)
    assert (refused.returncode, refused.stdout) == (2, "checking c.yaml\n")
    assert refused.stderr == "warning: odd\nerror: wrong\n"
    fine = run(["bash", script, "c.yaml"], tmp_path)
    assert (fine.returncode, fine.stdout, fine.stderr) == (0, "checking c.yaml\nstarted\n", "warning: odd\n")


def slurm(
    tmp_path: Path, nodes: list[str], python: str = 'printf "%s\\n" "$@"', **environment: str
) -> subprocess.CompletedProcess:
    """Run the batch script as Slurm would, on node 1 of the job, with stand-ins for Slurm's two commands."""
    executable(tmp_path / "bin" / "scontrol", "".join(f"echo {node}\n" for node in nodes))
    executable(tmp_path / "bin" / "srun", 'shift; SLURM_NODEID=1 "$@"')
    executable(tmp_path / ".venv" / "bin" / "python", python)
    variables = {
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        "SLURM_SUBMIT_DIR": str(tmp_path),
        "SLURM_JOB_ID": "123456",
        "SLURM_JOB_NODELIST": "gpu[07-09]",
        "SLURM_NNODES": "3",
        "SLURM_GPUS_ON_NODE": "8",
    }
    command = ["bash", ROOT / "launch" / "slurm.sbatch", "configs/x.yaml", "trainer.seed=1"]
    return run(command, tmp_path, **(variables | environment))


def test_slurm_starts_torchrun_on_every_node_towards_the_first(tmp_path):
    result = slurm(tmp_path, ["gpu07", "gpu08", "gpu09"])
    words = result.stdout.splitlines()[2:]
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


def test_slurm_starts_no_rank_of_what_the_dry_run_refuses(tmp_path):
    result = slurm(tmp_path, ["gpu07", "gpu08", "gpu09"], REFUSING.replace('echo "plan: $*"', 'echo "$*" >&2'))
    assert (result.returncode, "started" in result.stdout) == (2, False)
    assert result.stderr == (
        "-m megappo.plan --world-size 24 configs/x.yaml trainer.seed=1\nwarning: odd\nerror: wrong\n"
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
    variables |= {"SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "a", "SLURM_GPUS_ON_NODE": "1"}
    executable(tmp_path / "bin" / "scontrol", "echo a")
    assert run(["bash", tmp_path / "failing", "c.yaml"], tmp_path, **variables).returncode == 7


def test_setup_refuses_an_old_python_with_the_remedy(tmp_path):
    script = copy_script("setup.sh", tmp_path)
    for name in ("setup.py", "requirements.txt", "requirements-dev.txt", "requirements-cpu.txt"):
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
    for kind, found in names.items():
        assert len(found) == len(set(found)), kind


def test_the_environment_is_the_locks():
    """With the set-up's CPU environment: every pin is installed in exactly that version."""
    script = (
        "import importlib.metadata as m, sys; print('\\n'.join(f'{d.name}=={d.version}' for d in m.distributions()))"
    )
    result = run([sys.executable, "-c", script], ROOT)
    installed = {line.lower().replace("_", "-").replace("+cpu", "") for line in result.stdout.splitlines()}
    if "torch==2.13.0" not in installed:
        pytest.skip("not the CPU environment")
    for file in ("requirements.txt", "requirements-dev.txt", "requirements-cpu.txt"):
        for line in (ROOT / file).read_text().splitlines():
            if line and not line.startswith("#"):
                assert line.split(";")[0].lower().replace("_", "-") in installed, f"{file}: {line}"
