"""Kept rollouts: the first rows of a step with their texts and all that was computed for them, in a Parquet file."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow
from pyarrow import parquet

from megappo.batch.exchange import Batch
from megappo.batch.rows import Rows
from megappo.data.tokenizer import token_texts
from megappo.observe.files import kept_file
from megappo.observe.kept_table import PER_TOKEN, SCHEMA
from megappo.rollouts.rollouts import Rollouts
from megappo.rollouts.sample_rows import shown_facts
from megappo.rollouts.step_responses import StepResponses
from megappo.runtime.durable_files import put_whole

KEPT_ROWS = 64
"""Rows of a step that are kept at most: rows of the first prompts that it drew."""
ONCE = ("response_mask", "scores", "truncated", "episodes", "prompt_records")
"""Fields of rows that are read once for each row."""
Facts = dict[tuple[int, int], dict[str, Any]]
"""(prompt_index, sample_index) -> what people are shown of it beside texts and score."""


def keep_rollouts(
    output_dir: Path,
    step: int,
    batch: Batch,
    responses: StepResponses | None,
    rollouts: Rollouts,
) -> None:
    """Write `rollouts/step_XXXXXXXX.parquet`, a row for each response; all ranks together.

    Rows that rank 0 does not own travel there, KEPT_ROWS at most. A file that cannot be written is a warning.

    Args:
        batch: rows with their advantages, at their owners.
        responses: None where the rows were recorded, so that there are neither labels nor parts.
    """
    exchange = rollouts.exchange
    kept = range(min(KEPT_ROWS, len(batch.table)))
    names = {*PER_TOKEN, *ONCE} & batch.rows.fields.keys()
    rows = exchange.move(batch, (tuple(kept), *[()] * (exchange.world_size - 1)), sorted(names)).rows
    facts = exchange.merge(_facts(responses, set(batch.table.prompt_ids[kept].tolist()), rollouts))
    if exchange.rank:
        return
    labels = [] if responses is None else [prompt.label for prompt in responses.prompts]
    table = pyarrow.Table.from_pylist(list(_records(step, rows, labels, facts, rollouts)), SCHEMA)
    path = kept_file(output_dir, step)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        put_whole(path, lambda partial: parquet.write_table(table, partial, compression="zstd"))
    except OSError as error:
        print(f"WARNING: the rollouts of step {step} are not kept: {error}", flush=True)


def _facts(responses: StepResponses | None, prompts: set[int], rollouts: Rollouts) -> Facts:
    """Return the facts about this rank's responses to these prompts."""
    samples = [] if responses is None else responses.samples
    kept = [one for one in samples if one.prompt_index in prompts]
    return {(one.prompt_index, one.sample_index): shown_facts(one, rollouts.tokenizer) for one in kept}


def _records(
    step: int,
    rows: Rows,
    labels: list[Any],
    facts: Facts,
    rollouts: Rollouts,
) -> Iterator[dict[str, Any]]:
    """Yield what is kept of each row, by the names of SCHEMA."""
    fields = rows.fields
    tokenizer = rollouts.tokenizer
    prompt_ids = rows.prompt_ids.tolist()
    scores = fields["scores"].tolist()
    for row, (prompt, sequence) in enumerate(zip(prompt_ids, rows.sequences, strict=True)):
        prompt_tokens, tokens = sequence.tensor_split([int(rows.prompt_lengths[row])])
        number = int(fields["episodes"][row]) if "episodes" in fields else row - prompt_ids.index(prompt)
        default = "length" if fields["truncated"][row] else "stop"
        own_facts = facts.get((prompt, number), {"finish_reason": default})
        per_token = {name: fields[name][row, : len(tokens)].numpy() for name in PER_TOKEN if name in fields}
        record = {
            "step": step,
            "prompt": rollouts.prompt_text(prompt_tokens),
            "images": rollouts.images.thumbnails(fields["prompt_records"][row].tolist()) if rollouts.images else None,
            "response": tokenizer.decode(tokens, skip_special_tokens=True),
            "label": str(labels[prompt]) if labels else None,
            "score": scores[row],
            "parts": {},
            "passed": scores[row] >= rollouts.config.rollout.val_pass_threshold,
            "tokens": tokens.tolist(),
            "texts": token_texts(tokens.tolist(), tokenizer),
            "response_mask": rows.response_mask[row, : len(tokens)].numpy(),
        }
        yield record | per_token | own_facts
