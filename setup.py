"""Package metadata; every version comes from the requirements files, the one place for pins."""

from pathlib import Path

from setuptools import find_packages, setup


def pins(name: str) -> list[str]:
    """The pins of a requirements file of this folder, without its comments."""
    lines = (Path(__file__).parent / name).read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def without(names: set[str], requirements: list[str]) -> list[str]:
    """Return the requirements without the given projects."""
    return [line for line in requirements if line.split("==")[0] not in names]


setup(
    name="megappo",
    version="0.1.0",
    description="PPO for large language models on megatron-core, with SGLang rollouts",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=[
        *find_packages(include=["megappo", "megappo.*"]),
        *("megappo_tools", "megappo_tools.conversion", "megappo_tools.importing"),
    ],
    package_dir={"megappo_tools": "tools"},  # the commands beside training
    package_data={
        "megappo.architecture": ["shapes/*/config.json"],
        "megappo.config": ["*.yaml"],
        "megappo.lab.report": ["page/*"],
        "megappo.observe": ["*.yaml"],
        "megappo_tools.importing": ["*.sh"],
    },
    entry_points={"console_scripts": ["megappo = megappo.cli:main"]},
    install_requires=pins("requirements.txt"),
    extras_require={
        # sglang's metadata asks for CUDA packages: without CUDA, launch/setup.sh installs it with --no-deps
        "cpu": without({"sglang"}, pins("requirements-cpu.txt")),
        "gpu": pins("requirements-gpu.txt"),
        "dev": pins("requirements-dev.txt"),
        "agents": pins("requirements-agents.txt"),
    },
)
