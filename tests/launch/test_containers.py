"""The files for containers pass the linters of their formats. No image is built here."""

import subprocess
import sys
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = Path(sys.executable).parent


def checked(*command: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*map(str, command)], cwd=ROOT, capture_output=True, text=True)


def test_the_dockerfile_has_no_fault():
    done = checked(PROGRAMS / "hadolint", "docker/Dockerfile")
    assert done.returncode == 0, done.stdout


def test_the_kubernetes_objects_fit_their_schema():
    done = checked(PROGRAMS / "kubernetes-validate", "--strict", "docker/kubernetes.yaml")
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_job_starts_as_many_pods_as_the_run_has_nodes():
    service, job = yaml.safe_load_all((ROOT / "docker" / "kubernetes.yaml").read_text("utf-8"))
    [container] = job["spec"]["template"]["spec"]["containers"]
    variables = {variable["name"]: variable["value"] for variable in container["env"]}
    assert job["spec"]["completions"] == job["spec"]["parallelism"] == int(variables["NNODES"])
    assert variables["MASTER_ADDR"] == f"{job['metadata']['name']}-0.{service['metadata']['name']}"
    script = container["args"][0].split("bash ")[1].split()[0]
    assert (ROOT / Path(script).relative_to("/opt/megappo")).is_file()
