"""Keys and values that the schema refuses, one by one."""

import pytest

KEYS_AND_VALUES = {
    "actor.ppo_epoch=1": "actor.ppo_epoch: unknown key; did you mean actor.ppo_epochs?",
    "critic.lr=1e-5": "critic.lr: unknown key; did you mean critic.optim.lr?",
    "actor.gamma=1": "actor.gamma: unknown key; did you mean algorithm.gamma?",
    "algorithm.kl_coef=0.1": "algorithm.kl_coef: unknown key; did you mean algorithm.kl_ctrl.kl_coef?",
    "trainer.steps=10": "trainer.steps: unknown key; did you mean trainer.total_steps?",
    "data.batch_size=8": ("data.batch_size: unknown key; did you mean data.gen_batch_size or data.train_batch_size?"),
    "actr.clip_ratio=1": "actr: unknown key; did you mean actor?",
    "reward.zzz=1": "reward.zzz: unknown key; reward has function, num_workers, timeout_seconds, memory_limit_gib,",
    "base=other.yaml": "base: unknown key; the top level has model, placement,",
    "actor.optim.lr=fast": 'actor.optim.lr: expected float > 0 and < 1, found "fast"',
    "actor.optim.lr=0": "actor.optim.lr: expected float > 0 and < 1, found 0",
    "actor.optim.lr=.inf": "actor.optim.lr: expected float > 0 and < 1, found Infinity",
    "actor.optim.lr=true": "actor.optim.lr: expected float > 0 and < 1, found true",
    "actor.optim.betas=[0.9, 1.0]": "actor.optim.betas: expected list of 2: each float >= 0 and < 1, found 1.0",
    "actor.optim.betas=[0.9]": "actor.optim.betas: expected list of 2: each float >= 0 and < 1, found [0.9]",
    "actor.clip_ratio_c=1": "actor.clip_ratio_c: expected float > 1 | null, found 1",
    "rollout.n=1.5": "rollout.n: expected int >= 1, found 1.5",
    "rollout.n=true": "rollout.n: expected int >= 1, found true",
    "rollout.n=.inf": "rollout.n: expected int >= 1, found Infinity",
    "rollout.n=null": "rollout.n: expected int >= 1, found null",
    "rollout.top_p=1.1": "rollout.top_p: expected float > 0 and <= 1, found 1.1",
    "rollout.port=65536": "rollout.port: expected int >= 0 and <= 65535, found 65536",
    "rollout.mem_fraction_static=1": "rollout.mem_fraction_static: expected float > 0 and < 1, found 1",
    "rollout.server_args={a: [1]}": "rollout.server_args: expected keys with text | int | float | true | false",
    "eval.datasets={aime: {n: 2}}": "eval.datasets.aime.files: must be set (jsonl, jsonl.gz or parquet files of its",
    "eval.datasets={aime: {files: val.jsonl, n: 0}}": "eval.datasets.aime.n: expected int >= 1 | null, found 0",
    "eval.datasets={aime: {files: val.jsonl, temprature: 0}}": (
        "eval.datasets.aime.temprature: unknown key; did you mean eval.datasets.aime.temperature?"
    ),
    "eval.datasets={aime: {files: val.jsonl, zzz: 0}}": (
        "eval.datasets.aime.zzz: unknown key; eval.datasets.aime has files, n, temperature,"
    ),
    "eval.datasets={aime: val.jsonl}": "eval.datasets.aime: expected section such as {files: val.jsonl}, found",
    "eval.datasets={aime: null}": "eval.datasets.aime: expected section such as {files: val.jsonl}, found null",
    "trainer.seed=36893488147419103232": (
        "trainer.seed: expected int >= 0, found 36893488147419103232 (at most 2**63 - 1)"
    ),
    "actor.lora={rank: 100000}": "actor.lora.rank: expected int >= 1 and <= 65536, found 100000",
    "trainer.process_group_timeout_seconds=1e-9": (
        "trainer.process_group_timeout_seconds: expected float >= 0.1 and <= 1e+09, found 1e-09"
    ),
    "trainer.hang_timeout_seconds=1e20": "trainer.hang_timeout_seconds: expected float >= 0.1 and <= 1e+09 | null",
    "algorithm.adv_estimator=groo": '| optimal_token_baseline, found "groo"',
    "eval.dataset={}": "eval.dataset: unknown key; did you mean eval.datasets?",
    "data.shuffle=1": "data.shuffle: expected true | false, found 1",
    "data.train_files=[]": "data.train_files: expected non-empty list of text | keys with float >= 0, found []",
    "data.prompt_key=1": "data.prompt_key: expected text, found 1",
    "algorithm.kl_penalty=k4": "algorithm.kl_penalty: expected k1 | abs | k2 | k3 | k1+ | k3+ | full | kl | mse |",
    "reward.scale=-1": "reward.scale: expected float > 0, found -1",
    "algorithm.rollout_correction.veto_threshold=1": (
        "algorithm.rollout_correction.veto_threshold: expected float > 0 and < 1 | null, found 1"
    ),
    "algorithm.adv_estimator=ppo": (
        "algorithm.adv_estimator: expected gae | grpo | rloo | reinforce_plus_plus | reinforce_plus_plus_baseline | "
        'remax | opo | gpg | grpo_passk | gdpo | optimal_token_baseline, found "ppo"'
    ),
    "actor.policy_loss=ppo": (
        "actor.policy_loss: expected clip | gspo | clip_turn | cispo | sapo | gpg | clip_cov | kl_cov | gmpo | "
        'dppo_tv | dppo_kl | dro | dis, found "ppo"'
    ),
    "actor.loss_agg_mode=mean": (
        "actor.loss_agg_mode: expected token-mean | token-sum | seq-mean-token-sum | seq-mean-token-mean | "
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
    "actor.optim.lr=nan": "actor.optim.lr: expected float > 0 and < 1, found NaN",
    "actor.optim.lr=.nan": "actor.optim.lr: expected float > 0 and < 1, found NaN",
    "actor.optim.lr='1e999'": "actor.optim.lr: expected float > 0 and < 1, found Infinity",
    "actor.optim.lr=2020-01-01": 'actor.optim.lr: expected float > 0 and < 1, found "2020-01-01"',
    "rollout.n=++5": 'rollout.n: expected int >= 1, found "++5"',
    "actor.parallel.pipeline_split=[1, 0]": "actor.parallel.pipeline_split: expected list of int >= 1 | null",
    "rollout.tensor_parallel=0": "rollout.tensor_parallel: expected int >= 1, found 0",
    "model.path=12": "model.path: expected text, found 12",
    "model=": "model: expected section, found null",
    "model=[]": "model: expected section, found []",
    "data.train_files={a: b}": (
        'data.train_files: expected non-empty list of text | keys with float >= 0, found {"a": "b"}'
    ),
    "data.train_files={a: -1}": 'data.train_files: expected non-empty list of text | keys with float >= 0, found {"a":',
    "data.train_files={}": "data.train_files: expected non-empty list of text | keys with float >= 0, found {}",
    "data.train_files=[[a]]": ('data.train_files: expected non-empty list of text | keys with float >= 0, found ["a"]'),
    "rollout.stop={a: {b: c}}": 'rollout.stop: expected list of text, found {"a": {"b": "c"}}',
    "rollout.server_args={a: .inf}": "rollout.server_args: expected keys with text | int | float | true | false",
    "rollout.server_args={a: null}": "rollout.server_args: expected keys with text | int | float | true | false",
    "placement=0-3": 'placement: expected section, found "0-3"',
    "placement.actor=null": "placement.actor: expected text, found null",
    "placement.everything=0": "placement.everything: unknown key; placement has actor, critic, ref, reward_model",
    "trainer.eval_interval=-1": "trainer.eval_interval: expected int >= 0 | null, found -1",
    "trainer.resume=always": 'trainer.resume: expected auto | never, found "always"',
    'placement.actor="\\udc00"': "placement.actor: '\\udc00' is not a list of ranks: write",
}


@pytest.mark.parametrize(("override", "message"), KEYS_AND_VALUES.items())
def test_a_wrong_key_or_value(refusals, override, message):
    (error,) = refusals(override)
    assert error.startswith("command line: ")
    assert message in error
