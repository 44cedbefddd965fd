"""A script with the rewards that TRL ships and an adapter with its defaults."""

from datasets import load_dataset
from peft import LoraConfig
from trl import RLOOConfig, RLOOTrainer
from trl.rewards import accuracy_reward, think_format_reward

training_args = RLOOConfig(output_dir="rloo-out", learning_rate=1e-5, gradient_accumulation_steps=2, use_vllm=True)
trainer = RLOOTrainer(
    model="Qwen/Qwen3-0.6B",
    args=training_args,
    reward_funcs=[think_format_reward, accuracy_reward],
    train_dataset=load_dataset("AI-MO/NuminaMath-TIR", split="train"),
    peft_config=LoraConfig(),
)
trainer.train()
