"""Kept rollouts: the first rows of a step with their texts and all that was computed for them, in a Parquet file."""

from pathlib import Path
from typing import Any

import pyarrow
from pyarrow import parquet

from megappo.batch.exchange import Batch, Exchange
from megappo.batch.rows import Rows, is_within
from megappo.data.tokenizer import token_texts
from megappo.observe.files import kept_file
from megappo.rollouts.group_selection import StepResponses
from megappo.rollouts.rollouts import Rollouts

KEPT_ROWS = 64
"""Rows of a step that are kept at most: those of the first prompts that it drew."""
TOKEN_FIELDS = {
    "response_mask": pyarrow.int8(),
    **dict.fromkeys(("rollout_log_probs", "old_log_probs", "ref_log_probs"), pyarrow.float32()),
    **dict.fromkeys(("values", "advantages", "returns"), pyarrow.float32()),
}
"""Fields with a number per response token that are kept -> their type."""
Facts = dict[tuple[int, int], tuple[dict[str, float], str]]
"""(prompt_index, sample_index) -> what functions and environments returned beside the score, and how it ended."""


def keep_rollouts(
    output_dir: Path, step: int, batch: Batch, responses: StepResponses | None, rollouts: Rollouts
) -> None:
    """Write `rollouts/step_XXXXXXXX.parquet`, a row for each response; all ranks together.

    Rows that rank 0 does not own travel there, KEPT_ROWS at most. A file that cannot be written is a warning.

    Args:
        batch: rows with their advantages, at their owners.
        responses: None where the rows were recorded, so that there are neither labels nor parts.
    """
    exchange: Exchange = rollouts.exchange
    kept = range(min(KEPT_ROWS, len(batch.table)))
    names = {*TOKEN_FIELDS, "scores", "truncated", "episodes"} & batch.rows.fields.keys()
    rows = exchange.move(batch, (tuple(kept), *[()] * (exchange.world_size - 1)), sorted(names)).rows
    facts = exchange.merge(_facts(responses, set(batch.table.prompt_ids[kept].tolist())))
    if exchange.rank:
        return
    labels = [] if responses is None else [prompt.label for prompt in responses.prompts]
    table = _table(step, rows, labels, facts, rollouts)
    path = kept_file(output_dir, step)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".tmp")
        parquet.write_table(table, partial, compression="zstd")
        partial.replace(path)  # the report, which may read meanwhile, never finds half a file
    except OSError as error:
        print(f"WARNING: the rollouts of step {step} are not kept: {error}", flush=True)


def _facts(responses: StepResponses | None, prompts: set[int]) -> Facts:
    """Return the facts about this rank's responses to these prompts."""
    samples = [] if responses is None else responses.samples
    kept = [one for one in samples if one.prompt_index in prompts]
    return {
        (one.prompt_index, one.sample_index): ({**(one.parts or {}), **one.grade.parts}, one.ending) for one in kept
    }


def _table(step: int, rows: Rows, labels: list[Any], facts: Facts, rollouts: Rollouts) -> pyarrow.Table:
    prompts, tokens = [], []
    for sequence, length in zip(rows.sequences, rows.prompt_lengths.tolist(), strict=True):
        prompts.append(sequence[:length].tolist())
        tokens.append(sequence[length:].tolist())
    decode, prompt_ids = rollouts.tokenizer.batch_decode, rows.prompt_ids.tolist()
    facts_of_rows = []
    for row, prompt in enumerate(prompt_ids):
        default = "length" if rows.fields["truncated"][row] else "stop"
        number = rows.fields["episodes"][row] if "episodes" in rows.fields else row - prompt_ids.index(prompt)
        facts_of_rows.append(facts.get((prompt, int(number)), ({}, default)))
    scores = rows.fields["scores"].double().tolist()
    threshold = rollouts.config.rollout.val_pass_threshold
    mask = is_within(rows.response_lengths, rows.max_response_length)
    offsets = pyarrow.array([0, *rows.response_lengths.cumsum(0).tolist()], pyarrow.int32())
    columns = {
        "step": pyarrow.array([step] * len(rows), pyarrow.int64()),
        "dataset": pyarrow.nulls(len(rows), pyarrow.string()),
        "prompt": decode(prompts),
        "response": decode(tokens, skip_special_tokens=True),
        "label": pyarrow.array([str(labels[prompt]) if labels else None for prompt in prompt_ids], pyarrow.string()),
        "score": scores,
        "parts": pyarrow.array(
            [parts for parts, _ in facts_of_rows], pyarrow.map_(pyarrow.string(), pyarrow.float64())
        ),
        "passed": [score >= threshold for score in scores],
        "finish_reason": [ending for _, ending in facts_of_rows],
        "tokens": tokens,
        "texts": [token_texts(of_row, rollouts.tokenizer) for of_row in tokens],
    }
    for name, kind in TOKEN_FIELDS.items():
        columns[name] = pyarrow.nulls(len(rows), pyarrow.list_(kind))
        if name in rows.fields:
            numbers = pyarrow.array(rows.fields[name][mask].numpy()).cast(kind)
            columns[name] = pyarrow.ListArray.from_arrays(offsets, numbers)
    return pyarrow.table(columns)
