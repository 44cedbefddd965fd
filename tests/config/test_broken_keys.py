"""Contradicting keys and missing files: errors with the line that sets one of the keys."""

import os

import pytest
import yaml

from megappo.commands import plan

CONTRADICTIONS = {
    "reward.length_penalty=overlong reward.overlong_buffer=2000": (
        "reward.overlong_buffer 2000 is longer than rollout.max_response_length 1024: shorten it"
    ),
    "actor.target_kl=0.1": "actor.target_kl 0.1 has nothing to skip: a step has one optimizer step only; drop it",
    "trainer.process_group_timeout_seconds=600 trainer.hang_timeout_seconds=600": (
        "trainer.hang_timeout_seconds 600 must be below trainer.process_group_timeout_seconds 600, which would"
    ),
    "actor.policy_loss=dis": (
        "actor.policy_loss dis weights tokens by the ratio to the engine's log-probs, but algorithm.old_log_probs is "
        "trainer: set it to engine"
    ),
    "algorithm.old_log_probs=engine algorithm.kl_penalty=full": (
        "KL kind full (algorithm.kl_penalty or distillation.kl_type) needs the actor's forward pass over the rollouts, "
        "which algorithm.old_log_probs engine leaves out: choose k3, or set algorithm.old_log_probs to trainer"
    ),
    "algorithm.old_log_probs=engine algorithm.shared_backbone=true": "algorithm.shared_backbone true needs the actor's",
    "algorithm.old_log_probs=engine rollout.sync.probe_interval=0": "rollout.sync.probe_interval 0 needs the actor's",
    "critic.freeze=[attention, mlp] critic.lora.rank=4 model.layer_spec=torch": (
        "critic.freeze attention, mlp has no effect on critic.lora, which trains adapters: drop one"
    ),
    "rollout.sync.merge_adapters=true": "rollout.sync.merge_adapters true has no effect, as actor.lora is null",
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
    "ref.parallel={pipeline: 2, pipeline_split: [6]}": "ref.parallel.pipeline_split [6] is of 1 chunk, but",
    "actor.parallel={pipeline: 2, virtual_pipeline: 2, pipeline_split: [3, 3]}": (
        "actor.parallel.pipeline_split [3, 3] is of 2 chunks, but actor.parallel.pipeline 2 x virtual_pipeline 2 = 4: "
    ),
    "critic.parallel.virtual_pipeline=2": (
        "critic.parallel.virtual_pipeline 2 needs critic.parallel.pipeline > 1, found 1: raise pipeline, or drop it"
    ),
    "algorithm.filter_groups.enable=true rollout.n=1": (
        "algorithm.filter_groups.enable true compares the responses to a prompt: rollout.n must be at least 2, found 1"
    ),
    "algorithm.filter_groups.enable=true rollout.n=2 algorithm.adv_estimator=remax": (
        "algorithm.adv_estimator remax subtracts greedy baselines, which reward.normalize none or "
    ),
    "data.gen_batch_size=255": (
        "data.gen_batch_size 255 is below data.train_batch_size 256, the prompts that a step trains on: raise it, or "
    ),
    "algorithm.filter_groups.metric=acc": (
        'algorithm.filter_groups.metric "acc" has no effect, as algorithm.filter_groups.enable is false: drop it'
    ),
    "reward.options={mine.py:f: {limit: 3}}": (
        "reward.options names 'mine.py:f', but reward.function does not (it names exact_match)"
    ),
    "ref.parallel.sequence=true": "ref.parallel.sequence needs ref.parallel.tensor > 1",
    "actor.optim.min_lr=1e-3 actor.optim.lr_decay_style=linear": (
        "actor.optim.min_lr 0.001 is above actor.optim.lr 1e-06: lower it"
    ),
    "critic.optim.min_lr=1e-7": "critic.optim.min_lr 1e-07 has no effect with lr_decay_style constant",
    "actor.optim.offload_fraction=0.5 actor.optim.distributed=false": (
        "actor.optim.offload_fraction above 0 needs Megatron's distributed optimizer: set "
    ),
    "critic.optim.moments_dtype=bf16 critic.optim.betas=[0.9,0.999]": (
        "critic.optim.betas 0.9, 0.999 with critic.optim.moments_dtype bf16: a moment that decays by less than 1/256"
    ),
    "actor.optim.lr_warmup_steps=100": (
        "actor.optim.lr_warmup_steps 100 must be below the run's 100 optimizer steps: "
        "shorten it or raise trainer.total_steps"
    ),
    "algorithm.use_kl_in_reward=false algorithm.kl_ctrl.type=adaptive": (
        'algorithm.kl_ctrl.type "adaptive" has no effect, as algorithm.use_kl_in_reward is false: drop it, or change '
        "algorithm.use_kl_in_reward"
    ),
    "algorithm.kl_ctrl={type: adaptive, kl_coef: 0}": "algorithm.kl_ctrl.kl_coef 0 stays 0, as",
    "actor.tau_pos=2": "actor.tau_pos 2.0 has no effect, as actor.policy_loss clip does not read it: drop it",
    "reward.overlong_buffer=4": "reward.overlong_buffer 4 has no effect, as reward.length_penalty none does not read",
    "algorithm.use_kl_in_reward=false placement.ref=0": (
        'placement.ref "0" has no effect, as algorithm.use_kl_in_reward and actor.use_kl_loss are false, so that no '
        "reference is built: drop it"
    ),
    "algorithm.use_kl_in_reward=false ref.parallel.tensor=2": (
        "ref.parallel.tensor 2 has no effect, as algorithm.use_kl_in_reward and actor.use_kl_loss are false, so that "
        "no reference is built: drop it"
    ),
    "algorithm.adv_estimator=grpo": (
        "algorithm.adv_estimator grpo compares the responses to a prompt: rollout.n must be at least 2, found 1"
    ),
    "algorithm.adv_estimator=remax reward.normalize=batch": (
        "algorithm.adv_estimator remax subtracts greedy baselines, which reward.normalize batch or "
    ),
    "algorithm.adv_estimator=gdpo rollout.n=2": (
        "algorithm.use_kl_in_reward true has no effect, as algorithm.adv_estimator gdpo takes the scores one by one"
    ),
    **{
        f"algorithm.adv_estimator=gdpo rollout.n=2 algorithm.use_kl_in_reward=false {key}={value}": (
            f"{key} {value} has no effect, as algorithm.adv_estimator gdpo takes the scores one by one, not their sum"
        )
        for key, value in {"reward.scale": "2.0", "reward.clip": "1.5", "reward.length_penalty": '"linear"'}.items()
    },
    "algorithm.adv_estimator=gdpo rollout.n=2 algorithm.use_kl_in_reward=false reward.normalize=batch": (
        'reward.normalize "batch" has no effect, as algorithm.adv_estimator gdpo takes the scores one by one'
    ),
    "algorithm.adv_estimator=rloo rollout.n=2 algorithm.shared_backbone=true": (
        "algorithm.shared_backbone true has no effect, as algorithm.adv_estimator rloo does without values, which gae "
        "needs: drop it"
    ),
    "algorithm.adv_estimator=rloo rollout.n=2 algorithm.critic_lam=1": (
        "algorithm.critic_lam 1.0 has no effect, as algorithm.adv_estimator rloo does without values"
    ),
    "critic.warmup_steps=100": "critic.warmup_steps 100 must be below trainer.total_steps 100: lower it",
    "trainer.train=[critic] critic.warmup_steps=2": (
        "critic.warmup_steps 2 has no effect, as trainer.train leaves the actor as it is: drop it"
    ),
    "trainer.train=[critic] actor.clip_ratio=0.3": "actor.clip_ratio 0.3 has no effect, as trainer.train leaves",
    "trainer.train=[critic] ref.parallel={tensor: 2}": "ref.parallel.tensor 2 has no effect, as trainer.train leaves",
    "trainer.train=[critic] algorithm.adv_estimator=grpo rollout.n=2": (
        "algorithm.adv_estimator grpo and algorithm.shared_backbone false leave this run, which trains a critic alone,"
    ),
    "trainer.train=[critic] algorithm.shared_backbone=true": (
        "algorithm.adv_estimator gae and algorithm.shared_backbone true leave this run, which trains a critic alone,"
    ),
    "critic.gate={explained_variance: 0.5}": "critic.gate.explained_variance 0.5 has no effect, as trainer.train",
    "trainer.train=[critic] critic.gate={explained_variance: 0.5} trainer.eval_interval=0": (
        "critic.gate is checked on held-out rollouts: name data.val_files"
    ),
    "trainer.train=[critic] trainer.replay_held_out=held": "trainer.replay_held_out needs trainer.replay_rollouts",
    "trainer.kind=critic critic.warmup_steps=2": "critic.warmup_steps 2 has no effect, as trainer.train",
    "trainer.kind=critic reward.normalize=group": "reward.normalize group compares the responses to a prompt, but each",
    "trainer.kind=critic critic.value_loss=two_hot": (
        "critic.value_loss two_hot needs the range of the returns, which is unknown with scores that files give: set"
    ),
    "trainer.kind=critic data.columns={score: reward}": (
        "data.columns names score: name messages alone, or prompt and response, each with the field"
    ),
    "critic.warmup_steps=1 algorithm.shared_backbone=true": (
        "critic.warmup_steps 1 has no effect, as this run builds no critic: drop it"
    ),
    "reward.normalize=group": "reward.normalize group compares the responses to a prompt: rollout.n must be at least 2",
    "algorithm.kl_penalty=full actor.parallel.pipeline=2": (
        "KL kind full (algorithm.kl_penalty or actor.kl_loss_type) needs the logits of ref where the actor's are"
    ),
    "algorithm.use_kl_in_reward=false actor.use_kl_loss=true actor.kl_loss_type=full placement.ref=0-3": (
        "KL kind full (algorithm.kl_penalty or actor.kl_loss_type) needs the logits of ref where the actor's are"
    ),
    "algorithm.rollout_correction={level: token, mode: mask, threshold: 1}": (
        "algorithm.rollout_correction.threshold_lower 1 must be below algorithm.rollout_correction.threshold 1.0"
    ),
    "rollout.n=2000000000": "data.train_batch_size and rollout.n make 512,000,000,000 rows a step, more than",
    "rollout.engines=[http://a:1, http://A:1]": "rollout.engines names http://a:1 2 times: drop the others, or",
    "rollout.engines=[http://b:1, http://h:99999]": "rollout.engines: http://h:99999 is not an address such as http",
    "rollout.engines=[http://h:0]": "rollout.engines: http://h:0 is not an address such as http://10.0.0.7:30000: wr",
    "rollout.engines=['http://a:30000:30001']": "rollout.engines: http://a:30000:30001 is not an address such as",
    "rollout.engines=['http://[::1:30000']": "rollout.engines: http://[::1:30000 is not an address such as",
    "actor.clip_ratio=1": "actor.clip_ratio 1.0 must be below 1: lower it",
    "actor.clip_ratio_low=1.5": "actor.clip_ratio_low 1.5 must be below 1: lower it",
    "actor.policy_loss=clip_cov actor.clip_cov_lb=5": "actor.clip_cov_lb 5.0 must be below actor.clip_cov_ub 5.0",
    "rollout.port=65535": "rollout.port 65535 is too high: each engine of a node takes one port more; lower it to",
    "rollout.port=65535 rollout.tensor_parallel=2": "rollout.port 65535 is too high: each engine of a node takes one",
    "algorithm.rollout_correction={level: token, mode: mask, threshold_lower: 3}": (
        "algorithm.rollout_correction.threshold_lower 3 must be below algorithm.rollout_correction.threshold 2.0"
    ),
    "algorithm.rollout_correction.normalize=true": (
        "algorithm.rollout_correction.normalize true has no effect, as algorithm.rollout_correction.level is none"
    ),
    "algorithm.rollout_correction.reject={token_k3: [0.1, 0.2]}": (
        "algorithm.rollout_correction.reject token_k3 (0.1, 0.2): set two ascending bounds or one above 1 for k1, and"
    ),
    "algorithm.rollout_correction.reject={seq_mean_k1: 0.9}": (
        "algorithm.rollout_correction.reject seq_mean_k1 0.9: set two ascending bounds or one above 1 for k1, and"
    ),
    "algorithm.use_kl_in_reward=false actor.use_kl_loss=true actor.kl_loss_type=k3+ actor.kl_loss_unbiased=true": (
        "actor.kl_loss_unbiased true needs actor.kl_loss_type k1 or k3, found k3+: choose k3"
    ),
    "algorithm.use_kl_in_reward=false actor.use_kl_loss=true actor.kl_loss_unbiased=true algorithm.preset=nemo_rl": (
        "actor.kl_loss_unbiased true and algorithm.preset nemo_rl both correct the KL's gradient: drop one"
    ),
    "trainer.rollout_only=true": "trainer.rollout_only without trainer.record_rollouts keeps nothing: name a folder",
    "trainer.profile.steps=[3,200]": "trainer.profile.steps 200 is after trainer.total_steps 100: choose another",
    "trainer.profile.ranks=[1]": "trainer.profile.ranks [1] has no effect, as trainer.profile.steps is [",
    "trainer.replay_rollouts=rec trainer.eval_interval=3": (
        "trainer.replay_rollouts starts no engines, which the evaluation on data.val_files needs: set"
    ),
    "trainer.replay_rollouts=rec trainer.eval_interval=0 trainer.total_steps=2": (
        "trainer.replay_rollouts: rec (looked in "
    ),
    "trainer.replay_rollouts=rec trainer.eval_interval=0 trainer.record_rollouts=new": (
        "trainer.record_rollouts needs rollouts, without trainer.eval_only and trainer.replay_rollouts: drop it"
    ),
    "actor.kl_loss_unbiased=true": "actor.kl_loss_unbiased true has no effect, as actor.use_kl_loss is false: drop it",
    "algorithm.rollout_correction.mode=mask": (
        'algorithm.rollout_correction.mode "mask" has no effect, as algorithm.rollout_correction.level is none: drop it'
    ),
    "rollout.max_turns=3": "rollout.max_turns 3 has no effect, as rollout.environment is null: drop it",
    "rollout.environment=json.decoder:JSONDecoder rollout.tools=json:loads rollout.tool_call_parser=qwen25": (
        "rollout.environment and rollout.tools are both set: keep one"
    ),
    "rollout.tools=json:loads": "rollout.tools needs rollout.tool_call_parser: name SGLang's for the model",
    "rollout.tool_call_parser=qwen25": 'rollout.tool_call_parser "qwen25" has no effect, as rollout.tools is empty',
    "rollout.environment=json.decoder:JSONDecoder data.too_long=truncate_left": (
        "data.too_long truncate_left would cut an episode's first messages: set it to skip"
    ),
    "rollout.environment=json.decoder:JSONDecoder rollout.max_total_tokens=2050": (
        "rollout.max_total_tokens 2050 is below the 2054 tokens that an engine needs for prompts of 1024 "
        "and responses of 1024 tokens"
    ),
    "rollout.environment=json.decoder:JSONDecoder rollout.max_total_tokens=2100 "
    "eval.datasets={a: {files: val.jsonl, max_prompt_length: 16, max_response_length: 1500}}": (
        "rollout.max_total_tokens 2100 is below the 2530 tokens that an engine needs for prompts of 1024 "
        "and responses of 1500 tokens"
    ),
    "rollout.environment=json.decoder:JSONDecoder reward.clip=1": "reward.clip 1.0 changes the sum of an episode",
    "rollout.environment=json.decoder:JSONDecoder reward.normalize=batch": (
        "reward.normalize batch changes the sum of an episode's rewards, not the rewards of its turns"
    ),
    "reward.function=null": "reward.function and rollout.environment leave responses without a score: name a",
    "actor.policy_loss=clip_turn": "actor.policy_loss clip_turn needs several turns: name a rollout.environment",
    "algorithm.gae_level=turn": "algorithm.gae_level turn needs several turns: name a rollout.environment",
    "algorithm.mask_truncated=true algorithm.bootstrap_truncated=true": (
        "algorithm.mask_truncated and algorithm.bootstrap_truncated are both true: drop one"
    ),
    **{
        f"rollout.engines={url}": f"rollout.engines: {shown} is not an address such as http://10.0.0.7:30000: write sch"
        for url, shown in {
            "[10.0.0.7:30000]": "10.0.0.7:30000",
            "http://me:secret@h:30000": "http://h:30000",
            "https://key@h:30000": "https://h:30000",
            "http://h:30000/v1": "http://h:30000/v1",
            "http://h?engine:30000": "http://h?engine:30000",
            "h:30": "h:30",
        }.items()
    },
    "model.layer_spec=torch actor.lora.target_modules=[q_proj, k_proj]": (
        "actor.lora.target_modules q_proj, k_proj: SGLang serves q_proj and v_proj together only, k_proj with these"
    ),
    "model.layer_spec=torch actor.lora.target_modules=[up_proj, o_proj]": (
        "actor.lora.target_modules up_proj, o_proj: SGLang serves q_proj and v_proj together only, k_proj with these"
    ),
    "model.layer_spec=torch actor.lora.rank=4 rollout.sync.transport=broadcast": (
        "rollout.sync.transport broadcast sends whole models, not actor.lora's adapters: set it to auto"
    ),
    "model.layer_spec=torch actor.lora.rank=4 rollout.sync.bucket_bytes=1": (
        "rollout.sync.bucket_bytes 1 has no effect on adapters, sent at once: drop it"
    ),
    "rollout.engines=[http://a:1] rollout.sync.transport=ipc": (
        "rollout.sync.transport ipc reaches no server of rollout.engines: set it to auto"
    ),
    "rollout.engines=[http://a:1] rollout.sleep=auto": (
        'rollout.sleep "auto" has no effect, as rollout.engines are already running: drop it'
    ),
    "rollout.engines=[http://a:1] rollout.mem_fraction_static=0.9": (
        "rollout.mem_fraction_static 0.9 has no effect, as rollout.engines are already running: drop it"
    ),
    "rollout.engines=[http://a:1, http://a:2] placement.rollout=0": (
        "placement.rollout: the ranks 0 do not suffice for 2 rollout.engines: name one for each"
    ),
    "algorithm.value_coef=1": (
        "algorithm.value_coef 1.0 has no effect, as algorithm.shared_backbone is false: drop it"
    ),
    "algorithm.adv_estimator=rloo rollout.n=2 algorithm.gamma=0.9": (
        "algorithm.gamma 0.9 has no effect, as algorithm.adv_estimator rloo does not read it: drop it"
    ),
    "actor.kl_loss_coef=1": "actor.kl_loss_coef 1.0 has no effect, as actor.use_kl_loss is false: drop it",
    "algorithm.shared_backbone=true critic.model_path=model": (
        'critic.model_path "model" has no effect, as this run builds no critic: drop it'
    ),
    "algorithm.rollout_correction.reject_geometric=[1.1, 2]": (
        "algorithm.rollout_correction.reject_geometric (1.1, 2.0) must enclose 1: set such as [0.999, 1.001]"
    ),
    "rollout.top_k=0": "rollout.top_k: expected -1 | int >= 1, found 0",
    "rollout.max_total_tokens=2049": (
        "rollout.max_total_tokens 2049 is below the 2050 tokens that an engine needs for prompts of 1024 "
        "and responses of 1024 tokens"
    ),
    "rollout.max_total_tokens=1030 rollout.max_response_length=1": (
        "rollout.max_total_tokens 1030 is below the 1031 tokens that an engine needs"
    ),
    "rollout.stop=['']": "rollout.stop holds an empty string",
    "data.val_files=[] trainer.eval_interval=10": (
        "trainer.eval_interval needs data.val_files or eval.datasets, found none: name some, or drop it"
    ),
    "eval.datasets={a.b: {files: val.jsonl}}": "eval.datasets: 'a.b' is not a valid name, or is taken by one of",
    "eval.datasets={val: {files: val.jsonl}}": (
        "eval.datasets: 'val' is not a valid name, or is taken by one of data.val_files: choose another"
    ),
    "eval.datasets={a: {files: val.jsonl, n: 4}}": (
        "eval.datasets.a.n 4 requests the same response to each prompt of a as many times, with temperature 0 and "
        "top_k -1: raise rollout.val_temperature (or the one of the data set), or set eval.datasets.a.n to 1"
    ),
    "rollout.val_n=2": "rollout.val_n 2 requests the same response to each prompt of val as many times, with",
    "eval.datasets={a: {files: val.jsonl, top_k: 0}}": "eval.datasets.a.top_k: expected -1 | int >= 1 | null, found 0",
    "trainer.eval_checkpoint=out": 'trainer.eval_checkpoint "out" has no effect, as trainer.eval_only is false:',
    "trainer.eval_only=true data.val_files=[]": "trainer.eval_only needs data.val_files or eval.datasets, found none",
    "trainer.eval_only=true trainer.rollout_only=true": (
        "trainer.eval_only and trainer.rollout_only exclude each other: drop one"
    ),
    "trainer.eval_only=true trainer.eval_checkpoint=absent": "trainer.eval_checkpoint: no folder absent (looked in /",
    "trainer.eval_only=true trainer.eval_checkpoint=model": (
        "trainer.eval_checkpoint: model is no checkpoint of a run: name a folder step_XXXXXXXX with state.json, or set"
    ),
    "rollout.val_top_k=0": "rollout.val_top_k: expected -1 | int >= 1, found 0",
    "eval.datasets={a: {files: val.jsonl, reward: {math: 0}}}": (
        "eval.datasets.a.reward {'math': 0.0} names no function with a weight other than 0: name one"
    ),
    "eval.datasets={a: {files: val.jsonl, prompt_key: label}}": (
        "eval.datasets.a.prompt_key and eval.datasets.a.label_key are both 'label': name two different fields"
    ),
    "rollout.max_total_tokens=2050 eval.datasets={a: {files: val.jsonl, max_response_length: 1025}}": (
        "rollout.max_total_tokens 2050 is below the 2051 tokens that an engine needs for prompts of 1024 "
        "and responses of 1025 tokens (eval.datasets.a.files): raise it, or lower"
    ),
    "eval.datasets={a: {files: absent.jsonl}}": "eval.datasets.a.files: no file absent.jsonl (looked in /",
    "eval.datasets={a: {files: val.jsonl, reward: absent.py:f}}": (
        "eval.datasets.a.reward 'absent.py:f': no file absent.py"
    ),
    "eval.datasets={a: {files: val.jsonl, reward: {math: 1}, label_key: answer}}": (
        "eval.datasets.a.files: val.jsonl lines 1, 2, 3 and 253 more: no field 'answer': correct "
        "eval.datasets.a.label_key, or add it (data.on_bad_row=skip leaves such out); the file has: prompt, label"
    ),
    "eval.datasets={a: {files: val.jsonl, environment: json.decoder:JSONDecoder, tools: json:loads}} "
    "rollout.tool_call_parser=qwen25": "eval.datasets.a.environment and eval.datasets.a.tools are both set: keep one",
    "eval.datasets={a: {files: val.jsonl, tools: json:loads}}": (
        "eval.datasets.a.tools needs rollout.tool_call_parser: name SGLang's for the model, such as qwen25"
    ),
    "eval.datasets={a: {files: val.jsonl, environment: absent.py:Own}}": (
        "eval.datasets.a.environment 'absent.py:Own': no file absent.py"
    ),
    "eval.datasets={a: {files: val.jsonl, environment: non}}": (
        "eval.datasets.a.environment 'non': expected FILE.py:CLASS or package.module:CLASS"
    ),
    "eval.datasets={a: {files: val.jsonl, reward: none}}": (
        "eval.datasets.a.reward and rollout.environment leave responses without a score: name a function, an"
    ),
    "rollout.environment=json.decoder:JSONDecoder reward.function=null data.val_files=[] "
    "eval.datasets={a: {files: val.jsonl, environment: none}}": (
        "reward.function and eval.datasets.a.environment leave responses without a score: name a function, an"
    ),
    "eval.datasets={a: {files: val.jsonl, environment: json.decoder:JSONDecoder}} rollout.max_total_tokens=2050": (
        "rollout.max_total_tokens 2050 is below the 2054 tokens that an engine needs for prompts of 1024 "
        "and responses of 1024 tokens"
    ),
    "eval.datasets={a: {files: val.jsonl, environment: json.decoder:JSONDecoder}} data.too_long=truncate_left": (
        "data.too_long truncate_left would cut an episode's first messages: set it to skip"
    ),
    "actor.optim.lr_warmup_steps=1 trainer.total_steps=1": (
        "actor.optim.lr_warmup_steps 1 must be below the run's 1 optimizer step: shorten it or raise"
    ),
    "trainer.time_limit=120": (
        "trainer.time_limit 120 is not above trainer.grace_seconds 120, so that no step would begin: raise it, or lower"
    ),
    "data.label_key=prompt": "data.prompt_key and data.label_key are both 'prompt': name two different fields",
}
PLACEMENTS = {
    "placement.rollout=4": (
        "placement.rollout: '4' names rank 4, but this run has 4 ranks, numbered from 0: "
        "start 5 processes or more (megappo train --nproc 5, or torchrun --nproc-per-node 5), or name lower ranks"
    ),
    "placement.critic=3-1": "placement.critic: '3-1': the range 3-1 runs backwards: write 1-3",
    "placement.rollout=0-2,2": "placement.rollout: '0-2,2' names a rank twice: name it once",
    "placement.rollout=gpus": (
        "placement.rollout: 'gpus' is not a list of ranks: write 'all', '0-7', '0,2' or '0-3,6'"
    ),
    "placement.critic=0-2 critic.parallel.tensor=2": (
        "placement.critic with critic.parallel: tensor 2 x context 1 x pipeline 1 = 2 does not divide 3, "
        "the number of ranks 0-2: name a multiple of 2 ranks, or make tensor x context x pipeline 1 or 3"
    ),
    "actor.parallel.pipeline=3": (
        "placement.actor with actor.parallel: tensor 1 x context 1 x pipeline 3 = 3 does not divide 4, "
        "the number of ranks 0-3: "
        "name a multiple of 3 ranks, or make tensor x context x pipeline 2 or 4"
    ),
    "placement.ref=0-2 actor.parallel.tensor=2": (
        "placement.ref with actor.parallel: tensor 2 x context 1 x pipeline 1 = 2 does not divide 3, "
        "the number of ranks 0-2"
    ),
    "placement.rollout=0-2 rollout.tensor_parallel=2": (
        "placement.rollout with rollout.tensor_parallel: tensor 2 x context 1 x "
        "pipeline 1 = 2 does not divide 3, the number of ranks 0-2: name a multiple of 2 ranks, "
        "or make tensor x context x pipeline 1 or 3"
    ),
    "placement.rollout=0,2 rollout.tensor_parallel=2": (
        "placement.rollout: engine 0 of rollout.tensor_parallel 2 would get ranks 0,2: "
        "name ranks that follow each other, equally many on each of its nodes of 4"
    ),
    "placement.actor=0-1 placement.critic=0-3 rollout.sync.transport=ipc": (
        "rollout.sync.transport is ipc, but the engines' ranks 2-3 are not the actor's (0-1): set it to auto, or place "
        "the engines there"
    ),
    "placement.critic=3 critic.parallel.tensor=2": (
        "placement.critic with critic.parallel: tensor 2 x context 1 x pipeline 1 = 2 does not divide 1, "
        "the number of ranks 3: "
        "name a multiple of 2 ranks, or make tensor x context x pipeline 1"
    ),
    "placement.actor,critic,rollout=1-3": (
        "placement: ranks 0 of this run's 4 belong to no component: place one there, or start fewer processes"
    ),
    "placement.rollout=\u0661": "placement.rollout: '\u0661' is not a list of ranks: write 'all', '0-7', '0,2'",
    "placement.critic=0-999999999999": (
        "placement.critic: '0-999999999999' is not a list of ranks: write 'all', '0-7'"
    ),
    "placement.actor,critic,rollout=0-1": (
        "placement: ranks 2-3 of this run's 4 belong to no component: "
        "place one there, or start fewer processes (--nproc of megappo train"
    ),
    "actor.ppo_mini_batch_size=2": (
        "actor.ppo_mini_batch_size 2 x rollout.n 1 = 2 trajectories are fewer than the actor's 4 data-parallel shards "
        "on ranks 0-3: raise actor.ppo_mini_batch_size to 4 or more"
    ),
}
FILES = {
    "model.path=''": 'model.path: expected text, found "" (empty paths, variables',
    "critic.model_path=''": 'critic.model_path: expected text | null, found "" (empty paths, variables',
    "model.path=absent": "model.path: no folder absent (looked in /",
    "critic.model_path=absent": "critic.model_path: no folder absent (looked in /",
    "data.train_files=absent.jsonl": "data.train_files: no file absent.jsonl (looked in /",
    "data.train_files={train.jsonl: 0}": "data.train_files: every weight is 0: raise one",
    "data.train_files={train.jsonl: 1, absent.jsonl: 1}": "data.train_files: no file absent.jsonl (looked in /",
    "data.val_files=[val.jsonl, val.jsonl]": "data.val_files: each is reported under its own name, so rename or merge",
    "data.val_files=.": "data.val_files: . is a folder: name its files",
    "data.val_files=[val.jsonl, data.csv]": "data.val_files: data.csv is neither .jsonl, .jsonl.gz nor .parquet: ",
    "reward.function=exact": "reward.function 'exact': expected exact_match, regex_match, multiple_choice, gsm8k, ",
    'model.path="a\\0b"': "model.path: no path holds a NUL, found 'a\\x00b': correct it",
    f"model.path={'m' * 5000}": "model.path: cannot inspect " + "m" * 80 + "...: File name too long: correct the path",
    f"data.train_files={'d' * 5000}.jsonl": "data.train_files: cannot inspect " + "d" * 80 + "...: File name too long",
    f"trainer.output_dir={'o' * 5000}": "trainer.output_dir: cannot inspect " + "o" * 80 + "...: File name too long",
    'trainer.output_dir="a\\0b"': "trainer.output_dir: no path holds a NUL, found 'a\\x00b': correct it",
    "model.path=circle": "model.path: cannot inspect circle: Too many levels of symbolic links: correct the path",
    "data.train_files=pipe.jsonl": "data.train_files: no file pipe.jsonl (looked in /",
    f"reward.function={'r' * 5000}.py:f": "reward.function: cannot read "
    + "r" * 80
    + "... (File name too long): correct",
    "reward.function=absent.py:score": "reward.function 'absent.py:score': no file absent.py",
    "reward.pass_env=[PATH, ABSENT_KEY]": "reward.pass_env names 'ABSENT_KEY', which is not set here: set it",
    "trainer.output_dir=train.jsonl": "trainer.output_dir: train.jsonl is a file: name a folder",
    "actor.parallel.tensor=4": (
        "actor.parallel.tensor 4 does not divide num_key_value_heads 2 of model/config.json: 2 would"
    ),
    "critic.parallel.pipeline=4": (
        "critic.parallel.pipeline 4 x virtual_pipeline 1 = 4 does not divide num_hidden_layers 6 of model/config.json: "
        "3 or 6 would, or set critic.parallel.pipeline_split"
    ),
    "actor.parallel={pipeline: 2, virtual_pipeline: 2}": (
        "actor.parallel.pipeline 2 x virtual_pipeline 2 = 4 does not divide num_hidden_layers 6 of model/config.json: "
        "3 or 6 would, or set actor.parallel.pipeline_split"
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
}


@pytest.mark.parametrize(("overrides", "message"), (CONTRADICTIONS | PLACEMENTS | FILES).items())
def test_a_run_that_cannot_be(run_folder, refusals, overrides, message):
    (run_folder / "circle").symlink_to("circle")
    os.mkfifo(run_folder / "pipe.jsonl")
    (run_folder / "data.csv").touch()
    keys = yaml_aware_split(overrides)
    (error,) = refusals(*keys)
    assert error.startswith(f"command line: {message}")
    (run_folder / "bad.yaml").write_text("base: run.yaml\n" + as_document(keys))
    (in_file,) = refusals(config="bad.yaml")
    place, _, text = in_file.partition(": ")
    assert (place.rpartition(":")[0], text) == ("bad.yaml", error.partition(": ")[2])


def yaml_aware_split(overrides: str) -> list[str]:
    """`a=1 b=[1, 2]` -> both overrides."""
    parts: list[str] = []
    for word in overrides.split(" "):
        parts += [word] if "=" in word else []
        if "=" not in word:
            parts[-1] += " " + word
    return parts


def as_document(overrides: list[str]) -> str:
    """Return overrides as YAML with one key a line; a mapping stays on its line."""
    document: dict = {}
    for override in overrides:
        key, _, value = override.partition("=")
        *sections, name = key.split(".")
        section = document
        for above in sections:
            section = section.setdefault(above, {})
        section[name] = value if sections == ["placement"] else yaml.safe_load(value)
    return yaml.safe_dump(document, sort_keys=False)


def test_everything_wrong_with_a_run_comes_at_once(refusals):
    errors = refusals("actor.ppo_mini_batch_size=3", "actor.parallel.tensor=3", "data.train_files=absent.jsonl")
    assert [error.removeprefix("command line: ").split(" ")[0] for error in errors] == [
        "actor.ppo_mini_batch_size",
        "placement.actor",
        "actor.parallel.tensor",
        "actor.parallel.tensor",
        "actor.parallel.tensor",
        "data.train_files:",
    ]


def test_an_error_names_the_first_key_that_was_set(run_folder, refusals):
    """actor.ppo_mini_batch_size is at its default, which is not written anywhere."""
    (run_folder / "base.yaml").write_text("base: run.yaml\n\ndata:\n  train_batch_size: 100\n")
    (run_folder / "bad.yaml").write_text("base: base.yaml\ncritic: {ppo_mini_batch_size: 50}\n")
    assert refusals(config="bad.yaml") == [
        "base.yaml:4: actor.ppo_mini_batch_size 256 does not divide data.train_batch_size 100: 100 would"
    ]


def test_an_error_about_a_missing_field_is_where_its_key_was_written(refusals):
    errors = refusals("data.label_key=answer")
    assert [error.partition(": no field 'answer'")[0] for error in errors] == [
        f"command line: data.{split}_files: {split}.jsonl lines 1, 2, 3 and 253 more" for split in ("train", "val")
    ]


def test_the_first_of_two_keys_is_named_by_whoever_wrote_it_last(run_folder, refusals):
    (run_folder / "bad.yaml").write_text("base: run.yaml\nplacement:\n  critic: 0-2\ncritic: {parallel: {tensor: 2}}\n")
    (error,) = refusals(config="bad.yaml")
    assert error.startswith("bad.yaml:3: placement.critic with critic.parallel: tensor 2")
    (error,) = refusals("placement.critic=0-2", config="bad.yaml")
    assert error.startswith("command line: placement.critic with critic.parallel: tensor 2")


def test_an_error_about_defaults_names_the_file(refusals, capsys):
    assert refusals("rollout.max_response_length=3071") == [
        "run.yaml:7: model.path: model/config.json's max_position_embeddings 4096 is below the 4097 tokens that an "
        "engine needs for prompts of 1024 and responses of 3071 tokens (data.train_files): raise it, "
        "or lower max_prompt_length or max_response_length"
    ]
    assert plan.main(["run.yaml"]) == 2
    (error,) = capsys.readouterr().err.splitlines()
    assert (
        error == "error: run.yaml: placement: every component is on 'all' ranks: set their number with --world-size N"
    )


@pytest.mark.parametrize(
    ("override", "warning"),
    {
        "actor.optim.lr=0.1": "actor.optim.lr 0.1 is unusual: Adam takes 1e-7 to 1e-4 for a language model",
        "algorithm.gamma=0.5": "algorithm.gamma 0.5 is unusual: a reward is forgotten within some tokens",
        "actor.entropy_coeff=1": "actor.entropy_coeff 1.0 is unusual: the bonus makes responses random",
        "rollout.temperature=3": "rollout.temperature 3.0 is unusual: responses are sampled at about 1",
    }.items(),
)
def test_an_unusual_value_gives_a_warning(run_folder, capsys, override, warning):
    assert plan.main(["run.yaml", override, "--world-size", "4"]) == 0
    assert capsys.readouterr().err == f"warning: {warning}\n"


def test_servers_of_all_forms_and_the_last_ports_are_valid(accepted):
    servers = "[http://10.0.0.7:30000, https://node-1.cluster:65535, 'http://[fe80::1]:1', http://h:7]"
    accepted(f"rollout.engines={servers}", "rollout.sync.transport=disk")
    accepted("rollout.port=65532")
    accepted("rollout.port=65535", "placement.rollout=0")


def test_a_bound_that_a_loss_does_not_have_is_no_matter(accepted):
    accepted("actor.policy_loss=cispo", "actor.clip_ratio_low=1", "actor.clip_ratio_high=4")


def test_a_context_that_is_just_long_enough_is_valid(accepted):
    accepted("rollout.max_response_length=3070", "rollout.max_total_tokens=4096")


def test_without_held_out_files_the_plan_reports_no_evaluation(accepted):
    assert "evaluation: none" not in accepted()
    assert "  evaluation: none (data.val_files, " in accepted("data.val_files=[]")
    assert "  evaluation: none (data.val_files, " in accepted("trainer.eval_interval=0")


def test_all_ranks_may_be_more_than_the_machine_has(accepted):
    assert "plan of run.yaml on 4 ranks" in accepted("placement.actor,critic,rollout=all")


def test_an_evaluation_needs_neither_prompts_to_train_on_nor_a_critic(run_folder, accepted):
    (run_folder / "train.jsonl").unlink()
    found = accepted("trainer.eval_only=true", "data.train_batch_size=4096", "critic.model_path=absent")
    assert "prompts of val.jsonl" in found and "train.jsonl:" not in found
    assert "  actor: data 4" in found and "critic: data" not in found and "ref: data" not in found
