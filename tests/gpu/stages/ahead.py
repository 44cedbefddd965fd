"""The run of whole_run.py with an engine that stays awake and samples ahead (rollout.max_staleness=1): sampling and
training overlap on one GPU.

python tests/gpu/stages/ahead.py
"""

import shutil

import torch
from common import CUDA, report
from engines import VOCABULARY, model_folder
from runs import figures, output_folder, train
from whole_run import CONFIG, SMALL, write_prompts, write_tokenizer

from megappo.observe.metrics_file import read_metrics

MAX_STALENESS = 1
AHEAD = (
    *(f"rollout.max_staleness={MAX_STALENESS}", "rollout.sleep=never", "trainer.total_steps=6"),
    *("actor.offload=[]", "critic.offload=[]", "ref.offload=[]", "rollout.mem_fraction_static=0.3"),
)


def measure() -> dict:
    folder = output_folder("ahead")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    model_folder(folder / "model", eos_token_id=VOCABULARY - 1, bos_token_id=None)
    torch.cuda.empty_cache()
    write_tokenizer(folder / "model")
    write_prompts(folder / "train.jsonl")
    run = folder / "run"
    paths = (
        f"model.path={folder / 'model'}",
        f"data.train_files={folder / 'train.jsonl'}",
        f"trainer.output_dir={run}",
    )
    train(CONFIG, [*paths, "model.layer_spec=torch", *AHEAD, *(() if CUDA else SMALL)])
    steps = read_metrics(run)
    later = steps[1:]  # the first step waits for its rollout
    difference = steps[0]["rollout/log_prob_diff/mean"]  # later tokens are of other weights than those that are trained
    assert difference < 0.05, difference
    # The sides' shares of the time add up to 1 at most where they take turns.
    busy = [2 - step["timing/engines_idle_frac"] - step["timing/trainers_idle_frac"] for step in later]
    if CUDA:
        assert min(busy) > 1, busy
    return {"stage": "ahead", "log_prob_diff": difference, "busy_shares": busy, **figures(run)}


if __name__ == "__main__":
    report(measure)
