"""Steps of TRL's GRPO for trl.py, which starts this file in the environment of TRL, and the score of both sides."""

import json
import sys
import time
from pathlib import Path
from typing import Any


def scores(prompts: list[Any], completions: list[Any], label: list[str], **fields: Any) -> list[float]:
    """Return 1 for the right number alone, 0.5 where it is among other words. A reward function of TRL's form, which
    megappo takes, too."""
    found = []
    for completion, right in zip(completions, label, strict=True):
        words = completion[0]["content"].strip(" .").split()
        found.append(1.0 if words == [right] else 0.5 if right in words else 0.0)
    return found


def main(settings: dict[str, Any]) -> None:
    """Train, and append a line of JSON with the seconds of each step to the log."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    class Timed(GRPOTrainer):
        seconds: dict[str, float] = {}
        begin = 0.0

        def _generate(self, *arguments: Any) -> Any:
            start = time.perf_counter()
            generated = super()._generate(*arguments)
            self.seconds["rollout"] = time.perf_counter() - start
            return generated

        def _generate_and_score_completions(self, *arguments: Any) -> Any:
            self.seconds = {}
            self.begin = time.perf_counter()
            batch = super()._generate_and_score_completions(*arguments)
            self.scored = time.perf_counter()
            self.seconds["length"] = float(batch["completion_mask"].sum(dim=1).float().mean())
            return batch

    class Log(TrainerCallback):
        def on_step_end(self, *arguments: Any, **others: Any) -> None:
            end = time.perf_counter()
            step = trainer.seconds | {"update": end - trainer.scored, "step": end - trainer.begin}
            with Path(settings["log"]).open("a") as file:
                file.write(json.dumps(step) + "\n")

    lines = Path(settings["prompts"]).read_text().splitlines()
    arguments = GRPOConfig(
        output_dir=settings["output"],
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        per_device_train_batch_size=settings["micro_batch"],
        gradient_accumulation_steps=settings["rows"] // settings["micro_batch"],
        num_generations=settings["group"],
        max_completion_length=settings["response_length"],
        max_steps=settings["steps"],
        learning_rate=settings["lr"],
        lr_scheduler_type="constant",
        max_grad_norm=settings["clip"],
        beta=0.0,
        temperature=1.0,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    trainer = Timed(
        model=AutoModelForCausalLM.from_pretrained(settings["model"], dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(settings["model"]),
        reward_funcs=scores,
        args=arguments,
        train_dataset=Dataset.from_list([json.loads(line) for line in lines]),
        callbacks=[Log()],
    )
    trainer.train()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
