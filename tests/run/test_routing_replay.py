"""Whole runs of a mixture of experts whose routers are nearly undecided, so that engine and trainer, which round
differently, send many tokens to different experts."""

import shutil
import signal
from pathlib import Path

import pytest
import torch
from ahead_runs import journal_lines
from program import ONE_RANK_EACH, Program, has_logged, logged, trained_on
from transformers import AutoConfig, AutoModelForCausalLM

from megappo.batch.rows_file import RowsFile
from megappo.observe.files import rows_file

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
SHAPE = {
    **{"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48, "initializer_range": 0.2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "head_dim": 8},
    **{"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True},
}
EXACT = 1e-4
"""Largest difference of log-probs by rounding alone."""
STEPS = ("trainer.total_steps=2", "trainer.eval_interval=0", "trainer.save_interval=0", "actor.optim.lr=1e-8")
LAYOUTS = {
    "tp2 ep2 sp, full recompute": ("actor.parallel={tensor: 2, sequence: true, expert: 2}", "actor.recompute=full"),
    "pp2": ("actor.parallel={tensor: 1, pipeline: 2}",),
    "cp2": ("actor.parallel={tensor: 1, context: 2}", "algorithm.old_log_probs=trainer"),
}
ON = "rollout.routing_replay=true"


@pytest.fixture(scope="module")
def model(config: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the setting of a model with the tokenizer of the tiny run's."""
    folder, tiny = tmp_path_factory.mktemp("mixture"), config.parent / "model"
    torch.manual_seed(0)
    given = AutoConfig.from_pretrained(tiny)
    ids = {name: getattr(given, name) for name in ("vocab_size", "eos_token_id", "pad_token_id")}
    mixture = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3_moe", **SHAPE, **ids, bos_token_id=None))
    for layer in mixture.model.layers:
        gate = layer.mlp.gate.weight.data
        gate.copy_(gate[:1] + 3e-8 * torch.randn_like(gate))
    mixture.save_pretrained(folder)
    for file in tiny.glob("*token*"):
        shutil.copy(file, folder)
    return f"model.path={folder}"


def run(folder: Path, config: Path, *settings: str) -> list[dict]:
    """Run the program and return its steps' metrics."""
    out = folder / "out"
    with Program(folder / "program", config, f"trainer.output_dir={out}", *STEPS, *settings) as program:
        assert program.wait() == 0, program.output
    return logged(out)


def test_the_routers_are_undecided(config: Path, model: str, folder: Path) -> None:
    steps = run(folder, config, model, *LAYOUTS["pp2"], "rollout.sync.probe_tolerance=10")
    differences = [metrics["rollout/log_prob_diff/mean"] for metrics in steps]
    assert min(differences) > 10 * EXACT, differences
    assert "actor/routing_diff_frac" not in steps[0]


@pytest.mark.parametrize("name", LAYOUTS)
def test_engine_and_trainer_agree_in_log_probs(name: str, config: Path, model: str, folder: Path) -> None:
    record = f"trainer.record_rollouts={folder / 'record'}"
    steps = run(folder, config, model, ON, record, *LAYOUTS[name], f"rollout.sync.probe_tolerance={EXACT}")
    assert [metrics["step"] for metrics in steps] == [1, 2]
    for metrics in steps:
        assert metrics["rollout/log_prob_diff/max"] < EXACT and metrics["sync/log_prob_diff/max"] < EXACT
        assert 0.01 < metrics["actor/routing_diff_frac"] < 1 < metrics["actor/expert_load_max"]
        assert metrics["actor/grad_norm"] > 0 and abs(metrics["actor/ppo_kl"]) < 1e-3
    replay = (ON, f"trainer.replay_rollouts={folder / 'record'}")
    run(folder / "again", config, model, *replay, *LAYOUTS[name])
    assert trained_on(folder / "again" / "out") == trained_on(folder / "out")


def test_runs_ahead_keep_the_choices_in_their_journal(config: Path, model: str, folder: Path) -> None:
    ahead = (*ONE_RANK_EACH, "placement.rollout=1", "rollout.max_staleness=1", ON, "rollout.keep_partial=true")
    settings = (model, *ahead, f"rollout.sync.probe_tolerance={EXACT}", "trainer.total_steps=6")
    out = folder / "out"
    with Program(folder / "interrupted", config, f"trainer.output_dir={out}", *STEPS, *settings) as program:
        program.wait_until(lambda: has_logged(out, 2))
        program.process.send_signal(signal.SIGTERM)
        assert program.wait() == 75, program.output
    samples = [line["sample"]["segments"][0] for line in journal_lines(out) if "sample" in line]
    assert samples and all(one["choices"] for one in samples)
    steps = run(folder, config, *settings)
    assert [metrics["step"] for metrics in steps] == [1, 2, 3, 4, 5, 6]
    assert all(metrics["sync/log_prob_diff/max"] < EXACT for metrics in steps)
    assert max(metrics["rollout/staleness/max"] for metrics in steps) > 0


def test_episodes_of_several_turns(config: Path, model: str, folder: Path) -> None:
    (folder / "environment.py").write_text(ENVIRONMENT)
    settings = (f"rollout.environment={folder / 'environment.py'}:Echo", "rollout.max_turns=3", "reward.function=null")
    # The engine caches the first tokens of equal responses to a prompt once, with the experts of one of them.
    settings += ("rollout.n=1", "rollout.sync.probe_interval=0")
    lengths = ("rollout.max_response_length=24", "data.max_prompt_length=8")
    record = f"trainer.record_rollouts={folder / 'record'}"
    settings += LAYOUTS["pp2"]
    steps = run(folder, config, model, ON, record, *settings, *lengths, f"rollout.sync.probe_tolerance={EXACT}")
    assert all(metrics["rollout/log_prob_diff/max"] < EXACT for metrics in steps)
    assert steps[0]["episode/turns"] > 1
    with RowsFile(rows_file(folder / "record", 1)) as file:
        rows = file.rows(0, len(file.table))
    is_known = rows.fields["expert_choices"].bool().all(dim=1)
    for known in is_known.split(rows.lengths.tolist()):
        num_known = int(known.sum())
        assert known[:num_known].all() and num_known < len(known), "all tokens before the end of the last turn"


ENVIRONMENT = """
class Echo:
    def reset(self, row):
        return []

    def step(self, message):
        return [{"role": "user", "content": "7+7="}], 0.5, False
"""


def test_a_record_without_choices_is_refused(config: Path, model: str, folder: Path) -> None:
    record = folder / "record"
    run(folder, config, model, *LAYOUTS["pp2"], f"trainer.record_rollouts={record}", "trainer.rollout_only=true")
    again = (f"trainer.output_dir={folder / 'again'}", f"trainer.replay_rollouts={record}", ON)
    with Program(folder / "refused", config, *STEPS, model, *LAYOUTS["pp2"], *again) as program:
        assert program.wait() != 0
    assert "has no expert_choices, which rollout.routing_replay needs" in program.output
