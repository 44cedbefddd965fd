"""Scores of reward models against transformers', in every layout, in the actor's tokens and rendered again."""

import json
import re
from contextlib import nullcontext
from dataclasses import replace
from itertools import accumulate
from pathlib import Path

import hf_oracle  # noqa: F401  # before transformers' models
import pytest
import torch
import torch.distributed as dist
from layouts import parallel_of
from recorder import recorder_in
from samples_of import sample_of
from scoring_adapters import write_adapters
from spawn import run_ranks
from tiny_shapes import CHANGES, SHAPE
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedTokenizerFast,
)

from megappo.architecture.parsing import read_architecture
from megappo.batch.exchange import Exchange
from megappo.config.checks import config_errors
from megappo.config.config_error import ConfigError
from megappo.config.schema import Config
from megappo.data.conversations import Conversations
from megappo.data.prompts import Prompt, PromptDataset
from megappo.data.tokenizer import load_tokenizer
from megappo.placement.components import components_of
from megappo.placement.groups import build_groups
from megappo.placement.layout import Layout
from megappo.recipes.ppo import ppo_step
from megappo.rollouts.responses import Responses
from megappo.rollouts.sample_rows import sample_rows
from megappo.trainer.component_batch import Component
from megappo.trainer.models import build_engine
from megappo.trainer.response_scorer import ResponseScorer
from megappo.userland.grades import Grade

ACTORS = ["<pad>", "<eos>", *"abc.?"]
OWN = ["<eos>", "<pad>", ".", "ab", *"abc?Q:A; "]
"""Tokens of the actor and of a reward model with its own tokenizer, in which `ab` is one."""
TEMPLATE = "{% for message in messages %}{{ 'QA'[loop.index0 % 2] }}: {{ message['content'] }};{% endfor %}"
PAD = 0
CASES = [("ab?", "ab.cab..c"), ("c?", "b"), ("cab?", "abab."), ("?", "."), ("bb?", ""), ("a?", "cc.ab")]
"""Prompts with a response each. Those of the even rows were ended by the actor."""
LAYOUTS = {
    "tp2": Layout((0, 1), tensor=2),
    "pp2": Layout((2, 3), pipeline=2),
    "dp2": Layout((3, 1)),
    "cp2 tp2": Layout((0, 1, 2, 3), tensor=2, context=2),
}
MIXTURE_LAYOUTS = {
    "ep2": Layout((0, 1), expert=2),
    "ep2 tp2 sp": Layout((0, 1, 2, 3), tensor=2, expert=2),
    "ep2 pp2": Layout((0, 1, 2, 3), pipeline=2, expert=2),
}
HEADS = {"whole": AutoModelForSequenceClassification, "steps": AutoModelForTokenClassification}


def write_tokenizer(folder: Path, tokens: list[str], template: str | None = None) -> None:
    """Write a tokenizer of these tokens, the longest first."""
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("ab|." if "ab" in tokens else "."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>")
    fast.chat_template = template
    fast.save_pretrained(folder)


def write_model(folder: Path, kind: str, tokens: list[str], family: str = "qwen2") -> torch.nn.Module:
    """Write a random reward model; return transformers' one."""
    torch.manual_seed(5)
    shape = SHAPE | CHANGES.get(family, {}) | {"vocab_size": len(tokens), "pad_token_id": tokens.index("<pad>")}
    model = HEADS[kind].from_config(AutoConfig.for_model(family, **shape, num_labels=1))
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    return model.eval()


def write_adapted(folder: Path) -> torch.nn.Module:
    """Write a language model, and a reward model's adapters for it; return transformers' model with these merged."""
    model = write_model(folder / "merged", "whole", ACTORS)
    language = AutoModelForCausalLM.from_config(model.config)
    language.model.load_state_dict(model.model.state_dict())
    language.save_pretrained(folder / "language")
    write_tokenizer(folder / "language", ACTORS)
    tensors = {"score.weight": model.score.weight.data}
    for name, module in model.model.named_modules():
        if name.endswith(("q_proj", "down_proj")):
            low, high = 0.1 * torch.randn(2, module.in_features), torch.randn(module.out_features, 2)
            tensors |= {f"model.{name}.lora_A.weight": low, f"model.{name}.lora_B.weight": high}
            module.weight.data += 4 / 2**0.5 * high @ low
    settings = {"target_modules": r".*\.(down_proj|q_proj)", "use_rslora": True}  # PEFT: W x + alpha / r^1/2 * B A x
    write_adapters(folder / "adapters", str(folder / "language"), tensors, **settings)
    return model


def config_of(folder: Path, kind: str = "whole", **settings: object) -> Config:
    return Config.model_validate(
        {
            "model": {"path": str(folder / "actor"), "dtype": "fp32"},
            "data": {"train_files": [str(folder / "train.jsonl")]},
            "reward": {"function": "exact_match"},
            "reward_model": {
                **{"model_path": str(folder / kind), "step_separator": ".", "weight": 0.5},
                **{"max_tokens_per_micro_batch": 40, **settings},
            },
            "trainer": {"output_dir": str(folder)},
        }
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rewards")
    write_tokenizer(folder / "actor", ACTORS)
    shape = SHAPE | {"vocab_size": len(ACTORS)}
    AutoConfig.for_model("qwen2", **shape, architectures=["Qwen2ForCausalLM"]).save_pretrained(folder / "actor")
    prompts = [{"prompt": prompt} for prompt, _ in CASES]
    (folder / "train.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    return folder


@torch.no_grad()
def expected_scores(model: torch.nn.Module, kind: str, *, is_rendered: bool) -> list[list[float]]:
    """Return the scores of each response by transformers: one, or one for each character of the response."""
    found = []
    for i, (prompt, response) in enumerate(CASES):
        text = f"Q: {prompt};A: {response};" if is_rendered else prompt + response
        pieces = re.findall("ab|." if is_rendered else ".", text)
        vocabulary = OWN if is_rendered else ACTORS
        tokens = [vocabulary.index(piece) for piece in pieces]
        if not is_rendered and i % 2 == 0:
            tokens.append(ACTORS.index("<eos>"))
        logits = model(torch.tensor([tokens])).logits[0]
        if kind == "whole":
            found.append(logits.tolist())
            continue
        ends = [match.end() for match in re.finditer(r"\.+", response)]
        ends += [len(response)] if not response.endswith(".") else []
        first = len(prompt) + (7 if is_rendered else 0)
        reached = list(accumulate(map(len, pieces)))
        scores = [0.0] * max(1, len(response) + (i % 2 == 0))
        for end in ends:
            place = next(n for n, length in enumerate(reached) if length >= first + end) if end else -1
            scores[max(0, end - 1)] += float(logits[place])
        found.append(scores)
    return found


def check_scores(rank: int, world_size: int, folder: Path, cases: list, layouts: dict[str, Layout]) -> None:
    exchange = Exchange(dist.group.WORLD)
    tokenizer = load_tokenizer(str(folder / "actor"))
    prompts = [Prompt(i, [ACTORS.index(letter) for letter in text], text, None) for i, (text, _) in enumerate(CASES)]
    groups, phase = build_groups(layouts, seed=0), lambda name: nullcontext()
    for kind, settings, expected in cases:
        config = config_of(folder, kind, **settings)
        dataset = PromptDataset(config.data.files, tokenizer, config.data, 0, needs_label=False)
        responses = Responses(prompts, None, tokenizer)
        for i, (_, response) in enumerate(CASES):
            tokens = [ACTORS.index(letter) for letter in response] + [ACTORS.index("<eos>")] * (i % 2 == 0)
            if i % 2 == rank:
                ending = "length" if i % 2 else "stop"
                responses.add([sample_of(i, 0, tokens, [-1.0] * len(tokens), ending, prompt=prompts[i].tokens)])
        batch = exchange.number(sample_rows(responses.samples))
        mine = batch.rows.prompt_ids.tolist()
        batch = replace(batch, rows=replace(batch.rows, fields=batch.rows.fields | {"scores": torch.ones(len(mine))}))
        for name, layout in layouts.items():
            spec = components_of(config)["reward_model"]
            parallel = parallel_of(layout, sequence="sp" in name)
            spec = replace(spec, parallel=spec.parallel._replace(value=parallel))
            engine = build_engine(config, spec, groups[name]) if groups[name].member else None
            scorer = ResponseScorer(
                config, Component(name, spec, layout, exchange, engine), dataset, tokenizer, exchange
            )
            conversations = scorer.scatter(batch, responses)
            rows = scorer.add_scores(batch, conversations, scorer.forward(conversations, phase)).rows
            whole = torch.tensor([sum(expected[i]) for i in mine])
            torch.testing.assert_close(rows.fields["reward_model_scores"], whole, rtol=0, atol=1e-5)
            torch.testing.assert_close(rows.fields["scores"], 1 + 0.5 * whole, rtol=0, atol=1e-5)
            terms = torch.stack([torch.ones(len(mine)), 0.5 * whole], dim=1)
            torch.testing.assert_close(rows.fields["score_components"], terms, rtol=0, atol=1e-5)
            assert ("turn_rewards" in rows.fields) == kind.endswith("steps")
            if kind.endswith("steps"):
                for row, i in enumerate(mine):
                    steps = rows.fields["turn_rewards"][row, : len(expected[i])]
                    torch.testing.assert_close(steps, 0.5 * torch.tensor(expected[i]), rtol=0, atol=1e-5)
        for sample in responses.samples:
            sample.grade = Grade([2.0], {})
        responses._is_graded = True
        scorer.grade(responses, dataset, phase)
        for sample in responses.samples:
            assert sample.grade.scores == pytest.approx([2.0, 0.5 * sum(expected[sample.prompt_index])], abs=1e-5)


def test_scores_are_transformers_in_every_layout(folder: Path) -> None:
    cases = []
    for kind in HEADS:
        model = write_model(folder / kind, kind, ACTORS)
        write_tokenizer(folder / kind, ACTORS)
        cases.append((kind, {}, expected_scores(model, kind, is_rendered=False)))
        model = write_model(folder / f"own {kind}", kind, OWN)
        write_tokenizer(folder / f"own {kind}", OWN, TEMPLATE)
        cases.append((f"own {kind}", {}, expected_scores(model, kind, is_rendered=True)))
    adapted = expected_scores(write_adapted(folder), "whole", is_rendered=False)
    cases.append(("language", {"adapter": str(folder / "adapters")}, adapted))
    run_ranks(4, check_scores, folder, cases, LAYOUTS)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_moe", "qwen2_moe"])
def test_scores_of_a_mixture_of_experts_are_transformers_in_every_layout(family: str, folder: Path) -> None:
    cases = []
    for kind in HEADS:
        model = write_model(folder / kind, kind, ACTORS, family)
        write_tokenizer(folder / kind, ACTORS)
        cases.append((kind, {}, expected_scores(model, kind, is_rendered=False)))
    run_ranks(4, check_scores, folder, cases, MIXTURE_LAYOUTS)


FOUR = {
    "placement": {"actor": "0-1", "critic": "2-3", "ref": "0-3", "reward_model": "1-2"},
    "actor": {"parallel": {"tensor": 2}},
    "critic": {"parallel": {"pipeline": 2}},
    "ref": {"parallel": {"context": 2}},
    "algorithm": {"use_kl_in_reward": True},
    "reward": {"normalize": "running"},
}
OFFLOADED = {name: {"offload": ["weights", "gradients", "optimizer"]} for name in ("actor", "critic")}
OFFLOADED |= {name: {"offload": ["weights"]} for name in ("ref", "reward_model")}


def check_steps(rank: int, world_size: int, folder: Path) -> None:
    bench = recorder_in(folder / "bench")
    judge = {"model_path": str(folder / "judge"), "parallel": {"pipeline": 2}}
    tokenizer = load_tokenizer(str(folder / "judge"))
    found = []
    for offloads in ({}, OFFLOADED):
        keys = bench.merged(bench.settings(folder / "bench"), FOUR, {"reward_model": judge}, offloads)
        run = bench.build(Config.model_validate(keys))
        component = run.models.components["reward_model"]
        run.scorer = ResponseScorer(run.config, component, None, tokenizer, run.exchange)
        steps = [ppo_step(run, step) for step in (1, 2)]
        assert ("memory/offloaded_gib/sum" in steps[0]) == bool(offloads)
        found.append([{name: one[name] for name in one if not bench.OF_TIME.search(name)} for one in steps])
        assert run.progress.reward_moments.count == 2 * bench.PROMPTS * bench.RESPONSES
    assert found[0] == found[1], "to the bit"
    for metrics in found[0]:
        assert metrics["reward/model/std"] > 0.1 and metrics["reward/score/mean"] != metrics["reward/model/mean"]
    assert found[0][0]["reward/model/mean"] != found[0][1]["reward/model/mean"]


def test_four_models_at_once_and_all_offloaded_are_equal_to_the_bit(tmp_path: Path) -> None:
    tokens = ["<pad>", "<eos>", *map(chr, range(97, 97 + 59))]
    write_model(tmp_path / "judge", "whole", tokens)
    write_tokenizer(tmp_path / "judge", tokens)
    (tmp_path / "bench").mkdir()
    run_ranks(4, check_steps, tmp_path)


def conversations_of(folder: Path, kind: str, **settings: object) -> Conversations:
    config = config_of(folder, kind, **settings)
    architecture = read_architecture(folder / kind, head="value")
    return Conversations(config, architecture, load_tokenizer(config.model.path))


def refused(error: type[Exception], call, *arguments: object, **settings: object) -> str:
    with pytest.raises(error) as raised:
        call(*arguments, **settings)
    return str(raised.value)


def test_unusable_tokenizers_and_templates_are_named(folder: Path) -> None:
    for name, tokens, template in (
        ("other", OWN, TEMPLATE),
        (
            "dropping",
            OWN,
            "{% for message in messages if message['role'] == 'user' %}Q: {{ message['content'] }};{% endfor %}",
        ),
        ("halving", OWN, "{% for message in messages %}{{ message['content'].split('.')[-1] }}{% endfor %}"),
        ("refusing", OWN, "{{ raise_exception('no system') }}"),
        ("plain", OWN, None),
        ("larger", [*OWN, "d"], TEMPLATE),
    ):
        write_model(folder / name, "whole", OWN)
        write_tokenizer(folder / name, tokens, template)
    error = refused(ConfigError, conversations_of, folder, "other", retokenize=False)
    assert error.endswith("the tokenizer has other tokens than the actor's: drop reward_model.retokenize false")
    error = refused(ConfigError, conversations_of, folder, "dropping")
    assert "the chat template drops the answer 'An answer', or a part of it: it renders 'Q: A question;'" in error
    error = refused(ConfigError, conversations_of, folder, "refusing")
    assert "the chat template refuses a conversation (TemplateError: no system)" in error
    error = refused(ConfigError, conversations_of, folder, "larger")
    assert "the tokenizer has token 13, but vocab_size is 13 in config.json" in error
    halving, plain = conversations_of(folder, "halving"), conversations_of(folder, "plain")
    tokens = [ACTORS.index(letter) for letter in "a?b.c"]
    error = refused(ConfigError, halving.of, tokens, 2, "a?", is_truncated=True)
    assert "drops the answer 'b.c', or a part of it: it renders 'a?c'" in error
    chat = [{"role": "user", "content": "a?"}]
    error = refused(ConfigError, plain.of, tokens, 2, chat, is_truncated=True)
    assert "the tokenizer has no chat template, but prompts are chat messages: add chat_template.jinja" in error
    ended, cut = (plain.of(tokens, 2, "a?", is_truncated=is_truncated).tokens for is_truncated in (False, True))
    assert ended == [*cut, OWN.index("<eos>")], "a text ends as the actor ended it"


def test_an_answer_that_continues_a_message_is_one_message(folder: Path) -> None:
    write_model(folder / "other", "whole", OWN)
    write_tokenizer(folder / "other", OWN, TEMPLATE)
    messages = [{"role": "user", "content": "a?"}, {"role": "assistant", "content": "b"}]
    tokens = [ACTORS.index(letter) for letter in "a?b.c"]
    found = conversations_of(folder, "other").of(tokens, 3, messages, is_truncated=False).tokens
    assert "".join(OWN[token] for token in found) == "Q: a?;A: b.c;"


def test_tokens_that_the_model_lacks_are_named(folder: Path) -> None:
    write_model(folder / "smaller", "whole", ACTORS[:-1])
    write_tokenizer(folder / "smaller", ACTORS)
    tokens = [ACTORS.index(letter) for letter in "ab?"]
    error = refused(ConfigError, conversations_of(folder, "smaller").of, tokens, 1, "", is_truncated=True)
    assert "a response has token 6, which the model does not know (vocab_size is 6 in its config.json)" in error


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"algorithm": {"filter_groups": {"enable": True}}, "rollout": {"n": 2}}, "chooses groups by their scores"),
        ({"algorithm": {"adv_estimator": "remax"}}, "algorithm.adv_estimator remax scores greedy responses, too"),
        ({"rollout": {"environment": "env.py:Env"}}, "make episodes of several turns"),
        (
            {"reward_model": {"weight": 2.0}},
            "reward_model.weight 2.0 has no effect, as reward_model.model_path is null",
        ),
        ({"reward_model": {"offload": ["optimizer"]}}, "reward_model.offload"),
    ],
)
def test_contradictions_are_found_before_a_run(changes: dict, error: str) -> None:
    keys = {
        "model": {"path": "m"},
        "data": {"train_files": ["f"]},
        "trainer": {"output_dir": "o"},
        "reward_model": {"model_path": "r"},
        **changes,
    }
    with pytest.raises(ValueError, match=re.escape(error)):
        raise ConfigError(*config_errors(Config.model_validate(keys)))


def test_the_reward_model_scores_alone_unless_functions_are_named() -> None:
    keys = {"model": {"path": "m"}, "data": {"train_files": ["f"]}, "trainer": {"output_dir": "o"}}
    scored = keys | {"reward_model": {"model_path": "r"}}
    assert Config.model_validate(keys).reward.function == "exact_match"
    assert Config.model_validate(scored).reward.function is None
    assert Config.model_validate(scored | {"reward": {"function": "gsm8k"}}).reward.function == "gsm8k"
    assert Config.model_validate(scored | {"reward": {"clip": 2.0}}).reward.model_dump()["clip"] == 2.0
    assert not config_errors(Config.model_validate(scored))
