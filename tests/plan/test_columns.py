"""The dry run of data and reward functions as other programs have them."""

import subprocess
from pathlib import Path

import pytest
from planning import errors_of
from verl_style import CHAT_TEMPLATE, write_compute_score, write_gsm8k

from megappo.data.tokenizer import load_tokenizer


@pytest.fixture
def gsm8k(run_folder: Path) -> tuple[str, ...]:
    """Return the arguments of a run with verl's GSM8K files."""
    tokenizer = load_tokenizer(str(run_folder / "model"))
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(run_folder / "model")
    write_gsm8k(run_folder / "train.parquet")
    write_compute_score(run_folder / "gsm8k.py")
    function, label = "reward.function=gsm8k.py:compute_score", "data.label_key=reward_model.ground_truth"
    lengths = (f"{name}.max_tokens_per_micro_batch=256" for name in ("actor", "critic"))
    return "run.yaml", "data.train_files=train.parquet", "data.max_prompt_length=240", *lengths, function, label


def about_data(done: subprocess.CompletedProcess[str]) -> list[str]:
    """Return errors and warnings after the first, of a chat template whose end of messages the tokenizer lacks."""
    template, *others = errors_of(done)
    assert template.startswith("warning: the chat template ends a message with '[UNK]'")
    return others


def test_verls_parquet_and_function_work_as_they_are(plan, run_folder, gsm8k):
    done = plan(run_folder, *gsm8k)
    [warning] = about_data(done)  # of a tokenizer that knows digits alone
    assert "train.parquet rows 1, 2, 3 and 97 more: the tokenizer loses at least half of the prompt's" in warning
    assert done.returncode == 0
    assert "  prompts of train.parquet: all 200\n" in done.stdout
    assert (
        "  gsm8k.py:compute_score: the response '82' to the first prompt scores 0, given data_source, extra_info\n"
        in done.stdout
    )


def test_fields_that_the_data_lack_are_reported_before_a_run(plan, run_folder, gsm8k):
    (run_folder / "mine.py").write_text("def f(prompts, responses, difficulty):\n    open('called', 'w')\n")
    has = "the file has: data_source, prompt, ability, reward_model, extra_info"
    missing = {"reward_model.truth": "data.label_key", "difficulty": "reward.function"}
    assert about_data(plan(run_folder, *gsm8k, "reward.function=mine.py:f", "data.label_key=reward_model.truth")) == [
        f"error: data.train_files: train.parquet rows 1, 2, 3 and 197 more: no field {name!r}: correct {key}, or add "
        f"it (data.on_bad_row=skip leaves such out); {has}"
        for name, key in missing.items()
    ]
    assert not (run_folder / "called").exists()


def test_a_wrong_signature_is_reported_together_with_errors_in_the_data(plan, run_folder, gsm8k):
    (run_folder / "mine.py").write_text("def f(answer):\n    return 1.0\n")
    form, label = about_data(plan(run_folder, *gsm8k, "reward.function=mine.py:f", "data.label_key=answer"))
    assert form.startswith("error: reward.function: reward function mine.py:f takes (answer); expected f(prompts, ")
    assert "train.parquet rows 1, 2, 3 and 197 more: no field 'answer': correct data.label_key" in label
