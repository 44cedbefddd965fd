"""Metrics of several ranks' responses to held-out prompts: the same as if one rank had them all."""

import statistics
from collections.abc import Sequence

import pytest
import torch.distributed as dist
from engine_handles import restarts_of
from samples_of import sample_of
from spawn import run_ranks

from megappo.batch.exchange import Exchange
from megappo.config.schema import Config
from megappo.data.prompts import Prompt
from megappo.engines.client import SamplingParams
from megappo.engines.handle import EngineHandle
from megappo.observe.observer import NullObserver
from megappo.rollouts.datasets import Datasets
from megappo.rollouts.responses import Responses
from megappo.rollouts.rollouts import Rollouts
from megappo.trainer.evaluation import evaluate, prompt_statistics
from megappo.userland.environments import TaskWorkers
from megappo.userland.grades import Grade
from megappo.userland.signatures import Row

ANSWERS = [[1, 1, 2, 0], [2, 2, 2, 1], [1, 2, 0, 0], [0, 0, 0, 0], [3, 1, 1, 1]]
"""Tokens of the four responses to each prompt, in order, one token each; 0 is no answer, and 1 is right."""
OF_RANKS = [[], [3, 0], [4, 1, 2]]
"""The prompts that each rank's engine got to."""
OWN = {
    "files": ["f"],
    "n": 4,
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 5,
    "max_response_length": 3,
    "reward": "gsm8k",
    "pass_threshold": 1.0,
}
CONFIG = Config.model_validate(
    {
        "model": {"path": "m"},
        "data": {"train_files": ["f"], "val_files": ["greedy.jsonl"]},
        "rollout": {"val_pass_threshold": 0.5},
        "trainer": {"output_dir": "o", "num_samples": 2},
        "eval": {"datasets": {"own": OWN}},
    }
)


class FewSampled(Rollouts):
    """Its engines have written already."""

    def sample(self, prompts: Sequence[Prompt], n: int, params: SamplingParams, *, task: str) -> Responses:
        self.requests = [*getattr(self, "requests", []), (n, params)]
        responses = self.new_responses(prompts, task)
        mine = [(i, j) for i in OF_RANKS[self.exchange.rank] for j in reversed(range(n))]
        responses.add([sample_of(i, j, [ANSWERS[i][j]], [-1.0], "length" if j == 3 else "stop") for i, j in mine])
        return responses


class Answers:
    """Stands where a pool of workers is."""

    def __init__(self, kind: str):
        self.kind = kind

    on_error, failure = "raise", ""

    def begin(self) -> "Answers":
        self.rows: list[Row] = []
        return self

    def add(self, rows: Sequence[Row]) -> None:
        assert [row.label for row in rows] == [f"label {row.prompt}" for row in rows]
        self.rows += rows

    def results(self) -> list[Grade]:
        texts = [row.response for row in self.rows]
        answers = [None if text == "0" or self.kind == "silent" else text for text in texts]
        scores = [[float(text == "1"), 0.5 * (text == "3")] for text in texts]
        return [Grade(of_one, {}, answer) for of_one, answer in zip(scores, answers, strict=True)]


class Tokenizer:
    def batch_decode(self, tokens: Sequence[list[int]], *, skip_special_tokens: bool) -> list[str]:
        return [" ".join(map(str, of_sample)) for of_sample in tokens]

    def decode(self, tokens: list[int], *, skip_special_tokens: bool) -> str:
        return " ".join(map(str, tokens))


class Held:
    kept = range(len(ANSWERS))

    def at(self, indices: Sequence[int]) -> list[Prompt]:
        return [Prompt(i, [5], str(i), f"label {i}") for i in indices]


class Shown(NullObserver):
    def __init__(self) -> None:
        self.shown: list[dict] = []

    def samples(self, step: int, samples: Sequence[dict]) -> None:
        self.shown += [{"step": step, **sample} for sample in samples]


def evaluate_on(rank: int, world_size: int) -> None:
    pools = {"greedy": Answers("silent"), "own": Answers("gsm8k")} if rank else {}
    workers = {name: TaskWorkers(pool) for name, pool in pools.items()}
    restarts = restarts_of(EngineHandle(rank) if rank else EngineHandle(), Exchange(dist.group.WORLD))
    datasets = Datasets(Tokenizer(), (1,), 30, None, {"greedy": Held(), "own": Held()})
    exchange, observer = Exchange(dist.group.WORLD), Shown()
    rollouts = FewSampled(CONFIG, datasets, restarts, exchange, workers=workers, num_engines=2)
    metrics = evaluate(rollouts, datasets, observer, 7, lambda responses: None)
    greedy, sampled = SamplingParams(1024, 0.0, stop_token_ids=(1,)), SamplingParams(3, 0.5, 0.9, 5, (1,))
    assert rollouts.requests == [(1, greedy), (4, sampled)]

    scores = [[float(answer == 1) + 0.5 * (answer == 3) for answer in of_prompt] for of_prompt in ANSWERS]
    answers = [[str(answer) if answer else None for answer in of_prompt] for of_prompt in ANSWERS]
    for one, given in zip(scores, answers, strict=True):
        for name in prompt_statistics(one, given, 1.0):
            values = [prompt_statistics(s, a, 1.0)[name] for s, a in zip(scores, answers, strict=True)]
            assert metrics[f"val/own/{name}"] == pytest.approx(statistics.fmean(values))
            half = 1.959964 * statistics.stdev(values) / len(values) ** 0.5
            assert metrics[f"val/own/{name}/ci95"] == pytest.approx(half, rel=1e-6)
    assert metrics["val/own/maj@4"] == pytest.approx((1 + 0 + 0.5 + 0 + 1) / 5)
    assert metrics["val/own/truncated_frac"] == 0.25 and metrics["val/own/response_length/mean"] == 1
    first = [one[0] for one in scores]
    assert metrics["val/greedy/score/mean"] == metrics["val/greedy/mean@1"] == pytest.approx(statistics.fmean(first))
    assert (metrics["val/greedy/score/max"], metrics["val/greedy/score/min"]) == (1, 0)
    assert metrics["val/greedy/pass@1"] == pytest.approx(3 / 5), "0.5 is enough"
    assert not [name for name in metrics if "greedy/maj" in name or "greedy/best" in name]

    assert [(one["dataset"], one["prompt"]) for one in observer.shown] == [
        *(("greedy", "0"), ("greedy", "1"), ("own", "0"), ("own", "1"))
    ]
    assert observer.shown[3] == {
        "step": 7,
        "dataset": "own",
        "prompt": "1",
        "response": "2",
        "label": "label 1",
        "score": 0.0,
        "passed": False,
        "finish_reason": "stop",
        "scores": [0.0, 0.0, 0.0, 1.0],
        "answers": ["2", "2", "2", "1"],
    }


def test_evaluations_are_of_all_ranks_together():
    run_ranks(3, evaluate_on)
