"""Mistakes that people make in configs: keys that the chosen method leaves unread, and paths that only a shell would
understand. Each is refused with its place, its key and a remedy."""

import re

import pytest

from megappo.config.checks import config_errors
from megappo.config.describe import keys
from megappo.config.loading import load_config
from megappo.config.model_sections import RewardModel
from megappo.config.recipes import ACTOR_KEYS, OF_PPO, RECIPES, ROLLOUT_KEYS, Recipe
from megappo.config.schema import Actor, Algorithm, Config, Critic, Reward
from megappo.config.values import ReadIf

GRPO = "algorithm.adv_estimator=grpo rollout.n=4"
UNREAD = {
    f"{GRPO} critic.optim.lr=1e-5": "critic.optim.lr 1e-05 has no effect, as this run builds no critic: drop it, or",
    f"{GRPO} critic.lora.rank=8": "critic.lora.rank 8 has no effect, as this run builds no critic: drop it, or change",
    f"{GRPO} critic.lora.rank=16": "critic.lora.rank 16 has no effect, as this run builds no critic",
    f"{GRPO} critic.parallel.tensor=2": "critic.parallel.tensor 2 has no effect, as this run builds no critic",
    f"{GRPO} critic.ppo_epochs=2": "critic.ppo_epochs 2 has no effect, as this run builds no critic",
    f"{GRPO} critic.value_clip=0.2": "critic.value_clip 0.2 has no effect, as algorithm.adv_estimator grpo does",
    f"{GRPO} critic.loss_agg_mode=token-sum": 'critic.loss_agg_mode "token-sum" has no effect, as algorithm.adv_est',
    "critic.value_loss=quantile critic.value_clip=0.2": "critic.value_clip 0.2 has no effect, as critic.value_loss qua",
    "critic.value_loss=huber critic.value_bins=51": "critic.value_bins 51 has no effect, as critic.value_loss huber",
    "critic.value_range=[0, 1]": "critic.value_range [0.0, 1.0] has no effect, as critic.value_loss mse does not read",
    "algorithm.shared_backbone=true critic.offload=[weights]": 'critic.offload ["weights"] has no effect, as this run',
    "algorithm.shared_backbone=true critic.freeze=attention": 'critic.freeze ["attention"] has no effect, as this run',
    "algorithm.use_kl_in_reward=false ref.offload=[weights]": 'ref.offload ["weights"] has no effect, as algorithm.use',
    "algorithm.kl_ctrl.target_kl=0.05": "algorithm.kl_ctrl.target_kl 0.05 has no effect, as algorithm.kl_ctrl.type is",
    "algorithm.kl_ctrl.horizon=500": "algorithm.kl_ctrl.horizon 500 has no effect, as algorithm.kl_ctrl.type is fixed",
    "algorithm.use_kl_in_reward=false actor.use_kl_loss=true algorithm.kl_ctrl.kl_coef=0.1": (
        "algorithm.kl_ctrl.kl_coef 0.1 has no effect, as algorithm.use_kl_in_reward is false"
    ),
    "trainer.keep_every=10 trainer.save_interval=0": "trainer.keep_every 10 has no effect, as trainer.save_interval",
    "trainer.keep_every=10 trainer.keep_checkpoints=0": "trainer.keep_every 10 has no effect, as trainer.keep_checkp",
    "data.val_files=[] rollout.val_temperature=0.6": "rollout.val_temperature 0.6 has no effect, as data.val_files and",
    "data.val_files=[] rollout.val_n=8": "rollout.val_n 8 has no effect, as data.val_files and eval.datasets are",
    "data.val_files=[] trainer.num_samples=10": "trainer.num_samples 10 has no effect, as data.val_files and",
    "actor.clip_ratio=0.3 actor.clip_ratio_low=0.2 actor.clip_ratio_high=0.28": (
        "actor.clip_ratio 0.3 has no effect, as actor.clip_ratio_low and actor.clip_ratio_high are set: drop it"
    ),
    "algorithm.old_log_probs=engine algorithm.rollout_correction.level=token": (
        'algorithm.rollout_correction.level "token" has no effect, as algorithm.old_log_probs is engine: drop it, or'
    ),
    "algorithm.old_log_probs=engine algorithm.rollout_correction.veto_threshold=1e-4": (
        "algorithm.rollout_correction.veto_threshold 0.0001 has no effect, as algorithm.old_log_probs is engine"
    ),
    "rollout.num_environment_workers=4": "rollout.num_environment_workers 4 has no effect, as rollout.environment is",
    "rollout.engines=[http://a:1] rollout.max_total_tokens=9000": "rollout.max_total_tokens 9000 has no effect, as",
}
NO_PATH = "(empty paths, variables and unknown home folders are not read: write the whole path)"
PATHS = (
    *("model.path=$HOME/model", "critic.model_path=${MODELS}/critic", "trainer.output_dir=$SCRATCH/run"),
    *("data.train_files=[train.jsonl, '${DATA}/more.jsonl']", "data.train_files={$DATA/a.jsonl: 1}"),
    *("trainer.output_dir=~nobody-of-this-name/run", "trainer.record_rollouts=''", "trainer.replay_rollouts=' '"),
    *("trainer.eval_checkpoint=''", "data.val_files=['']", "rollout.environment=''", "reward.function=''"),
    *("rollout.tools=['$HOME/tools.py:f']", "reward.function=$REWARDS/mine.py:f", "trainer.extensions=$HOME/mine.py"),
    *("eval.datasets={a: {files: ''}}", "eval.datasets={a: {files: val.jsonl, reward: '$HOME/mine.py:f'}}"),
    "reward.options={$HOME/mine.py:f: {limit: 3}}",
)


@pytest.mark.parametrize(("overrides", "message"), (UNREAD | dict.fromkeys(PATHS, NO_PATH)).items())
def test_a_mistake_is_refused_with_its_key(refusals, overrides, message):
    (error,) = refusals(*re.split(r" (?=[a-z_.]+=)", overrides))
    set_keys = [word.partition("=")[0] for word in overrides.split(" ")]
    assert error.startswith("command line: ") and message in error and any(key in error for key in set_keys)


def test_a_home_folder_is_found(run_folder, accepted, monkeypatch):
    monkeypatch.setenv("HOME", str(run_folder))
    (run_folder / "base.yaml").write_text("base: ~/run.yaml\ntrainer: {output_dir: ~/out}\n")
    accepted("model.path=~/model", "data.train_files={~/train.jsonl: 1}", config="base.yaml")
    config = load_config("base.yaml", ["model.path=~/model", "reward.function=~/mine.py:f"])
    found = (config.model.path, config.trainer.output_dir, config.reward.function)
    assert found == tuple(str(run_folder / name) for name in ("model", "out", "mine.py:f"))


def test_a_base_may_hold_keys_of_a_method_that_is_not_chosen(run_folder, accepted, refusals):
    """As the published GRPO configs do, which rest on one with a critic; and the command line over any file."""
    (run_folder / "ppo.yaml").write_text("base: run.yaml\ncritic: {optim: {lr: 1e-5}}\nref: {offload: [weights]}\n")
    chosen = "algorithm: {adv_estimator: grpo, use_kl_in_reward: false}\nrollout: {n: 4}\n"
    (run_folder / "grpo.yaml").write_text(f"base: ppo.yaml\n{chosen}")
    accepted(config="grpo.yaml")
    accepted("algorithm.adv_estimator=grpo", "rollout.n=4", "algorithm.use_kl_in_reward=false", config="ppo.yaml")
    (run_folder / "own.yaml").write_text(f"base: ppo.yaml\n{chosen}critic: {{optim: {{lr: 2e-5}}}}\n")
    (error,) = refusals(config="own.yaml")
    assert error.startswith("own.yaml:4: critic.optim.lr 2e-05 has no effect, as this run builds no critic: drop it")
    (error,) = refusals("critic.warmup_steps=3", config="grpo.yaml")
    assert error.startswith("command line: critic.warmup_steps 3 has no effect")


def test_every_condition_names_keys_that_there_are(run_folder):
    known, config = {key.path for key in keys()}, load_config(run_folder / "run.yaml")
    assert config_errors(config) == []
    sections = [Config, *(key.section for key in keys() if key.section)]
    fields = [field for section in sections for field in section.model_fields.values()]
    conditions = [item for field in fields for item in field.metadata if isinstance(item, ReadIf)]
    assert len(conditions) > 30
    for condition in conditions:
        assert {condition.switch, *condition.others} <= known and condition.is_read(config) in (True, False)
        assert set(condition.always) <= {*Critic.model_fields, *RewardModel.model_fields}


def test_a_recipe_reads_keys_that_there_are():
    known = {key.path for key in keys()}
    for name, recipe in (RECIPES | OF_PPO).items():
        assert set(recipe.reads) <= known, name
        assert recipe.names("actor.optim.lr") == (recipe.trains != "reward_model")
        assert recipe.names("rollout.n") == recipe.has_rollouts


def test_a_recipe_of_ones_own_refuses_keys_that_it_does_not_name(refusals, monkeypatch):
    components = "megappo.placement.components:of_learner"
    monkeypatch.setitem(RECIPES, "own", Recipe("own:build", "own:loop", components, (*ROLLOUT_KEYS, *ACTOR_KEYS)))
    (error,) = refusals("trainer.kind=own", "actor.clip_ratio=0.3", "rollout.n=4", "actor.optim.lr=1e-4")
    assert "actor.clip_ratio 0.3 has no effect, as trainer.kind is own: drop it, or change trainer.kind" in error


def test_a_method_reads_keys_of_its_section():
    for section in (Actor, Algorithm, Reward):
        assert section.method_key in section.model_fields
        for method in section.methods.values():
            assert set(method.reads) <= set(section.model_fields)
