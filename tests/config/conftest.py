"""A valid run for tables of invalid changes, and checks that hold for every refusal."""

import json
import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from megappo.commands import plan

MOST_SECONDS = 3.0
HF_CONFIG = {
    "architectures": ["Qwen2ForCausalLM"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 6,
    "hidden_size": 64,
    "intermediate_size": 128,
    "vocab_size": 100,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
}
NO_TENSORS = (2).to_bytes(8, "little") + b"{}"  # as safetensors has them
PLACE = re.compile(r"error: (?:(?P<file>[^:]+\.yaml)(?::(?P<line>\d+))?|command line): ")
REMEDY = re.compile(
    r"\b(expected|did you mean|here nest it|has \w+, \w+|would|must|set|drop|remove|write|name|rename|correct|lower"
    r"|raise|choose|download|copy|create|convert|put|shorten|turn|start|save|quote|merge|make|leave|use"
    r"|is it the right file)\b"
)


@pytest.fixture
def run_folder(tmp_path, monkeypatch) -> Path:
    """A folder with everything a valid run needs, as the current one."""
    monkeypatch.chdir(tmp_path)
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(HF_CONFIG))
    (model / "model.safetensors").write_bytes(NO_TENSORS)
    words = Tokenizer(models.WordLevel({"[UNK]": 0, "</s>": 1, "1+1=": 2}, unk_token="[UNK]"))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="</s>", unk_token="[UNK]").save_pretrained(model)
    for name in ("train.jsonl", "val.jsonl"):
        (tmp_path / name).write_text('{"prompt": "1+1=", "label": "2"}\n' * 256)
    valid = {
        "model": {"path": "model"},
        "data": {"train_files": ["train.jsonl"], "val_files": ["val.jsonl"]},
        "trainer": {"output_dir": "out"},
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(valid))
    return tmp_path


@pytest.fixture
def model_config(run_folder) -> Callable[..., None]:
    """Write the model's config.json: the valid values with others over them; ... removes one."""

    def write(**changes: object) -> None:
        values = {key: value for key, value in (HF_CONFIG | changes).items() if value is not ...}
        (run_folder / "model" / "config.json").write_text(json.dumps(values))

    return write


@pytest.fixture
def refusals(run_folder, capsys) -> Callable[..., list[str]]:
    """Return the lines that the command prints about a run on 4 ranks that cannot be.

    Each is asserted to be an error with the place of the key and a remedy."""

    def refusals(*arguments: str, config: str = "run.yaml") -> list[str]:
        start = time.process_time()  # others may use the machine, too
        code = plan.main([config, *arguments, "--world-size", "4"])
        seconds = time.process_time() - start
        lines = capsys.readouterr().err.splitlines()
        assert (code, bool(lines)) == (2, True)
        assert seconds < MOST_SECONDS
        for line in lines:
            check_refusal(line)
        return [line.removeprefix("error: ") for line in lines]

    return refusals


def check_refusal(line: str) -> None:
    """It starts with a place, ends with a remedy, and the line it points to is about one of the keys it names."""
    assert (place := PLACE.match(line)), line
    assert REMEDY.search(line[place.end() :]), line
    assert line.isprintable() and len(line) < 1200
    if place["line"]:
        written = ["", *Path(place["file"]).read_text(errors="replace").split("\n")][int(place["line"])]
        dotted = re.findall(r"^[a-z_]+(?=:)|[a-z_]+(?:\.[a-z_]+)+", line[place.end() :])
        named = {name for key in dotted for name in key.split(".")}
        assert not named or named & set(re.findall(r"[a-z_]+", written)), (line, written)


@pytest.fixture
def accepted(run_folder, capsys) -> Callable[..., str]:
    """Return the output of the command about a valid run on 4 ranks."""

    def accepted(*arguments: str, config: str = "run.yaml") -> str:
        code = plan.main([config, *arguments, "--world-size", "4"])
        printed = capsys.readouterr()
        assert (code, printed.err) == (0, "")
        return printed.out

    return accepted
