"""plan --gpu with engines that run ahead: two sides of a step, splits of the GPUs, and the queue's host memory."""

import json
import re
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from planning import REPOSITORY, plan_here
from published_models import published_folders

from megappo.engines.generations import Generation
from megappo.lab.estimate.gpu_memory import QUEUED_TOKEN_BYTES
from megappo.rollouts.sample_rows import Segment

CLUSTER, NODE = "qwen2.5_32b_64node.yaml", "qwen2.5_7b_critic_7b_8gpu.yaml"
Estimates = Callable[..., str]
TAKING_TURNS = """\
estimated seconds of a step in which every row has the maximum length
                 seconds  share  MFU
  rollout          119.5    55%
  old_log_probs     16.8     8%  31%
  values             3.1     1%  36%
  ref_log_probs     16.7     8%  31%
  update_actor      51.8    24%  30%
  update_critic     10.1     5%  33%
  sync              0.31     0%
  together         218.3
  a sync sends 771 tensors, assuming 80 us each besides their bytes
  at the start ranks make the models' 1,014 process groups, in an assumed 33.7 s
  105 steps: 6.4 hours, without evaluations and saves
"""
"""Printed before engines could run ahead."""


@pytest.fixture(scope="module")
def estimates(tmp_path_factory: pytest.TempPathFactory) -> Estimates:
    """Return what the plan of a config prints."""
    folder = published_folders(tmp_path_factory.mktemp("published"))
    return lambda name, *words: plan_here(folder, str(REPOSITORY / "configs" / name), "--gpu", "h100", *words).stdout


def split(first: int, last: int, max_staleness: int, *more: str) -> list[str]:
    """Return overrides that give the engines the ranks from `first` on."""
    models = [f"placement.{name}=0-{first - 1}" for name in ("actor", "critic")]
    return [*models, f"placement.rollout={first}-{last}", f"rollout.max_staleness={max_staleness}", *more]


def seconds_of(text: str) -> dict[str, float]:
    """Return the seconds of the table's rows."""
    table = text.partition("seconds of a step")[2].partition("steps:")[0]
    rows = re.findall(r"^  (\w+) +([\d,.]+)(?: |$)", table, re.MULTILINE)
    return {name: float(number.replace(",", "")) for name, number in rows}


def lane(text: str, side: str) -> list[tuple[str, int]]:
    """Return the blocks of a side's lane: name, and width."""
    (line,) = re.findall(rf"^  {side} +\|(.*)\|$", text, re.MULTILINE)
    return [(block.rstrip("-."), len(block)) for block in line.split("|")]


def test_without_running_ahead_nothing_changes(estimates: Estimates) -> None:
    text = estimates(CLUSTER)
    assert TAKING_TURNS in text
    assert not re.search("overlapped|trainers|queue|batches of prompts", text)


def test_the_slower_side_and_the_sync_make_the_step(estimates: Estimates) -> None:
    """More GPUs for the engines than for the models' part of the work: the models are slower, and take no longer."""
    text = estimates(CLUSTER, *split(256, 511, 1))
    found = seconds_of(text)
    models = sum(found[name] for name in found if name not in ("rollout", "sync", "overlapped"))
    assert found["overlapped"] == pytest.approx(models + found["sync"], abs=0.2)
    assert found["rollout"] < models
    share = (models - found["rollout"]) / found["overlapped"]
    assert f"the engines wait for {share:.0%} of the step: give the models more of the GPUs" in text
    (sampling, width), (wait, idle) = lane(text, "engines")
    assert (sampling, wait) == ("rollout", "") and idle / (width + idle) == pytest.approx(share, abs=0.02)
    assert [name[:6] for name, _ in lane(text, "trainers")[:1]] == ["old_lo"]


def test_the_models_wait_for_slow_engines_and_less_with_more_prompts_in_progress(estimates: Estimates) -> None:
    waits = []
    sizes = [
        f"{name}=256" for name in ("data.train_batch_size", "actor.ppo_mini_batch_size", "critic.ppo_mini_batch_size")
    ]
    for max_staleness in (1, 4):
        text = estimates(CLUSTER, *split(448, 511, max_staleness, "rollout.tensor_parallel=8", *sizes))
        waits.append(int(re.search(r"the trainers wait for (\d+)% of the step: give the engines more", text)[1]))
        name, width = lane(text, "trainers")[0]
        assert name == "" and width == pytest.approx(waits[-1], abs=2)
    assert waits[0] > waits[1] > 0


def test_engines_on_the_models_gpus_count_as_taking_turns(estimates: Estimates) -> None:
    text = estimates(NODE, "rollout.max_staleness=1", "rollout.sleep=never")
    found = seconds_of(text)
    assert found.pop("together") == pytest.approx(sum(found.values()), abs=0.3)
    assert "engines and models share GPUs: the phases count as if they took turns" in text


def test_suggestions_split_the_gpus(estimates: Estimates, tmp_path: Path) -> None:
    text = estimates(NODE, "rollout.max_staleness=2", "rollout.on_sync=finish", "--suggest")
    text = text.partition("the fastest by estimate first\n")[2].partition("\n\n")[0]
    _, *parts = re.split(r"(?m)^  # \d: ([\d.]+) s a step; .*$", text)
    steps = [float(part) for part in parts[::2]]
    assert len(steps) == 3 and steps == sorted(steps)
    assert re.search(r"# everything on all ranks, with rollout.max_staleness=0: [\d.]+ s a step", parts[-1])
    for step, part in zip(steps, parts[1::2], strict=True):
        values = yaml.safe_load(part)
        models, engines = (values["placement"][name] for name in ("actor", "rollout"))
        assert models.startswith("0-") and engines.endswith("7") and int(str(engines)[0]) == int(models[2:]) + 1
        assert values["rollout"]["max_staleness"] == 2 and values["rollout"]["mem_fraction_static"] >= 0.8
        path = tmp_path / "suggested.yaml"
        path.write_text(yaml.safe_dump({"base": str(REPOSITORY / "configs" / NODE)} | values))
        found = estimates(path, "rollout.on_sync=finish")
        assert "it fits: " in found and seconds_of(found)["overlapped"] == step


def test_the_queue_is_stated_and_bounded(estimates: Estimates) -> None:
    """3 batches of 1024 prompts with 4 responses each, over 64 engines, eight of them on a node."""
    text = estimates(CLUSTER, *split(256, 511, 2))
    gib = 3 * 1024 * 4 * (1024 + 8192) * QUEUED_TOKEN_BYTES / 64 / 2**30
    assert f"up to 3 batches of prompts are started and not trained: at most {gib:.2f} GiB of host memory" in text
    assert f"queued responses {2 * gib:.1f}" in text


def test_bytes_of_a_queued_token_are_those_of_a_response() -> None:
    """Read JSON as the engine sends it into the segment that waits until it is trained."""
    count = 20_000
    reply = json.dumps(
        {"tokens": list(range(1000, 1000 + count)), "log_probs": [-0.1 - i / count for i in range(count)]}
    )
    tracemalloc.start()
    try:
        segment = Segment([1])
        segment.write(Generation(**json.loads(reply), finish_reason="stop"), 1)
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert 0.7 * QUEUED_TOKEN_BYTES < held / len(segment.tokens) < QUEUED_TOKEN_BYTES
