"""One of each kind of extension, in one file of trainer.extensions, takes part in a run started as users do.

The family is one that SGLang serves and this program does not know; the reward function is in a file of its own.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from program import REPOSITORY, Program, logged
from tiny_run import reached
from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM

KEY = "known-to-this-test-alone"
OF_ENGINES = f'''
import secrets
from pathlib import Path


def known_key(num_bytes):
    Path(__file__).with_name("asked_for_a_key").touch()
    return "{KEY}"


secrets.token_urlsafe = known_key
'''
EXTENSION = '''
from pathlib import Path

import torch

from megappo.architecture.families import FAMILIES, Family
from megappo.batch.fields import FIELDS, Field
from megappo.batch.row_metrics import ROW_METRICS, RowMetric, of_rows, of_tokens
from megappo.config.methods import ESTIMATORS, POLICY_LOSSES, TRANSPORTS, VALUE_LOSSES
from megappo.config.methods import Estimator, PolicyLoss, Transport, ValueLoss
from megappo.placement.components import COMPONENTS, ComponentSpec, ForwardPass, Setting


def halved_mean_baseline(token_level_rewards, response_mask, groups):
    scores = token_level_rewards.sum(dim=1)
    means = torch.stack([scores[groups == group].mean() for group in groups])
    advantages = 0.5 * (scores - means)[:, None] * response_mask
    return advantages, advantages


def squashed(tokens, config):
    ratios = tokens.ratios()
    loss = tokens.weighted(-tokens.advantages * torch.tanh(ratios) - config.clip_ratio)
    result, metrics = tokens.result(loss, config, ratios=ratios)
    return result, metrics | {"own_ratio_min": (ratios[tokens.mask], "min")}


def absolute(inputs, config):
    return (inputs.outputs[..., 0] - inputs.returns).abs()


def judge(config):
    """A frozen model with a value head, which other runs of this config would have as their critic."""
    return ComponentSpec(
        ranks=Setting("placement.critic", config.placement.critic),
        parallel=Setting("critic.parallel", config.critic.parallel),
        folder=Setting("model.path", config.model.path),
        max_tokens=Setting("critic.max_tokens_per_micro_batch", config.critic.max_tokens_per_micro_batch),
        head="value",
        forward=ForwardPass("judge", {"values": "judged"}),
    )


def noted_writer(link):
    from megappo.sync.disk import DiskWriter

    with Path(link.config.trainer.output_dir, "noted").open("a") as file:
        file.write("made\\n")
    return DiskWriter(link)


ESTIMATORS.register("halved", Estimator(halved_mean_baseline, compares_responses=True))
POLICY_LOSSES.register("squashed", PolicyLoss(squashed, ("clip_ratio",)))
VALUE_LOSSES.register("absolute", ValueLoss(absolute))
FAMILIES.register("InternLM3ForCausalLM", Family())
FIELDS.register("judged", Field(True, "the judge's forward pass", "what the judge expects"))
COMPONENTS.register("judge", judge)
TRANSPORTS.register("noted", Transport("megappo.sync.disk:DiskReader", noted_writer))
ROW_METRICS.register("judge/values", RowMetric(of_tokens("judged")))
ROW_METRICS.register("reward/own_score", RowMetric(of_rows("scores"), ("sum",)))
'''

pytestmark = pytest.mark.timeout(300)


def family_folder(folder: Path, like: Path) -> Path:
    """Write a random model of the family, with the tokenizer of another folder."""
    known = AutoConfig.from_pretrained(like)
    sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    tokens = {name: getattr(known, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    config = LlamaConfig(**{name: getattr(known, name) for name in sizes}, **tokens, max_position_embeddings=32)
    LlamaForCausalLM(config).save_pretrained(folder)
    written = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(written | {"architectures": ["InternLM3ForCausalLM"]}))
    for file in like.glob("*token*"):
        shutil.copy(file, folder)
    return folder


def shown_on_the_page(folder: Path, name: str) -> Path:
    """Write a program of docs/extending.md into its file."""
    page = (REPOSITORY / "docs" / "extending.md").read_text("utf-8")
    file = folder / name
    file.write_text(page.split(f"```python\n# {name}\n")[1].split("```")[0])
    return file


def shows_key(process: psutil.Process) -> bool:
    """Return True if a process shows the engine's key to other users or to its children."""
    try:
        return KEY in " ".join(process.cmdline()) or KEY in process.environ().values()
    except psutil.NoSuchProcess:
        return False


def assert_key_is_nowhere(*files: Path) -> None:
    """Check that no file of the run contains the key of its engine."""
    assert (files[0].parent / "asked_for_a_key").exists()
    assert {"config.yaml", "metrics.jsonl", "engine_0.log"} <= {file.name for file in files}
    assert not [file for file in files if KEY.encode() in file.read_bytes()]


def test_each_takes_part_in_a_run(config, folder):
    extension, run = folder / "mine.py", folder / "run"
    # A model's code of one's own imports megatron-core, which must be made usable before.
    extension.write_text(f"import megappo.models.gpt\n{OF_ENGINES}{EXTENSION}")
    overrides = (
        f"trainer.extensions={extension}",
        f"model.path={family_folder(folder / 'model', config.parent / 'model')}",
        "algorithm.adv_estimator=halved",
        "actor.policy_loss=squashed",
        "actor.clip_ratio=0.3",
        "algorithm.use_kl_in_reward=false",
        "rollout.sync.transport=noted",
        "trainer.total_steps=2",
        f"trainer.loggers=[{shown_on_the_page(folder, 'best.py')}:Best]",
        f"trainer.output_dir={run}",
    )
    command = [sys.executable, "-m", "megappo", "plan", config, *overrides]
    planned = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert planned.returncode == 0, planned.stderr
    assert "  judge: data 1 x tensor 1 x pipeline 2\n" in planned.stdout
    assert "  weights: noted from rank 0 to engine 0\n" in planned.stdout

    with Program(folder, config, *overrides) as program:
        program.wait_until(lambda: reached(run, 1))
        assert not [process for process in program.seen if shows_key(process)]
        assert program.wait() == 0, program.output
    assert_key_is_nowhere(program.output_file, *filter(Path.is_file, run.rglob("*")))
    steps = [line for line in logged(run) if line["step"] > 0]
    assert len(steps) == 2
    for metrics in steps:
        assert "values/mean" not in metrics, "without values there is no critic"
        assert metrics["reward/own_score/sum"] == pytest.approx(metrics["reward/score/mean"] * 32 * 4)
        assert abs(metrics["advantages/mean"]) < 0.1 < metrics["advantages/max"] - metrics["advantages/min"]
        assert 0 < metrics["actor/own_ratio_min"] <= metrics["actor/ratio"] <= metrics["actor/ratio_max"]
        assert metrics["actor/pg_loss"] < -0.25, "tanh(1) x 0, minus the clip ratio"
        assert abs(metrics["judge/values/mean"]) > 0
        assert metrics["timing_s/judge"] > 0
    rewards = {line["reward/score/mean"]: line["step"] for line in steps}
    best = max(rewards)
    assert (run / "best.txt").read_text() == f"finished: reward {best:.3f} in step {rewards[best]}"
    assert set((run / "noted").read_text().split()) == {"made"}
    exported = json.loads((run / "hf_actor" / "config.json").read_text())
    assert exported["architectures"] == ["InternLM3ForCausalLM"]


def test_a_kind_of_run_of_ones_own_learns_its_best_responses(config, folder):
    extension, run = shown_on_the_page(folder, "best_of_n.py"), folder / "run"
    overrides = (f"trainer.extensions={extension}", "trainer.kind=best_of_n", f"trainer.output_dir={run}")
    with Program(folder, config, *overrides, "trainer.total_steps=2") as program:
        assert program.wait() == 0, program.output
    first, second = [line for line in logged(run) if line["step"] > 0]
    for metrics in (first, second):
        assert metrics["reward/score/max"] >= metrics["reward/score/mean"] and metrics["actor/nll_loss"] > 0
        assert metrics["actor/num_optimizer_steps"] == 1 and metrics["sync/bytes"] > 0
        assert "values/mean" not in metrics and "timing_s/update_critic" not in metrics
    assert second["actor/nll_loss"] != first["actor/nll_loss"]
    assert (run / "hf_actor" / "config.json").exists()
