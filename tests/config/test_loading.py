"""Reading a config: base files, overrides, types as declared, origins in errors, and the dump that reads back."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megappo.config.config_error import ConfigError
from megappo.config.describe import config_help, keys
from megappo.config.loading import changes_since, dump_config, load_config
from megappo.config.schema import Config

MINIMAL = "model: {path: m}\ndata: {train_files: [t.jsonl]}\ntrainer: {output_dir: out}\n"


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, "utf-8")
    return path


@pytest.fixture
def minimal(tmp_path: Path) -> Path:
    return write(tmp_path, "run.yaml", MINIMAL)


def errors_of(path: Path, *overrides: str) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    assert str(caught.value) == "\n".join(caught.value.errors)
    return caught.value.errors


def test_defaults_fill_what_the_file_leaves_out(minimal):
    config = load_config(minimal)
    assert (config.model.path, config.data.train_files, config.trainer.output_dir) == ("m", ("t.jsonl",), "out")
    assert config == Config.model_validate(
        {"model": {"path": "m"}, "data": {"train_files": ["t.jsonl"]}, "trainer": {"output_dir": "out"}}
    )


@pytest.mark.parametrize(
    ("override", "read", "expected"),
    [
        ("actor.optim.lr=1e-6", lambda c: c.actor.optim.lr, 1e-6),
        ("actor.optim.eps=1", lambda c: c.actor.optim.eps, 1.0),
        ("trainer.total_steps=1e3", lambda c: c.trainer.total_steps, 1000),
        ("trainer.total_steps=8.0", lambda c: c.trainer.total_steps, 8),
        ("trainer.total_steps='12'", lambda c: c.trainer.total_steps, 12),
        ("trainer.seed=9007199254740993", lambda c: c.trainer.seed, 2**53 + 1),
        ("rollout.max_total_tokens=null", lambda c: c.rollout.max_total_tokens, None),
        ("actor.clip_ratio_low=2e-1", lambda c: c.actor.clip_ratio_low, 0.2),
        ("actor.optim.betas=[0, 9e-1]", lambda c: c.actor.optim.betas, (0.0, 0.9)),
        ("data.train_files=a.jsonl", lambda c: c.data.train_files, ("a.jsonl",)),
        ("actor.offload=weights", lambda c: c.actor.offload, ("weights",)),
        ("actor.offload=auto", lambda c: c.actor.offload, "auto"),
        ("data.train_files={a.jsonl: 1, b.jsonl: 1e-1}", lambda c: c.data.shares, {"a.jsonl": 1, "b.jsonl": 0.1}),
        ("data.train_files={a.jsonl: 1, b.jsonl: 0}", lambda c: c.data.files, ("a.jsonl",)),
        ("data.train_files=[a.jsonl, b.parquet]", lambda c: c.data.train_files, ("a.jsonl", "b.parquet")),
        ("data.shuffle=off", lambda c: c.data.shuffle, False),
        ("model.path=a=b", lambda c: c.model.path, "a=b"),
        ('rollout.stop="\\n"', lambda c: c.rollout.stop, ("\n",)),
        ("rollout.server_args.random_seed=3", lambda c: c.rollout.server_args, {"random_seed": 3}),
        (
            "rollout.server_args.disable_radix_cache=true",
            lambda c: c.rollout.server_args,
            {"disable_radix_cache": True},
        ),
        ("ref.parallel={tensor: 2}", lambda c: c.ref.parallel.tensor, 2),
        ("ref.parallel.pipeline=2", lambda c: c.ref.parallel.pipeline, 2),
        ("placement.rollout=0", lambda c: c.placement.rollout, "0"),
        ("placement.ref=null", lambda c: c.placement.ref, None),
        ("placement.actor,critic=0-3,6", lambda c: (c.placement.actor, c.placement.critic), ("0-3,6", "0-3,6")),
    ],
)
def test_values_are_read_as_the_declared_type(minimal, override, read, expected):
    found = read(load_config(minimal, [override]))
    assert found == expected
    assert type(found) is type(expected)


def test_later_overrides_win_over_earlier_ones_and_over_the_file(tmp_path):
    path = write(tmp_path, "run.yaml", MINIMAL + "rollout: {n: 2, top_k: 5}\n")
    assert load_config(path, ["rollout.n=3", "rollout.n=4"]).rollout.model_dump(include={"n", "top_k"}) == {
        "n": 4,
        "top_k": 5,
    }


def test_components_share_a_placement_key(tmp_path):
    path = write(tmp_path, "run.yaml", MINIMAL + "placement:\n  actor, critic: 0-7\n  rollout: 0\n  ref: 2-3,6\n")
    placement = load_config(path).placement
    expected = {"actor": "0-7", "critic": "0-7", "ref": "2-3,6", "reward_model": None, "rollout": "0"}
    assert placement.model_dump() == expected


def test_bases_merge_deeply_in_order_below_the_file(tmp_path):
    write(
        tmp_path,
        "shared/a.yaml",
        "actor: {clip_ratio: 0.1, ppo_epochs: 2, optim: {lr: 1e-5, eps: 1e-7}}\nrollout: {n: 8}\n",
    )
    write(tmp_path, "shared/b.yaml", "base: c.yaml\nactor: {ppo_epochs: 3}\n")
    write(tmp_path, "shared/c.yaml", "rollout: {n: 7}\nplacement: {actor: 0-3, rollout: 0}\n")
    path = write(
        tmp_path,
        "run.yaml",
        "base: [shared/a.yaml, shared/b.yaml]\n"
        + MINIMAL
        + "actor: {optim: {lr: 2e-5}}\nplacement: {'actor, critic': 0-7}\n",
    )
    config = load_config(path)
    assert (config.actor.clip_ratio, config.actor.ppo_epochs) == (0.1, 3)
    assert (config.actor.optim.lr, config.actor.optim.eps) == (2e-5, 1e-7)
    assert config.rollout.n == 7
    assert (config.placement.actor, config.placement.critic, config.placement.rollout) == ("0-7", "0-7", "0")


def test_an_error_names_the_base_file_that_holds_the_key(tmp_path):
    write(tmp_path, "base.yaml", "\nactor:\n  ppo_epoch: 2\n")
    path = write(tmp_path, "run.yaml", "base: base.yaml\n" + MINIMAL)
    expected = f"{tmp_path / 'base.yaml'}:3: actor.ppo_epoch: unknown key; did you mean actor.ppo_epochs?"
    assert errors_of(path) == (expected,)


def test_a_file_may_be_the_base_of_two(tmp_path):
    write(tmp_path, "root.yaml", "rollout: {n: 3}\n")
    write(tmp_path, "a.yaml", "base: root.yaml\n")
    write(tmp_path, "b.yaml", "base: root.yaml\n")
    assert load_config(write(tmp_path, "run.yaml", "base: [a.yaml, b.yaml]\n" + MINIMAL)).rollout.n == 3


def test_all_errors_come_at_once(tmp_path):
    path = write(
        tmp_path, "run.yaml", "model: {path: 3}\nactor:\n  ppo_epoch: 2\n  clip_ratio: -1\n  clip_ratio: 0\ndata: {}\n"
    )
    found = errors_of(path, "rollout.n=1.5", "nonsense")
    assert sorted(found) == sorted(
        [
            f"{path}:1: model.path: expected text, found 3",
            f"{path}:3: actor.ppo_epoch: unknown key; did you mean actor.ppo_epochs?",
            f"{path}:4: actor.clip_ratio: expected float > 0, found -1",
            f"{path}:5: actor.clip_ratio: set twice, first at {path}:4; remove one",
            f"{path}:6: data.train_files: must be set (jsonl, jsonl.gz or parquet files of training prompts; with "
            "weights, as {a.jsonl: 0.7, b.jsonl: 0.3}, each file gives its share of every step and has epochs of its "
            "own; weight 0 drops a file that base names)",
            f"{path}: trainer.output_dir: must be set "
            "(folder for config.yaml, metrics.jsonl, tensorboard/, checkpoints/, rollouts/)",
            "command line: rollout.n: expected int >= 1, found 1.5",
            "command line: 'nonsense': expected key=value, such as trainer.total_steps=10",
        ]
    )


def test_the_dump_reads_back_equal(tmp_path):
    path = write(
        tmp_path,
        "run.yaml",
        MINIMAL
        + "placement: {'actor, critic': 0-1, rollout: 0}\n"
        + "rollout: {stop: ['\\n', 'null', 'é', '1e-6'], server_args: {a: 1e-6, b: 1.0e-6, c: true, d: 7}}\n"
        + "actor: {optim: {lr: 1e-6, eps: 1e-20}, clip_ratio_c: null}\nref: {parallel: {tensor: 2}}\n",
    )
    config = load_config(path)
    assert config.rollout.server_args == {"a": "1e-6", "b": 1e-6, "c": True, "d": 7}
    assert load_config(write(tmp_path, "dump.yaml", dump_config(config))) == config


def test_what_has_changed_since_a_dump_is_named(tmp_path):
    path = write(tmp_path, "run.yaml", MINIMAL)
    dump = write(tmp_path, "dump.yaml", dump_config(load_config(path)))
    assert changes_since(dump, load_config(path)) == []
    changed = load_config(path, ["trainer.seed=7", "actor.optim.lr=1e-4", "rollout.stop=['a']"])
    assert changes_since(dump, changed) == [
        "actor.optim.lr: 1e-06 -> 0.0001",
        'rollout.stop: [] -> ["a"]',
        "trainer.seed: 0 -> 7",
    ]


@settings(deadline=None, max_examples=15)
@given(
    eps=st.floats(0, 1e15, exclude_min=True),
    text=st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1),
    seed=st.integers(0, 2**63 - 1),
)
def test_the_dump_reads_back_any_value(tmp_path_factory, eps, text, seed):
    folder = tmp_path_factory.mktemp("dump")
    config = load_config(write(folder, "run.yaml", MINIMAL)).model_copy(deep=True)
    sections = config.model_dump() | {"trainer": {"output_dir": "out", "seed": seed}}
    sections["actor"]["optim"]["eps"] = eps
    sections["data"]["prompt_key"] = text
    config = Config.model_validate(sections)
    assert load_config(write(folder, "dump.yaml", dump_config(config))) == config


def test_a_config_cannot_be_changed(minimal):
    config = load_config(minimal)
    with pytest.raises(ValueError, match="frozen"):
        config.trainer.seed = 1


def test_an_error_raised_later_names_the_place_too(tmp_path):
    path = write(tmp_path, "run.yaml", MINIMAL + "rollout:\n  stop: [ab]\n")
    config = load_config(path, ["trainer.seed=1"])
    with pytest.raises(ConfigError) as caught, config.locating():
        raise ConfigError("rollout.stop: 'ab' is 2 tokens", "trainer.seed 1: no", "critic: none\n\x1b[2J")
    assert caught.value.errors == (
        f"{path}:5: rollout.stop: 'ab' is 2 tokens",
        "command line: trainer.seed 1: no",
        f"{path}: critic: none\\n\\x1b[2J",
    )


def test_places_do_not_matter_when_configs_are_compared(tmp_path, minimal):
    other = load_config(write(tmp_path, "other.yaml", "\n\n" + MINIMAL), ["trainer.seed=0"])
    assert other == load_config(minimal)
    assert other.model_copy(update={"ref": other.ref}).located(["trainer.seed: no"]) == [
        "command line: trainer.seed: no"
    ]


def test_help_names_every_key_once_with_default_and_meaning():
    lines = config_help().splitlines()
    assert max(map(len, lines)) <= 120
    names = [line.split(":")[0].strip() for line in lines if line.startswith("  ") and line[2] != " "]
    assert names == [key.path for key in keys() if "." in key.path] and len(names) > 80
    at = lines.index("  rollout.top_k: -1 | int >= 1, default -1")
    assert lines[at + 1] == "      top-k sampling; -1 = off"
    assert any(line.startswith("  model.path: text, required") for line in lines)


def test_every_key_has_a_meaning():
    assert [key.path for key in keys() if len(key.meaning) < 3] == []
