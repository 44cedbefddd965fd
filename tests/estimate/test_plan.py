"""plan --gpu: what published models take of GPUs, what does not fit, and what would."""

import re
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from planning import REPOSITORY, plan_here
from published_models import published_folders

from megappo.config.loading import load_config
from megappo.config.schema import Config
from megappo.placement.components import COMPONENTS, ComponentSpec, Setting

RECIPES = [
    path.name
    for path in (REPOSITORY / "configs").glob("*.yaml")
    if not load_config(path).model.path.startswith("outputs/")
]
"""Configs of published models; the others create their own model."""
TABLE = re.compile(r"^  together +([-\d., ]+)$", re.MULTILINE)
Plan = Callable[..., subprocess.CompletedProcess]


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    """In a folder with the config.json of published models: their weights, tokenizers and data are missing."""
    folder = published_folders(tmp_path_factory.mktemp("published"))
    return lambda name, *arguments: plan_here(folder, str(REPOSITORY / "configs" / name), "--gpu", "h100", *arguments)


def unfit(done: subprocess.CompletedProcess) -> list[str]:
    assert "Traceback" not in done.stderr
    return [line for line in done.stderr.splitlines() if "does not fit" in line]


def overrides(values: dict[str, str]) -> list[str]:
    return [f"{key}={value}" for key, value in values.items()]


def fullest(done: subprocess.CompletedProcess) -> float:
    """GiB on the fullest GPU in its fullest phase."""
    return max(float(number.replace(",", "")) for number in TABLE.search(done.stdout)[1].split())


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_fit(plan: Plan, name: str) -> None:
    done = plan(name)
    assert unfit(done) == []
    margin = int(re.search(r"it fits: .*\n  keep (\d+) GiB of that: CUDA contexts and NCCL", done.stdout)[1])
    assert fullest(done) < min(0.95 * 79.1, 79.1 - margin)
    assert re.search(r"^  pinned_copies +on +actor", done.stdout, re.MULTILINE)
    others = [line for line in done.stderr.splitlines() if not re.search("no (folder|file|tokenizer)|holds no", line)]
    assert others == []


def test_what_does_not_fit_is_refused_with_what_would(plan: Plan) -> None:
    recipe = "qwen2.5_7b_critic_7b_8gpu.yaml"
    without = {"actor.offload": "[]", "critic.offload": "[]", "ref.offload": "[]"}
    refused = plan(recipe, *overrides(without))
    assert refused.returncode == 2
    (line,) = unfit(refused)
    remedies = dict(re.findall(r"'([\w.]+)=(\S+)'", line.partition("it would fit with ")[2]))
    assert {"actor.offload", "critic.offload"} <= remedies.keys() <= without.keys()
    accepted = plan(recipe, *overrides(without | remedies))
    assert unfit(accepted) == [] and fullest(accepted) < 0.95 * 79.1 < fullest(refused)
    for key in remedies:  # and none is too much
        assert unfit(plan(recipe, *overrides(without | remedies | {key: "[]"})))


def test_engines_without_room_get_more_of_the_gpu(plan: Plan) -> None:
    (line,) = unfit(plan("qwen2.5_7b_critic_7b_8gpu.yaml", "rollout.mem_fraction_static=0.05"))
    assert "the engines have room for 0 tokens" in line
    (share,) = re.findall(r"it would fit with '(rollout.mem_fraction_static=[\d.]+)'$", line)
    assert unfit(plan("qwen2.5_7b_critic_7b_8gpu.yaml", share)) == []


@pytest.mark.parametrize("key", ["rollout.max_response_length", "data.max_prompt_length"])
def test_rows_that_no_micro_batch_holds_are_not_reckoned(plan: Plan, key: str) -> None:
    done = plan("qwen2.5_7b_critic_7b_8gpu.yaml", f"{key}=20000")
    assert "GiB on each h100" not in done.stdout
    assert "max_tokens_per_micro_batch 8192 cannot hold one row" in done.stderr


def test_auto_offloads_what_does_not_fit(plan: Plan) -> None:
    recipe = "qwen2.5_7b_critic_7b_8gpu.yaml"
    done = plan(recipe, "actor.offload=auto", "critic.offload=auto", "ref.offload=auto")
    assert unfit(done) == []
    assert "actor.offload auto: gradients" in done.stdout and "critic.offload auto: gradients" in done.stdout
    small = plan("qwen2.5_0.5b_gsm8k_1gpu.yaml", "actor.offload=auto")
    assert "actor.offload auto: nothing" in small.stdout


def test_a_node_has_eight_gpus_unless_the_nodes_are_counted(plan: Plan) -> None:
    hosts = {}
    for of_node, words in {8: (), 4: ("--nodes", "8")}.items():
        done = plan("qwen3_30b_a3b_4node.yaml", *words)
        assert f"estimated for nodes of {of_node} GPUs\n" in done.stdout
        hosts[of_node] = float(re.search(r"host memory of the fullest node, about ([\d,.]+) GiB", done.stdout)[1])
    assert hosts[4] == pytest.approx(hosts[8] / 2, rel=1e-3)


def test_a_run_that_no_key_makes_fit_is_refused(plan: Plan) -> None:
    done = plan("llama3.1_70b_8node.yaml", "placement.actor=0-3", "placement.critic=0-3", "placement.rollout=0-3",
                "actor.parallel.pipeline=1", "actor.parallel.tensor=4", "rollout.tensor_parallel=4")  # fmt: skip
    (line,) = unfit(done)
    assert "more or larger GPUs" in line


def test_thousands_of_ranks(plan: Plan) -> None:
    everywhere = [f"placement.{name}=all" for name in ("actor", "critic", "rollout")]
    done = plan("llama3.1_70b_8node.yaml", *everywhere, "--world-size", "4096", "data.train_batch_size=8192")
    assert unfit(done) == [] and "on ranks 3072-4095" in done.stdout


def suggested(done: subprocess.CompletedProcess) -> list[tuple[dict, float]]:
    """Return the suggested YAML, and GiB of the fullest GPU."""
    text = done.stdout.partition("layouts that fit, the fastest by estimate first\n")[2].partition("\n\n")[0]
    _, *parts = re.split(r"(?m)^  # \d: .* the fullest GPU holds ([\d.]+) of .*$", text)
    return [(yaml.safe_load(text), float(gib)) for gib, text in zip(parts[::2], parts[1::2], strict=True)]


@pytest.mark.parametrize(
    "name", ["qwen2.5_7b_critic_7b_8gpu.yaml", pytest.param("qwen3_30b_a3b_4node.yaml", marks=pytest.mark.slow)]
)
def test_suggestions_fit(plan: Plan, name: str, tmp_path: Path) -> None:
    first = plan(name, "--suggest")
    found, ranks = suggested(first), re.search(r"on (\d+) ranks", first.stdout)[1]
    assert len(found) == 3
    for values, gib in found:
        path = tmp_path / "suggested.yaml"
        path.write_text(yaml.safe_dump({"base": str(REPOSITORY / "configs" / name)} | values))
        done = plan(path, "--world-size", ranks)
        assert unfit(done) == [] and fullest(done) == gib < 0.95 * 79.1


def test_suggestions_need_a_gpu() -> None:
    done = plan_here(REPOSITORY, "configs/quickstart.yaml", "--suggest")
    assert done.returncode == 2 and "error: --suggest needs --gpu" in done.stderr


def test_a_registered_component_counts(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    """Return a component that is trained by the critic's section, with further settings of its own."""

    def judge(config: Config) -> ComponentSpec:
        critic = COMPONENTS["critic"](config)
        return replace(critic, ranks=Setting("judge.ranks", "0-7"), max_tokens=Setting("judge.max_tokens", 4096))

    name, values = "qwen2.5_7b_gsm8k_8gpu.yaml", ["critic.recompute=none", "critic.max_tokens_per_micro_batch=65536"]
    alone = plan(name, *values)
    monkeypatch.setitem(COMPONENTS, "judge", judge)
    done = plan(name, *values, "--suggest")
    assert fullest(done) > fullest(alone)
    (line,) = unfit(done)
    assert "'critic.recompute=full'" in line and "judge" not in line.partition("it would fit with")[2]
    assert all(values.keys() <= {"placement", "actor", "critic", "ref", "rollout"} for values, _ in suggested(done))


def test_layers_are_torchs_where_transformer_engine_would_pad_packs(plan: Plan) -> None:
    done = plan("qwen2.5_7b_gsm8k_8gpu.yaml", "--gpu", "a100")
    assert [line.split()[1] for line in done.stdout.splitlines() if line.split()[:1] == ["varlen_attn"]] == ["on"]
    packed = "attention of packed rows on GPUs of compute capability 8.0"
    assert f"which does not compute {packed}" in done.stdout
    asked = plan(
        "qwen2.5_7b_gsm8k_8gpu.yaml", "--gpu", "a100", "--ignore-missing", "model.layer_spec=transformer_engine"
    )
    assert asked.returncode == 2 and f"TransformerEngine does not compute {packed}, which " in asked.stderr
