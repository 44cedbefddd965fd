"""Keys of models: their training, the frozen reference, and a reward model, which PPO reads and a run of its own trains."""

from typing import Annotated, Any, Literal

from annotated_types import MinLen
from pydantic import Field, SerializerFunctionWrapHandler, StrictBool, model_serializer

from megappo.config.methods import POLICY_LOSSES
from megappo.config.sections import Parallel
from megappo.config.values import (
    ADAPTED_MODULES,
    LISTED,
    NUMBER,
    AdaptedModule,
    Aggregation,
    BetweenZeroAndOne,
    Decay,
    FieldValues,
    FilePath,
    Float,
    Fraction,
    ModelPath,
    NonNegative,
    NonNegativeFloat,
    Positive,
    PositiveFloat,
    Ranks,
    Section,
    TensorKind,
    Texts,
    key,
)

_OWN_AVERAGING = ", ".join(name for name, method in POLICY_LOSSES.items() if method.loss_agg_mode)


class Optim(Section):
    lr: BetweenZeroAndOne = key(1e-6, "peak learning rate (Adam)")
    min_lr: NonNegativeFloat = key(0.0, "learning rate at the end of the decay")
    lr_warmup_steps: NonNegative = key(0, "optimizer steps of linear warm-up from 0")
    lr_decay_style: Literal["constant", "linear", "cosine"] = key("constant", "decay from lr to min_lr over the whole run")
    weight_decay: NonNegativeFloat = key(0.0, "decoupled weight decay; not applied to biases and norms")
    betas: tuple[Decay, Decay] = key((0.9, 0.95), "Adam's moment decays")
    eps: PositiveFloat = key(1e-8, "Adam's epsilon")
    clip_grad: NonNegativeFloat = key(1.0, "clip the global gradient norm to this; 0 = off")
    distributed: StrictBool = key(True, "shard optimizer state over data-parallel ranks (Megatron's distributed optimizer)")
    moments_dtype: Literal["fp32", "bf16"] = key("fp32", "dtype of Adam's two moments between optimizer steps, which compute in fp32; bf16 takes half the memory")
    offload_fraction: Fraction = key(0.0, "share of main parameters and moments that stays in host memory, in updates, too: each optimizer step moves them to the device and back, a part at a time. It changes no number")

    @property
    def is_compact(self) -> bool:
        """True if Adam's states rest in bf16, or in host memory."""
        return self.moments_dtype != "fp32" or self.offload_fraction > 0


class Lora(Section):
    rank: Annotated[int, Field(ge=1, le=2**16), NUMBER] = key(16, "rank of each adapter: numbers per token between its two matrices")
    alpha: PositiveFloat = key(32.0, "an adapter's product is multiplied by alpha / rank")
    target_modules: Literal["all-linear"] | Annotated[tuple[AdaptedModule, ...], MinLen(1), LISTED] = key("all-linear", "matrices of each layer that get an adapter; all-linear = all of them")

    @model_serializer(mode="wrap")
    def _with_size(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Dump rank and alpha even if they are the defaults, which a dump may exclude."""
        return {"rank": self.rank, "alpha": self.alpha} | dump(self)

    @property
    def modules(self) -> tuple[AdaptedModule, ...]:
        """Names of the matrices that get an adapter."""
        return ADAPTED_MODULES if self.target_modules == "all-linear" else self.target_modules

    @property
    def scale(self) -> float:
        """Factor of an adapter's product."""
        return self.alpha / self.rank


class Router(Section):
    aux_loss_coef: NonNegativeFloat = key(0.0, "weight of the load-balancing loss over the tokens of each micro-batch (Megatron's aux_loss), such as 0.001; it depends on how rows are packed; balanced routers have a loss of 1, where transformers' load_balancing_loss_func gives top_k; 0 = none")
    seq_aux_loss_coef: NonNegativeFloat = key(0.0, "weight of the load-balancing loss over the tokens of each row (Megatron's seq_aux_loss), such as 0.0001; no layout changes it; 0 = none")
    bias_update_rate: NonNegativeFloat = key(0.0, "routers with biases for the choice of experts (DeepSeek-V3, GLM-4-MoE, MiniMax): after each optimizer step add this to the bias of each expert with fewer tokens than the mean, and subtract it from the bias of each expert with more, such as 0.001; 0 = leave them")


class Learner(Section):
    """Keys of every model that a run trains."""

    optim: Optim = key(Optim(), "optimizer")
    lora: Lora | None = key(None, "train low-rank adapters beside the matrices, and a value head, instead of the weights; null = train all weights")
    recompute: Literal["none", "selective", "full"] = key("none", "activation recomputation in the backward pass")
    router: Router = key(Router(), "mixtures of experts: how their load is balanced")


class Trained(Learner):
    """Keys of actor and critic alike."""

    parallel: Parallel = key(Parallel(), "layout of this component over its placement's ranks")
    offload: Literal["auto"] | Annotated[tuple[TensorKind, ...], LISTED] = key((), "tensors to keep in host memory while no phase needs them on the device: weights, gradients, optimizer; auto = the tensors that do not fit otherwise, by the plan's estimate")
    max_tokens_per_micro_batch: Positive = key(8192, "most tokens (prompt + response) packed into one micro-batch, over all ranks of parallel.context together")
    ppo_mini_batch_size: Positive = key(256, "prompts (each with rollout.n responses) per optimizer step")
    ppo_epochs: Positive = key(1, "passes over the rollouts of a step")
    loss_agg_mode: Aggregation | None = key(None, f"how token losses are averaged, always over all data-parallel ranks; -norm divides by rollout.max_response_length; null = token-mean or algorithm.preset's, but seq-mean-token-mean for the policy term of {_OWN_AVERAGING}")

    def num_mini_batches(self, num_prompts: int) -> int:
        """Return the mini-batches per epoch of a step with `num_prompts` prompts."""
        return num_prompts // self.ppo_mini_batch_size

    def num_updates(self, num_prompts: int) -> int:
        """Return the optimizer steps of a step with `num_prompts` prompts."""
        return self.ppo_epochs * self.num_mini_batches(num_prompts)


class FrozenPolicy(Section):
    """Keys of a frozen language model that reads the tokens of the actor's rows: the reference, or a teacher."""

    model_path: ModelPath | None = key(None, "Hugging Face folder, or id on the hub, of a model with the actor's vocabulary; null = model.path")
    adapter: ModelPath | None = key(None, "folder of LoRA adapters in PEFT's format beside that model's weights, such as a run's hf_actor/adapter; null = none")
    dist_checkpointing_path: FilePath | None = key(None, "folder of the weights, as model.dist_checkpointing_path, such as RUN/checkpoints/step_00000100/actor; null = the safetensors of model_path, or the actor's initial weights")
    parallel: Parallel | None = key(None, "its layout; null = the actor's")
    offload: Literal["auto"] | Annotated[tuple[Literal["weights"], ...], LISTED] = key((), "weights: keep them in host memory while no phase needs them on the device; auto = if they do not fit otherwise")
    max_tokens_per_micro_batch: Positive | None = key(None, "tokens per forward micro-batch; null = the actor's")

    @property
    def is_initial_actor(self) -> bool:
        """True if it has the actor's initial weights, without adapters."""
        return not (self.model_path or self.adapter or self.dist_checkpointing_path)


class Teacher(FrozenPolicy):
    placement: Ranks | None = key(None, "its ranks; null = the actor's")
    url: Texts = key((), "addresses, http://host:port, of SGLang servers that you start, which serve the teacher in place of a model of the run; their key is in the environment variable MEGAPPO_TEACHER_API_KEY")
    when: dict[str, FieldValues] = key({}, "fields of a row of data.train_files, whose names may be dotted, with their values, or lists of them: {data_source: gsm8k}. It teaches the rows that have all of them and that no teacher before it teaches; {} = all remaining rows")


class RewardModel(Learner):
    model_path: ModelPath | None = key(None, "Hugging Face folder, or id on the hub, of a frozen reward model with one label: *ForSequenceClassification scores a response at its last token, *ForTokenClassification each of its steps. reward.function is then null unless it is set. null = none")
    adapter: ModelPath | None = key(None, "folder of LoRA adapters and a score in PEFT's format, such as a run's hf_reward_model/adapter: with them a language model in model_path scores responses, and may share its weights with actor and critic; null = none")
    weight: Float = key(1.0, "factor of its scores, which are added to the scores of reward.function")
    retokenize: StrictBool | None = key(None, "render each conversation with its own chat template and tokenize it again; false = it reads the actor's tokens; null = true if its tokenizer or chat template differs from the actor's")
    step_separator: Annotated[str, MinLen(1)] = key("\n\n", "*ForTokenClassification: text that ends a step of a response")
    center_coef: NonNegativeFloat = key(0.0, "weight of the mean squared sum of a pair's scores in the loss, which keeps scores around 0, such as 0.01")
    parallel: Parallel | None = key(None, "its layout; null = the actor's")
    offload: Literal["auto"] | Annotated[tuple[TensorKind, ...], LISTED] = key((), "tensors to keep in host memory while no phase needs them on the device: weights, and of a model that is trained gradients, optimizer; auto = the tensors that do not fit otherwise")
    max_tokens_per_micro_batch: Positive | None = key(None, "tokens per micro-batch, and most tokens of a conversation, or of the two of a pair; null = the actor's")
