"""An evaluation: responses to held-out prompts, scored, as metrics, and a few of them to show. All ranks together."""

from collections.abc import Sequence
from typing import Any

from megappo.data.prompts import Prompt
from megappo.observe.metrics import Metric, reduce_ranks
from megappo.observe.observer import NullObserver, Observer
from megappo.trainer.datasets import Datasets
from megappo.trainer.rollouts import Rollouts, summed
from megappo.trainer.statistics import value_parts


def evaluate(rollouts: Rollouts, datasets: Datasets, observer: Observer | NullObserver, step: int) -> dict[str, Any]:
    """`val/<dataset>/*` on every held-out prompt of each file, and a few samples logged."""
    metrics = {}
    for name in datasets.val:
        parts, samples = _evaluate(rollouts, datasets.held_out(name, rollouts.exchange))
        found = reduce_ranks(rollouts.exchange.share(parts))
        metrics |= {f"val/{name}/{metric}": value for metric, value in found.items()}
        observer.samples(step, samples)
    return metrics


def _evaluate(rollouts: Rollouts, prompts: Sequence[Prompt]) -> tuple[dict[str, Metric], list[dict[str, Any]]]:
    """This rank's part of the metrics of one response to each prompt, and the first prompts' responses to show."""
    scoring = rollouts.scoring(prompts, rollouts.rewards)
    samples = rollouts.sample(prompts, 1, rollouts.evaluation, "evaluate", scoring)
    several, parts = rollouts.score(samples, prompts, scoring)
    scores = summed(several)
    shown = {
        one.prompt_index: {
            "prompt": prompts[one.prompt_index].text,
            "response": rollouts.tokenizer.decode(one.tokens, skip_special_tokens=True),
            "label": prompts[one.prompt_index].label,
            "score": float(score),
        }
        for one, score in zip(samples, scores, strict=True)
        if one.prompt_index < rollouts.config.trainer.num_samples
    }
    of_all_ranks = {index: entry for part in rollouts.exchange.share(shown) for index, entry in part.items()}
    return value_parts("score", scores) | parts, [of_all_ranks[index] for index in sorted(of_all_ranks)]
