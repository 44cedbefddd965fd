"""The folder that SGLang serves Gemma 4 from; tests/run/test_families.py has a run with it."""

from pathlib import Path

import pytest
from tiny_models import hf_folder
from tiny_shapes import GEMMA4
from transformers import AutoConfig

from megappo.config.text_files import TextFileError
from megappo.engines.served_folder import served_folder


def test_sizes_of_heads_stand_under_sglangs_names(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    model = hf_folder(tmp_path / "model", "gemma4_text", **GEMMA4)
    served = Path(served_folder(str(model)))
    config = AutoConfig.from_pretrained(served)
    assert served.parent == tmp_path and not config.is_heterogeneous
    assert (config.head_dim, config.num_key_value_heads) == (24, 2)
    assert (config.swa_head_dim, config.swa_num_key_value_heads) == (16, 4)
    assert {file.name for file in served.iterdir()} == {file.name for file in model.iterdir()}
    assert (served / "model.safetensors").samefile(model / "model.safetensors")


def test_others_are_served_from_their_own_folder(tmp_path: Path) -> None:
    for path in (hf_folder(tmp_path / "model", "qwen2"), "owner/of-the-hub"):
        assert served_folder(str(path)) == str(path)


def test_a_config_that_is_not_json_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": [')
    with pytest.raises(TextFileError, match=f"cannot use {tmp_path}/config.json: .*copy it again"):
        served_folder(str(tmp_path))
