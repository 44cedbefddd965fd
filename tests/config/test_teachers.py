"""Keys of teachers and of another reference: what excludes what, which teacher a record has, whose tokens differ."""

from pathlib import Path

import pytest
from pydantic import ValidationError
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from megappo.config.checks import config_errors
from megappo.config.config_error import ConfigError
from megappo.config.schema import Config
from megappo.data.entries import RecordFields
from megappo.data.tokenizer import check_vocabularies
from megappo.placement.components import components_of, policy_folders, uses_of
from megappo.placement.run_plan import plan_run
from megappo.userland.signatures import NO_INPUT

TWO = {
    "math": {"model_path": "big", "when": {"source": ["gsm8k", "math"], "extra.level": 2}},
    "rest": {"adapter": None},
}
URL = "http://10.0.0.7:30000"


def tokenizer_of(tokens: str) -> PreTrainedTokenizerFast:
    core = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token="?"))
    return PreTrainedTokenizerFast(tokenizer_object=core, unk_token="?", eos_token=".")


def config_of(**sections: dict) -> Config:
    required = {"model": {"path": "m"}, "data": {"train_files": ["f"]}, "trainer": {"output_dir": "o"}}
    return Config.model_validate(required | {"teachers": TWO} | sections)


REFUSED = {
    "teachers.a has no `when`, so that teachers after it": {"teachers": {"a": {}, "b": {"when": {"x": 1}}}},
    "teachers.a.adapter and teachers.a.dist_checkpointing_path are both set": {
        "teachers": {"a": {"dist_checkpointing_path": "x", "adapter": "y"}}
    },
    "distillation.kl_type k1 as a loss has a gradient that does not": {
        "distillation": {"signal": "loss", "kl_type": "k1"}
    },
    "distillation.kl_type full compares the actor's logits with one model's": {"distillation": {"kl_type": "full"}},
    "KL kind full (distillation.kl_type) needs the logits of teachers.a where the actor's are": {
        "teachers": {"a": {"parallel": {"tensor": 2}}},
        "distillation": {"kl_type": "full"},
    },
    "distillation.without_teacher reward needs scores, but reward.function is null": {
        "reward": {"function": None},
        "distillation": {"without_teacher": "reward"},
    },
    "distillation.signal reward is a reward of each token": {"algorithm": {"gae_level": "turn"}},
    "algorithm.filter_groups.enable true uses the scores of all rows": {
        "algorithm": {"filter_groups": {"enable": True}, "adv_estimator": "grpo", "use_kl_in_reward": False},
        "rollout": {"n": 2},
        "distillation": {"task_reward": False},
    },
    "reward.normalize batch uses the scores of all rows": {
        "reward": {"normalize": "batch"},
        "distillation": {"task_reward": False},
    },
    "actor.positive_nll_coef 0.1 uses the scores of all rows": {
        "actor": {"positive_nll_coef": 0.1},
        "distillation": {"task_reward": False},
    },
    "a KL of kind full (algorithm.kl_penalty or distillation.kl_type) needs the actor's forward pass": {
        "teachers": {"a": {}},
        "distillation": {"kl_type": "full"},
        "trainer": {"output_dir": "o", "train": ["critic"]},
    },
    "algorithm.adv_estimator gdpo takes scores of the reward section": {
        "algorithm": {"adv_estimator": "gdpo", "use_kl_in_reward": False},
        "rollout": {"n": 2},
    },
    "distillation.coef 2.0 has no effect, as teachers names none": {"teachers": {}, "distillation": {"coef": 2}},
    "teachers.a.url: the model is its server's: drop parallel and placement": {
        "teachers": {"a": {"url": URL, "placement": "0", "parallel": {"tensor": 2}}}
    },
    "teachers.a.url: 10.0.0.1:30000 is not an address such as http://10.0.0.7:30000": {
        "teachers": {"a": {"url": "10.0.0.1:30000"}}
    },
    "teachers.a.url: servers return log-probs at temperature 1": {
        "teachers": {"a": {"url": URL}},
        "rollout": {"temperature": 0.7},
    },
    "teachers.a.url: servers return log-probs of given tokens alone": {
        "teachers": {"a": {"url": URL}},
        "distillation": {"kl_type": "full"},
    },
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_does_not_go_together_is_refused(message: str) -> None:
    changes = REFUSED[message]
    if any("adapter" in one for one in changes.get("teachers", {}).values()):
        errors = config_errors(config_of(**changes))
    else:
        with pytest.raises(ConfigError) as raised:
            plan_run(config_of(**changes), 4)
        errors = raised.value.errors
    assert [error for error in errors if error.startswith(message)] != [], errors


def test_a_name_is_a_part_of_keys() -> None:
    with pytest.raises(ValidationError, match="a name of letters, digits, _ and - alone"):
        config_of(teachers={"a.b": {}})


def test_without_a_reward_function_teachers_are_enough_and_nothing_else_is() -> None:
    assert config_errors(config_of(reward={"function": None})) == []
    assert config_errors(config_of(reward={"function": None}, teachers={})) != []
    held_out = config_of(reward={"function": None}, eval={"datasets": {"val": {"files": "v.jsonl"}}})
    assert any("leave responses without a score" in error for error in config_errors(held_out))


def test_teachers_are_placed_and_used_in_their_own_phase_alone() -> None:
    teachers = {"a": {"placement": "2-3", "parallel": {"tensor": 2}, "when": {"x": 1}}, "b": {"offload": ["weights"]}}
    config = config_of(teachers=teachers).changed("teachers.b.offload", ())
    assert config.teachers["b"].offload == ()
    specs, uses = components_of(config), uses_of(components_of(config))
    assert [specs[f"teacher_{name}"].teacher for name in "ab"] == [1, 2]
    assert plan_run(config, 4).layouts["teacher_a"].ranks == (2, 3)
    assert [phase for phase, use in uses.items() if "teacher_a" in use] == ["teacher_a"]
    assert specs["teacher_a"].training is None and specs["teacher_b"].parallel.key == "actor.parallel"


def test_a_served_teacher_is_no_model_of_the_run() -> None:
    config = config_of(teachers={"a": {"url": URL, "when": {"x": 1}}, "b": {"placement": "2-3"}})
    assert config.teachers["a"].url == (URL,) and config.distilled_at == "reward"
    plan = plan_run(config, 4)
    assert "teacher_a" not in plan.components and plan.layouts["teacher_b"].ranks == (2, 3)
    assert components_of(config)["teacher_b"].teacher == 2 and policy_folders(config) == {}


def test_a_reference_of_its_own_is_built_for_a_critic_alone_too() -> None:
    alone = {"trainer": {"output_dir": "o", "train": ["critic"]}, "teachers": {}}
    assert "ref" not in components_of(config_of(**alone))
    spec = components_of(config_of(**alone, ref={"model_path": "other"}))["ref"]
    assert spec.folder == ("ref.model_path", "other") and spec.weights.value is None


RECORDS = [
    ({"source": "gsm8k", "extra": {"level": 2}}, 1),
    ({"source": "math", "extra.level": 2}, 1),
    ({"source": "math", "extra": {"level": "2"}}, 2),
    ({"source": ["math"]}, 2),
    ({}, 2),
]


@pytest.mark.parametrize(("record", "expected"), RECORDS)
def test_a_record_has_the_first_teacher_whose_fields_it_has(record: dict, expected: int) -> None:
    teachers = config_of().teachers
    fields = RecordFields("prompt", "label", NO_INPUT, teachers=teachers, without_teacher="error")
    assert fields.teacher_of(record) == expected
    alone = RecordFields("prompt", "label", NO_INPUT, teachers={"math": teachers["math"]}, without_teacher="error")
    assert {"source", "extra.level"} <= set(alone.names)
    if expected == 1:
        assert alone.teacher_of(record) == 1
        return
    with pytest.raises(ValueError, match="no teacher has this row .*set distillation.without_teacher to reward"):
        alone.teacher_of(record)
    lenient = RecordFields("prompt", "label", NO_INPUT, teachers={"math": teachers["math"]})
    assert lenient.teacher_of(record) == 0


def test_vocabularies_are_compared_token_by_token(tmp_path: Path) -> None:
    folders = {}
    for name, tokens in {"own": "?.0123", "more": "?.01234", "other": "?.0132", "fewer": "?.012"}.items():
        folders[name] = str(tmp_path / name)
        tokenizer_of(tokens).save_pretrained(folders[name])
    own = tokenizer_of("?.0123")
    check_vocabularies(own, {"ref.model_path": folders["own"], "teachers.a.model_path": folders["more"]})
    with pytest.raises(ConfigError) as raised:
        check_vocabularies(own, {"ref.model_path": folders["own"], "teachers.a.model_path": folders["other"]})
    (error,) = raised.value.errors
    assert error.startswith("teachers.a.model_path: 2 of the actor's 6 tokens") and "'2' of the actor, '3' th" in error
    with pytest.raises(ConfigError, match=r"'3' of the actor, no token there"):
        check_vocabularies(own, {"ref.model_path": folders["fewer"]})
    config = config_of(ref={"model_path": "r"}, algorithm={"use_kl_in_reward": True})
    assert policy_folders(config) == {"ref.model_path": "r", "teachers.math.model_path": "big"}
