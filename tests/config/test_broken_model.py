"""Model folders that are incomplete, damaged, of another kind, or do not fit the layout."""

import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from scoring_adapters import write_adapters
from tiny_shapes import GEMMA4

from megappo.config.config_error import shorten

FILE = "model/config.json"
CANNOT = "cannot use model/config.json: "
HEADS = f"{CANNOT}num_attention_heads: Input should be "
QWEN3_MOE = {"architectures": ["Qwen3MoeForCausalLM"], "moe_intermediate_size": 8}
GRANITE = {
    "architectures": ["GraniteForCausalLM"],
    **dict.fromkeys(("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling"), 2.0),
}
MINIMAX_M2 = {"architectures": ["MiniMaxM2ForCausalLM"], "num_local_experts": 4, "num_experts_per_tok": 2}
GEMMA3 = {"architectures": ["Gemma3ForCausalLM"], "hidden_act": None, "query_pre_attn_scalar": 16}
LONG_ROPE = {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
LONG_ROPE_SHOWN = shorten(str({"rope_type": "longrope", **LONG_ROPE}).replace("'type': 'longrope', ", ""))
PHI3 = {"architectures": ["Phi3ForCausalLM"], "rope_scaling": LONG_ROPE}
WRONG_VALUES = [
    ({"architectures": ["MambaForCausalLM"]}, f"{FILE} is of architecture MambaForCausalLM; this version trains Llama"),
    (
        {"architectures": ["GlmMoeDsaForCausalLM"]},
        f"{FILE} is of architecture GlmMoeDsaForCausalLM (attention to the tokens that an indexer picks is not "
        "supported); this version trains Llama",
    ),
    ({"architectures": ...}, f"{FILE} is of architecture none; this version trains"),
    ({"architectures": None}, f"{FILE} is of architecture none; this version trains"),
    ({"architectures": "LlamaForCausalLM"}, f"{FILE} is of architecture none; this version trains"),
    ({"architectures": {"a": "b"}}, f"{FILE} is of architecture none; this version trains"),
    ({"architectures": []}, f"{FILE} is of architecture none; this version trains"),
    ({"architectures": [{}]}, f"{FILE} is of architecture {{}}; this version trains"),
    ({"architectures": [None]}, f"{FILE} is of architecture None; this version trains"),
    ({"architectures": ["x" * 9000]}, f"{FILE} is of architecture {'x' * 80}...; this version"),
    ({"num_attention_heads": 0}, HEADS + "greater than or equal to 1, found 0: correct it, or copy the file again"),
    ({"num_attention_heads": -4}, HEADS + "greater than or equal to 1, found -4"),
    ({"num_attention_heads": "4"}, HEADS + "a valid integer, found '4'"),
    ({"num_attention_heads": 4.0}, HEADS + "a valid integer, found 4.0"),
    ({"num_attention_heads": True}, HEADS + "a valid integer, found True"),
    ({"num_attention_heads": float("nan")}, HEADS + "a valid integer, found nan"),
    ({"num_attention_heads": [4]}, HEADS + "a valid integer, found [4]"),
    ({"num_attention_heads": 10**100}, HEADS + "less than or equal to 2147483647, found 1" + "0" * 79 + "..."),
    ({"num_attention_heads": None}, f"{FILE} lacks num_attention_heads: download it again"),
    ({"num_hidden_layers": None}, f"{FILE} lacks num_hidden_layers: download it again"),
    ({"num_hidden_layers": 0}, f"{CANNOT}num_hidden_layers: Input should be greater than or equal to 1, found 0"),
    ({"max_position_embeddings": ..., "rms_norm_eps": ...}, f"{FILE} lacks max_position_embeddings, rms_norm_eps"),
    ({"rms_norm_eps": "1e-6"}, f"{CANNOT}rms_norm_eps: Input should be a valid number, found '1e-6'"),
    ({"rms_norm_eps": 0}, f"{CANNOT}rms_norm_eps: Input should be greater than 0, found 0"),
    ({"rope_theta": float("inf")}, f"{CANNOT}rope_theta: Input should be a finite number, found inf"),
    ({"head_dim": 0}, f"{CANNOT}head_dim: Input should be greater than or equal to 1, found 0"),
    ({"head_dim": 15}, f"{FILE}: the size of a head is 15, but rotary positions need an even one"),
    ({"hidden_size": 66}, f"{FILE}: num_attention_heads 4 does not divide hidden_size 66, and head_dim is not set"),
    ({"num_key_value_heads": 3}, f"{FILE}: num_key_value_heads 3 does not divide num_attention_heads 4"),
    ({"tie_word_embeddings": "false"}, f"{CANNOT}tie_word_embeddings: Input should be a valid boolean, found 'false'"),
    ({"use_sliding_window": True, "sliding_window": 16}, f"{FILE}'s sliding_window 16 is below"),
    ({"layer_types": "full_attention"}, f"{FILE} of this Qwen2ForCausalLM has layer_types = 'full_attention', which"),
    ({"rope_scaling": "linear"}, f"{CANNOT}rope_scaling: expected an object, found 'linear': correct it"),
    (
        {"rope_scaling": {"type": "linear", "factor": "2"}},
        f"{CANNOT}factor: expected a number greater than 0, found '2': correct it",
    ),
    (
        PHI3 | {"original_max_position_embeddings": 2048},
        f"{FILE}'s original_max_position_embeddings 2048 is below the 2050 tokens that an engine needs for prompts of "
        "1024 and responses of 1024 tokens (data.train_files): lower max_prompt_length or max_response_length",
    ),
    (
        PHI3 | {"original_max_position_embeddings": 4096, "head_dim": 32},
        f"{FILE}: short_factor has 8 numbers, but rotary positions need 16: correct it, or download it again",
    ),
    ({"quantization_config": []}, f"{FILE} of this Qwen2ForCausalLM has quantization_config = [], which is not"),
    (
        {"architectures": ["MistralForCausalLM"], "sliding_window": 2047},
        f"{FILE}'s sliding_window 2047 is below prompts of 1024 and responses of 1024 tokens",
    ),
    (
        {"architectures": ["LlamaForCausalLM"], "hidden_size": ..., "vocab_size": ...},
        f"{FILE} lacks hidden_size, vocab_size: download it again",
    ),
    (
        QWEN3_MOE | {"num_experts": 0, "num_experts_per_tok": 1},
        f"{CANNOT}num_experts: Input should be greater than or equal to 1, found 0",
    ),
    (
        {"architectures": ["SmolLM3ForCausalLM"], "no_rope_layers": [1, 0, 1]},
        f"{FILE}: no_rope_layers has 3 layers, num_hidden_layers is 6",
    ),
    (
        MINIMAX_M2 | {"head_dim": 16, "rotary_dim": 8, "partial_rotary_factor": 1.0},
        f"{FILE}: rotary_dim is 8, partial_rotary_factor 1 x head_dim 16 is another number",
    ),
    *(
        (family | {key: value}, f"{CANNOT}{key}: expected a number greater than 0, found {value!r}: correct it")
        for family, key, value in (
            *((GRANITE, "logits_scaling", value) for value in (0, 0.0, -16.0, True, float("inf"))),
            *((GRANITE, key, 0) for key in ("embedding_multiplier", "attention_multiplier", "residual_multiplier")),
            *((GEMMA3, "query_pre_attn_scalar", value) for value in (0, "256")),
        )
    ),
]


@pytest.mark.parametrize(("changes", "message"), WRONG_VALUES, ids=range(len(WRONG_VALUES)))
def test_a_model_that_cannot_be_trained(refusals, model_config, changes, message):
    model_config(**changes)
    (error,) = refusals()
    assert error.startswith(f"run.yaml:7: model.path: {message}")


OF_QWEN2 = f"{FILE} of this Qwen2ForCausalLM has "
FP8_CONFIG = (
    f"{OF_QWEN2}quantization_config = {{'quant_method': 'fp8'}}, which is not supported: choose the model's weights "
    "in bf16 or fp16, or convert these and remove the key"
)
UNSUPPORTED = [
    ({"attention_bias": True}, f"{OF_QWEN2}attention_bias = True, which is not supported: choose another model"),
    ({"hidden_act": "gelu"}, f"{OF_QWEN2}hidden_act = 'gelu', which is not supported: choose another model"),
    ({"quantization_config": {"quant_method": "fp8"}}, FP8_CONFIG),
    ({"layer_types": ["sliding_attention"]}, f"{OF_QWEN2}layer_types = ['sliding_attention'], which is not supported"),
    (
        {"rope_scaling": {"rope_type": "dynamic", "factor": 2}},
        f"{FILE}: rope {{'rope_type': 'dynamic', 'factor': 2}} is not supported; supported are, over the whole head, "
        "default; linear (factor); llama3 (factor, low_freq_factor, high_freq_factor, "
        "original_max_position_embeddings); yarn (factor, original_max_position_embeddings): set rope_scaling to null: "
        "up to max_position_embeddings transformers does not scale, but SGLang does",
    ),
    (
        {"architectures": ["MixtralForCausalLM"], "num_local_experts": 4, "num_experts_per_tok": 2}
        | {"rope_scaling": {"type": "linear", "factor": 2}},
        f"{FILE}: rope {{'rope_type': 'linear', 'factor': 2}} is not supported; supported are, over the whole head, "
        "default: choose another model",
    ),
    (
        PHI3 | {"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 8}},
        f"{FILE}: rope {{'rope_type': 'longrope', 'short_factor': [1.0",
    ),
    (
        PHI3 | {"original_max_position_embeddings": 4096, "rope_scaling": LONG_ROPE | {"attention_factor": 1.2}},
        f"{FILE}: rope {LONG_ROPE_SHOWN} is not supported: SGLang ignores factor and ",
    ),
    (
        QWEN3_MOE | {"num_experts": 4, "num_experts_per_tok": 2, "mlp_only_layers": [0]},
        f"{FILE} of this Qwen3MoeForCausalLM has mlp_only_layers = [0], which is not supported: choose another model",
    ),
]


@pytest.mark.parametrize(("changes", "message"), UNSUPPORTED, ids=range(len(UNSUPPORTED)))
def test_what_is_not_supported_is_refused_before_ranks_start(refusals, model_config, changes, message):
    model_config(**changes)
    (error,) = refusals()
    assert error.startswith(f"run.yaml:7: model.path: {message}")


def test_all_unsupported_settings_are_reported_at_once(refusals, model_config):
    model_config(attention_bias=True, rope_scaling={"type": "yarn"}, mlp_bias=True)
    assert len(refusals()) == 3


CONFIG = "cannot use model/config.json: "
FP8 = b'{"a":{"dtype":"F8_E4M3","shape":[1],"data_offsets":[0,1]}}'
INDEX = "model.safetensors.index.json"
FOLDERS = [
    ({"config.json": '{"archit'}, CONFIG + "it is not valid JSON (Unterminated string starting at: line 1"),
    ({"config.json": ""}, CONFIG + "it is not valid JSON (Expecting value"),
    ({"config.json": "[]"}, CONFIG + "it is not a JSON object: copy it again"),
    ({"config.json": "[" * 100_000}, CONFIG + "it is not valid JSON (maximum recursion depth exceeded"),
    ({"config.json": '{"a":' * 100_000}, CONFIG + "it is not valid JSON (maximum recursion depth exceeded"),
    ({"config.json": '{"vocab_size": ' + "9" * 5000 + "}"}, CONFIG + "it is not valid JSON (Exceeds the limit"),
    ({"config.json": '{"a": "\0"}'}, CONFIG + "it is not valid JSON (Invalid control character"),
    ({"config.json": b"\xff{}"}, CONFIG + "it is not UTF-8 text (line 1): save it as UTF-8"),
    ({"config.json": "{}".encode("utf-16")}, CONFIG + "it is not UTF-8 text (line 1)"),
    ({"config.json": " " * (17 * 2**20)}, CONFIG + "it has 17,825,792 bytes, more than 16,777,216: is it the right"),
    ({"config.json": None}, CONFIG + "No such file or directory"),
    ({"config.json": "a folder"}, CONFIG + "it is a folder, or no ordinary file: name a file"),
    ({"config.json": "a pipe"}, CONFIG + "it is a folder, or no ordinary file: name a file"),
    ({"config.json": "a circle"}, CONFIG + "Too many levels of symbolic links (looked in /"),
    ({"model.safetensors": None}, f"model holds no model.safetensors and no {INDEX}: complete the download; other"),
    ({"model.safetensors": "a folder"}, f"model holds no model.safetensors and no {INDEX}: complete the download"),
    ({"model.safetensors": ""}, "model/model.safetensors (0 bytes) is damaged or truncated ("),
    (
        {"model.safetensors": "version https://git-lfs"},
        "model/model.safetensors is a pointer of Git LFS, not the file: ",
    ),
    ({"tokenizer.json": "version https://git-lfs"}, "model/tokenizer.json is a pointer of Git LFS, not the file: "),
    (
        {"model.safetensors": b"\7" + bytes(7) + b'{"a":{}'},
        "model/model.safetensors (15 bytes) is damaged or truncated",
    ),
    (
        {"model.safetensors": len(FP8).to_bytes(8, "little") + FP8 + b"\0"},
        "model/model.safetensors holds quantised weights, a (F8_E4M3), which are not read: choose ",
    ),
    (
        {INDEX: '{"weight_map": {"a": "1.safetensors"}}'},
        f"model holds model.safetensors, which transformers reads, and {INDEX}",
    ),
    (
        {"adapter_config.json": "{}", "config.json": None},
        "model holds an adapter, model/adapter_config.json: merge it into its base",
    ),
    ({"adapter_config.json": "{}"}, "model holds an adapter, model/adapter_config.json: merge it into its base"),
    (
        {"model.safetensors": None, "pytorch_model.bin": ""},
        "model holds weights as pickles, model/pytorch_model.bin: save",
    ),
    ({INDEX: "[]"}, f"cannot use model/{INDEX}: it is not a JSON object: copy it again"),
    (
        {INDEX: '{"weight_map": 3}'},
        f"cannot use model/{INDEX}: weight_map: expected object of names of files in its own",
    ),
    ({INDEX: '{"weight_map": {"a": {}}}'}, f"cannot use model/{INDEX}: weight_map: expected object of names of files"),
    (
        {INDEX: '{"weight_map": {"a": "../1.safetensors"}}'},
        f"cannot use model/{INDEX}: weight_map: expected object of names of files in its own",
    ),
    (
        {INDEX: "{}"},
        f"cannot use model/{INDEX}: weight_map: expected object of names of files in its own folder, found null",
    ),
    (
        {INDEX: '{"weight_map": {"a": "1.safetensors"}}', "model.safetensors": None},
        "model lacks 1.safetensors: complete the download",
    ),
    ({"tokenizer_config.json": None}, "no tokenizer in model: expected tokenizer_config.json and tokenizer.json"),
    ({"tokenizer_config.json": "a folder"}, "no tokenizer in model: expected tokenizer_config.json and tokenizer.json"),
    ({"generation_config.json": "[2]"}, "cannot use model/generation_config.json: it is not a JSON object"),
    (
        {"generation_config.json": '{"eos_token_id": ["</s>"]}'},
        'cannot use model/generation_config.json: eos_token_id: expected token id or list of them, found ["</s>"]',
    ),
]


@pytest.mark.parametrize(("files", "message"), FOLDERS, ids=range(len(FOLDERS)))
def test_a_model_folder_that_cannot_be_used(run_folder, refusals, files, message):
    for name, content in files.items():
        put(run_folder / "model" / name, content)
    (error,) = refusals()
    assert error.startswith(f"run.yaml:7: model.path: {message}")


def put(path, content):
    """Write a file of that text or bytes, remove it, or put something else in its place."""
    path.unlink(missing_ok=True)
    if content == "a folder":
        path.mkdir()
    elif content == "a pipe":
        os.mkfifo(path)
    elif content == "a circle":
        path.symlink_to(path.name)
    elif content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())


EXPERTS = {
    "architectures": ["Qwen2MoeForCausalLM"],
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 18,
    "shared_expert_intermediate_size": 33,
}
MIXTURES = {
    "actor.parallel.dispatcher=deepep": (
        "actor.parallel.dispatcher deepep needs actor.parallel.expert or expert_tensor above 1: set it to alltoall"
    ),
    "actor.parallel.expert=3": (
        "placement.actor with actor.parallel: expert 3 x expert_tensor 1 = 3 does not divide 4, the ranks of a stage "
        "(tensor 1 x context 1 x data 4): make expert x expert_tensor 2 or 4"
    ),
    "actor.parallel={expert: 2, expert_tensor: 6}": (
        "placement.actor with actor.parallel: expert 2 x expert_tensor 6 = 12 does not divide 4, the ranks of a stage "
        "(tensor 1 x context 1 x data 4): make expert x expert_tensor 4"
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
def test_a_mixture_of_experts_that_cannot_be_laid_out(refusals, model_config, overrides, message):
    model_config(**EXPERTS)
    (error,) = refusals(overrides)
    assert error.partition(": ")[2].startswith(message)


def test_experts_with_biases_are_not_cut_and_sinks_need_torchs_layers(refusals, model_config):
    own = {"num_local_experts": 4, "num_experts_per_tok": 2, "quantization_config": {"quant_method": "mxfp4"}}
    model_config(architectures=["GptOssForCausalLM"], model_type="gpt_oss", **own)
    (error,) = refusals("actor.parallel.expert_tensor=2", "critic.model_path=null")
    assert "expert_tensor 2: the experts of model/config.json have biases" in error
    (error,) = refusals("model.layer_spec=transformer_engine", "critic.model_path=null")
    assert "TransformerEngine does not compute attention sinks of packed rows, which model/config.json needs" in error


def test_adapters_of_experts_reach_engines_merged_only(refusals, accepted, model_config):
    model_config(**EXPERTS)
    (error,) = refusals("actor.lora.rank=4")
    assert "actor.lora.target_modules: model/config.json is of a mixture of experts, whose adapters engines" in error
    assert "set rollout.sync.merge_adapters to true" in error
    accepted("actor.lora.rank=4", "rollout.sync.merge_adapters=true")
    accepted("actor.lora.target_modules=[q_proj, v_proj]")
    accepted("critic.lora.rank=4")


def test_adapters_of_different_heads_reach_engines_merged_only(refusals, accepted, model_config):
    own = {"architectures": ["Gemma4ForCausalLM"], "hidden_act": None, "num_hidden_layers": 4}
    model_config(**GEMMA4 | own)
    (error,) = refusals("actor.lora.rank=4")
    assert "actor.lora: engines take adapters of model/config.json, whose layers have different heads, merged" in error
    accepted("actor.lora.rank=4", "rollout.sync.merge_adapters=true")


def test_routing_replay_of_a_dense_model(refusals, accepted, model_config):
    model_config(architectures=["Qwen2ForCausalLM"])
    (error,) = refusals("rollout.routing_replay=true")
    assert error.endswith("rollout.routing_replay: model/config.json is of no mixture of experts: set it to false")
    model_config(**EXPERTS)
    accepted("rollout.routing_replay=true")


def test_balancing_experts_that_are_not_there_or_frozen(refusals, accepted, model_config):
    model_config(architectures=["Qwen2ForCausalLM"])
    (error,) = refusals("actor.router.aux_loss_coef=0.1")
    assert error.endswith("actor.router: model/config.json is of a dense model, without experts: drop it")
    model_config(**EXPERTS)
    accepted("actor.router.aux_loss_coef=0.1", "critic.router.seq_aux_loss_coef=0.1", "critic.freeze=[attention]")
    (error,) = refusals("actor.router.aux_loss_coef=0.1", "actor.router.seq_aux_loss_coef=0.1")
    assert error.endswith("actor.router.seq_aux_loss_coef are both above 0: set one to 0")
    attention = "actor.lora.target_modules=[q_proj, v_proj]"
    for name, frozen in (("actor", attention), ("critic", "critic.freeze=mlp")):
        (error,) = refusals(f"{name}.router.aux_loss_coef=0.1", frozen)
        assert f"{name}.router: lora or freeze of {name} keeps the routers of model/config.json fixed" in error
    (error,) = refusals("actor.router.bias_update_rate=0.001")
    assert error.endswith("the routers of model/config.json have no biases: set it to 0")


def test_settings_that_a_mixture_of_experts_must_have(refusals, accepted, model_config):
    model_config(**EXPERTS | {"shared_expert_intermediate_size": 32})
    assert refusals("actor.parallel.expert=2", "actor.parallel.tensor=2") == [
        "command line: actor.parallel.sequence must be true with actor.parallel.tensor 2, as model/config.json is of a "
        "mixture of experts"
    ]
    accepted("actor.parallel={tensor: 2, expert: 2, sequence: true}", "critic.parallel.expert=2")
    model_config(architectures=["Qwen2MoeForCausalLM"])
    (error,) = refusals()
    assert error.startswith(
        "run.yaml:7: model.path: model/config.json lacks moe_intermediate_size, num_experts_per_tok, "
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
    "actor.parallel={tensor: 2, sequence: true}": (
        "actor.parallel.tensor 2 does not divide moe_intermediate_size x n_shared_experts 33 of model/config.json: "
        "1 or 3 would"
    ),
    "actor.parallel.expert=4": (
        "actor.parallel.expert 4 does not divide n_routed_experts 6 of model/config.json: 3 or 6 would"
    ),
}


@pytest.mark.parametrize(("override", "message"), LATENT_LAYOUTS.items())
def test_latent_attention_is_divided_by_heads_alone(refusals, model_config, override, message):
    model_config(**DEEPSEEK | {"num_key_value_heads": 3})
    assert refusals(override) == [f"command line: {message}"]


def test_an_engine_cuts_latent_attention_by_heads_alone(accepted, model_config):
    model_config(**DEEPSEEK | {"num_key_value_heads": 3})
    accepted("rollout.tensor_parallel=4")


def test_a_stage_without_experts_needs_the_sharded_optimizer(refusals, accepted, model_config):
    model_config(**DEEPSEEK | {"first_k_dense_replace": 3, "moe_intermediate_size": 8})
    stages = ("actor.parallel.pipeline=2", "actor.optim.distributed=false")
    assert refusals(*stages) == [
        "command line: actor.optim.distributed must be true, as the first 3 layers of model/config.json have no "
        "experts and the first of actor.parallel.pipeline 2 stages has 3 layers"
    ]
    accepted(*stages, "actor.parallel.pipeline_split=[4,2]")
    accepted(stages[0])


def test_latent_attention_that_does_not_divide(refusals, model_config):
    model_config(**DEEPSEEK | {"num_attention_heads": 5, "moe_intermediate_size": 8})
    (error,) = refusals("actor.parallel={tensor: 2, sequence: true}")
    assert error.startswith(
        "command line: actor.parallel.tensor 2 does not divide num_attention_heads 5 of model/config.json: "
    )


@pytest.mark.parametrize("lacking", ["q_lora_rank", "first_k_dense_replace", "n_shared_experts", "n_routed_experts"])
def test_settings_that_latent_attention_must_have(refusals, model_config, lacking):
    model_config(**DEEPSEEK | {lacking: ...})
    (error,) = refusals()
    assert error.startswith(f"run.yaml:7: model.path: model/config.json lacks {lacking}: ")


@pytest.mark.parametrize("null", ["kv_lora_rank", "first_k_dense_replace", "n_group", "routed_scaling_factor"])
def test_what_latent_attention_may_not_leave_null(refusals, model_config, null):
    model_config(**DEEPSEEK | {null: None})
    (error,) = refusals()
    assert error.startswith(f"run.yaml:7: model.path: model/config.json lacks {null}: ")


@pytest.mark.parametrize(
    "changes",
    [
        {"architectures": ["MistralForCausalLM"], "sliding_window": 2048},
        {"architectures": ["MistralForCausalLM"], "sliding_window": None},
        {"use_sliding_window": False, "sliding_window": 16},
        {"num_key_value_heads": None, "head_dim": None, "rope_scaling": None},
        {"num_attention_heads": 6, "head_dim": 32},
        DEEPSEEK,
        DEEPSEEK | {"architectures": ["DeepseekV2ForCausalLM"], "n_group": None, "topk_group": None},
    ],
    ids=range(7),
)
def test_models_in_which_nothing_is_wrong(accepted, model_config, changes):
    model_config(**changes)
    accepted()


def test_an_empty_data_file(run_folder, refusals):
    (run_folder / "train.jsonl").write_text("")
    (error,) = refusals()
    assert error.startswith("run.yaml:2: data.train_files: train.jsonl is empty: put prompts in it")


def test_a_critic_may_start_from_a_reward_model_an_actor_may_not(run_folder, refusals, accepted, model_config):
    shutil.copytree(run_folder / "model", run_folder / "language")
    model_config(architectures=["Qwen2ForSequenceClassification"])  # transformers writes no labels for two
    tensors = load_file(run_folder / "model" / "model.safetensors")
    save_file(tensors | {"score.weight": torch.ones(2, 8)}, run_folder / "model" / "model.safetensors")
    note = "critic: a new value head, with one output, as the head in model has 2 outputs"
    assert note in accepted("model.path=language", "critic.model_path=model")
    keys = ("critic.value_loss=two_hot", "critic.value_range=[0, 2]", "critic.value_bins=5")
    note = "critic: a new value head, of 5 classes from 0 to 2, as the head in model has 2 outputs"
    assert note in accepted("model.path=language", "critic.model_path=model", *keys)
    save_file(tensors | {"score.weight": torch.ones(1, 8)}, run_folder / "model" / "model.safetensors")
    model_config(architectures=["Qwen2ForSequenceClassification"], num_labels=1)
    for name in ("tokenizer.json", "tokenizer_config.json"):  # a critic reads the actor's tokens
        (run_folder / "model" / name).unlink()
    accepted("model.path=language", "critic.model_path=model")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(run_folder / "language" / name, run_folder / "model" / name)
    (error,) = refusals("critic.model_path=language")
    assert "model/config.json is of architecture Qwen2ForSequenceClassification; this version trains" in error


def test_what_is_no_reward_model_cannot_score(run_folder, refusals, accepted, model_config):
    shutil.copytree(run_folder / "model", run_folder / "language")
    scored = ("model.path=language", "reward_model.model_path=model")
    (error,) = refusals(*scored)
    assert "model/config.json is of architecture Qwen2ForCausalLM, without a score: name a *ForSequence" in error
    model_config(architectures=["Qwen2ForSequenceClassification"])  # transformers writes no labels for two
    (error,) = refusals(*scored)
    assert "is of architecture Qwen2ForSequenceClassification with 2 labels: name a reward model of one" in error
    model_config(architectures=["Qwen2ForTokenClassification"], id2label={"0": "bad", "1": "", "2": "good"})
    (error,) = refusals(*scored)
    assert "is of architecture Qwen2ForTokenClassification with 3 labels" in error
    model_config(architectures=["Qwen2ForTokenClassification"], id2label={"0": "score"})
    (error,) = refusals(*scored, "reward.clip=5")
    assert "reward.clip 5.0 changes the score of a response, not the scores of its steps, which reward_model" in error
    assert "\n  tokenizer and chat template of model\n" in accepted(*scored)


ONE, Q_PROJ = torch.ones(1), "model.layers.0.self_attn.q_proj"
MERGE = "or merge these into their base (merge_and_unload) and name the result in reward_model.model_path"
ADAPTERS = {
    "another base": (
        {"base_model_name_or_path": "models/other"},
        "are of the base models/other, but reward_model.mo",
    ),
    "a policy's": ({"task_type": "CAUSAL_LM"}, 'found task_type "CAUSAL_LM": name the adapters of a reward model'),
    "another method": ({"peft_type": "LOHA"}, 'found peft_type "LOHA"'),
    "no rank": ({"r": 0}, "found rank 0 (Input should be greater than "),
    "ranks of some matrices": ({"rank_pattern": {"q_proj": 4}}, 'found rank_pattern {"q_proj": 4}', MERGE),
    "DoRA": ({"use_dora": True}, "found use_dora true", MERGE),
    "PiSSA": ({"init_lora_weights": "pissa"}, 'found init_lora_weights "pissa"', MERGE),
    "some layers": ({"layers_to_transform": [0]}, "found layers_to_transform [0]", MERGE),
    "without a score": ({"lacks": "score"}, "missing score.weight; unknown none"),
    "without a layer": ({"lacks": "layers.5"}, "missing model.layers.5.self_attn.q_proj.lora_A.weight, ", MERGE),
    "without a half": (
        {"lacks": "0.self_attn.v_proj.lora_B"},
        "missing model.layers.0.self_attn.v_proj.lora_B.weight;",
    ),
    "embeddings": ({"more": {"model.embed_tokens.weight": ONE}}, "unknown model.embed_tokens.weight: name", MERGE),
    "unknown matrices": ({"more": {"model.wte.lora_A.weight": ONE}}, "unknown model.wte.lora_A.weight: "),
    "biases": ({"more": {f"{Q_PROJ}.lora_B.bias": ONE}}, f"unknown {Q_PROJ}.lora_B.bias: ", MERGE),
    "magnitudes": ({"more": {f"{Q_PROJ}.lora_magnitude_vector": ONE}}, f"unknown {Q_PROJ}.lora_magnitude_vector: "),
    "no file": ({"file": ...}, "holds no adapter_model.safetensors"),
    "no folder": ({"folder": ...}, "No such file"),
}


@pytest.mark.parametrize("name", ADAPTERS)
def test_adapters_that_cannot_score(name, run_folder, refusals, accepted):
    """Adapters of the run's own model are accepted, also under the model's new path."""
    scored = ("reward_model.model_path=model", "reward_model.adapter=adapter")
    pattern = {
        "target_modules": r".*\.(q_proj|v_proj)",
        "use_rslora": True,
        "fan_in_fan_out": True,
        "lora_dropout": 0.1,
    }
    write_adapters(run_folder / "adapter", "elsewhere/model", **pattern)
    accepted(*scored)
    changes, *expected = ADAPTERS[name]
    write_adapters(run_folder / "adapter", **changes)
    (error,) = refusals(*scored)
    assert "reward_model.adapter adapter: " in error
    for text in expected:
        assert text in error


CHECKPOINTS = {
    "actor/common.pt actor/__0_0.distcp": (
        "actor",
        "is a component of a training checkpoint: name the run's hf_actor",
    ),
    "run/checkpoints/step_00000020/state.json": (
        "run",
        "is the output folder of a run: convert one's actor, run",
    ),
    "step_00000020/state.json": ("step_00000020", "is a training checkpoint: name the run's hf_actor, or convert its"),
}


@pytest.mark.parametrize(("files", "path", "message"), [(files, *rest) for files, rest in CHECKPOINTS.items()])
def test_a_checkpoint_as_model_is_no_download_to_complete(refusals, files, path, message):
    for file in map(Path, files.split()):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    errors = refusals(f"model.path={path}")
    assert any(message in error for error in errors) and not any("download" in error for error in errors)


def test_a_parser_that_sglang_lacks_is_refused_before_workers_start(refusals, run_folder):
    (run_folder / "tools.py").write_text("def add(a: int):\n    pass\n")
    (error,) = refusals("rollout.tools=tools.py:add", "rollout.tool_call_parser=qwen52")
    assert "rollout.tool_call_parser: SGLang has no qwen52: choose " in error and "qwen25" in error
