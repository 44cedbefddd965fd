"""The memory of hosts and engines against plain counts, and GPUs by the names that CUDA gives them."""

import contextlib
import json
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
from planning import REPOSITORY
from published_models import published_folders

from megappo.architecture.parameters import stage_sizes
from megappo.architecture.parsing import read_architecture
from megappo.config.loading import load_config
from megappo.config.model_sections import Lora
from megappo.config.schema import Config
from megappo.config.sections import Parallel
from megappo.lab.estimate.fitting import SPARE, _has_room, fits, remedies, resolve_offload
from megappo.lab.estimate.gpu_memory import START, Cluster, MemoryEstimate
from megappo.lab.estimate.seconds import BUCKET_SECONDS, TimeEstimate
from megappo.placement.run_plan import plan_run
from megappo.runtime.gpus import GIB, GPUS, find_gpu
from megappo.sync.build import adapter_shapes

MIXTURE = REPOSITORY / "configs" / "qwen3_30b_a3b_4node.yaml"
SAO = REPOSITORY / "configs" / "sao_qwen3_30b_a3b_8node.yaml"
SMALL = REPOSITORY / "configs" / "qwen2.5_0.5b_gsm8k_1gpu.yaml"
BOTH_7B = REPOSITORY / "configs" / "qwen2.5_7b_critic_7b_8gpu.yaml"


@pytest.fixture(autouse=True)
def published(tmp_path: Path) -> Iterator[None]:
    with contextlib.chdir(published_folders(tmp_path)):
        yield


def estimate_of(config: Config, world_size: int) -> MemoryEstimate:
    return MemoryEstimate(plan_run(config, world_size), Cluster(79.1 * GIB))


def estimate(*overrides: str, world_size: int = 32) -> MemoryEstimate:
    return estimate_of(load_config(MIXTURE, overrides), world_size)


@pytest.mark.parametrize(
    "layout",
    [
        {"expert": 8},
        {"tensor": 2, "context": 2, "expert": 1},
        {"tensor": 2, "pipeline": 2, "expert": 4, "expert_tensor": 2},
    ],
    ids=str,
)
def test_a_save_copies_everything_once_over_all_nodes(layout: dict[str, int]) -> None:
    """Weights in bf16; main parameters and two moments in fp32."""
    memory = estimate(*(f"actor.parallel.{key}={str(value).lower()}" for key, value in layout.items()))
    [size] = stage_sizes(read_architecture("models/Qwen3-30B-A3B"), Parallel())
    assert memory.host()["checkpoint copies"] * 4 == pytest.approx((2 + 3 * 4) * sum(size), rel=0.05)


def test_a_save_copies_frozen_weights_without_states() -> None:
    """All of the actor; all weights of the critic, with states of all but the attention's four matrices and norms.

    Tensor-parallel ranks each copy the routers, 0.13 % of the bytes; the missing states are 1.3 %.
    """
    memory = estimate_of(load_config(SAO), 64)
    model = read_architecture("models/Qwen3-30B-A3B")
    heads, kv_heads, head = model.num_heads, model.num_kv_heads, model.head_size
    attention = model.num_layers * (2 * model.hidden_size * (heads + kv_heads) * head + 2 * head)
    actor, critic = (sum(stage_sizes(model.with_head(kind), Parallel())[0]) for kind in ("policy", "value"))
    copies = (2 + 12) * (actor + critic) - 12 * attention
    assert memory.host()["checkpoint copies"] * 4 == pytest.approx(copies, rel=0.003)


def test_engines_pin_copies_of_what_a_sleep_loses() -> None:
    """CUDA graphs always, base weights beside adapters, and 48 x 8 int32 a cached token for the replay of routing."""
    plain, replayed = estimate(), estimate("rollout.routing_replay=true")
    adapted = estimate("actor.lora={rank: 8}", "ref.offload=[]")
    graphs = plain.engine.graphs
    assert plain.host()["pinned by engines"] == pytest.approx(8 * graphs)
    assert adapted.host()["pinned by engines"] == pytest.approx(8 * (graphs + adapted.engine.weights))
    pinned = graphs + 4 * 48 * 8 * replayed.engine.cache_tokens
    assert replayed.host()["pinned by engines"] == pytest.approx(8 * pinned)


def test_the_experts_of_tokens_are_held_by_the_actors_ranks_and_wait_at_the_engines() -> None:
    """A byte for each of 48 layers x 8 experts. A node has 8 ranks, each with a shard's rows, and 2 of 8 engines."""
    data, rollout = load_config(MIXTURE).data, load_config(MIXTURE).rollout
    step = 512 * 8 * (data.max_prompt_length + rollout.max_response_length) * 48 * 8
    host = estimate("rollout.routing_replay=true", "rollout.max_staleness=1").host()
    assert host["expert choices"] == pytest.approx(8 * step / 8 + 2 * (2 * step / 8))
    assert not estimate().host()["expert choices"]


def test_weights_that_models_share_are_counted_once() -> None:
    """The actor's 7B in bf16; of the critic its adapters and value head, of the reference nothing."""
    keys = ("lora.rank=16", "parallel.tensor=1", "parallel.pipeline=1", "parallel.sequence=false")
    alike = [f"{name}.{key}" for name in ("actor", "critic") for key in keys]
    memory = estimate_of(load_config(BOTH_7B, [*alike, "ref.offload=[]"]), 8)
    model = read_architecture("models/Qwen2.5-7B")
    hidden, ffn = model.hidden_size, model.ffn_size
    queries, keys = (heads * model.head_size for heads in (model.num_heads, model.num_kv_heads))
    adapters = model.num_layers * 16 * (2 * (hidden + queries) + 2 * (hidden + keys) + 3 * (hidden + ffn))
    [size] = stage_sizes(model, Parallel())
    expected = {"actor": 2 * (sum(size) + adapters), "critic": 2 * (adapters + hidden), "ref": 0}
    assert {name: placed.states(0)["weights"] for name, placed in memory.models.items()} == expected
    held = {phase: set(ledger) for phase, ledger in memory.fullest.ledgers.items()}
    assert "actor weights" in held["values"] and "actor activations" not in held["values"]
    assert "critic activations" in held["values"] and "ref activations" in held["ref_log_probs"]


def test_an_engine_in_fp8_takes_a_byte_for_each_weight_of_its_layers() -> None:
    """The embedding and the output layer stay in bf16."""
    in_fp8 = ("rollout.server_args.quantization=fp8", "rollout.server_args.load_format=flash_rl")
    plain, quantised = (estimate_of(load_config(BOTH_7B, overrides), 8) for overrides in ((), in_fp8))
    model, num_gpus = read_architecture("models/Qwen2.5-7B"), plain.config.rollout.tensor_parallel
    [size] = stage_sizes(model, Parallel())
    words = 2 * model.vocab_size * model.hidden_size
    assert plain.engine.weights * num_gpus == 2 * sum(size)
    assert quantised.engine.weights * num_gpus == sum(size) + words
    assert quantised.engine.cache_tokens > plain.engine.cache_tokens


def test_sampled_log_probs_save_a_phase_and_its_seconds() -> None:
    without, with_pass = (
        estimate_of(load_config(SAO, [f"algorithm.old_log_probs={old}", "actor.policy_loss=gpg"]), 64)
        for old in ("engine", "trainer")
    )
    assert set(with_pass.phases) - set(without.phases) == {"old_log_probs"}
    fewer, more = (TimeEstimate(memory, GPUS["h100"]).seconds for memory in (without, with_pass))
    assert more.pop("old_log_probs") > 1 and more == fewer


def test_critics_of_an_ensemble_take_the_memory_of_one_each_and_divide_its_update() -> None:
    one, two = (estimate_of(load_config(BOTH_7B, ["rollout.n=4", f"critic.ensemble={size}"]), 8) for size in (1, 2))
    states = [one.models["critic"].states(0), *(two.models[name].states(0) for name in ("critic", "critic_2"))]
    assert states[0] == states[1] == states[2]
    alone, both = (TimeEstimate(memory, GPUS["h100"]).seconds for memory in (one, two))
    assert alone["values"] == pytest.approx(both["values"], rel=0.05) and both["values"] == both["values_2"]
    update = both["update_critic"] + both["update_critic_2"]
    assert alone["update_critic"] < update < 1.2 * alone["update_critic"], "each exchanges gradients of its own"


def test_a_critic_alone_needs_weights_of_the_actor_and_on_recorded_rollouts_nothing_else() -> None:
    alone = "trainer.train=[critic]"
    both, live, replayed = (
        estimate_of(load_config(BOTH_7B, overrides), 8)
        for overrides in ((), (alone,), (alone, "trainer.replay_rollouts=r", "trainer.eval_interval=0"))
    )
    assert {*live.phases} == {*both.phases} - {"update_actor", "old_log_probs", "ref_log_probs"}
    assert {*live.models} == {"actor", "critic"} and {*replayed.models} == {"critic"}
    assert {entry for entry in live.fullest.ledgers["save"] if entry.startswith("actor")} == {"actor weights"}
    assert not any(kind.has_engine for kind in replayed.rank_kinds)
    assert (
        TimeEstimate(live, GPUS["h100"]).seconds["sync"] == TimeEstimate(replayed, GPUS["h100"]).seconds["rollout"] == 0
    )


def test_engines_elsewhere_take_none_of_the_gpus():
    own, elsewhere = estimate(), estimate("rollout.engines=[http://a:1]")
    assert not any(rank_kind.has_engine for rank_kind in elsewhere.rank_kinds)
    assert any(rank_kind.has_engine for rank_kind in own.rank_kinds)
    full = [one.plan.changed(one.config.changed("rollout.max_total_tokens", 1)) for one in (own, elsewhere)]
    assert [_has_room(MemoryEstimate(plan, own.cluster)) for plan in full] == [False, True]


def test_what_torch_allocates_does_not_depend_on_engines() -> None:
    own, elsewhere = estimate(), estimate("rollout.engines=[http://a:1]")
    assert own.allocated() == elsewhere.allocated()
    contexts, kind = 0.7 * GIB, elsewhere.fullest
    of_nccl = kind.ledgers["save"]["NCCL communicators"]
    for phase, held in elsewhere.allocated().items():
        assert sum(kind.ledgers[phase].values()) == pytest.approx(held + contexts + of_nccl)


def test_an_engine_takes_no_more_than_its_tokens() -> None:
    whole, limited = estimate(), estimate("rollout.max_total_tokens=100000")
    assert limited.engine.cache_tokens == 100_000 < whole.engine.cache_tokens
    # 48 layers, 4 heads of 128 for keys and for values, over 4 GPUs, in bf16
    assert limited.engine.cache == 100_000 * 48 * 2 * 128 * 2 < whole.engine.cache


QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151_936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 32_768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
}


@pytest.mark.parametrize(
    ("tokens", "predicting", "measured_gib"),
    [
        (16_384, 14_336, 19.72),  # the training step of the stage `models`, beside weights, gradients and optimizer
        (8_704, 8_192, 20.88 - 9.99),  # update_actor of `whole_run`: two micro-batches of 16 rows of 544 tokens
    ],
)
def test_activations_are_those_that_an_h100_measured(
    tmp_path: Path, tokens: int, predicting: int, measured_gib: float
) -> None:
    """With TransformerEngine's layers, see docs/clusters.md."""
    (tmp_path / "config.json").write_text(json.dumps(QWEN3))
    overrides = [f"model.path={tmp_path}", f"actor.max_tokens_per_micro_batch={tokens}", "actor.recompute=none"]
    actor = estimate_of(load_config(SMALL, overrides), 1).models["actor"]
    size = actor.activations(0, trains=True) + actor.head(predicting / tokens, trains=True)
    assert size / GIB == pytest.approx(measured_gib, rel=0.05)


def test_a_sync_takes_round_trips_and_two_buckets_at_most() -> None:
    [size] = stage_sizes(read_architecture("models/Qwen3-30B-A3B"), Parallel())
    small, large, whole = (estimate(f"rollout.sync.bucket_bytes={one}") for one in (2**30, 2**31, 2**40))
    assert small.num_buckets == -(-2 * sum(size) // 2**30) and whole.num_buckets == 1
    seconds = [TimeEstimate(one, GPUS["h100"]).seconds["sync"] for one in (small, large)]
    assert seconds[0] - seconds[1] == pytest.approx((small.num_buckets - large.num_buckets) * BUCKET_SECONDS)
    tensors = 48 * (4 + 2 + 2 + 1 + 3 * 128) + 3  # a layer's attention, its and the layer's norms, router and experts
    assert TimeEstimate(large, GPUS["h100"]).num_tensors == tensors
    adapted = TimeEstimate(
        estimate("actor.lora={rank: 8, target_modules: [q_proj, v_proj]}", "ref.offload=[]"), GPUS["h100"]
    )
    assert adapted.num_tensors == 48 * 2 * 2
    shapes = dict.fromkeys(("q_proj.weight", "v_proj.weight", "o_proj.weight"), (4096, 2048))
    shapes["v_proj.weight"] = (512, 2048)
    lora = Lora(rank=8, target_modules=("q_proj", "v_proj"))
    numbers = sum(math.prod(shape) for shape in adapter_shapes(shapes, lora).values())
    assert (adapted.memory.sent_bytes, adapted.memory.num_buckets) == (2 * 48 * numbers, 1)
    assert adapted.seconds["sync"] < TimeEstimate(large, GPUS["h100"]).seconds["sync"] / 2
    taken = [one.fullest.ledgers["sync"]["sync buckets"] for one in (small, large, whole)]
    assert taken == [2**31, 2**32, 2 * sum(size)]


CRITIC_BUILT = {"actor weights", "critic weights", "critic gradients", "critic optimizer"}
ACTOR_TRAINED = {"actor weights", "actor gradients", "actor optimizer"}
STARTS = {
    "as it is": ([], CRITIC_BUILT),
    "the actor stays": (["actor.offload=[]"], CRITIC_BUILT | ACTOR_TRAINED),
    "all stay": (
        ["actor.offload=[]", "critic.offload=[]", "ref.offload=[]"],
        CRITIC_BUILT | ACTOR_TRAINED | {"ref weights"},
    ),
    "nothing stays": (["actor.offload=[weights,gradients,optimizer]"], ACTOR_TRAINED),
    "optimizers in one piece": (
        ["critic.optim.distributed=false", "actor.offload=[weights,optimizer]"],
        CRITIC_BUILT - {"actor weights"} | {"actor gradients"},
    ),
    "the actor alone": (["algorithm.adv_estimator=grpo", "rollout.n=2"], ACTOR_TRAINED),
    "the actor's head reads the reference": (
        [
            "algorithm.adv_estimator=grpo",
            "rollout.n=2",
            "actor.use_kl_loss=true",
            "actor.kl_loss_type=full",
            "ref.offload=[]",
        ],
        ACTOR_TRAINED | {"ref weights"},
    ),
}


@pytest.mark.parametrize(("overrides", "held"), STARTS.values(), ids=STARTS)
def test_a_start_holds_one_model_whole_and_of_those_before_what_stays(overrides: list[str], held: set[str]) -> None:
    memory = estimate_of(load_config(BOTH_7B, overrides), 8)
    rank_kind = memory.fullest
    states = {}
    for name, stage in rank_kind.stages.items():
        states |= {f"{name} {kind}": size for kind, size in memory.models[name].states(stage).items()}
    started = rank_kind.ledgers[START]
    found = {entry: size for entry, size in started.items() if entry.split()[0] in memory.models}
    assert found == {entry: states[entry] for entry in held}
    assert started.keys() - held == {"CUDA contexts", "NCCL communicators"}, "the engine sleeps"


def test_a_start_of_everything_at_once_would_not_fit() -> None:
    """7B with a critic of 7B, the engine awake."""
    memory = estimate_of(load_config(BOTH_7B), 8)
    rank_kind = memory.fullest
    engine = memory.engine.weights + memory.engine.cache + memory.engine.graphs + memory.engine.working
    at_once = engine + sum(sum(memory.models[name].states(stage).values()) for name, stage in rank_kind.stages.items())
    assert sum(rank_kind.ledgers[START].values()) < 45 * GIB < 100 * GIB < at_once


def test_a_start_that_does_not_fit_is_refused() -> None:
    """Over many ranks the optimizer is small, and Megatron copies the weights before there is one."""
    few = ["actor.max_tokens_per_micro_batch=4096", "actor.recompute=full", "rollout.mem_fraction_static=0.3"]
    alone = [f"placement.{name}=0-63" for name in ("actor", "critic", "rollout")]
    short = ["data.max_prompt_length=512", "rollout.max_response_length=512", "actor.offload=[gradients,optimizer]"]
    method = ["algorithm.adv_estimator=grpo", "rollout.n=2", "actor.parallel={tensor: 1, sequence: false}"]
    config = load_config(BOTH_7B, [*few, *alone, *short, *method])
    memory = estimate_of(config, 64)
    size, phase = memory.fullest.peak
    ledger = memory.fullest.ledgers[START]
    assert phase == START and ledger["actor weights, copied"] == ledger["actor weights"]
    others = max(sum(one.values()) for name, one in memory.fullest.ledgers.items() if name != START)
    between = Cluster((size + others) / 2 / (1 - SPARE))
    assert others < size and not fits(MemoryEstimate(memory.plan, between))


@pytest.mark.parametrize(
    ("device", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA H200 NVL", None),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("NVIDIA L40S", "l40s"),
        ("Tesla T4", None),
    ],
)
def test_names_of_devices(device: str, name: str | None) -> None:
    gpu = find_gpu(device)
    assert (gpu.name if gpu else None) == name


ASLEEP = ("start", "old_log_probs", "values", "ref_log_probs", "update_actor", "update_critic", "save")


def test_an_engine_that_stays_awake_counts_in_every_phase() -> None:
    asleep, awake = (estimate_of(load_config(SMALL, [f"rollout.sleep={sleep}"]), 1) for sleep in ("auto", "never"))
    engine = awake.engine.weights + awake.engine.cache + awake.engine.graphs + awake.engine.working
    more = {}
    for phase, ledger in awake.fullest.ledgers.items():
        more[phase] = sum(ledger.values()) - sum(asleep.fullest.ledgers[phase].values())
    expected = (
        dict.fromkeys(awake.phases, 0.0) | dict.fromkeys(ASLEEP, engine) | {"sync": engine - awake.engine.weights}
    )
    assert more == pytest.approx(expected)


SLEEPS = {
    "room for both": (SMALL, [], 1, 79.1, "never"),
    "too small a GPU": (SMALL, [], 1, 40.0, "always"),
    "a larger share for the engine": (SMALL, ["rollout.mem_fraction_static=0.8"], 1, 79.1, "always"),
    "two models of 7B": (BOTH_7B, [], 8, 79.1, "always"),
    "two models of 7B on twice the memory": (BOTH_7B, [], 8, 139.0, "never"),
    "offload comes first": (BOTH_7B, ["actor.offload=auto", "critic.offload=auto"], 8, 79.1, "always"),
    "no GPU": (SMALL, [], 1, None, "always"),
}


@pytest.mark.parametrize(("path", "overrides", "ranks", "gib", "expected"), SLEEPS.values(), ids=SLEEPS)
def test_auto_has_engines_sleep_only_where_memory_needs_it(
    path: Path, overrides: list[str], ranks: int, gib: float | None, expected: str
) -> None:
    plan = plan_run(load_config(path, [*overrides, "rollout.sleep=auto"]), ranks)
    found = resolve_offload(plan, None if gib is None else Cluster(gib * GIB))
    assert found.config.rollout.sleep == expected
    assert f"rollout.sleep auto: {expected}" in found.decisions()
    default = plan_run(load_config(path, overrides), ranks)
    assert resolve_offload(default, None).config.rollout.sleep == "always", "unless the config requests it"


def test_sleep_is_the_first_remedy_where_an_awake_engine_leaves_too_little() -> None:
    config = load_config(BOTH_7B, ["rollout.sleep=never"])
    assert remedies(plan_run(config, 8), Cluster(79.1 * GIB)) == {"rollout.sleep": "always"}


def test_the_free_memory_holds_uneven_loads_of_experts() -> None:
    """Counted by hand: 48 layers keep input, output, gate, up and their product of 8 experts a token in bf16, cut over
    four tensor-parallel ranks."""
    memory = estimate()
    config, free = memory.config, 79.1 * GIB - sum(memory.fullest.ledgers["update_actor"].values())
    even = 48 * config.actor.max_tokens_per_micro_batch * 8 * (2 * 2048 + 3 * 768) * 2 / 4
    assert memory.expert_loads() == {"actor": pytest.approx(1 + free / even)}
    full = estimate("actor.recompute=full")
    free = 79.1 * GIB - sum(full.fullest.ledgers["update_actor"].values())
    assert full.expert_loads() == {"actor": pytest.approx(1 + free / (even / 48), rel=0.01)}
    assert estimate("actor.parallel.expert=1").expert_loads() == {}, "each rank has all experts"
