"""Training files that change between two runs in one folder."""

import json
from types import SimpleNamespace

from megappo.config.loading import dump_config
from megappo.config.schema import Config
from megappo.data.records import open_records
from megappo.ppo.reward_shaping import RunningMoments
from megappo.trainer.progress import Progress


def test_a_resumed_run_reports_training_files_of_other_content(tmp_path):
    names = ["same.jsonl", "other.jsonl"]
    paths = [str(tmp_path / name) for name in names]
    for name in names:
        (tmp_path / name).write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    sections = {"model": {"path": "m"}, "data": {"train_files": paths}, "trainer": {"output_dir": str(tmp_path)}}
    config = Config.model_validate(sections | {"rollout": {}})
    exchange = SimpleNamespace(on_rank_0=lambda action: action(), merge=dict)
    checkpoint, saved = tmp_path / "step_00000003", {}
    checkpoint.mkdir()
    progress = SimpleNamespace(
        **{"config": config, "exchange": exchange, "checkpoint": checkpoint, "num_drawn": 4, "pending": ()},
        **{"kl": SimpleNamespace(state_dict=lambda: {"value": 0.1}), "reward_moments": RunningMoments()},
        **{"_models": {}, "_position": (3, -1), "_write_more": print, "data": {}},
        store=SimpleNamespace(begin=lambda step, trained, state, **more: saved.update(state, step=step)),
    )
    (checkpoint / "config.yaml").write_text(dump_config(config))
    Progress.note_data(progress, [open_records(path, None) for path in paths])
    models = SimpleNamespace(trained={}, num_mini_batches=dict)
    Progress.begin_save(progress, models, in_background=False)
    (checkpoint / "state.json").write_text(json.dumps(saved))
    assert list(Progress.changes(progress)) == []

    (tmp_path / "other.jsonl").write_text('{"prompt": "c"}\n' * 3)
    Progress.note_data(progress, [open_records(path, None) for path in paths])
    [change] = Progress.changes(progress)
    found, _, effect = change.partition("; ")
    assert found.startswith(f"{paths[1]}: 2 records, SHA-256 ") and " -> 3 records, SHA-256 " in found
    assert "may repeat records" in effect
    (checkpoint / "state.json").write_text(json.dumps({**saved, "data": {}}))
    assert list(Progress.changes(progress)) == [], "a checkpoint of an older version"
