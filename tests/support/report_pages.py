"""Pages of reports, taken apart; and the files of runs that they are made of."""

import json
import random
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

PHASES = {"rollout": 0.3, "reward": 0.02, "scatter": 0.01, "old_log_probs": 0.05, "gather": 0.01}
PHASES |= {"update_critic": 0.1, "update_actor": 0.15, "gather_metrics": 0.01, "sync": 0.05}
NUMBERS = ("rollout_log_probs", "old_log_probs", "ref_log_probs", "values", "advantages", "returns")


class Tags(HTMLParser):
    """Elements of a page: [name, attributes, text] each."""

    def __init__(self, text: str):
        super().__init__()
        self.found: list[list[Any]] = []
        self._is_open = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append([tag, dict(attrs), ""])
        self._is_open = True

    def handle_data(self, data: str) -> None:
        if self._is_open:
            self.found[-1][2] += data

    def handle_endtag(self, tag: str) -> None:
        self._is_open = False


def content_of(path: Path) -> dict[str, Any]:
    """Return the data of a page, as its script reads them."""
    [text] = [text for tag, attributes, text in Tags(path.read_text("utf-8")).found if attributes.get("id") == "data"]
    return json.loads(text)


def write_run(
    folder: Path, num_steps: int, num_ranks: int = 2, seed: int = 0, num_parts: int = 80, **config: Any
) -> Path:
    """Write the files of a run that a report is made of, with random numbers; num_parts more metrics are of rewards."""
    rng = random.Random(seed)
    (folder / "rollouts").mkdir(parents=True)
    (folder / "timeline").mkdir()
    sections = {"model": {"path": "m"}, "trainer": {"seed": seed, "output_dir": str(folder)}, **config}
    (folder / "config.yaml").write_text(json.dumps(sections))
    facts = {"status": "finished", "total_steps": num_steps, "commit": "4ac0f14aa0f3b2c5", "run_id": "a1"}
    (folder / "run.json").write_text(json.dumps(facts | {"hardware": {"device": "cpu", "ranks": str(num_ranks)}}))
    steps = [metrics(step, num_steps, rng, num_parts) for step in range(num_steps + 1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    timed = range(max(1, num_steps - 999), num_steps + 1)
    for rank in range(num_ranks):
        lines = [json.dumps({"step": step, "phases": spans(step, rng)}) for step in timed]
        (folder / "timeline" / f"rank_{rank:05d}.jsonl").write_text("\n".join(lines) + "\n")
    for step in (1, num_steps // 2, num_steps):
        write_kept(folder, step, [kept(step, row, rng) for row in range(32)])
    return folder


def metrics(step: int, num_steps: int, rng: random.Random, num_parts: int) -> dict[str, float]:
    reward = 0.3 + 0.6 * step / num_steps + 0.03 * rng.random()
    found = {"step": step, "val/sums/mean@4": reward, "val/sums/mean@4/ci95": 0.02, "val/sums/pass@4": reward}
    if step == 0:
        return found
    found |= {"reward/score/mean": reward, "reward/score/std": 0.2, "reward/score/min": 0.0, "reward/score/max": 1.0}
    found |= {"actor/entropy": 1 - reward, "rollout/tokens_per_second": 4000 * rng.random(), "actor/grad_norm": 1e-5}
    found |= {f"reward/part/{number}": rng.random() for number in range(num_parts)}
    found |= {f"memory/{phase}_peak_gib": 2 + rng.random() for phase in PHASES}
    timings = {f"timing_s/{phase}": seconds * (1 + rng.random()) for phase, seconds in PHASES.items()}
    return found | timings | {"timing_s/other": 0.01, "timing_s/step": sum(timings.values()) + 0.01}


def spans(step: int, rng: random.Random) -> list[list[Any]]:
    at, found = 1.7e9 + 2 * step, []
    for phase, seconds in PHASES.items():
        found.append([phase, at, seconds * (1 + rng.random())])
        at += found[-1][2]
    return found


def kept(step: int, number: int, rng: random.Random, **others: Any) -> dict[str, Any]:
    """Return a kept rollout of five tokens."""
    texts = ["1", "2", "\n", "<b>", "<eos>"]
    row = {
        "step": step,
        "dataset": None,
        "prompt": f"{number}+2=",
        "response": "12\n<b>",
        "label": "12",
        "passed": None,
    }
    row |= {"score": float(number % 3 > 0), "parts": [("length", 5.0)], "finish_reason": "stop", "texts": texts}
    row |= {"passed": None, "tokens": [1, 2, 3, 4, 5], "response_mask": [1] * 5}
    return row | {name: [rng.gauss(0, 1) for _ in texts] for name in NUMBERS} | others


def write_kept(folder: Path, step: int, rows: list[dict[str, Any]]) -> None:
    """Write kept rollouts, in the columns of `megappo.observe.kept_table`."""
    texts, floats = pyarrow.string(), pyarrow.list_(pyarrow.float32())
    types = {"step": pyarrow.int64(), **dict.fromkeys(("dataset", "prompt", "response", "label"), texts)}
    types |= {"score": pyarrow.float64(), "parts": pyarrow.map_(texts, pyarrow.float64()), "passed": pyarrow.bool_()}
    turn = {"turn": pyarrow.int64(), "text": texts, "reward": pyarrow.float64()}
    turn |= {"begins": texts, "follows": pyarrow.int64(), "depth": pyarrow.int64()}
    types |= {
        "turns": pyarrow.list_(pyarrow.struct(turn)),
        "finish_reason": texts,
        "tokens": pyarrow.list_(pyarrow.int64()),
        "texts": pyarrow.list_(texts),
    }
    types |= {"response_mask": pyarrow.list_(pyarrow.int8()), **dict.fromkeys(NUMBERS, floats)}
    table = pyarrow.Table.from_pylist(rows, schema=pyarrow.schema(list(types.items())))
    pyarrow.parquet.write_table(table, folder / "rollouts" / f"step_{step:08d}.parquet")
