"""Which weights an engine may be sent; that it computes with them is tested in tests/rollout/test_weight_update.py."""

import pytest
import torch

from megappo.weights.transport import push_buckets

WEIGHTS = {
    "model.embed_tokens.weight": torch.zeros(8, 4),
    "model.norm.weight": torch.zeros(4),
    "lm_head.weight": torch.zeros(8, 4),
}
SHAPES = {name: tuple(tensor.shape) for name, tensor in WEIGHTS.items()}


def test_complete_weights_pass():
    items = list(WEIGHTS.items())
    stats = push_buckets(None, [items[:1], [], items[1:]], SHAPES)
    assert stats.bytes == 4 * (32 + 4 + 32)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w | {"model.extra.weight": torch.zeros(1)}, "no tensor model.extra.weight"),
        (
            lambda w: {n: t for n, t in w.items() if "norm" not in n},
            "1 of the engine's 3 .* not sent: model.norm.weight",
        ),
        (
            lambda w: w | {"model.norm.weight": torch.zeros(5)},
            r"model.norm.weight has shape \(5,\), but the engine's is \(4,\)",
        ),
        (
            lambda w: w | {"model.norm.weight": torch.tensor([0.0, 1.0, torch.nan, 0.0])},
            "model.norm.weight holds values that are not finite",
        ),
        (
            lambda w: w | {"lm_head.weight": torch.full((8, 4), torch.inf, dtype=torch.bfloat16)},
            "lm_head.weight holds values that are not finite",
        ),
    ],
)
def test_wrong_weights_are_refused_by_name(change, message):
    with pytest.raises(ValueError, match=message):
        push_buckets(None, [list(change(WEIGHTS).items())], SHAPES)


def test_a_tensor_sent_twice_is_refused():
    items = list(WEIGHTS.items())
    with pytest.raises(ValueError, match="model.embed_tokens.weight was sent twice"):
        push_buckets(None, [items, items], SHAPES)
