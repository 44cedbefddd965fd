import json

import pytest

from megappo.commands.timeline_command import main
from megappo.observe.timeline import Interval, append_phases, drop_phases, read_timeline

ROLLOUT, REWARD = Interval("rollout", 1764204000.5, 0.25), Interval("rollout/reward", 1764204000.625, 0.0625)


def test_a_trace_has_the_phases_of_all_ranks(tmp_path, capsys):
    for rank in (0, 1):
        for step in (1, 2):
            append_phases(tmp_path, rank, step, [REWARD, ROLLOUT])
    assert read_timeline(tmp_path) == {step: {rank: [REWARD, ROLLOUT] for rank in (0, 1)} for step in (1, 2)}

    assert main([str(tmp_path), "--steps", "2", "2"]) == 0
    assert str(tmp_path / "timeline.json") in capsys.readouterr().out
    events = json.loads((tmp_path / "timeline.json").read_text())["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    assert names == {0: "rank 0", 1: "rank 1"}
    phases = [event for event in events if event["ph"] == "X"]
    assert [(event["pid"], event["args"]["step"]) for event in phases] == [(0, 2), (0, 2), (1, 2), (1, 2)]
    inner, outer = phases[:2]
    assert (outer["name"], outer["dur"], inner["ts"] - outer["ts"]) == ("rollout", 250_000, 125_000)


def test_a_resumed_run_leaves_every_step_once_whatever_its_ranks(tmp_path):
    for rank in range(3):
        for step in (1, 2, 3):
            append_phases(tmp_path, rank, step, [ROLLOUT])
    with (tmp_path / "timeline" / "rank_00001.jsonl").open("a") as file:
        file.write('{"step": 4, "pha')  # killed
    drop_phases(tmp_path, resume_step=3)
    append_phases(tmp_path, 0, 3, [ROLLOUT])
    append_phases(tmp_path, 1, 3, [ROLLOUT])
    assert {step: sorted(ranks) for step, ranks in read_timeline(tmp_path).items()} == {
        1: [0, 1, 2],
        2: [0, 1, 2],
        3: [0, 1],
    }


def test_a_folder_without_a_timeline_is_named(tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        main([str(tmp_path)])
    assert f"{tmp_path} has no timeline: " in capsys.readouterr().err
    append_phases(tmp_path, 0, 3, [ROLLOUT])
    with pytest.raises(SystemExit, match="2"):
        main([str(tmp_path), "--steps", "4", "9"])
    assert f"--steps 4 9: {tmp_path} has the steps 3 to 3" in capsys.readouterr().err
