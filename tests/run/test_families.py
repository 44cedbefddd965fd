"""Two steps of the whole program for each family that SGLang serves on a CPU, with odd shapes and odd layouts, and a
tokenizer as transformers saves it today.
"""

import json
from pathlib import Path

import pytest
import torch
from program import Program, logged
from safetensors.torch import load_file
from tiny_shapes import DEEPSEEK_V2, DEEPSEEK_V3
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from megappo.data.tokenizer import load_tokenizer

pytestmark = pytest.mark.timeout(300)
# Two tokens end a response; the last two stand in no text.
TOKENS = ["<pad>", "<eos>", "<end>", "<unk>", *"0123456789+-=", "<reserved 1>", "<reserved 2>"]
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}={% endif %}"
# What published chat models want to be sampled with, and training must not be.
CHAT_SAMPLING = {"temperature": 0.6, "top_k": 3, "top_p": 0.8, "repetition_penalty": 1.3}
GREEDY = {"do_sample": False, "repetition_penalty": 1.0}
SHAPE = {
    **{"num_hidden_layers": 3, "hidden_size": 32, "intermediate_size": 48, "initializer_range": 0.2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 16},  # as few as will do
    **{"bos_token_id": None, "eos_token_id": 1},
}
MODELS = {
    "llama": {"head_dim": 12, "vocab_size": 37, "tie_word_embeddings": False},
    "mistral": {"num_key_value_heads": 1, "vocab_size": 33, "tie_word_embeddings": True, "sliding_window": 16},
    "qwen2": {"num_attention_heads": 8, "vocab_size": 17, "tie_word_embeddings": True},
    "qwen3": {"num_hidden_layers": 5, "head_dim": 24, "vocab_size": 23, "tie_word_embeddings": True},
    "glm4": {"head_dim": 16, "vocab_size": 19, "attention_bias": True, "pad_token_id": None},
    "phi3": {
        **{"vocab_size": 21, "pad_token_id": None, "tie_word_embeddings": True, "sliding_window": None},
        **{"partial_rotary_factor": 0.75, "max_position_embeddings": 32, "original_max_position_embeddings": 16},
    },
    "gemma3_text": {
        **{"head_dim": 16, "query_pre_attn_scalar": 10, "vocab_size": 24, "pad_token_id": None},
        **{"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    },
    "gemma4_text": {
        **{"head_dim": 12, "global_head_dim": 24, "num_key_value_heads": 4, "num_global_key_value_heads": 2},
        **{"attention_k_eq_v": True, "hidden_size_per_layer_input": 0, "final_logit_softcapping": 3.0},
        **{"sliding_window": 4, "layer_types": ["sliding_attention", "sliding_attention", "full_attention"]},
        **{"vocab_size": 28, "pad_token_id": None},
    },
    "granite": {
        **{"embedding_multiplier": 3.0, "logits_scaling": 2.0, "residual_multiplier": 0.7, "attention_multiplier": 0.2},
        **{"vocab_size": 25, "head_dim": 16},
    },
    "seed_oss": {"head_dim": 12, "vocab_size": 35, "pad_token_id": 0},
    "smollm3": {"no_rope_layers": [1, 0, 1], "vocab_size": 22, "pad_token_id": None},
    "olmo3": {
        **{"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
        **{"vocab_size": 26, "pad_token_id": None},
    },
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "vocab_size": 29, "sliding_window": None},
    "qwen3_moe": {
        **{"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20, "norm_topk_prob": True},
        **{"num_key_value_heads": 1, "head_dim": 12, "vocab_size": 31},
    },
    "glm4_moe": {
        **{"n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20, "first_k_dense_replace": 1},
        **{"attention_bias": True, "use_qk_norm": True, "head_dim": 16, "vocab_size": 27, "num_mtp_layers": 0},
    },
    "deepseek_v2": DEEPSEEK_V2 | {"q_lora_rank": None, "max_position_embeddings": 64, "vocab_size": 34},
    "deepseek_v3": DEEPSEEK_V3 | {"head_dim": 8, "max_position_embeddings": 64, "vocab_size": 36},
}
MODELS["llama"]["rope_parameters"] = {
    **{"rope_type": "llama3", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 8},
    **{"low_freq_factor": 1.0, "high_freq_factor": 4.0},
}
MODELS["phi3"]["rope_parameters"] = {
    **{"rope_type": "longrope", "rope_theta": 500.0, "original_max_position_embeddings": 16},
    **{"short_factor": [1.1, 1.5, 2.0], "long_factor": [2.0, 4.0, 8.0]},
}
# Of the actor and of the critic.
LAYOUTS = {
    "llama": ("{tensor: 2, sequence: true}", "{pipeline: 2, pipeline_split: [1, 2]}"),
    "mistral": ("{tensor: 1, pipeline: 2, pipeline_split: [2, 1]}", "{pipeline: 1, context: 2}"),
    "qwen2": ("{tensor: 2}", "{pipeline: 1}"),
    "qwen3": (
        "{tensor: 1, pipeline: 2, virtual_pipeline: 2, pipeline_split: [1, 1, 2, 1]}",
        "{pipeline: 1, tensor: 2}",
    ),
    "glm4": ("{tensor: 2, sequence: true}", "{pipeline: 1, context: 2}"),
    "phi3": ("{tensor: 2}", "{pipeline: 2, pipeline_split: [1, 2]}"),
    "gemma3_text": ("{tensor: 2}", "{pipeline: 1, context: 2}"),
    "gemma4_text": ("{tensor: 2, sequence: true}", "{pipeline: 1, context: 2}"),
    "granite": ("{tensor: 1, pipeline: 2, pipeline_split: [2, 1]}", "{pipeline: 1, tensor: 2, sequence: true}"),
    "seed_oss": ("{tensor: 2}", "{pipeline: 1, context: 2}"),
    "smollm3": ("{tensor: 1, pipeline: 2, pipeline_split: [1, 2]}", "{pipeline: 1, context: 2}"),
    "olmo3": ("{tensor: 2, sequence: true}", "{pipeline: 2, pipeline_split: [1, 2]}"),
    "mixtral": ("{tensor: 2, sequence: true, expert: 2}", "{pipeline: 2, pipeline_split: [1, 2]}"),
    "qwen3_moe": ("{tensor: 1, expert: 2}", "{pipeline: 1, context: 2, expert_tensor: 2}"),
    "glm4_moe": ("{tensor: 1, expert: 2}", "{pipeline: 2, pipeline_split: [1, 2]}"),
    "deepseek_v2": ("{tensor: 2, sequence: true, expert: 2}", "{pipeline: 2, pipeline_split: [1, 2]}"),
    "deepseek_v3": ("{tensor: 1, expert: 2}", "{pipeline: 1, tensor: 2, sequence: true}"),
}
BALANCING = {
    "mixtral": ["actor.router.aux_loss_coef=0.01"],
    "qwen3_moe": ["actor.router.seq_aux_loss_coef=0.01", "critic.router.aux_loss_coef=0.01"],
    "glm4_moe": [
        "actor.router.bias_update_rate=0.01",
        "critic.router={seq_aux_loss_coef: 0.01, bias_update_rate: 0.01}",
    ],
    "deepseek_v3": ["actor.router.bias_update_rate=0.01"],
}
"""Settings by which a mixture of experts balances its load."""


def write_model(folder: Path, family: str) -> Path:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **SHAPE | MODELS[family]))
    model.generation_config.update(eos_token_id=[1, 2], do_sample=True, **CHAT_SAMPLING)
    model.save_pretrained(folder)
    if family == "olmo3":  # SGLang reads its rotary positions as they are published, only
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"rope_parameters": None, "rope_theta": 500000.0}))
    core = Tokenizer(models.WordLevel({token: i for i, token in enumerate(TOKENS)}, unk_token="<unk>"))
    core.pre_tokenizer, core.decoder = pre_tokenizers.Split(Regex("."), "isolated"), decoders.Fuse()
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>", "extra_special_tokens": ["<end>"]}
    PreTrainedTokenizerFast(tokenizer_object=core, chat_template=TEMPLATE, **special).save_pretrained(folder)
    assert json.loads((folder / "tokenizer_config.json").read_text())["tokenizer_class"] == "TokenizersBackend"
    return folder


def write_prompts(file: Path) -> Path:
    """Write prompts of different lengths, every other one as chat messages."""
    texts = [f"{a}+{b}" for a in range(0, 80, 11) for b in range(4)]
    prompts = [f"{t}=" if i % 2 else [{"role": "user", "content": t}] for i, t in enumerate(texts)]
    file.write_text("".join(json.dumps({"prompt": prompt, "label": ""}) + "\n" for prompt in prompts))
    return file


def check_export(run: Path) -> None:
    """Check that transformers loads the export and gives the engine's greedy responses of the last evaluation."""
    exported, info = AutoModelForCausalLM.from_pretrained(run / "hf_actor", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    tokenizer = load_tokenizer(str(run / "hf_actor"))
    samples = [json.loads(line) for line in (run / "rollouts" / "step_00000002.jsonl").read_text().splitlines()]
    assert len(samples) == 8
    for sample in samples:
        prompt = tokenizer(sample["prompt"], return_tensors="pt")["input_ids"]
        tokens = exported.generate(prompt, **GREEDY, max_new_tokens=6)[0, prompt.shape[1] :]
        assert tokenizer.decode(tokens, skip_special_tokens=True) == sample["response"]


# All train in tests/models/test_train_engine.py, and reach an engine in tests/sync/test_layouts.py; test_extensions.py
# has a run of another one.
@pytest.mark.slow
@pytest.mark.parametrize("family", MODELS)
def test_a_family_trains(family: str, config: Path, folder: Path) -> None:
    run, model = folder / "run", write_model(folder / "model", family)
    prompts = write_prompts(folder / "prompts.jsonl")
    settings = [f"model.path={model}", f"data.train_files={prompts}", f"data.val_files={prompts}"]
    settings += ["trainer.total_steps=2", "trainer.eval_interval=2", "rollout.sync.probe_tolerance=1e-4"]
    settings += ["actor.max_tokens_per_micro_batch=48"]  # so few that shards need different numbers of micro-batches
    settings += BALANCING.get(family, [])
    settings += [f"{name}.parallel={layout}" for name, layout in zip(("actor", "critic"), LAYOUTS[family], strict=True)]
    settings += [f"{name}.offload=[weights,gradients,optimizer]" for name in ("actor", "critic")]
    temporary = folder / ("job-" * 15)  # too long for the names of sockets, as a cluster's may be
    temporary.mkdir()
    variables = {"TMPDIR": str(temporary)}
    with Program(folder, config, f"trainer.output_dir={run}", *settings, environment=variables) as program:
        assert program.wait() == 0, program.output
    assert "Warning" not in program.output
    steps = logged(run)[1:]
    assert [metrics["step"] for metrics in steps] == [1, 2]
    assert all(value is not None for metrics in steps for value in metrics.values()), "no NaN"
    for name in ("rollout", "sync"):
        assert all(metrics[f"{name}/log_prob_diff/max"] < 1e-4 for metrics in steps)
    assert all(metrics[f"{name}/grad_norm"] > 0 for metrics in steps for name in ("actor", "critic"))
    balanced = {setting.split(".")[0] for setting in BALANCING.get(family, []) if "aux_loss_coef" in setting}
    for name in balanced:
        assert all(0.5 < metrics[f"{name}/load_balancing_loss"] < 5 for metrics in steps)
    check_export(run)
    before, after = (load_file(one / "model.safetensors") for one in (model, run / "hf_actor"))
    for key in before:
        if key.endswith("e_score_correction_bias"):
            steps_taken = (after[key] - before[key]) / 0.01
            assert steps_taken.any() and steps_taken.sub(steps_taken.round()).abs().max() < 1e-3
