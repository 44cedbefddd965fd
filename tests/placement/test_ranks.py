"""Ranks as text, and layouts against an independent statement of Megatron's rank order."""

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megappo.config.config_error import ConfigError
from megappo.config.schema import Config
from megappo.config.sections import Parallel
from megappo.placement.components import components_of
from megappo.placement.layout import START_TOKENS, Layout, format_ranks, parse_ranks
from megappo.placement.placing import place, smallest_world
from megappo.placement.run_plan import plan_run


def make(**sections) -> Config:
    required = {"model": {"path": "m"}, "data": {"train_files": ["t.jsonl"]}, "trainer": {"output_dir": "o"}}
    return Config.model_validate(
        {name: required.get(name, {}) | sections.get(name, {}) for name in required | sections}
    )


@st.composite
def layouts(draw) -> Layout:
    tensor, pipeline, data, context = (draw(st.integers(1, most)) for most in (4, 3, 4, 3))
    size = tensor * context * pipeline * data
    ranks = draw(st.sets(st.integers(0, 200), min_size=size, max_size=size))
    return Layout(tuple(sorted(ranks)), tensor, pipeline, context=context)


def placement_layouts(config: Config, world_size: int) -> dict[str, Layout]:
    return place(config, components_of(config), world_size, ranks_per_node=world_size)


def _errors(config: Config, world_size: int) -> list[str]:
    with pytest.raises(ConfigError) as refused:
        placement_layouts(config, world_size)
    return list(refused.value.errors)


@pytest.mark.parametrize(
    ("text", "ranks"),
    [
        ("all", (0, 1, 2, 3, 4, 5, 6, 7)),
        ("0-7", (0, 1, 2, 3, 4, 5, 6, 7)),
        ("5", (5,)),
        ("2-3,6", (2, 3, 6)),
        (" 6 , 0 - 1 ", (0, 1, 6)),
        ("3-3", (3,)),
    ],
)
def test_ranks_are_read(text, ranks):
    assert parse_ranks(text, 8) == ranks


@pytest.mark.parametrize("text", ["", ",", "0,", "-1", "0-", "a", "0-7-8", "0 1", "1.0", "²", "all,1", "0x1", "1_0"])
def test_what_is_no_list_of_ranks_is_refused(text):
    with pytest.raises(ValueError, match="is not a list of ranks: write 'all', '0-7', '0,2' or '0-3,6'"):
        parse_ranks(text, 8)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("3-1", "the range 3-1 runs backwards: write 1-3"),
        ("0-3,3", "names a rank twice: name it once"),
        ("0-8", "names rank 8, but this run has 8"),
        ("0-99999", "names rank 99999, but this run has 8"),
        ("0-100000", "is not a list of ranks"),
        ("9" * 5000, "is not a list of ranks"),
    ],
)
def test_wrong_ranks_are_refused(text, message):
    with pytest.raises(ValueError, match=message):
        parse_ranks(text, 8)


@settings(deadline=None)
@given(st.sets(st.integers(0, 63), min_size=1))
def test_formatted_ranks_read_back(ranks):
    assert parse_ranks(format_ranks(sorted(ranks)), 64) == tuple(sorted(ranks))


@settings(deadline=None)
@given(st.sets(st.integers(0, 63), min_size=1), st.randoms())
def test_ranks_are_a_set_whatever_their_order(ranks, random):
    shuffled = sorted(ranks)
    random.shuffle(shuffled)
    assert parse_ranks(",".join(map(str, shuffled)), 64) == tuple(sorted(ranks))


@settings(deadline=None)
@given(layouts())
def test_a_layout_counts_tensor_then_context_then_data_then_pipeline(layout):
    counted = {}
    rank = iter(layout.ranks)
    slowest_first = (layout.pipeline, layout.data, layout.context, layout.tensor)
    for stage, data, context, tensor in product(*map(range, slowest_first)):
        counted[next(rank)] = (data, context, tensor, stage)
    assert {rank: tuple(layout.coordinates(rank)) for rank in layout.ranks} == counted


@settings(deadline=None)
@given(layouts())
def test_every_rank_is_in_exactly_one_shard(layout):
    shards = [layout.shard_ranks(shard) for shard in range(layout.data)]
    assert sorted(rank for shard in shards for rank in shard) == list(layout.ranks)
    assert all(layout.shard_of(rank) == shard for shard, ranks in enumerate(shards) for rank in ranks)
    assert {len(ranks) for ranks in shards} == {layout.tensor * layout.context * layout.pipeline}


@settings(deadline=None)
@given(layouts())
def test_the_output_rank_is_tensor_and_context_0_of_the_last_stage_of_its_shard(layout):
    for shard in range(layout.data):
        rank = layout.output_rank(shard)
        assert rank in layout.shard_ranks(shard)
        assert layout.coordinates(rank) == (shard, 0, 0, layout.pipeline - 1)


@settings(deadline=None)
@given(layouts())
def test_the_blocks_of_a_layout_are_a_stages_ranks_of_a_shard(layout):
    blocks = [layout.block(stage, shard) for stage in range(layout.pipeline) for shard in range(layout.data)]
    assert [rank for block in blocks for rank in block] == list(layout.ranks)
    assert all(len({layout.coordinates(rank)[::3] for rank in block}) == 1 for block in blocks)


@settings(deadline=None)
@given(layouts())
def test_ranks_outside_have_no_place(layout):
    outside = set(range(201)) - set(layout.ranks)
    assert all(layout.shard_of(rank) is None and layout.coordinates(rank) is None for rank in outside)


@pytest.mark.parametrize(("ranks", "tensor", "pipeline"), [((), 1, 1), ((0, 1, 2), 2, 1), ((0, 1), 1, 4)])
def test_impossible_layouts_are_refused(ranks, tensor, pipeline):
    with pytest.raises(ValueError):
        Layout(ranks, tensor, pipeline)


def test_experts_are_shared_out_within_a_stage():
    assert Layout((0, 1, 2, 3), tensor=2, expert=4).expert == 4
    with pytest.raises(
        ValueError,
        match=r"expert 4 x expert_tensor 1 = 4 does not divide 2, the ranks of a stage \(tensor 2 x context 1 x",
    ):
        Layout((0, 1, 2, 3), tensor=2, pipeline=2, expert=4)
    with pytest.raises(ValueError, match="expert 2 x expert_tensor 4 = 8 does not divide 4"):
        Layout((0, 1, 2, 3), expert=2, expert_tensor=4)


def test_context_ranks_count_towards_the_product_and_the_experts():
    layout = placement_layouts(make(actor={"parallel": {"tensor": 2, "context": 2, "expert": 4}}), 8)["actor"]
    assert layout == Layout(tuple(range(8)), tensor=2, context=2, expert=4) and layout.data == 2
    wrong = make(actor={"parallel": {"tensor": 2, "context": 2, "pipeline": 2}}, placement={"rollout": "0"})
    assert _errors(wrong, 6) == [
        "placement.actor with actor.parallel: tensor 2 x context 2 x pipeline 2 = 8 does not divide 6, "
        "the number of ranks 0-5: "
        "name a multiple of 8 ranks, or make tensor x context x pipeline 6"
    ]
    wrong = make(actor={"parallel": {"context": 2, "expert": 3}}, placement={"rollout": "0"})
    assert _errors(wrong, 4) == [
        "placement.actor with actor.parallel: expert 3 x expert_tensor 1 = 3 does not divide 4, the ranks of a stage "
        "(tensor 1 x context 2 x data 2): make expert x expert_tensor 2 or 4"
    ]


def test_the_quickstart_placement():
    config = make(
        placement={"actor": "0-1", "critic": "0-1", "rollout": "0"},
        actor={"parallel": {"tensor": 2}},
        critic={"parallel": {"pipeline": 2}},
    )
    assert placement_layouts(config, 2) == {
        "actor": Layout((0, 1), tensor=2),
        "critic": Layout((0, 1), pipeline=2),
        "ref": Layout((0, 1), tensor=2),
        "rollout": Layout((0,)),
    }


def test_no_reference_without_a_kl_penalty():
    assert "ref" not in placement_layouts(make(algorithm={"use_kl_in_reward": False}), 2)


def test_the_reference_may_live_elsewhere_than_the_actor():
    config = make(placement={"ref": "0-1"}, ref={"parallel": {"pipeline": 2}}, actor={"parallel": {"tensor": 2}})
    assert placement_layouts(config, 4)["ref"] == Layout((0, 1), pipeline=2)


def test_engines_are_runs_of_consecutive_ranks():
    config = make(placement={"rollout": "0-1,4-5"}, rollout={"tensor_parallel": 2})
    rollout = placement_layouts(config, 8)["rollout"]
    assert [rollout.shard_ranks(engine) for engine in range(rollout.data)] == [(0, 1), (4, 5)]
    assert [rollout.output_rank(engine) for engine in range(rollout.data)] == [0, 4]


def test_every_component_in_error_is_named_at_once():
    config = make(
        placement={"actor": "0-2", "critic": "3-1", "ref": "x", "rollout": "9"}, actor={"parallel": {"tensor": 2}}
    )
    errors = _errors(config, 4)
    assert [error.split(":")[0] for error in errors] == [
        "placement.actor with actor.parallel",
        "placement.critic",
        "placement.ref",
        "placement.rollout",
    ]
    with pytest.raises(ConfigError):
        placement_layouts(config, 4)


@pytest.mark.parametrize(
    ("placement", "smallest"),
    [({}, None), ({"rollout": "0"}, 1), ({"actor": "0-3,6"}, 7), ({"critic": "all", "ref": "2"}, 3)],
)
def test_the_smallest_world(placement, smallest):
    assert smallest_world(make(placement=placement)) == smallest


def test_the_smallest_world_of_no_list_of_ranks():
    with pytest.raises(ConfigError, match=r"^placement.critic: 'x' is not a list of ranks"):
        smallest_world(make(placement={"critic": "x"}))


def test_how_the_batch_is_split():
    config = make(
        actor={"ppo_mini_batch_size": 6, "ppo_epochs": 2, "max_tokens_per_micro_batch": 32},
        critic={"ppo_mini_batch_size": 12, "max_tokens_per_micro_batch": 20},
        rollout={"n": 3, "max_response_length": 6},
        data={"train_batch_size": 12, "max_prompt_length": 4},
    )
    splits = plan_run(config, 4).batch_splits
    actor, critic, ref = splits["actor"], splits["critic"], splits["ref"]
    assert (actor.mini_batches, actor.optimizer_steps, actor.trajectories) == (2, 4, 18)
    assert actor.shard_trajectories == (4, 5)
    assert actor.micro_batches == (1, 2)  # 32 tokens hold 3 rows of 10
    assert (critic.mini_batches, critic.optimizer_steps, critic.trajectories) == (1, 1, 36)
    assert critic.micro_batches == (1, 5)  # 9 rows, 2 at a time
    interleaved = config.critic.model_copy(update={"parallel": Parallel(pipeline=2, virtual_pipeline=2)})
    config = config.model_copy(update={"critic": interleaved})
    filled = plan_run(config, 4).batch_splits["critic"]
    assert filled.micro_batches == (2, 10)  # 18 rows, 2 at a time: 9, filled up to whole groups of 2
    assert (ref.optimizer_steps, ref.trajectories, ref.micro_batches) == (0, 36, (1, 3))


@pytest.mark.parametrize("device", START_TOKENS)
@pytest.mark.parametrize(("pipeline", "chunks", "tensor"), [(2, 1, 1), (8, 1, 4), (4, 2, 1)])
def test_stages_wait_about_as_little_as_any_number_of_micro_batches_has_them(device, pipeline, chunks, tensor):
    layout = Layout(tuple(range(pipeline * tensor)), tensor, pipeline, virtual_pipeline=chunks)
    to_move, to_start = START_TOKENS[device]
    for hidden, tokens in product((64, 768, 4096), (100, 4000, 100_000)):
        start = to_move + to_start * tensor / hidden**2

        def seconds(number: int, tokens: int = tokens, start: float = start) -> float:
            """Return the schedule's duration in tokens of a stage: its slots, and the work and the start of each."""
            return (number + (pipeline - 1) / chunks) * (tokens / number + start)

        found = layout.filling(tokens, hidden, device)
        group = pipeline if chunks > 1 else 1
        assert found % group == 0
        assert seconds(found) <= 1.06 * min(map(seconds, range(group, 3000, group)))


def test_without_stages_there_is_nothing_to_fill():
    assert Layout((0, 1, 2, 3), tensor=2).filling(100_000, 4096, "cpu") == 1


def test_too_few_examples_for_the_shards_are_refused_in_the_words_of_examples() -> None:
    config = make(trainer={"kind": "sft"}, data={"train_batch_size": 2})
    [error] = _errors(config, 4)
    assert error == (
        "data.train_batch_size 2 examples are fewer than the actor's 4 data-parallel shards on ranks 0-3: raise "
        "data.train_batch_size to 4 or more"
    )
