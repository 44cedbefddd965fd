"""Where in the data a run goes on, by its checkpoint."""

import pytest

from megappo.config.loading import dump_config
from megappo.config.schema import Config
from megappo.trainer.progress import prompts_drawn

SIZES = ({"train_batch_size": 256}, {"train_batch_size": 128, "gen_batch_size": 256})


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("state", [{"prompts_drawn": 25_600}, {"num_drawn": 100}, {}])
def test_a_checkpoint_tells_prompts_or_batches_of_its_own_size(tmp_path, sizes, state):
    config = {"model": {"path": "m"}, "data": {"train_files": ["f"], **sizes}, "trainer": {"output_dir": "o"}}
    (tmp_path / "config.yaml").write_text(dump_config(Config.model_validate(config)))
    assert prompts_drawn(tmp_path, state, 100) == 25_600
