"""Scripts of verl, TRL and OpenRLHF become configs that the dry run accepts, or that name what is missing."""

from pathlib import Path

import pytest
import yaml

from megappo.commands import plan
from megappo.commands.arguments import plan_arguments, train_arguments
from megappo.config.config_error import ConfigError
from megappo.config.describe import declared, keys
from megappo.config.elsewhere import BELOW, System, systems
from megappo.config.loading import load_config
from megappo.lab.plan.run_checks import check_run
from megappo.placement.placing import smallest_world
from megappo_tools import coming_from, importer
from megappo_tools.importing.script_settings import PROGRAM, of_command, read_settings, trainings_of
from megappo_tools.importing.shell_commands import RecordedCommand, ShellScript
from megappo_tools.importing.translation import Translation

SCRIPTS = Path(__file__).parent / "scripts"
ARGUMENTS = yaml.safe_load((Path(__file__).parent / "argument_lists.yaml").read_text("utf-8"))
ALL = sorted(path.relative_to(SCRIPTS) for path in SCRIPTS.rglob("*.*"))
NEEDS_FILES = (
    "model.path: ",
    "model.dist_checkpointing_path: ",
    "critic.model_path: ",
    "reward_model.model_path: ",
    "teachers.teacher.model_path: ",
    "data.",
    "reward.function",
    "trainer.loggers",
    "trainer.eval_",
)
"""Beginnings of errors about what lies on the machine of the script's author, or is missing from the script."""
EXPECTED = {
    "verl/ppo_gsm8k.sh": {
        "data.train_files": "~/data/gsm8k/train.parquet",
        "data.too_long": "skip",
        "actor.offload": ["optimizer", "weights"],
        "actor.max_tokens_per_micro_batch": 8 * (512 + 256),
        "critic.max_tokens_per_micro_batch": 16 * (512 + 256),
        "critic.ppo_mini_batch_size": 128,
        "critic.warmup_steps": 2,
        "placement.actor, critic, rollout": "0-7",
        "reward.function": "gsm8k",
        "critic.recompute": "full",
        "algorithm.preset": "verl",
        "algorithm.use_kl_in_reward": False,
        "trainer.output_dir": "outputs/gsm8k/ppo",
        "trainer.eval_interval": 5,
    },
    "verl/distillation.sh": {
        "teachers.teacher.model_path": "teacher",
        "distillation.signal": "advantage",
        "distillation.kl_type": "k1",
        "distillation.coef": 0.5,
        "distillation.task_reward": False,
    },
    "verl/ppo_mixed.sh": {
        "data.train_files": ["~/data/gsm8k/train.parquet", "~/data/math/train.parquet"],
        "actor.parallel.context": 2,
        "reward_model.model_path": "~/models/RM",
        "actor.max_tokens_per_micro_batch": 48000,
        "actor.optim.lr_warmup_steps": 0.1 * 100 * 1024 / 256,
        "algorithm.kl_ctrl.type": "adaptive",
        "placement.actor, critic, rollout": "0-7",
        "trainer.total_steps": 100,
    },
    "verl/ppo_megatron.sh": {
        "model.dist_checkpointing_path": "~/dist/actor",
        "critic.dist_checkpointing_path": None,
        "actor.parallel.tensor": 2,
        "actor.parallel.pipeline": 2,
        "actor.parallel.sequence": True,
        "actor.recompute": "full",
        "actor.offload": ["weights", "gradients", "optimizer"],
        "actor.optim.lr_warmup_steps": 10 * 256 // 64,  # verl counts PPO steps
        "algorithm.rollout_correction.reject": {"seq_mean_k1": [0.999, 1.001]},
        "critic.parallel.tensor": 2,
        "critic.offload": ["optimizer"],
        "critic.recompute": None,
        "trainer.output_dir": "~/runs/megatron",
    },
    "verl/ppo_reward_file.sh": {
        "reward.function": "rewards/mine.py:score",
        "data.prompt_key": "question",
        "actor.ppo_epochs": 2,
        "critic.ppo_epochs": 2,
        "actor.optim.clip_grad": 0.5,
        "rollout.sleep": "never",
        "rollout.server_args.disable_cuda_graph": True,
        "trainer.save_interval": 0,
        "trainer.keep_checkpoints": 2,
    },
    "verl/ppo_small.sh": {"model.path": "model", "reward.function": "mine.py:compute_score"},
    "verl/grpo_gsm8k.sh": {
        "actor.kl_loss_type": "low_var_kl",
        "ref.offload": ["weights"],
        "rollout.n": 5,
        "trainer.loggers": ["wandb"],
    },
    "verl/grpo_dapo_moe.sh": {
        "data.max_prompt_length": 2048,
        "rollout.max_response_length": 8192,
        "data.too_long": "truncate_left",
        "actor.max_tokens_per_micro_batch": 10240,
        "actor.parallel.expert": 8,
        "reward.length_penalty": "overlong",
        "reward.overlong_buffer": 4096,
        "algorithm.filter_groups.enable": True,
        "placement.actor, critic, rollout": "0-15",
        "trainer.output_dir": f"{SCRIPTS}/verl/run",
    },
    "verl/grpo_lora.sh": {"actor.lora.rank": 64, "actor.lora.alpha": 32, "data.shuffle": False},
    "verl/gspo.sh": {"actor.policy_loss": "gspo", "actor.clip_ratio_low": 3e-4, "rollout.n": 16},
    "verl/rloo.sh": {"algorithm.adv_estimator": "rloo", "algorithm.use_kl_in_reward": True},
    "trl/ppo.sh": {
        "model.path": "my/sft",
        "data.train_batch_size": 4 * 16 * 4,
        "actor.ppo_mini_batch_size": 128,
        "trainer.total_steps": 1000000 // 256,
        "trainer.eval_interval": 100,
        "rollout.temperature": 0.7,
        "actor.ppo_epochs": 4,
        "critic.optim.lr": 3e-6,
    },
    "trl/grpo.sh": {
        "reward.function": {"math": 1.0, "my_lib.rewards:brief": 0.1},
        "data.train_batch_size": 8 * 2 // 4,
        "rollout.n": 4,
        "actor.loss_agg_mode": "seq-mean-token-sum-norm",
        "actor.use_kl_loss": True,
        "actor.kl_loss_coef": 0.04,
        "actor.lora.target_modules": ["q_proj", "v_proj"],
        "actor.recompute": "full",
        "algorithm.rollout_correction.level": "sequence",
        "algorithm.rollout_correction.mode": "mask",
        "algorithm.rollout_correction.threshold": 3.0,
        "trainer.total_steps": 100,
    },
    "trl/grpo.py": {
        "model.path": "Qwen/Qwen2-0.5B-Instruct",
        "actor.lora.rank": 8,
        "actor.clip_ratio_high": 0.28,
        "trainer.save_interval": 0,
    },
    "trl/rloo.py": {
        "reward.function": {"trl.rewards:think_format_reward": 1, "math": 1},
        "algorithm.adv_estimator": "rloo",
        "algorithm.kl_ctrl.kl_coef": 0.05,
        "rollout.n": 2,
        "data.train_batch_size": 8 * 2 // 2,
        "actor.lora.rank": 8,
        "actor.lora.target_modules": ["q_proj", "v_proj"],
    },
    "openrlhf/slurm.sh": {
        "critic.model_path": "OpenRLHF/Llama-3-8b-rm-mixture",
        "placement.actor": "0-3",
        "placement.critic": "4-7",
        "placement.rollout": "8-15",
        "rollout.max_staleness": 2,
        "rollout.on_sync": "finish",
        "trainer.loggers": ["wandb"],
    },
    "openrlhf/ppo.sh": {
        "placement.actor": "0-1",
        "placement.critic": "2-3",
        "placement.rollout": "4-7",
        "reward.function": "rewards/reward_func.py:reward_func",
        "reward.normalize": "running",
        "data.max_prompt_length": 1024,
        "trainer.total_steps": 97,
        "actor.optim.min_lr": 5e-8,
        "critic.offload": ["optimizer"],
    },
    "openrlhf/reinforce_baseline.sh": {
        "algorithm.adv_estimator": "reinforce_plus_plus_baseline",
        "actor.ppo_mini_batch_size": 128,
        "actor.use_kl_loss": True,
        "algorithm.use_kl_in_reward": False,
        "actor.clip_ratio_high": 0.27,
        "algorithm.rollout_correction.mode": "mask",
        "trainer.output_dir": f"{SCRIPTS.parent}/exp",
        "trainer.loggers": ["wandb"],
    },
    "openrlhf/old_flags.sh": {
        "model.path": "meta-llama/Llama-3.2-1B",
        "algorithm.adv_estimator": "grpo",
        "actor.ppo_mini_batch_size": 16,
        "placement.rollout": "0-1",
    },
}
MISSING = {
    "verl/ppo_gsm8k.sh": ("trainer.total_epochs=15",),
    "verl/ppo_mixed.sh": (),
    "verl/rloo.sh": (),
    "verl/ppo_small.sh": (),
    "trl/ppo.sh": ("dataset_name=trl-lib/tldr", "missing_eos_penalty=1.0"),
    "openrlhf/slurm.sh": (),
    "openrlhf/reinforce_baseline.sh": ("train.agent_func_path=agent.py", "reward.function"),
    "openrlhf/old_flags.sh": ("train.num_episodes=2",),
}


OF_ARGUMENTS = {
    "ppo qwen3_8b fsdp": {
        "data.train_files": ["~/data/gsm8k/train.parquet", "~/data/math/train.parquet"],
        "critic.offload": None,
        "critic.max_tokens_per_micro_batch": 24576,
    },
    "router_replay qwen3_30b_a3b megatron": {
        "rollout.routing_replay": True,
        "actor.parallel.dispatcher": "deepep",
        "data.train_batch_size": 3,
        "actor.offload": ["weights", "optimizer", "gradients"],
    },
    "grpo mistral_nemo_12b skyworkrm": {
        "reward_model.model_path": "Skywork/Skywork-Reward-Llama-3.1-8B",
        "reward.function": None,
        "reward.num_workers": 8,
    },
    "gdpo qwen3_8b fsdp": {"reward.function": "verl/utils/reward_score/rlla.py:compute_score"},
    "sapo qwen3_30b_a3b fsdp": {"actor.policy_loss": "sapo", "actor.tau_pos": 1.0, "actor.tau_neg": 1.05},
    "grpo deepseek_v4_flash megatron": {"reward.length_penalty": None, "actor.recompute": "full"},
    "grpo hy_v3 megatron": {
        "reward.length_penalty": "overlong",
        "reward.overlong_buffer": 4096,
        "algorithm.rollout_correction.threshold_lower": 0.5,
        "placement.actor, critic, rollout": "0-127",
    },
    "sft qwen megatron_fsdp": {
        "trainer.kind": "sft",
        "placement.actor": "0-7",
        "actor.parallel.tensor": 4,
        "actor.optim.betas": [0.9, 0.95],
        "trainer.loggers": ["wandb"],
    },
    "sft qwen3_5_397b megatron": {
        "placement.actor": "0-127",
        "data.columns": {"messages": "messages"},
        "actor.parallel.expert": 32,
        "actor.recompute": "full",
    },
}
"""Our settings for the lists in argument_lists.yaml."""


def translation_of(script: str) -> Translation:
    return Translation(*read_settings(ShellScript(SCRIPTS / script), candidates(script.partition("/")[0])))


def candidates(command: str) -> list[System]:
    return [system for name, system in systems().items() if name.partition("_")[0] == command]


def dropped(translation: Translation) -> list[str]:
    """Return the settings that a translation neither uses nor names."""
    named = [one for lists in (translation.missing, translation.unneeded) for ones in lists.values() for one in ones]
    used = {key for origins in translation.origins.values() for key in origins}
    return [key for key in translation.theirs if key not in used and not any(one.startswith(key) for one in named)]


def test_each_script_has_an_expectation() -> None:
    assert sorted(map(str, ALL)) == sorted(EXPECTED)


@pytest.mark.parametrize("script", EXPECTED)
def test_settings_are_translated(script: str) -> None:
    translation = translation_of(script)
    assert {key: translation.values.get(key) for key in EXPECTED[script]} == EXPECTED[script]
    missing = [setting for settings in translation.missing.values() for setting in settings]
    assert set(MISSING.get(script, ())) <= set(missing)
    assert dropped(translation) == []


@pytest.mark.parametrize("name", OF_ARGUMENTS)
def test_present_arguments_are_translated(name: str) -> None:
    command = RecordedCommand(1, ARGUMENTS[name])
    system = next(system for system in candidates("verl") if trainings_of([command], system))
    translation = Translation(system, of_command(command, system))
    assert {key: translation.values.get(key) for key in OF_ARGUMENTS[name]} == OF_ARGUMENTS[name]
    assert dropped(translation) == []
    given = [word for word in command.words if "=" in word and not word.startswith(("--standalone", "--rdzv"))]
    assert len(translation.theirs.keys() - {PROGRAM}) >= len({word.lstrip("+-").partition("=")[0] for word in given})


@pytest.mark.parametrize("script", map(str, ALL))
def test_the_dry_run_names_only_what_the_script_leaves_open(script: str, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    assert importer.main([script.partition("/")[0], str(SCRIPTS / script), "--output", "run.yaml"]) == 0
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.endswith("megappo plan run.yaml\n")
    try:
        config = load_config("run.yaml")
    except ConfigError as error:
        assert all("$" in line or "must be set" in line for line in error.errors), error
        return
    world_size = smallest_world(config)
    assert world_size
    errors = [line.split(": ", 1)[1] for line in check_run(config, world_size)[1]]
    assert [line for line in errors if not line.startswith(NEEDS_FILES)] == []


def test_the_dry_run_accepts_a_complete_script(run_folder, capsys) -> None:
    """Data, model and reward function of the script exist here; the fields of verl's records do, too."""
    rewards = "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    return 1.0\n"
    record = '{"prompt": "1+1=", "reward_model": {"ground_truth": "2"}, "data_source": "sums"}\n'
    for name in ("train.jsonl", "val.jsonl"):
        Path(name).write_text(record * 64)
    Path("mine.py").write_text(rewards)
    assert importer.main(["verl", str(SCRIPTS / "verl" / "ppo_small.sh"), "--output", "imported.yaml"]) == 0
    capsys.readouterr()
    code = plan.main(["imported.yaml"])
    printed = capsys.readouterr()
    assert (code, "error" in printed.err) == (0, False)
    assert "\n  24 prompts in 3 steps: 0.375 epochs\n" in printed.out


REASONS = {
    "actor_rollout_ref.actor.megatron.load_weight=False": ("missing", "a model starts from model.path"),
    "critic.megatron.load_weight=True": ("unneeded", "the default here"),
    "critic.megatron.override_transformer_config.moe_router_dtype=fp32": ("missing", "routers have the dtype"),
    "actor_rollout_ref.ref.fsdp_config.pad_to_length=128": ("unneeded", "sequences are always packed"),
    "critic.model.tokenizer_path=tokenizer": ("unneeded", "the critic reads the actor's tokens"),
    "critic.fsdp.full_determinism=True": ("missing", "sampling is not reproducible"),
    "actor_rollout_ref.actor.fsdp_config.dtype=float16": ("missing", "set model.dtype"),
    "async_training.partial_rollout=True": ("missing", "see rollout.on_sync"),
}
"""Settings of verl -> the list that has them, and the reason."""


def test_each_setting_has_its_own_reason() -> None:
    words = [*REASONS, "actor_rollout_ref.actor.megatron.override_transformer_config.use_distributed_optimizer=False"]
    command = RecordedCommand(1, ["python3", "-m", "verl.experimental.fully_async_policy.fully_async_main", *words])
    [verl] = [system for system in candidates("verl") if trainings_of([command], system)]
    translation = Translation(verl, of_command(command, verl))
    for setting, (group, reason) in REASONS.items():
        key, _, value = setting.partition("=")
        given = getattr(translation, group).items()
        assert [why for why, settings in given if f"{key}={value.lower()}" in settings and reason in why], setting
    assert translation.values["actor.optim.distributed"] is False


def test_what_is_no_script_is_refused(tmp_path, capsys) -> None:
    for name, text, message in (("a.sh", "echo\n", "found no settings of verl"), ("b.py", "def (", "invalid syntax")):
        (tmp_path / name).write_text(text)
        assert importer.main(["verl", str(tmp_path / name)]) == 2
        assert message in capsys.readouterr().err
    assert importer.main(["trl", str(tmp_path / "none.sh")]) == 2
    assert "No such file" in capsys.readouterr().err


def test_the_table_names_keys_that_exist() -> None:
    known = {key.path for key in keys()} | {"placement", "trainer.loggers"}
    for system in systems().values():
        named = [row.key for row in system.rows.values() if row.key]
        named += [key.replace(", critic, rollout", "") for key in system.formulas if key[0] != "_"]
        named += [key for defaults in system.defaults.values() for key in defaults]
        assert [key for key in named if declared(key) not in known and not key.startswith("rollout.server_args.")] == []
        assert [name for name in system.aliases.values() if system.find(name)[1] is None] == []
        assert [name for name in system.rows if BELOW in name and not name.endswith(BELOW)] == []


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("actor_rollout_ref.model.path=m", "unknown key; write model.path=m for verl's actor_rollout_ref.model.path"),
        ("+actor_rollout_ref.rollout.n=4", "unknown key; write rollout.n=4 for verl's actor_rollout_ref.rollout.n"),
        ("trainer.save_freq=5", "unknown key; write trainer.save_interval=5 for verl's trainer.save_freq"),
        ("trainer.total_epochs=5", "no counterpart (set trainer.total_steps to epochs x prompts / data.train_batch"),
        ("trainer.balance_batch=true", "trainer.balance_batch is not needed (ranks are always balanced by cost): drop"),
        ("trainer.logger=[console]", "unknown key; did you mean trainer.loggers?"),
        ("trainer.save_freq=-1", "unknown key; write trainer.save_interval=0 for verl's trainer.save_freq"),
        ("data.truncation=error", 'unknown key; verl\'s data.truncation "error" is the default here: drop it'),
        ("data.truncation=right", "unknown key; write data.too_long for verl's data.truncation"),
        (
            "actor_rollout_ref.rollout.dtype=bf16",
            "verl's actor_rollout_ref.rollout.dtype is not needed (engines choose",
        ),
        ("rollout.gpu_memory_utilization=0.4", "write rollout.mem_fraction_static=0.4 for verl's actor_rollout_ref.ro"),
        ("learning_rate=1e-6", "write actor.optim.lr for TRL's learning_rate"),
        ("pretrain=m", "write model.path=m for OpenRLHF's actor.model_name_or_path"),
        ("algorithm.adv_estimator=ppo", 'found "ppo" (verl\'s ppo is gae here)'),
        ("algorithm.adv_estimator=group_norm", "(OpenRLHF's group_norm is grpo here)"),
        ("actor.policy_loss=vanilla", "(verl's vanilla is the default here)"),
        ("actor.ppo_epoch=2", "actor.ppo_epoch: unknown key; did you mean actor.ppo_epochs?"),
        ("trainer.total_step=2", "did you mean trainer.total_steps?"),
    ],
)
def test_an_error_answers_a_key_of_another_system(refusals, override: str, message: str) -> None:
    (error,) = refusals(override)
    assert message in error


def test_each_of_a_systems_keys_is_answered(refusals) -> None:
    errors = refusals("actor_rollout_ref.rollout.n=2", "actor_rollout_ref.actor.optim.lr=1e-6", "critic.model.path=m")
    assert sorted(error.split(" ", 3)[2] for error in errors) == [
        "actor_rollout_ref.actor.optim.lr:",
        "actor_rollout_ref.rollout.n:",
        "critic.model.path:",
    ]


def test_a_whole_script_on_the_command_line_is_pointed_to_the_importer(refusals) -> None:
    script = (SCRIPTS / "verl" / "ppo_small.sh").read_text()
    first, *errors = refusals(*[word for word in script.split() if "=" in word])
    assert len(errors) == 12 and all("verl's" in error or "did you mean trainer.loggers?" in error for error in errors)
    assert first == "run.yaml: 11 keys are of verl: write ours, or translate the script: megappo import verl SCRIPT"


def test_the_page_has_the_table_of_today() -> None:
    text = coming_from.PAGE.read_text("utf-8")
    assert coming_from.page(text) == text, "run tools/coming_from.py"


@pytest.mark.parametrize("parse", [plan_arguments, train_arguments])
@pytest.mark.parametrize("words", [["--actor.optim.lr=1e-6"], ["--actor.optim.lr", "1e-6"]])
def test_a_key_with_dashes_is_answered_with_the_key(parse, words, capsys) -> None:
    with pytest.raises(SystemExit):
        parse(["run.yaml", *words])
    assert capsys.readouterr().err.endswith("keys have no dashes here: write actor.optim.lr=1e-6\n")
