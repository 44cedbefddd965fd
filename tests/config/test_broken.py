"""Broken configs, each with the message it must give."""

import json
import shutil
from pathlib import Path

import pytest
import yaml

from megappo.config.errors import ConfigError
from megappo.config.loading import load_config
from megappo.trainer.preflight import check_run

WORLD_SIZE = 4
HF_CONFIG = {
    "architectures": ["Qwen2ForCausalLM"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 6,
    "hidden_size": 64,
    "intermediate_size": 128,
    "vocab_size": 100,
    "max_position_embeddings": 4096,
}


@pytest.fixture
def run_folder(tmp_path, monkeypatch) -> Path:
    """A folder with everything a valid run needs, as the current one."""
    monkeypatch.chdir(tmp_path)
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(HF_CONFIG))
    (model / "model.safetensors").write_bytes(b"weights")
    (model / "tokenizer_config.json").write_text("{}")
    for name in ("train.jsonl", "val.jsonl"):
        (tmp_path / name).write_text('{"prompt": "1+1=", "label": "2"}\n')
    valid = {
        "model": {"path": "model"},
        "data": {"train_files": ["train.jsonl"], "val_files": ["val.jsonl"]},
        "trainer": {"output_dir": "out"},
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(valid))
    return tmp_path


def errors_of(*overrides: str, path: str = "run.yaml") -> list[str]:
    """What is wrong with the run, found by loading, or, where that succeeds, by the checks."""
    try:
        return check_run(load_config(path, overrides), WORLD_SIZE)
    except ConfigError as error:
        return list(error.errors)


def test_the_run_that_the_tables_break_is_valid(run_folder):
    assert errors_of() == []


def test_a_bound_that_a_loss_does_not_have_is_no_matter(run_folder):
    assert errors_of("actor.policy_loss=cispo", "actor.clip_ratio_low=1", "actor.clip_ratio_high=4") == []


def test_a_context_that_is_just_long_enough_is_valid(run_folder):
    assert errors_of("rollout.max_response_length=3070", "rollout.max_total_tokens=4096") == []


KEYS_AND_VALUES = {
    "actor.ppo_epoch=1": "actor.ppo_epoch: unknown key; did you mean actor.ppo_epochs?",
    "critic.lr=1e-5": "critic.lr: unknown key; did you mean critic.optim.lr?",
    "actor.gamma=1": "actor.gamma: unknown key; did you mean algorithm.gamma?",
    "actr.clip_ratio=1": "actr: unknown key; did you mean actor?",
    "reward.zzz=1": "reward.zzz: unknown key; reward has function, num_workers, timeout_seconds, scale, clip,",
    "base=other.yaml": "base: unknown key; the top level has model, placement,",
    "actor.optim.lr=fast": 'actor.optim.lr: expected float > 0, found "fast"',
    "actor.optim.lr=0": "actor.optim.lr: expected float > 0, found 0",
    "actor.optim.lr=.inf": "actor.optim.lr: expected float > 0, found Infinity",
    "actor.optim.lr=true": "actor.optim.lr: expected float > 0, found true",
    "actor.optim.betas=[0.9, 1.0]": "actor.optim.betas: expected list of 2: each float in [0, 1), found [0.9, 1.0]",
    "actor.optim.betas=[0.9]": "actor.optim.betas: expected list of 2: each float in [0, 1), found [0.9]",
    "actor.clip_ratio_c=1": "actor.clip_ratio_c: expected float > 1 | null, found 1",
    "rollout.n=1.5": "rollout.n: expected int >= 1, found 1.5",
    "rollout.n=true": "rollout.n: expected int >= 1, found true",
    "rollout.n=.inf": "rollout.n: expected int >= 1, found Infinity",
    "rollout.n=null": "rollout.n: expected int >= 1, found null",
    "rollout.top_p=1.1": "rollout.top_p: expected float in (0, 1], found 1.1",
    "rollout.port=65536": "rollout.port: expected int in [0, 65535], found 65536",
    "rollout.mem_fraction_static=1": "rollout.mem_fraction_static: expected float in (0, 1), found 1",
    "rollout.server_args={a: [1]}": "rollout.server_args: expected keys with text | int | float | true | false",
    "data.shuffle=1": "data.shuffle: expected true | false, found 1",
    "data.train_files=[]": "data.train_files: expected non-empty list of text, found []",
    "data.prompt_key=1": "data.prompt_key: expected text, found 1",
    "algorithm.kl_penalty=k4": "algorithm.kl_penalty: expected k1 | abs | k2 | k3 | k1+ | k3+ | full | kl | mse |",
    "reward.scale=-1": "reward.scale: expected float > 0, found -1",
    "algorithm.rollout_correction.veto_threshold=1": (
        "algorithm.rollout_correction.veto_threshold: expected float in (0, 1) | null, found 1"
    ),
    "algorithm.adv_estimator=ppo": (
        "algorithm.adv_estimator: expected gae | grpo | rloo | reinforce_plus_plus | reinforce_plus_plus_baseline | "
        'remax | opo | gpg, found "ppo"'
    ),
    "actor.policy_loss=ppo": (
        'actor.policy_loss: expected clip | gspo | cispo | sapo | gpg | clip_cov | kl_cov | gmpo, found "ppo"'
    ),
    "actor.loss_agg_mode=mean": (
        "actor.loss_agg_mode: expected token-mean | seq-mean-token-sum | seq-mean-token-mean | "
        'seq-mean-token-sum-norm | null, found "mean"'
    ),
    "algorithm.preset=trl": 'algorithm.preset: expected verl | slime | miles | openrlhf | nemo_rl | null, found "trl"',
    "actor.entropy_coeff=-1": "actor.entropy_coeff: expected float >= 0, found -1",
    "actor.kl_loss_coef=-0.1": "actor.kl_loss_coef: expected float >= 0, found -0.1",
    "algorithm.kl_ctrl.kl_coef=-1": "algorithm.kl_ctrl.kl_coef: expected float >= 0, found -1",
    "algorithm.value_coef=-1": "algorithm.value_coef: expected float >= 0, found -1",
    "actor=3": "actor: expected section, found 3",
    "actor.optim=": "actor.optim: expected section, found null",
    "trainer.seed.x=1": 'trainer.seed: expected int >= 0, found {"x": 1}',
    "placement.actor=[0, 1]": "placement.actor: expected text, found [0, 1]",
    "rollout.n": "'rollout.n': expected key=value, such as trainer.total_steps=10",
    "=3": "'=3': expected key=value",
    "rollout.stop=[a": "not valid YAML: expected ',' or ']', but got '<stream end>' (in 'rollout.stop=[a')",
    "rollout.stop=!!python/name:os.system": "not valid YAML: could not determine a constructor for the tag",
}


@pytest.mark.parametrize(("override", "message"), KEYS_AND_VALUES.items())
def test_a_wrong_key_or_value(run_folder, override, message):
    (error,) = errors_of(override)
    assert error.startswith("command line: ")
    assert message in error


CONTRADICTIONS = {
    "actor.ppo_mini_batch_size=100": (
        "actor.ppo_mini_batch_size 100 does not divide data.train_batch_size 256: 64 or 128 would"
    ),
    "critic.ppo_mini_batch_size=512": (
        "critic.ppo_mini_batch_size 512 does not divide data.train_batch_size 256: 256 would"
    ),
    "actor.max_tokens_per_micro_batch=2047": (
        "actor.max_tokens_per_micro_batch 2047 cannot hold one row of data.max_prompt_length 1024 + "
        "rollout.max_response_length 1024: set it to 2048 or more"
    ),
    "ref.max_tokens_per_micro_batch=1": "ref.max_tokens_per_micro_batch 1 cannot hold one row of",
    "actor.parallel.sequence=true": (
        "actor.parallel.sequence needs actor.parallel.tensor > 1, found 1: raise tensor or turn sequence off"
    ),
    "actor.parallel.pipeline_split=[3, 3]": (
        "actor.parallel.pipeline_split [3, 3] is of 2 chunks, but actor.parallel.pipeline 1 x virtual_pipeline 1 = 1: "
        "name the layers of each, or drop it"
    ),
    "ref.parallel={pipeline: 2, pipeline_split: [6]}": "ref.parallel.pipeline_split [6] is of 1 chunks, but",
    "actor.parallel={pipeline: 2, virtual_pipeline: 2, pipeline_split: [3, 3]}": (
        "actor.parallel.pipeline_split [3, 3] is of 2 chunks, but actor.parallel.pipeline 2 x virtual_pipeline 2 = 4: "
    ),
    "critic.parallel.virtual_pipeline=2": (
        "critic.parallel.virtual_pipeline 2 needs critic.parallel.pipeline > 1, found 1: raise pipeline, or drop it"
    ),
    "ref.parallel.sequence=true": "ref.parallel.sequence needs ref.parallel.tensor > 1",
    "actor.optim.min_lr=1e-3 actor.optim.lr_decay_style=linear": (
        "actor.optim.min_lr 0.001 is above actor.optim.lr 1e-06: lower it"
    ),
    "critic.optim.min_lr=1e-7": "critic.optim.min_lr 1e-07 has no effect with lr_decay_style constant",
    "actor.optim.lr_warmup_steps=100": (
        "actor.optim.lr_warmup_steps 100 must be below the run's 100 optimizer steps: "
        "shorten it or raise trainer.total_steps"
    ),
    "actor.clip_ratio=1": "actor.clip_ratio 1.0 must be below 1: the ratio is clipped to 1 - clip_ratio",
    "actor.clip_ratio_low=1.5": "actor.clip_ratio_low 1.5 must be below 1",
    "algorithm.use_kl_in_reward=false algorithm.kl_ctrl.type=adaptive": (
        'algorithm.kl_ctrl {"type": "adaptive", "kl_coef": 0.001, "horizon": 10000, "target_kl": 0.1} has no effect, '
        "as algorithm.use_kl_in_reward is false: drop it"
    ),
    "algorithm.kl_ctrl={type: adaptive, kl_coef: 0}": "algorithm.kl_ctrl.kl_coef 0 stays 0 however adaptive",
    "actor.tau_pos=2": "actor.tau_pos 2.0 has no effect, as actor.policy_loss is clip: drop it",
    "reward.overlong_buffer=4": "reward.overlong_buffer 4 has no effect, as reward.length_penalty is not overlong",
    "algorithm.use_kl_in_reward=false placement.ref=0": (
        "placement.ref is set, but algorithm.use_kl_in_reward and actor.use_kl_loss are false, so no reference is "
        "built: drop placement.ref"
    ),
    "algorithm.use_kl_in_reward=false ref.parallel.tensor=2": (
        "ref.parallel is set, but algorithm.use_kl_in_reward and actor.use_kl_loss are false"
    ),
    "algorithm.adv_estimator=grpo": (
        "algorithm.adv_estimator grpo compares the responses to a prompt: rollout.n must be at least 2, found 1"
    ),
    "algorithm.adv_estimator=remax reward.normalize=batch": (
        "reward.normalize batch would hide the greedy baseline that algorithm.adv_estimator remax subtracts"
    ),
    "algorithm.adv_estimator=rloo rollout.n=2 algorithm.shared_backbone=true": (
        "algorithm.shared_backbone needs values, which algorithm.adv_estimator rloo does without: drop it or use gae"
    ),
    "algorithm.adv_estimator=rloo rollout.n=2 algorithm.critic_lam=1": "algorithm.critic_lam needs values",
    "critic.warmup_steps=100": "critic.warmup_steps 100 must be below trainer.total_steps 100: else the actor",
    "critic.warmup_steps=1 algorithm.shared_backbone=true": (
        "critic.warmup_steps 1 needs a critic, and this run builds none: set it to 0"
    ),
    "reward.normalize=group": "reward.normalize group compares the responses to a prompt: rollout.n must be at least 2",
    "reward.length_penalty=overlong reward.overlong_buffer=2000": (
        "reward.overlong_buffer 2000 is longer than rollout.max_response_length 1024: shorten it"
    ),
    "algorithm.kl_penalty=full actor.parallel.pipeline=2": (
        "algorithm.kl_penalty full needs actor.parallel.pipeline 1, found 2"
    ),
    "actor.use_kl_loss=true actor.kl_loss_type=full placement.ref=0-3": (
        "actor.kl_loss_type full needs the reference on the actor's ranks: drop placement.ref"
    ),
    "algorithm.rollout_correction={level: token, mode: mask, threshold_lower: 3}": (
        "algorithm.rollout_correction.threshold_lower 3.0 must be below algorithm.rollout_correction.threshold 2.0"
    ),
    "algorithm.rollout_correction={level: token, threshold_lower: 0.5}": (
        "algorithm.rollout_correction.threshold_lower is only used with algorithm.rollout_correction.mode mask: drop it"
    ),
    "algorithm.rollout_correction={level: token, mode: mask, threshold: 1}": (
        "algorithm.rollout_correction.threshold 1.0 must be above 1"
    ),
    "algorithm.rollout_correction.mode=mask": (
        "algorithm.rollout_correction.level is none, so its mode and thresholds have no effect: set level, such as"
    ),
    "actor.target_kl=0.1": "actor.target_kl 0.1 has nothing to skip: a step has one optimizer step only; drop it",
    "actor.policy_loss=clip_cov actor.clip_cov_lb=5": "actor.clip_cov_lb 5.0 must be below actor.clip_cov_ub 5.0",
    "algorithm.value_coef=1": (
        "algorithm.value_coef 1.0 has no effect, as algorithm.shared_backbone is false: drop it"
    ),
    "algorithm.adv_estimator=rloo rollout.n=2 algorithm.gamma=0.9": (
        "algorithm.gamma 0.9 has no effect, as algorithm.adv_estimator rloo discounts nothing: drop it"
    ),
    "actor.kl_loss_coef=1": "actor.kl_loss_coef 1.0 has no effect, as actor.use_kl_loss is false: drop it",
    "algorithm.shared_backbone=true critic.model_path=model": (
        'critic.model_path "model" has no effect, as this run builds no critic: drop it'
    ),
    "algorithm.rollout_correction.reject_geometric=[1.1, 2]": (
        "algorithm.rollout_correction.reject_geometric [1.1, 2.0] must enclose 1, such as [0.999, 1.001]"
    ),
    "rollout.top_k=0": "rollout.top_k 0 keeps no token: set -1 (off) or at least 1",
    "rollout.max_total_tokens=2049": (
        "rollout.max_total_tokens 2049 is below the 2050 tokens that an engine needs for data.max_prompt_length 1024 "
        "and rollout.max_response_length 1024 (their sum + 2, and the prompt + 7): raise it"
    ),
    "rollout.max_total_tokens=1030 rollout.max_response_length=1": (
        "rollout.max_total_tokens 1030 is below the 1031 tokens that an engine needs"
    ),
    "rollout.stop=['']": "rollout.stop holds an empty string",
    "data.val_files=[]": (
        "trainer.eval_interval 10 needs data.val_files, found none: name some or set trainer.eval_interval to 0"
    ),
    "data.label_key=prompt": "data.prompt_key and data.label_key are both 'prompt': name two different fields",
}
PLACEMENTS = {
    "placement.rollout=4": (
        "placement.rollout: '4' names rank 4, but this run has 4, numbered from 0: "
        "start 5 processes or more (NPROC=5 with launch/local.sh), or name lower ranks"
    ),
    "placement.critic=3-1": "placement.critic: '3-1': the range 3-1 runs backwards: write 1-3",
    "placement.rollout=0-2,2": "placement.rollout: '0-2,2' names rank 2 twice: name it once",
    "placement.rollout=gpus": (
        "placement.rollout: 'gpus' is not a list of ranks: write 'all', '0-7', '0,2' or '0-3,6'"
    ),
    "placement.critic=0-2 critic.parallel.tensor=2": (
        "placement.critic: the 3 ranks 0-2 do not divide by critic.parallel's tensor 2 x pipeline 1 = 2: "
        "name 2 or 4 ranks, or make it 1 or 3"
    ),
    "actor.parallel.pipeline=3": (
        "placement.actor: the 4 ranks 0-3 do not divide by actor.parallel's tensor 1 x pipeline 3 = 3: "
        "name 3 or 6 ranks, or make it 2 or 4"
    ),
    "placement.ref=0-2 actor.parallel.tensor=2": (
        "placement.ref: the 3 ranks 0-2 do not divide by actor.parallel's tensor 2 x pipeline 1 = 2"
    ),
    "placement.rollout=0-2 rollout.tensor_parallel=2": (
        "placement.rollout: the 3 ranks 0-2 do not divide by rollout.tensor_parallel 2: "
        "name 2 or 4 ranks, or make it 1 or 3"
    ),
    "placement.rollout=0,2 rollout.tensor_parallel=2": (
        "placement.rollout: engine 0 of rollout.tensor_parallel 2 would get ranks 0,2, "
        "which do not follow each other: name runs of 2 ranks"
    ),
    "placement.actor=0-1 placement.critic=0-3 rollout.sync.transport=ipc": (
        "rollout.sync.transport is ipc, but the engines' first ranks 2-3 are not the actor's (0-1): set it to auto, or "
        "place the engines there"
    ),
    "placement.actor,critic,rollout=0-1": (
        "placement: ranks 2-3 of this run's 4 belong to no component: "
        "start 2 processes (NPROC=2 with launch/local.sh), or place a component there"
    ),
    "actor.ppo_mini_batch_size=2": (
        "actor.ppo_mini_batch_size 2 x rollout.n 1 = 2 trajectories are fewer than the actor's 4 data-parallel shards "
        "on ranks 0-3: raise actor.ppo_mini_batch_size to 4 or more"
    ),
}
FILES = {
    "model.path=absent": "model.path: no folder absent: download the model",
    "critic.model_path=absent": "critic.model_path: no folder absent: download the model",
    "data.train_files=absent.jsonl": "data.train_files: no file absent.jsonl: create it or correct the path",
    "data.val_files=[val.jsonl, val.jsonl]": (
        "data.val_files: several are called 'val', under which each would be reported: rename or merge them"
    ),
    "data.val_files=[val.jsonl, data.csv]": "data.val_files: data.csv is neither .jsonl nor .parquet: convert it",
    "reward.function=exact": "reward.function 'exact': expected exact_match or FILE.py:FUNCTION",
    "reward.function=absent.py:score": "reward.function 'absent.py:score': no file absent.py",
    "trainer.output_dir=train.jsonl": "trainer.output_dir: train.jsonl is a file: name a folder",
    "actor.parallel.tensor=4": (
        "actor.parallel.tensor 4 does not divide num_key_value_heads 2 of model/config.json: 2 would"
    ),
    "critic.parallel.pipeline=4": (
        "critic.parallel.pipeline 4 x virtual_pipeline 1 = 4 does not divide num_hidden_layers 6 of model/config.json: "
        "3 or 6 would, or set critic.parallel.pipeline_split, such as [2, 2, 1, 1]"
    ),
    "actor.parallel={pipeline: 2, virtual_pipeline: 2}": (
        "actor.parallel.pipeline 2 x virtual_pipeline 2 = 4 does not divide num_hidden_layers 6 of model/config.json: "
        "3 or 6 would, or set actor.parallel.pipeline_split, such as [2, 2, 1, 1]"
    ),
    "actor.parallel.pipeline=2 actor.parallel.pipeline_split=[2, 3]": (
        "actor.parallel.pipeline_split [2, 3] has 5 layers together, num_hidden_layers of model/config.json is 6"
    ),
    "actor.parallel.expert_tensor=2": (
        "actor.parallel.expert_tensor 2: model/config.json is of a dense model, without experts: set it to 1"
    ),
    "actor.parallel.expert=2": (
        "actor.parallel.expert 2: model/config.json is of a dense model, without experts: set it to 1"
    ),
    "critic.parallel.pipeline_split=[7]": "critic.parallel.pipeline_split [7] has 7 layers together",
    "rollout.max_response_length=3071": (
        "model.path: model/config.json's max_position_embeddings 4096 is below the 4097 tokens that an engine needs "
        "for data.max_prompt_length 1024 and rollout.max_response_length 3071 "
        "(their sum + 2, and the prompt + 7): lower these"
    ),
}


@pytest.mark.parametrize(("overrides", "message"), (CONTRADICTIONS | PLACEMENTS | FILES).items())
def test_a_run_that_cannot_be(run_folder, overrides, message):
    (error,) = errors_of(*yaml_aware_split(overrides))
    assert error.startswith(message)


def yaml_aware_split(overrides: str) -> list[str]:
    """`a=1 b=[1, 2]` -> both overrides."""
    parts: list[str] = []
    for word in overrides.split(" "):
        parts += [word] if "=" in word else []
        if "=" not in word:
            parts[-1] += " " + word
    return parts


MODEL_FOLDERS = {
    "another architecture": (
        {"config.json": json.dumps(HF_CONFIG | {"architectures": ["MambaForCausalLM"]})},
        "model.path: model/config.json is of architecture MambaForCausalLM; this version trains LlamaForCausalLM,",
    ),
    "no architecture": ({"config.json": "{}"}, "model.path: model/config.json is of architecture none;"),
    "half a config.json": ({"config.json": '{"archit'}, "model.path: model/config.json is not valid JSON"),
    "not an object": ({"config.json": "[]"}, "model.path: model/config.json is not a JSON object: download it again"),
    "no config.json": ({"config.json": None}, "model.path: cannot read model/config.json (No such file or directory)"),
    "no weights": ({"model.safetensors": None}, "model.path: model holds no *.safetensors file: complete the download"),
    "no tokenizer": (
        {"tokenizer_config.json": None},
        "model.path: model holds no tokenizer_config.json: complete the download",
    ),
    "a window shorter than a row": (
        {"config.json": json.dumps(HF_CONFIG | {"architectures": ["MistralForCausalLM"], "sliding_window": 2047})},
        "model.path: model/config.json's sliding_window 2047 is below data.max_prompt_length 1024 + "
        "rollout.max_response_length 1024: lower these, as neither",
    ),
    "a window of Qwen's": (
        {"config.json": json.dumps(HF_CONFIG | {"use_sliding_window": True, "sliding_window": 16})},
        "model.path: model/config.json's sliding_window 16 is below",
    ),
    "fields missing": (
        {"config.json": json.dumps({"architectures": ["LlamaForCausalLM"], "num_attention_heads": 4})},
        "model.path: model/config.json lacks num_hidden_layers, hidden_size, intermediate_size, vocab_size",
    ),
}


def test_a_critic_may_start_from_a_reward_model_an_actor_may_not(run_folder):
    shutil.copytree(run_folder / "model", run_folder / "reward")
    reward_model = HF_CONFIG | {"architectures": ["Qwen2ForSequenceClassification"]}
    (run_folder / "reward" / "config.json").write_text(json.dumps(reward_model))
    assert errors_of("critic.model_path=reward") == []
    (error,) = errors_of("model.path=reward", "critic.model_path=model")
    assert "reward/config.json is of architecture Qwen2ForSequenceClassification; this version trains" in error


@pytest.mark.parametrize(("files", "message"), MODEL_FOLDERS.values(), ids=MODEL_FOLDERS)
def test_a_model_folder_that_cannot_be_used(run_folder, files, message):
    for name, text in files.items():
        (run_folder / "model" / name).unlink()
        if text is not None:
            (run_folder / "model" / name).write_text(text)
    (error,) = errors_of()
    assert error.startswith(message)


EXPERTS = {
    "architectures": ["Qwen2MoeForCausalLM"],
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 18,
    "shared_expert_intermediate_size": 33,
}
MIXTURES = {
    "actor.parallel.expert=3": (
        "placement.actor: the 4 ranks of each of actor.parallel's stages (tensor x context x data) do not divide by "
        "expert 3 x expert_tensor 1 = 3: make it 2 or 4"
    ),
    "actor.parallel={expert: 2, expert_tensor: 6}": (
        "placement.actor: the 4 ranks of each of actor.parallel's stages (tensor x context x data) do not divide by "
        "expert 2 x expert_tensor 6 = 12: make it 4"
    ),
    "actor.parallel.expert_tensor=4": (
        "actor.parallel.expert_tensor 4 does not divide moe_intermediate_size 18 of model/config.json: 3 or 6 would"
    ),
    "actor.parallel.expert=4": (
        "actor.parallel.expert 4 does not divide num_experts 6 of model/config.json: 3 or 6 would"
    ),
    "actor.parallel={tensor: 2, sequence: true}": (
        "actor.parallel.tensor 2 does not divide shared_expert_intermediate_size 33 of model/config.json: 1 or 3 would"
    ),
}


@pytest.mark.parametrize(("overrides", "message"), MIXTURES.items())
def test_a_mixture_of_experts_that_cannot_be_laid_out(run_folder, overrides, message):
    (run_folder / "model" / "config.json").write_text(json.dumps(HF_CONFIG | EXPERTS))
    (error,) = errors_of(overrides)
    assert error.startswith(message)


def test_what_a_mixture_of_experts_must_say_and_have(run_folder):
    file = run_folder / "model" / "config.json"
    file.write_text(json.dumps(HF_CONFIG | EXPERTS | {"shared_expert_intermediate_size": 32}))
    assert errors_of("actor.parallel.expert=2", "actor.parallel.tensor=2") == [
        "actor.parallel.sequence must be true with actor.parallel.tensor 2, as model/config.json is of a mixture of "
        "experts"
    ]
    assert errors_of("actor.parallel={tensor: 2, expert: 2, sequence: true}", "critic.parallel.expert=2") == []
    file.write_text(json.dumps(HF_CONFIG | {"architectures": ["Qwen2MoeForCausalLM"]}))
    (error,) = errors_of()
    assert error.startswith(
        "model.path: model/config.json lacks moe_intermediate_size, num_experts_per_tok, "
        "shared_expert_intermediate_size, num_experts: "
    )


DEEPSEEK = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "num_key_value_heads": 4,
    "q_lora_rank": None,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 8,
    "v_head_dim": 14,
    "first_k_dense_replace": 1,
    "intermediate_size": 128,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 11,
    "n_shared_experts": 3,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 2.5,
}
LATENT_LAYOUTS = {
    "actor.parallel={tensor: 2, sequence: true}": [
        "actor.parallel.tensor 2 does not divide moe_intermediate_size x n_shared_experts 33 of model/config.json: "
        "1 or 3 would"
    ],
    "actor.parallel.expert=4": [
        "actor.parallel.expert 4 does not divide n_routed_experts 6 of model/config.json: 3 or 6 would"
    ],
    "rollout.tensor_parallel=4": [],
}


@pytest.mark.parametrize(("override", "messages"), LATENT_LAYOUTS.items())
def test_latent_attention_is_divided_by_heads_alone(run_folder, override, messages):
    (run_folder / "model" / "config.json").write_text(json.dumps(HF_CONFIG | DEEPSEEK | {"num_key_value_heads": 3}))
    assert errors_of(override) == messages


def test_a_stage_without_experts_needs_the_sharded_optimizer(run_folder):
    dense = {"first_k_dense_replace": 3, "moe_intermediate_size": 8}
    (run_folder / "model" / "config.json").write_text(json.dumps(HF_CONFIG | DEEPSEEK | dense))
    stages = ("actor.parallel.pipeline=2", "actor.optim.distributed=false")
    assert errors_of(*stages) == [
        "actor.optim.distributed must be true, as the first 3 layers of model/config.json have no experts and the "
        "first of actor.parallel.pipeline 2 stages has 3 layers"
    ]
    assert errors_of(*stages, "actor.parallel.pipeline_split=[4,2]") == errors_of(stages[0]) == []


def test_latent_attention_that_does_not_divide(run_folder):
    (run_folder / "model" / "config.json").write_text(
        json.dumps(HF_CONFIG | DEEPSEEK | {"num_attention_heads": 5, "moe_intermediate_size": 8})
    )
    (error,) = errors_of("actor.parallel={tensor: 2, sequence: true}")
    assert error.startswith("actor.parallel.tensor 2 does not divide num_attention_heads 5 of model/config.json: ")


@pytest.mark.parametrize("lacking", ["q_lora_rank", "first_k_dense_replace", "n_shared_experts", "n_routed_experts"])
def test_what_latent_attention_must_say(run_folder, lacking):
    said = {key: value for key, value in (HF_CONFIG | DEEPSEEK).items() if key != lacking}
    (run_folder / "model" / "config.json").write_text(json.dumps(said))
    (error,) = errors_of()
    assert error.startswith(f"model.path: model/config.json lacks {lacking}: ")


@pytest.mark.parametrize(
    "changes",
    [
        {"architectures": ["MistralForCausalLM"], "sliding_window": 2048},
        {"architectures": ["MistralForCausalLM"], "sliding_window": None},
        {"use_sliding_window": False, "sliding_window": 16},
    ],
)
def test_windows_that_no_row_outgrows(run_folder, changes):
    (run_folder / "model" / "config.json").write_text(json.dumps(HF_CONFIG | changes))
    assert errors_of() == []


def test_an_empty_data_file(run_folder):
    (run_folder / "train.jsonl").write_text("")
    assert errors_of() == ["data.train_files: train.jsonl is empty: put prompts in it"]


DOCUMENTS = {
    "": "bad.yaml:1: expected sections such as `model:`, found nothing",
    "- 1\n": "bad.yaml:1: expected sections such as `model:`, found [1]",
    "model: {path: m\n": "bad.yaml:2: not valid YAML: expected ',' or '}', but got '<stream end>'",
    "a: \tb: c\n": "bad.yaml:1: not valid YAML: ",
    "base: bad.yaml\n": "bad.yaml: base: goes round in circles: bad.yaml -> bad.yaml",
    "base: absent.yaml\n": "bad.yaml: base: cannot read absent.yaml: No such file or directory",
    "base: 3\n": "bad.yaml: base: expected a path or a list of paths, found 3",
    "base: run.yaml\nalgorithm.adv_estimator: rloo\n": (
        "bad.yaml:2: algorithm.adv_estimator: unknown key; dots are for the command line; here nest it: "
        "algorithm: {adv_estimator: ...}"
    ),
    "base: run.yaml\nactor: {<<: {}}\n": "bad.yaml:2: not valid YAML: merge keys (<<) are not read; use base:",
    "base: run.yaml\nactor: &a {optim: *a}\n": "bad.yaml:2: not valid YAML: an alias refers to what holds it",
    "base: run.yaml\nactor: {[1]: 2}\n": "bad.yaml:2: not valid YAML: a key must be a name",
    "base: run.yaml\nactor: {}\nactor: {}\n": "bad.yaml:3: actor: set twice, first on line 2; remove one",
    "base: run.yaml\nplacement:\n  actor: all\n  critic, actor: 0-3\n": (
        "bad.yaml:4: placement.actor: set twice, first on line 3; remove one"
    ),
    "base: run.yaml\nplacement:\n  actor, critc: 0-3\n": (
        "bad.yaml:3: placement.critc: unknown key; did you mean placement.critic?"
    ),
}


@pytest.mark.parametrize(("text", "message"), DOCUMENTS.items())
def test_a_file_that_cannot_be_read(run_folder, text, message):
    (run_folder / "bad.yaml").write_text(text)
    error = errors_of(path="bad.yaml")[0]
    assert error.startswith(message)


def test_bases_that_name_each_other(run_folder):
    (run_folder / "a.yaml").write_text("base: b.yaml\n")
    (run_folder / "b.yaml").write_text("base: a.yaml\n")
    assert errors_of(path="a.yaml") == ["b.yaml: base: goes round in circles: a.yaml -> b.yaml -> a.yaml"]


def test_a_missing_file(run_folder):
    assert errors_of(path="absent.yaml") == ["absent.yaml: No such file or directory"]


def test_a_file_that_is_not_text(run_folder):
    (run_folder / "bad.yaml").write_bytes(b"\xff\xfe\x00")
    assert errors_of(path="bad.yaml") == ["bad.yaml: not UTF-8 text"]


def test_what_must_be_set(run_folder):
    (run_folder / "bad.yaml").write_text("actor: {}\n")
    assert [error.split(": must be set")[0] for error in errors_of(path="bad.yaml")] == [
        "bad.yaml: model.path",
        "bad.yaml: data.train_files",
        "bad.yaml: trainer.output_dir",
    ]


def test_everything_wrong_with_a_run_comes_at_once(run_folder):
    errors = errors_of("actor.ppo_mini_batch_size=3", "actor.parallel.tensor=3", "data.train_files=absent.jsonl")
    assert [error.split(" ")[0] for error in errors] == [
        "actor.ppo_mini_batch_size",
        "placement.actor:",
        "actor.parallel.tensor",
        "actor.parallel.tensor",
        "actor.parallel.tensor",
        "data.train_files:",
    ]
