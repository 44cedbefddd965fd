"""The converter on its command line: bitwise round trips, transformers as the oracle, and refusals."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from commands import CONVERT, Result, assert_equal, contents, convert, run, tensors_of
from safetensors.torch import save_file
from tiny_models import hf_folder, sequences
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification
from vision_rows import VISION, vision_folder


@pytest.fixture(scope="module")
def qwen2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model in several shards, with a tokenizer file beside it."""
    folder = hf_folder(tmp_path_factory.mktemp("hf") / "qwen2", "qwen2")
    model = AutoModelForCausalLM.from_pretrained(folder)
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size=40_000)
    (folder / "tokenizer.json").write_text('{"a": 1}')
    return folder


@pytest.fixture(scope="module")
def megatron(qwen2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model, converted."""
    folder = tmp_path_factory.mktemp("megatron") / "qwen2"
    printed = convert("hf-to-megatron", qwen2, folder)
    assert printed == f"wrote {folder}: 51 tensors, 37,088 parameters, 0.14 MiB in fp32\n"
    return folder


# --- there and back ---


@pytest.mark.parametrize(
    ("family", "dtype", "tied"),
    [("llama", torch.float32, False), ("qwen3", torch.bfloat16, False), ("qwen2", torch.bfloat16, True)],
)
def test_round_trip_is_bit_equal(tmp_path: Path, family: str, dtype: torch.dtype, tied: bool) -> None:
    source = hf_folder(tmp_path / "source", family, tie_word_embeddings=tied)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype).eval()
    model.save_pretrained(source)
    convert("hf-to-megatron", source, tmp_path / "megatron")
    convert("megatron-to-hf", tmp_path / "megatron", tmp_path / "back")
    assert_equal(tensors_of(tmp_path / "back"), tensors_of(source))
    again, info = AutoModelForCausalLM.from_pretrained(tmp_path / "back", output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert again.dtype == dtype
    tokens = sequences()[0][None]
    assert torch.equal(again.eval()(tokens).logits, model(tokens).logits)


@pytest.mark.slow
@pytest.mark.parametrize("family", VISION)
def test_a_vision_tower_is_taken_from_the_initial_folder(tmp_path: Path, family: str) -> None:
    source, middle, back = (tmp_path / name for name in ("source", "megatron", "back"))
    vision_folder(source, family)
    printed = convert("hf-to-megatron", source, middle)
    assert f"its vision tower is not converted: convert back with --hf-config {source}\n" in printed
    done = run(CONVERT, "megatron-to-hf", "--input", middle, "--output", back)
    assert done.returncode == 2 and f"{middle} lacks the vision tower, which training does not change" in done.stderr
    convert("megatron-to-hf", middle, back, "--hf-config", source)
    assert_equal(tensors_of(back), tensors_of(source))
    assert "equal to the bit: " in convert("verify", middle, back, "--hf-config", source)


def test_any_layout_reads_what_any_other_wrote(qwen2: Path, tmp_path: Path) -> None:
    convert("hf-to-megatron", qwen2, tmp_path / "tensor", "--tensor", 2, ranks=2, torchrun=True)
    assert len(list((tmp_path / "tensor").glob("__1_*.distcp"))) > 0, "the second rank wrote nothing"
    convert("megatron-to-hf", tmp_path / "tensor", tmp_path / "back", "--pipeline", 2, ranks=2)
    assert_equal(tensors_of(tmp_path / "back"), tensors_of(qwen2))
    assert (tmp_path / "back" / "tokenizer.json").read_text() == '{"a": 1}'
    printed = convert("verify", qwen2, tmp_path / "tensor")
    assert printed == "equal to the bit: 51 tensors, 37,088 parameters\n"


def test_a_clusters_variables_make_no_rank(qwen2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kubeflow sets some of torchrun's variables for every process of a pod."""
    for name, value in {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "head", "MASTER_PORT": "23456"}.items():
        monkeypatch.setenv(name, value)
    convert("hf-to-megatron", qwen2, tmp_path / "megatron")
    convert("verify", qwen2, tmp_path / "megatron")


def test_another_dtype(qwen2: Path, megatron: Path, tmp_path: Path) -> None:
    printed = convert("megatron-to-hf", megatron, tmp_path / "bf16", "--dtype", "bf16")
    assert printed.endswith("0.07 MiB in bf16\n")
    assert_equal(tensors_of(tmp_path / "bf16"), {name: tensor.bfloat16() for name, tensor in tensors_of(qwen2).items()})
    config = json.loads((tmp_path / "bf16" / "config.json").read_text())
    assert config["dtype"] == "bfloat16"
    convert("verify", qwen2, tmp_path / "bf16", "--dtype", "bf16")
    found = run(CONVERT, "verify", "--input", qwen2, "--output", tmp_path / "bf16")
    assert found.returncode == 1
    assert "model.norm.weight: dtype float32 against bfloat16\n" in found.stdout
    assert found.stdout.endswith("51 differences\n")


def test_verify_names_every_difference(qwen2: Path, megatron: Path, tmp_path: Path) -> None:
    tensors = tensors_of(qwen2)
    tensors["model.norm.weight"][3] += 0.5
    tensors["lm_head.weight"] = tensors["lm_head.weight"][:90].clone()
    tensors["model.embed_tokens.weight"][0, :2] = -0.0  # equal to 0.0, but not to the bit
    del tensors["model.layers.2.self_attn.k_proj.bias"]
    tensors["model.extra"] = torch.ones(1)
    other = tmp_path / "other"
    shutil.copytree(qwen2, other, ignore=shutil.ignore_patterns("*.safetensors*"))
    save_file(tensors, other / "model.safetensors")
    for first, second in ((qwen2, other), (megatron, other)):
        found = run(CONVERT, "verify", "--input", first, "--output", second)
        assert found.returncode == 1, found.stderr
        assert sorted(found.stdout.splitlines()) == [
            "5 differences",
            "lm_head.weight: shape [91, 32] against [90, 32]",
            "model.embed_tokens.weight: 2 of 2912 elements differ, by up to "
            + f"{tensors_of(qwen2)['model.embed_tokens.weight'][0, :2].double().abs().max():.3g}",
            f"model.extra: only in {other}",
            f"model.layers.2.self_attn.k_proj.bias: only in {first}",
            "model.norm.weight: 1 of 32 elements differ, by up to 0.5",
        ]


def test_two_megatron_folders(qwen2: Path, megatron: Path, tmp_path: Path) -> None:
    convert("hf-to-megatron", qwen2, tmp_path / "cut", "--tensor", 2, ranks=2)  # its vocabulary has a row of padding
    assert convert("verify", megatron, tmp_path / "cut") == "equal to the bit: 10 tensors, 37,088 elements\n"
    tensors = tensors_of(qwen2)
    tensors["model.layers.2.mlp.up_proj.weight"][5, 7] -= 0.25
    tensors["model.layers.3.mlp.up_proj.weight"][:2] = 0.0
    tensors["lm_head.weight"][90, 1:3] = torch.tensor([3.0, 1.0])
    other = tmp_path / "other"
    shutil.copytree(qwen2, other, ignore=shutil.ignore_patterns("*.safetensors*"))
    save_file(tensors, other / "model.safetensors")
    convert("hf-to-megatron", other, tmp_path / "changed")
    found = run(CONVERT, "verify", "--input", tmp_path / "changed", "--output", tmp_path / "cut")
    assert found.returncode == 1, found.stderr
    rows = tensors_of(qwen2)["model.layers.3.mlp.up_proj.weight"][:2]
    largest = max(0.25, rows.abs().max().item())
    changed = 3.0 - tensors_of(qwen2)["lm_head.weight"][90, 1].item()
    assert found.stdout.splitlines() == [
        f"decoder.layers.mlp.linear_fc1.weight: {1 + rows.count_nonzero()} of 12288 elements differ, "
        f"by up to {largest:.3g}",
        f"output_layer.weight: 2 of 2912 elements differ, by up to {changed:.3g}",
        "2 differences",
    ]
    found = run(CONVERT, "verify", "--input", megatron, "--output", tmp_path / "cut", "--tensor", 2, ranks=2)
    refused(found, 2, "two Megatron folders are compared in one process")
    convert("hf-to-megatron", qwen2, tmp_path / "bf16", "--dtype", "bf16")
    convert("verify", tmp_path / "cut", tmp_path / "bf16", "--dtype", "bf16")
    found = run(CONVERT, "verify", "--input", tmp_path / "bf16", "--output", megatron)
    assert found.stdout.endswith("10 differences\n") and ": dtype bfloat16 against float32\n" in found.stdout


# --- critics ---


def test_a_new_critic(qwen2: Path, tmp_path: Path) -> None:
    printed = convert("hf-to-megatron", qwen2, tmp_path / "critic", "--value-model")
    assert printed.startswith(f"{qwen2} has no value head: a new one is drawn\n")
    convert("megatron-to-hf", tmp_path / "critic", tmp_path / "back")
    tensors, expected = tensors_of(tmp_path / "back"), tensors_of(qwen2)
    assert tensors.pop("score.weight").std() > 0
    assert tensors.pop("score.bias") == 0
    expected.pop("lm_head.weight")
    assert_equal(tensors, expected)
    convert("hf-to-megatron", tmp_path / "back", tmp_path / "again", "--value-model")
    convert("verify", tmp_path / "back", tmp_path / "again")


def test_a_reward_model_with_a_bias(qwen2: Path, tmp_path: Path) -> None:
    model, _ = AutoModelForTokenClassification.from_pretrained(qwen2, num_labels=1, output_loading_info=True)
    model.score.weight.data.normal_()
    model.score.bias.data.fill_(0.75)
    model.save_pretrained(tmp_path / "reward")
    command = ("hf-to-megatron", "--input", tmp_path / "reward", "--output", tmp_path / "critic")
    refused(run(CONVERT, *command), 2, "is a critic or a reward model: --value-model converts it")
    convert("hf-to-megatron", tmp_path / "reward", tmp_path / "critic", "--value-model")
    convert("verify", tmp_path / "critic", tmp_path / "reward")
    convert("megatron-to-hf", tmp_path / "critic", tmp_path / "back")
    again, info = AutoModelForTokenClassification.from_pretrained(tmp_path / "back", output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    tokens = sequences()[0][None]
    # The last bits of a product depend on where a mapped file has its tensors.
    torch.testing.assert_close(again.eval()(tokens).logits, model.eval()(tokens).logits, rtol=0, atol=1e-5)
    assert again(tokens).logits.shape == (1, 5, 1)
    assert_equal(tensors_of(tmp_path / "back"), tensors_of(tmp_path / "reward"))


def test_a_critic_of_several_outputs(qwen2: Path, tmp_path: Path) -> None:
    model, _ = AutoModelForTokenClassification.from_pretrained(qwen2, num_labels=3, output_loading_info=True)
    model.score.weight.data.normal_()
    model.score.bias.data.normal_()
    model.config.value_support = {"size": 3, "centers": [0.0, 0.5, 1.0]}
    model.save_pretrained(tmp_path / "critic")
    convert("hf-to-megatron", tmp_path / "critic", tmp_path / "megatron", "--value-model")
    convert("verify", tmp_path / "megatron", tmp_path / "critic")
    convert("megatron-to-hf", tmp_path / "megatron", tmp_path / "back")
    again, info = AutoModelForTokenClassification.from_pretrained(tmp_path / "back", output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert again.num_labels == 3 and again.config.value_support == model.config.value_support
    assert_equal(tensors_of(tmp_path / "back"), tensors_of(tmp_path / "critic"))
    model.config.value_support = None
    model.save_pretrained(tmp_path / "classifier")
    command = ("hf-to-megatron", "--input", tmp_path / "classifier", "--output", tmp_path / "new", "--value-model")
    refused(run(CONVERT, *command), 2, "gives 3 numbers per token, expected 1")


# --- what it refuses ---


def refused(done: Result, code: int, message: str) -> None:
    """Check that a conversion ended with this code and one line of error message."""
    assert done.returncode == code, done.stdout + done.stderr
    assert message in done.stderr
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1, done.stderr


def damaged(qwen2: Path, name: str, folder: Path) -> Path:
    """Return a copy of the model with a defect."""
    shutil.copytree(qwen2, folder)
    shard = sorted(folder.glob("*.safetensors"))[1]
    config = json.loads((folder / "config.json").read_text())
    if name == "truncated":
        os.truncate(shard, shard.stat().st_size // 2)
    elif name == "missing shard":
        shard.unlink()
    elif name == "wrong shape":
        config["intermediate_size"] = 40
    elif name == "wrong family":
        config["architectures"] = ["Qwen3ForCausalLM"]
    elif name == "unsupported family":
        config["architectures"] = ["OPTForCausalLM"]
    elif name == "incomplete config":
        del config["hidden_size"]
    (folder / "config.json").write_text(json.dumps(config) if name != "damaged config" else "{")
    return folder


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("truncated", "is damaged or truncated"),
        ("missing shard", "lacks model-00002-of-"),
        ("wrong shape", "has shape [32, 48], but its config.json gives [32, 40]"),
        (
            "wrong family",
            "not hold the tensors its config.json describes: missing model.layers.0.self_attn.k_norm",
        ),
        ("unsupported family", "config.json is of architecture OPTForCausalLM; this version trains LlamaForCausalLM"),
        ("incomplete config", "config.json lacks hidden_size"),
        ("damaged config", "config.json: it is not valid JSON"),
    ],
)
def test_a_damaged_model_is_refused_and_the_output_kept(qwen2: Path, tmp_path: Path, name: str, message: str) -> None:
    source, target = damaged(qwen2, name, tmp_path / "source"), tmp_path / "target"
    target.mkdir()
    (target / "precious").write_text("kept")
    refused(run(CONVERT, "hf-to-megatron", "--input", source, "--output", target, "--force"), 2, message)
    assert contents(tmp_path / "target") == {"precious": b"kept"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source", "target"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("truncated", "is cut off: it has"),
        ("missing", "is missing; copy the checkpoint again"),
        ("another vocabulary", "has 91 rows, but config.json's vocab_size 80 gives 80"),
        ("another family", "missing decoder.layers.self_attention.k_layernorm.weight"),
        ("foreign code", "it may be an attack"),
        ("no config", "carries no config.json: name the Hugging Face folder the model started from with --hf-config"),
    ],
)
def test_a_damaged_checkpoint_is_refused_and_the_output_kept(
    megatron: Path, tmp_path: Path, name: str, message: str
) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    shutil.copytree(megatron, source)
    shard = sorted(source.glob("*.distcp"))[0]
    config = json.loads((source / "config.json").read_text())
    if name == "truncated":
        os.truncate(shard, shard.stat().st_size // 2)
    elif name == "missing":
        shard.unlink()
    elif name == "another vocabulary":
        (source / "config.json").write_text(json.dumps(config | {"vocab_size": 80}))
    elif name == "another family":
        (source / "config.json").write_text(json.dumps(config | {"architectures": ["Qwen3ForCausalLM"]}))
    elif name == "foreign code":
        (source / ".metadata").write_bytes(b"cos\nsystem\n(S'touch " + str(tmp_path / "run").encode() + b"'\ntR.")
    else:
        (source / "config.json").unlink()
    target.mkdir()
    (target / "precious").write_text("kept")
    refused(run(CONVERT, "megatron-to-hf", "--input", source, "--output", target, "--force"), 2, message)
    assert contents(target) == {"precious": b"kept"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source", "target"]


def test_usage_errors(qwen2: Path, megatron: Path, tmp_path: Path) -> None:
    taken = tmp_path / "taken"
    taken.mkdir()
    (taken / "precious").write_text("kept")
    command = ("hf-to-megatron", "--input", qwen2, "--output")
    refused(run(CONVERT, *command, taken), 2, "is not empty: --force replaces it")
    refused(run(CONVERT, *command, qwen2 / "inside", "--force"), 2, "lie in each other")
    refused(run(CONVERT, *command, tmp_path / "new", ranks=2, torchrun=True), 2, "needs 1 processes, this run has 2")
    command = ("megatron-to-hf", "--input", megatron, "--output", tmp_path / "new")
    refused(run(CONVERT, *command, "--value-model"), 2, "has no value head")
    twice = ("hf-to-megatron", "--input", megatron, "--output", tmp_path / "new")
    refused(run(CONVERT, *twice), 2, "is a Megatron folder already: megatron-to-hf, or reshard, takes it")
    mistyped = ("hf-to-megatron", "--input", qwen2.parent / "qwen3", "--output", tmp_path / "new")
    refused(run(CONVERT, *mistyped), 2, f"no folder {qwen2.parent / 'qwen3'}; {qwen2.parent} has {qwen2.name}")
    assert contents(tmp_path) == {"taken/precious": b"kept"}


def test_force_replaces_the_whole_folder(megatron: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir()
    (target / "stale").write_text("old")
    convert("megatron-to-hf", megatron, target, "--force")
    assert not (target / "stale").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["target"]


def test_an_output_that_cannot_be_made(qwen2: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    command = ("hf-to-megatron", "--input", qwen2, "--output")
    refused(run(CONVERT, *command, tmp_path / "file" / "target"), 2, f"{tmp_path / 'file'} is a file: name another")
    refused(run(CONVERT, *command, tmp_path / "file"), 2, "is a file: name a folder to write to")
