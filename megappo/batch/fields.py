"""Fields that rows carry beside their tokens. Torch-free."""

from dataclasses import dataclass, replace

from megappo.config.values import MOST_CRITICS
from megappo.table import Table


@dataclass(frozen=True)
class Field:
    """One float32 number per row, several per row, or one per response token; or bytes per token of `input_ids`.

    Attributes:
        per_token: [B, R], right-padded with 0; else [B].
        has_columns: [B, K] instead, with the same K on every rank; not per token.
        writer: the part of a step that adds it to the rows.
        meaning: description for error messages.
        has_bytes: [T, K] uint8 instead, for each token of `input_ids`, with the same K on every rank; not per token.
    """

    per_token: bool
    writer: str
    meaning: str
    has_columns: bool = False
    has_bytes: bool = False


_OF_MEMBER = Field(True, "the forward pass of a critic of an ensemble", "the return that this critic expects")
FIELDS: Table[Field] = Table(
    "field of rows",
    {
        "response_mask": Field(True, "the rollout", "1 on tokens that the policy wrote, 0 on an environment's"),
        "rollout_log_probs": Field(True, "the rollout", "the engine's log-probs of the policy's tokens"),
        "staleness": Field(
            True, "the rollout", "training steps between the weights that wrote the token and its step's"
        ),
        "expert_choices": Field(
            False,
            "the rollout",
            "the experts that each token went to, numbered from 1; all 0 if unknown",
            has_bytes=True,
        ),
        "prompt_records": Field(
            False, "the rollout", "number of the data set of the row's prompt, and the prompt's position in it", True
        ),
        "scores": Field(False, "the rollout", "the reward function's score of the response"),
        "score_components": Field(
            False, "the rollout", "the terms of the scores, where the reward function returns several", True
        ),
        "truncated": Field(
            False,
            "the rollout",
            "1 where rollout.max_response_length cut the response off, or its episode was not ended",
        ),
        "episodes": Field(False, "the rollout", "with an environment: the row's episode among the prompt's"),
        "segments": Field(False, "the rollout", "the number of the segment in its episode, from 0"),
        "turns": Field(True, "the rollout", "a token's turn of the policy, from 1; 0 on an environment's"),
        "turn_rewards": Field(
            True, "the rollout", "rewards that are part of the scores: an environment's, of steps of the response"
        ),
        "loss_weights": Field(False, "the rollout", "factors of the row's losses"),
        "teacher": Field(False, "the rollout", "the number of the row's teacher in teachers, from 1; 0 = none"),
        "margins": Field(False, "the preferences", "by which the chosen response's score should exceed the other's"),
        "baselines": Field(False, "the rollout", "the shaped score of the greedy response to the prompt"),
        "old_log_probs": Field(True, "the actor's forward pass", "log-probs before the step's updates"),
        "full_kl": Field(True, "the actor's forward pass", "KL to reference or teacher, over the whole vocabulary"),
        "ref_log_probs": Field(True, "the reference's forward pass", "log-probs of the frozen reference"),
        "teacher_log_probs": Field(True, "its teacher's forward pass, or server", "log-probs of the row's teacher"),
        "values": Field(True, "the critic's forward pass", "the return expected before the token"),
        "bootstrap_values": Field(False, "the critic's forward pass", "the return expected after the last token"),
        **{f"values_{i}": _OF_MEMBER for i in range(1, MOST_CRITICS + 1)},
        **{f"bootstrap_values_{i}": replace(_OF_MEMBER, per_token=False) for i in range(1, MOST_CRITICS + 1)},
        "reward_model_scores": Field(False, "the reward model's forward pass", "its score of the response"),
        "reward_model_token_scores": Field(True, "the reward model's forward pass", "its score before the token"),
        "shaped_scores": Field(False, "the advantages", "the scores after scale, clip, normalising and length penalty"),
        "kl_penalty": Field(True, "the advantages", "KL to the reference, before its coefficient"),
        "distillation_kl": Field(True, "the advantages", "KL to the row's teacher, before its coefficient"),
        "advantages": Field(True, "the advantages", "how much better than expected, whitened where the method does"),
        "clipped_advantages": Field(True, "the advantages", "1 where algorithm.advantages_clip made a difference"),
        "returns": Field(True, "the advantages", "targets of the values"),
        "value_std": Field(True, "the advantages", "standard deviation of the values between critics of an ensemble"),
        "agreed": Field(True, "the advantages", "1 where algorithm.mask_agreed sets the advantage to 0"),
        "disputed": Field(True, "the advantages", "1 where algorithm.mask_disputed leaves out the entropy bonus"),
        "rollout_is_weights": Field(True, "the advantages", "importance weights of the trainer against the engine"),
        "selected": Field(True, "the actor's update", "1 on tokens that the policy loss treats apart"),
    },
)
"""Name -> field; a component or method from outside registers what it adds: `FIELDS.register(name, Field(...))`."""


def field_of(name: str) -> Field:
    """Return the field of this name.

    Raises:
        ValueError: there is none.
    """
    if name not in FIELDS:
        raise ValueError(
            f"unknown field {name!r} of rows: choose one of {', '.join(FIELDS)}, or register it in "
            "megappo.batch.fields.FIELDS"
        )
    return FIELDS[name]
