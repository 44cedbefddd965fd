"""The meaning of a value head's outputs, by the files beside a component's folder."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest
from tiny_models import hf_folder

from megappo.checkpoint.folders import CheckpointError, stored_support
from megappo.config.methods import ValueSupport

SUPPORT = ValueSupport(3, (0.0, 0.5, 1.0))


def test_a_checkpoint_records_the_outputs_of_its_value_heads(tmp_path: Path) -> None:
    step = tmp_path / "step_00000002"
    step.mkdir()
    assert stored_support(step / "critic", SUPPORT) == SUPPORT, "no file records it"
    state = {"step": 2, "value_supports": {"critic": asdict(SUPPORT), "shared": asdict(ValueSupport(5))}}
    (step / "state.json").write_text(json.dumps(state))
    assert stored_support(step / "critic", None) == SUPPORT and stored_support(step / "shared", None) == ValueSupport(5)
    assert stored_support(step / "other", SUPPORT) is None, "one output"
    (step / "state.json").write_text(json.dumps({"step": 2}))
    assert stored_support(step / "critic", SUPPORT) is None, "of a run before there were several outputs"
    (step / "state.json").write_text(json.dumps({"step": 2, "value_supports": {"critic": [3]}}))
    with pytest.raises(CheckpointError, match="value_supports"):
        stored_support(step / "critic", None)


def test_a_converted_model_has_them_in_its_config(tmp_path: Path) -> None:
    folder = hf_folder(tmp_path / "model", "qwen2")
    assert stored_support(folder, SUPPORT) is None
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"value_support": asdict(SUPPORT)}))
    assert stored_support(folder, None) == SUPPORT
