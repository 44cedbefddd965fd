"""Run the dry run in this process or in a new one, write a folder with all its inputs, and read the reported errors."""

import contextlib
import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from unittest.mock import patch

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from megappo.commands.plan import main
from megappo.data.prompts import Prompt, PromptDataset

REPOSITORY = Path(__file__).parents[2]
CONFIG = """\
model: {path: model, dtype: fp32}
placement: {"actor, critic": 0-3, rollout: 0-1}
actor: {parallel: {tensor: 2}, ppo_mini_batch_size: 8, ppo_epochs: 2, max_tokens_per_micro_batch: 64}
critic: {parallel: {pipeline: 2}, ppo_mini_batch_size: 16, max_tokens_per_micro_batch: 64}
rollout: {n: 3, max_response_length: 8, tensor_parallel: 2}
data: {train_files: train.jsonl, train_batch_size: 16, max_prompt_length: 24}
trainer: {output_dir: out, eval_interval: 0, total_steps: 5}
"""
HF_CONFIG = {
    "architectures": ["Qwen2ForCausalLM"],
    "num_attention_heads": 4,
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "intermediate_size": 128,
    "vocab_size": 100,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
}
LINE = '{"prompt": "1+1=", "label": "2"}\n'
WORDS = ["[UNK]", "</s>", "1", "2", "+", "="]
PLACE = re.compile(r"^error: (command line|run.yaml(:\d+)?): ")


def write_run(folder: Path) -> Path:
    """Write a config, its model without tensors, and its data."""
    core = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="[UNK]"))
    core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    PreTrainedTokenizerFast(tokenizer_object=core, eos_token="</s>", unk_token="[UNK]").save_pretrained(
        folder / "model"
    )
    (folder / "model" / "config.json").write_text(json.dumps(HF_CONFIG))
    (folder / "model" / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    (folder / "train.jsonl").write_text(LINE * 300)
    (folder / "run.yaml").write_text(CONFIG)
    return folder


def start_plan(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess:
    """Run the command in a new process."""
    variables = {name: value for name, value in os.environ.items() if name != "WORLD_SIZE"}
    return subprocess.run(
        [sys.executable, "-m", "megappo", "plan", *arguments],
        cwd=folder,
        env=variables | {"PYTHONPATH": str(REPOSITORY)} | environment,
        capture_output=True,
        text=True,
        timeout=60,
    )


def plan_here(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess:
    """Run the dry run in this process."""
    return run_here(main, folder, *arguments, **environment)


def run_here(
    command: Callable[[Sequence[str]], int], folder: Path, *arguments: str, **environment: str
) -> subprocess.CompletedProcess:
    """Run a command in this process, which has already done its slow imports."""
    out, err = io.StringIO(), io.StringIO()
    variables = {name: value for name, value in os.environ.items() if name != "WORLD_SIZE"} | environment
    with (
        contextlib.chdir(folder),
        patch.dict(os.environ, variables, clear=True),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            code = command(arguments)
        except SystemExit as end:
            code = end.code
    return subprocess.CompletedProcess(arguments, code, out.getvalue(), err.getvalue())


def errors_of(done: subprocess.CompletedProcess) -> list[str]:
    """Return the reported errors, after checking the exit code and that there is no traceback."""
    assert done.returncode == (2 if "error: " in done.stderr else 0)
    assert "Traceback" not in done.stderr and (": ready for " in done.stdout) == (done.returncode == 0)
    return [PLACE.sub("error: ", line) for line in done.stderr.splitlines()]


def all_of(dataset: PromptDataset) -> list[Prompt]:
    """Return every prompt that is kept, in the files' order."""
    return dataset.at(dataset.kept)
