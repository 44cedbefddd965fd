"""Load-balancing losses of a mixture's routers with and without full recomputation: a training step in bf16 has the
same loss and gradient norm, by the layers that the machine has.

python tests/gpu/stages/balancing.py
"""

import tempfile
from pathlib import Path

from common import measured, one_rank, report, sized
from engines import CHANGES, VOCABULARY, model_folder, trained_engine
from ppo_engines import make_loss, make_rows

from megappo.config.model_sections import Router
from megappo.models.routing import ModelRouting
from megappo.placement.groups import ComponentGroups

LENGTHS = sized([(128, 896)] * 16, [(3, 5)] * 4)
ROUTERS = {
    "none": Router(),
    "aux_loss": Router(aux_loss_coef=10.0),
    "seq_aux_loss": Router(seq_aux_loss_coef=10.0),
}
"""The coefficients are large, so that a lost loss changes the norm."""
BOUND = 2e-2
"""Relative, of norms in bf16."""


def step(folder: Path, groups: ComponentGroups, router: Router, recompute: str) -> dict[str, float]:
    """Return the gradient norm, loss and figures of a training step."""
    engine = trained_engine(folder, groups, recompute=recompute)
    engine.routing = ModelRouting(engine.chunks, groups, "actor", router, replays=False)
    rows = make_rows(VOCABULARY, LENGTHS)
    update, figure = measured(lambda: engine.train_batch(rows, make_loss("actor", rows)), repeats=0)
    loss = update.metrics.get("actor/load_balancing_loss")
    return {"grad_norm": update.grad_norm, **({"loss": loss.value} if loss else {}), **figure}


def measure() -> dict:
    figures: dict = {"stage": "balancing"}
    with one_rank() as groups, tempfile.TemporaryDirectory() as root:
        folder = model_folder(Path(root), "qwen3_moe", **CHANGES["qwen3_moe"])
        norms = {}
        for name, router in ROUTERS.items():
            kept, recomputed = (step(folder, groups, router, recompute) for recompute in ("none", "full"))
            for key in kept.keys() - {"seconds", "peak_gib"}:
                assert abs(kept[key] - recomputed[key]) < BOUND * kept[key], (name, key, kept, recomputed)
            norms[name] = kept["grad_norm"]
            for recompute, found in (("none", kept), ("full", recomputed)):
                figures |= {f"{name}_recompute_{recompute}_{key}": value for key, value in found.items()}
    for name in ("aux_loss", "seq_aux_loss"):
        assert abs(norms[name] - norms["none"]) > 2 * BOUND * norms["none"], f"{name} has no effect: {norms}"
    return figures


if __name__ == "__main__":
    report(measure)
