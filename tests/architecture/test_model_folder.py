"""Files of a model's folder that are read and exported, and folders that hold no model."""

import contextlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

from megappo.architecture.model_folder import INDEX, SINGLE, check_companions, companions, other_kind, tensor_files
from megappo.config.text_files import TextFileError
from megappo.weights.hf_folder import copy_companions


def put(folder: Path, names: str) -> Path:
    """Files by their paths, such as "config.json original/params.json"."""
    for name in names.split():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("{}")
    return folder


def save(path: Path, names: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: torch.zeros(2) for name in names.split()}, path)


def index(folder: Path, **files: str) -> None:
    """An index that lists tensors by the stem of their file."""
    weight_map = {name: f"{stem}.safetensors" for stem, names in files.items() for name in names.split()}
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))


@contextlib.contextmanager
def another_user() -> Iterator[None]:
    """This process as a user who owns nothing, where it is root's."""
    is_root = os.geteuid() == 0
    if is_root:
        os.seteuid(4242)
    try:
        yield
    finally:
        if is_root:
            os.seteuid(0)


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that any user may enter, as pytest's own are not."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


def test_a_shard_may_hold_more_than_the_index_lists_of_it(tmp_path: Path) -> None:
    """transformers loads such tensors, and finds tensors that the index has in another shard."""
    save(tmp_path / "one.safetensors", "a.weight model.rotary_emb.inv_freq")
    save(tmp_path / "two.safetensors", "b.weight c.weight")
    index(tmp_path, one="a.weight c.weight", two="b.weight")
    assert tensor_files(tmp_path) == {
        "a.weight": "one.safetensors",
        "model.rotary_emb.inv_freq": "one.safetensors",
        "b.weight": "two.safetensors",
        "c.weight": "two.safetensors",
    }


def test_a_folder_that_transformers_saved_again_as_one_file(tmp_path: Path) -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1}
    config = AutoConfig.for_model("llama", vocab_size=20, num_key_value_heads=1, **sizes)
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path, max_shard_size=2000)
    assert tensor_files(tmp_path).keys() == model.state_dict().keys()
    model.save_pretrained(tmp_path)
    assert (tmp_path / INDEX).is_file() and (tmp_path / SINGLE).is_file(), "transformers removes the index now"
    with pytest.raises(TextFileError, match=rf"holds {SINGLE}.* and {INDEX}.*: remove the one that is out"):
        tensor_files(tmp_path)


def test_one_file_beside_whole_shards_is_refused_unless_the_index_names_it(tmp_path: Path) -> None:
    save(tmp_path / SINGLE, "a b")
    save(tmp_path / "one.safetensors", "a b")
    index(tmp_path, one="a b")
    with pytest.raises(TextFileError, match=f"which transformers reads, and {INDEX}, which SGLang reads: remove the"):
        tensor_files(tmp_path)
    index(tmp_path, model="a b")
    assert tensor_files(tmp_path) == {"a": SINGLE, "b": SINGLE}


def test_a_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    save(tmp_path / SINGLE, "a b")
    save(tmp_path / "consolidated.safetensors", "layers.0.wq")
    assert tensor_files(tmp_path) == {"a": SINGLE, "b": SINGLE}
    save(tmp_path / "model.fp16.safetensors", "b")  # SGLang would read it, too
    with pytest.raises(TextFileError, match=rf"model\.fp16\.safetensors holds b, as {SINGLE} does: remove"):
        tensor_files(tmp_path)
    shards = tmp_path / "shards"
    save(shards / "one.safetensors", "a b")
    save(shards / "two.safetensors", "b c")
    index(shards, one="a b", two="c")
    with pytest.raises(TextFileError, match=r"two\.safetensors holds b, as one\.safetensors does: remove"):
        tensor_files(shards)


DAMAGED = {
    "": "is damaged or truncated",
    "<!DOCTYPE html><html>not found</html>": "is damaged or truncated",
    "PK\3\4 a zip of torch.save": "is damaged or truncated",
    "version https://git-lfs.github.com/spec/v1\noid sha256:1\n": "is a pointer of Git LFS, not the file: download it",
}


@pytest.mark.parametrize(("content", "message"), DAMAGED.items(), ids=range(len(DAMAGED)))
def test_a_file_that_is_no_safetensors(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / SINGLE).write_text(content)
    with pytest.raises(TextFileError, match=message):
        tensor_files(tmp_path)


@pytest.mark.parametrize("left", [-1, 4, 12, 100])
def test_a_shard_that_is_cut_off(tmp_path: Path, left: int) -> None:
    save(tmp_path / "one.safetensors", "a b c")
    index(tmp_path, one="a b c")
    content = (tmp_path / "one.safetensors").read_bytes()
    (tmp_path / "one.safetensors").write_bytes(content[:left])
    with pytest.raises(TextFileError, match=r"one\.safetensors .* is damaged or truncated"):
        tensor_files(tmp_path)


def test_what_another_user_keeps_to_himself_is_named(open_folder: Path) -> None:
    save(open_folder / SINGLE, "a")
    put(open_folder, "tokenizer.json README.md")
    for name in (SINGLE, "tokenizer.json", "README.md"):
        (open_folder / name).chmod(0)
    with another_user():
        with pytest.raises(TextFileError, match=rf"cannot read .*/{SINGLE} \(Permission denied\): let this user"):
            tensor_files(open_folder)
        with pytest.raises(TextFileError, match=r"cannot read .*/tokenizer.json \(Permission denied\): let this user"):
            check_companions(open_folder)
    (open_folder / "tokenizer.json").unlink()
    with another_user():
        check_companions(open_folder)  # nobody needs the README
    open_folder.chmod(0o711)
    with another_user(), pytest.raises(PermissionError):
        other_kind(open_folder)


def test_a_link_to_a_file_that_is_gone_is_named(tmp_path: Path) -> None:
    """As a Hugging Face cache has them after its blobs were removed."""
    for name in (SINGLE, "tokenizer.json"):
        (tmp_path / name).symlink_to("../../blobs/0123")
    for name, check in ((SINGLE, tensor_files), ("tokenizer.json", check_companions)):
        with pytest.raises(TextFileError, match=rf"cannot read .*/{name} \(No such file or directory\): .*download"):
            check(tmp_path)


KINDS = {
    "adapter_config.json adapter_model.safetensors": "holds an adapter, .*/adapter_config.json: merge it",
    "adapter_model.bin": "holds an adapter, .*/adapter_model.bin: merge it",
    "config.json adapter_config.json model.safetensors": "holds an adapter, .*/adapter_config.json: merge it .* remove",
    "refs/main snapshots/01ab/config.json blobs/1": "is a repository in a Hugging Face cache: name .*/snapshots/01ab$",
    "models--acme--a/refs/main": "is a Hugging Face cache: name .*/models--acme--a/snapshots/REVISION",
    "config.yaml metrics.jsonl hf_actor/config.json checkpoints/latest": "is the output folder of a run: .*/hf_actor$",
    "latest step_00000002/state.json": "holds training checkpoints, .*/step_00000002: name the run's hf_actor, or",
    "state.json actor/metadata.json": "is a training checkpoint: name the run's hf_actor, or convert",
    ".metadata metadata.json common.pt config.json": "is a Megatron checkpoint: set dist_checkpointing_path",
    "latest_checkpointed_iteration.txt iter_0000001/x": "holds Megatron checkpoints: set dist_checkpointing_path",
    "latest zero_to_fp32.py global_step1/x": "is a DeepSpeed checkpoint: convert it to safetensors",
    "fsdp_config.json model_world_size_2_rank_0.pt huggingface/config.json": "is a checkpoint of FSDP shards: merge",
    "model_index.json unet/config.json": "holds a diffusion pipeline: choose a language model",
    "config.json model-Q4_K_M.gguf": "holds GGUF weights, .*/model-Q4_K_M.gguf: download",
    "checkpoint-5/config.json checkpoint-9/config.json": "holds the folders of models: .*/checkpoint-5/config.json",
    "params.json consolidated.00.pth": "holds weights in their author's format, .*/consolidated.00.pth:",
    "config.json consolidated.safetensors": "holds weights in their author's format, .*/consolidated.safetensors",
    "config.json pytorch_model.bin.index.json": "holds weights as pickles, .*/pytorch_model.bin.index.json: save",
    "config.json tokenizer.json model.pth": "holds weights as pickles, .*/model.pth: save",
}


@pytest.mark.parametrize(("names", "words"), KINDS.items())
def test_what_a_folder_is_instead_of_a_model(tmp_path: Path, names: str, words: str) -> None:
    found = other_kind(put(tmp_path, names))
    assert found is not None and re.match(words, found), found


MODELS = (
    "config.json model.safetensors pytorch_model.bin consolidated.safetensors original/params.json training_args.bin",
    "config.json model.safetensors.index.json model-00001-of-00002.safetensors adapter/adapter_config.json model.gguf",
    "config.json tokenizer.json",  # a download that is not complete
    "",
)


@pytest.mark.parametrize("names", MODELS)
def test_a_folder_that_is_a_model_or_a_part_of_one(tmp_path: Path, names: str) -> None:
    assert other_kind(put(tmp_path, names)) is None


GO_OUT = (
    "added_tokens.json additional_chat_templates/rag.jinja additional_chat_templates/tool_use.jinja "
    "chat_template.jinja custom_generate/generate.py generation_config.json LICENSE merges.txt modeling_own.py "
    "preprocessor_config.json qwen.tiktoken sentencepiece.bpe.model special_tokens_map.json tekken.json "
    "tokenization_own.py tokenizer.4.0.json tokenizer.json tokenizer.model.v3 tokenizer_config.json vocab.txt"
)
STAY = (
    "config.json model-00001-of-00002.safetensors model.safetensors.index.json pytorch_model.bin.index.json README.md "
    ".gitattributes .cache/huggingface/x training_args.bin optimizer.pt original/tokenizer.model runs/x train.jsonl"
)


def test_all_that_a_tokenizer_or_generation_may_need_goes_out_with_an_export(tmp_path: Path) -> None:
    source = put(tmp_path / "source", f"{GO_OUT} {STAY}")
    assert sorted(map(str, companions(source)), key=str.lower) == sorted(GO_OUT.split(), key=str.lower)
    target = put(tmp_path / "target", "config.json")
    (target / "generation_config.json").write_text("written before")
    copy_companions(source, target)
    written = {str(path.relative_to(target)) for path in target.rglob("*") if path.is_file()}
    assert written == {*GO_OUT.split(), "config.json"}
    assert (target / "generation_config.json").read_text() == "written before"
