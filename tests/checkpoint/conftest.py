"""Models for the checkpoints of these tests."""

from pathlib import Path

import pytest
from ppo_engines import with_score
from tiny_models import hf_folder


@pytest.fixture
def folders(tmp_path: Path) -> dict[str, Path]:
    """Hugging Face folders of an actor and a critic."""
    critic = with_score(hf_folder(tmp_path / "critic", "qwen2"))
    return {"actor": hf_folder(tmp_path / "actor", "qwen2"), "critic": critic}
