"""The three runs of launch/rlhf.sh on one GPU: supervised fine-tuning, a reward model, then PPO on its scores with
actor, critic, reference, reward model and engine on the same GPU.

python tests/gpu/stages/rlhf.py
"""

import shutil
import sys
from pathlib import Path

from common import CUDA, REPOSITORY, report, sized
from quickstart import ON_GPU
from runs import figures, output_folder, run_command, train

from megappo.observe.metrics_file import read_metrics

SFT_STEPS, REWARD_STEPS, PPO_STEPS = sized((400, 300, 60), (2, 2, 1))
CONFIGS = REPOSITORY / "configs"
ONE_GPU = ("placement.actor=0", "placement.critic=0", "placement.reward_model=0", "actor.parallel.tensor=1")


def pretrain(command: str, run: Path, *settings: str) -> list[dict[str, float]]:
    """Make a run of `megappo sft` or `megappo reward-model` and return the metrics of its steps."""
    component = "actor" if command == "sft" else "reward_model"
    own = sized("model.dtype=bf16", f"{component}.optim.lr_warmup_steps=0")
    config = CONFIGS / f"rlhf_{run.name}.yaml"
    run_command([sys.executable, "-m", "megappo", command, config, f"trainer.output_dir={run}", own, *settings])
    return read_metrics(run)


def measure() -> dict:
    folder = output_folder("rlhf")
    shutil.rmtree(folder, ignore_errors=True)
    run_command([sys.executable, "tools/make_rlhf.py", "--output", folder])
    sft, reward, ppo = folder / "sft", folder / "reward_model", folder / "ppo"

    def files(kind: str) -> tuple[str, str]:
        prefix = folder / f"{kind}_" if kind else f"{folder}/"
        return f"data.train_files={prefix}train.jsonl", f"data.val_files={prefix}val.jsonl"

    pretrain("sft", sft, f"model.path={folder}/model", f"trainer.total_steps={SFT_STEPS}", *files("demonstrations"))
    model = f"model.path={sft}/hf_actor"
    pairs = pretrain("reward-model", reward, model, f"trainer.total_steps={REWARD_STEPS}", *files("preferences"))
    learned = f"model_path={reward}/hf_reward_model"
    settings = [model, f"critic.{learned}", f"reward_model.{learned}", *files(""), f"trainer.output_dir={ppo}"]
    settings += [f"eval.datasets.truth.files={folder}/val.jsonl", f"trainer.total_steps={PPO_STEPS}", *ONE_GPU]
    train(CONFIGS / "rlhf_ppo.yaml", [*settings, *(ON_GPU if CUDA else ())])
    steps = read_metrics(ppo)
    truth = [step["val/truth/score/mean"] for step in steps if "val/truth/score/mean" in step]
    if CUDA:
        assert truth[-1] > truth[0] + 0.2, truth
    accuracy = [value for name, value in pairs[-1].items() if name.endswith("accuracy")]
    return {"stage": "rlhf", "pair_accuracy": accuracy, "truth": truth, **figures(ppo)}


if __name__ == "__main__":
    report(measure)
