"""One of each kind that a person may add, in one file of trainer.extensions, takes part in a run started as users do.

The family is one that SGLang serves and this program does not know; the reward is a function's file of its own.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from program import REPOSITORY, Program, logged
from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM

EXTENSION = '''
from pathlib import Path

from megappo.architecture.families import FAMILIES, Family
from megappo.batch.fields import FIELDS, Field
from megappo.batch.metrics import ROW_METRICS, RowMetric, of_tokens
from megappo.config.methods import ESTIMATORS, POLICY_LOSSES, Estimator, PolicyLoss
from megappo.config.transports import TRANSPORTS, Transport
from megappo.placement.components import COMPONENTS, ComponentSpec, ForwardPass, Setting


def above_a_half(token_level_rewards, response_mask):
    advantages = (token_level_rewards.sum(1, keepdim=True) - 0.5) * response_mask
    return advantages, advantages


def unclipped(tokens, config):
    ratios = tokens.ratios()
    return tokens.result(tokens.weighted(-ratios * tokens.advantages), config, ratios=ratios)


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


ESTIMATORS.register("above_a_half", Estimator(above_a_half))
POLICY_LOSSES.register("unclipped", PolicyLoss(unclipped))
FAMILIES.register("InternLM3ForCausalLM", Family())
FIELDS.register("judged", Field(True, "the judge's forward pass", "what the judge expects"))
COMPONENTS.register("judge", judge)
TRANSPORTS.register("noted", Transport("megappo.sync.disk:DiskReader", noted_writer))
ROW_METRICS.register("judge/values", RowMetric(of_tokens("judged")))
'''

pytestmark = pytest.mark.timeout(300)


def family_folder(folder: Path, like: Path) -> Path:
    """A random model of the family, with the tokenizer of another folder."""
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


def test_each_takes_part_in_a_run(config, folder):
    extension, run = folder / "mine.py", folder / "run"
    # A model's code of one's own imports megatron-core, which must be made usable before.
    extension.write_text(f"import megappo.models.build\n{EXTENSION}")
    overrides = (
        f"trainer.extensions={extension}",
        f"model.path={family_folder(folder / 'model', config.parent / 'model')}",
        "algorithm.adv_estimator=above_a_half",
        "actor.policy_loss=unclipped",
        "algorithm.use_kl_in_reward=false",
        "rollout.sync.transport=noted",
        "trainer.total_steps=2",
        f"trainer.output_dir={run}",
    )
    plan = [sys.executable, "-m", "megappo.plan", str(config), *overrides]
    planned = subprocess.run(plan, cwd=REPOSITORY, capture_output=True, text=True)
    assert planned.returncode == 0, planned.stderr
    assert "  judge: data 1 x tensor 1 x pipeline 2\n" in planned.stdout
    assert "  weights: noted from rank 0 to engine 0\n" in planned.stdout

    with Program(folder, config, *overrides) as program:
        assert program.wait() == 0, program.output
    steps = [line for line in logged(run) if line["step"] > 0]
    assert len(steps) == 2
    for metrics in steps:
        scores = [metrics[f"reward/score/{kind}"] for kind in ("min", "max")]
        assert [metrics[f"advantages/{kind}"] + 0.5 for kind in ("min", "max")] == pytest.approx(scores, abs=1e-6)
        assert metrics["actor/pg_clipfrac"] == 0 and abs(metrics["judge/values/mean"]) > 0
        assert metrics["timing_s/judge"] > 0
    assert set((run / "noted").read_text().split()) == {"made"}
    exported = json.loads((run / "hf_actor" / "config.json").read_text())
    assert exported["architectures"] == ["InternLM3ForCausalLM"]
