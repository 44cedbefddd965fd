"""A short run of the whole program on a mixture of experts, whose experts are shared out over both ranks."""

import shutil
from pathlib import Path

import pytest
from program import Program, logged
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3MoeConfig, Qwen3MoeForCausalLM

pytestmark = pytest.mark.timeout(300)
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
SAME = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "eos_token_id")


def mixture_like(source: Path, folder: Path) -> Path:
    """A random Qwen3-MoE of the sizes, and with the tokenizer, of another folder."""
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
    dense = AutoModelForCausalLM.from_pretrained(source).config.to_dict()
    config = Qwen3MoeConfig(**EXPERTS, **{name: dense[name] for name in SAME}, head_dim=16, max_position_embeddings=32)
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    return folder


def test_a_mixture_of_experts_learns_and_is_exported(config: Path, folder: Path) -> None:
    run = folder / "run"
    model = mixture_like(config.parent / "model", folder / "model")
    layouts = (
        "actor.parallel={tensor: 1, expert: 2}",
        "critic.parallel={tensor: 2, pipeline: 1, expert: 2, sequence: true}",
    )
    # So few tokens that the shards need different numbers of micro-batches.
    settings = ("trainer.total_steps=10", "trainer.eval_interval=0", "actor.max_tokens_per_micro_batch=48")
    with Program(folder, config, f"trainer.output_dir={run}", f"model.path={model}", *layouts, *settings) as program:
        assert program.wait() == 0, program.output
    steps = logged(run)
    assert [metrics["step"] for metrics in steps] == list(range(1, 11))
    assert all(value is not None for metrics in steps for value in metrics.values()), "no NaN"
    assert all(metrics["rollout/log_prob_diff/mean"] < 1e-4 for metrics in steps)
    rewards = [metrics["reward/score/mean"] for metrics in steps]
    assert rewards[0] < 0.2 and min(rewards[-2:]) > 0.4, rewards
    exported, info = AutoModelForCausalLM.from_pretrained(run / "hf_actor", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    tokenizer = AutoTokenizer.from_pretrained(run / "hf_actor")
    prompt = tokenizer("12+13=", return_tensors="pt")
    assert "7" in tokenizer.decode(exported.generate(**prompt, max_new_tokens=4, do_sample=False)[0])
