"""A script as people write it around TRL's trainer."""

from datasets import load_dataset
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer

LENGTH = 256


def brevity(completions, **kwargs):
    return [-len(completion) / 100 for completion in completions]


def main():
    args = GRPOConfig(
        output_dir="out",
        num_generations=8,
        per_device_train_batch_size=16,
        max_completion_length=LENGTH * 2,
        temperature=0.9,
        epsilon_high=0.28,
        save_strategy="no",
        bf16=True,
    )
    trainer = GRPOTrainer(
        model="Qwen/Qwen2-0.5B-Instruct",
        reward_funcs=brevity,
        args=args,
        train_dataset=load_dataset("trl-lib/tldr", split="train"),
        peft_config=LoraConfig(r=8, lora_alpha=16, task_type="CAUSAL_LM"),
    )
    trainer.train()
