"""Evaluate a checkpoint and a Hugging Face folder by `megappo evaluate`."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from commands import contents
from commands import run as run_tool
from ports import free_port
from program import REPOSITORY, Program, logged

GAME = """
class Game:
    columns = ("label",)

    def reset(self, row):
        self.turns = 0

    def step(self, message):
        self.turns += 1
        tokens = len(message["token_ids"])
        return "8=8=8=8=", tokens, self.turns == 3, {"tokens": tokens}
"""
OBSERVATION = "8=8=8=8="  # so long that the policy, which writes any token, does not write it by chance
pytestmark = pytest.mark.timeout(600)


def evaluated(source: Path, config: Path, folder: Path, *arguments: str) -> dict:
    """Run the evaluation and return its evaluation.json; the run's own files must not change."""
    before = {path: path.read_bytes() for path in source.parents[1].rglob("metrics.jsonl")}
    own = folder / "out" / "evaluations" / source.name
    command, words = (
        (sys.executable, "-m", "megappo", "evaluate"),
        (source, config, f"--output={folder / 'out'}", *arguments),
    )
    with Program(folder / "program", *words, command=command) as program:
        assert program.wait() == 0, program.output
    assert {path: path.read_bytes() for path in before} == before
    assert {path.name for path in (folder / "out").iterdir()} == {"evaluations"}
    assert not (own / "checkpoints").exists() and (own / "report.html").is_file()
    return json.loads((own / "evaluation.json").read_text())


def held_out(metrics: dict) -> dict:
    return {name: value for name, value in metrics.items() if name.startswith("val/held_out/")}


def samples(file: Path, dataset: str) -> list[dict]:
    """Return the samples of a data set's evaluation, without the step."""
    found = [json.loads(line) for line in file.read_text().splitlines()]
    return [{**one, "step": None} for one in found if one["dataset"] == dataset]


def test_a_checkpoint_is_evaluated_as_the_run_did(config, run, folder):
    """Greedy evaluation needs only the actor, with the checkpoint's weights and not the weights that training started
    from.

    A game that was no part of the run is played, too: its score is the length of the turn that ends it.
    """
    (folder / "game.py").write_text(GAME)
    game = {"files": str(config.parent / "held_out.jsonl"), "environment": f"{folder / 'game.py'}:Game"}
    game |= {"reward": "none", "n": 4, "temperature": 10.0, "max_response_length": 18}
    checkpoint, words = run / "checkpoints" / "step_00000010", f"eval.datasets.game={json.dumps(game)}"
    found, own = evaluated(checkpoint, config, folder, words), folder / "out" / "evaluations" / checkpoint.name
    played = {name: value for name, value in found["metrics"].items() if name.startswith("val/game/")}
    assert not any("episode" in name for name in held_out(found["metrics"]))
    assert 1 < played["val/game/episode/turns"] <= 3 and played["val/game/score/max"] > 1
    with_a_whole_turn = 32 * played["val/game/score/mean"] / played["val/game/episode/part/tokens"]
    assert 1 <= round(with_a_whole_turn) <= 32 and with_a_whole_turn == pytest.approx(round(with_a_whole_turn))
    assert (found["weights"], found["step"]) == (str(checkpoint), 10)
    assert held_out(found["metrics"]) == held_out(logged(run)[-1]) == held_out(logged(own)[0])
    last = samples(run / "rollouts" / "step_00000010.jsonl", "held_out")
    [shown] = (own / "rollouts").iterdir()
    assert len(last) == 8 and samples(shown, "held_out") == last
    games = samples(shown, "game")
    assert len(games) == 8
    assert [one for one in games if OBSERVATION in one["response"] and one["score"] <= 0] == []


@pytest.mark.slow  # the checkpoint's has all but the other weights
def test_a_hugging_face_folder_is_evaluated_as_the_run_did(config, run, folder):
    found = evaluated(run / "hf_actor", config, folder)
    assert (found["weights"], found["step"]) == (str(run / "hf_actor"), 0)
    assert held_out(found["metrics"]) == held_out(logged(run)[-1])


@pytest.mark.slow  # two starts of an engine
def test_servers_get_the_model_that_is_evaluated(config, run, folder):
    """The servers have held another model before."""
    port = str(free_port())
    model = config.parent / "model"
    command = [sys.executable, "-m", "megappo", "serve", model, "--max-total-tokens", "4096", "--port", port]
    with subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1"}) as server:
        try:
            engines = f"rollout.engines=[http://127.0.0.1:{port}]"
            found = evaluated(run / "hf_actor", config, folder, engines)
        finally:
            server.terminate()
    assert held_out(found["metrics"]) == held_out(logged(run)[-1])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: None, "no folder"),
        (
            lambda path: path.mkdir(),
            "is neither a run's folder with checkpoints/, nor a checkpoint (step_XXXXXXXX",
        ),
        (lambda path: (path / "checkpoints" / "step_00000003").mkdir(parents=True), "is neither a run's folder"),
        (
            lambda path: (path.mkdir(), (path / ".metadata").touch()),
            "is a Megatron folder by itself: name the checkpoint that it is in, or convert it",
        ),
    ],
)
def test_what_is_no_model_is_refused(config, tmp_path, make, message):
    make(tmp_path / "source")
    before = contents(tmp_path)
    done = run_tool(REPOSITORY / "tools" / "evaluate.py", tmp_path / "source", config)
    assert done.returncode == 2 and done.stdout == ""
    [line] = done.stderr.splitlines()
    assert line.startswith("error: ") and str(tmp_path / "source") in line and message in line
    assert contents(tmp_path) == before
