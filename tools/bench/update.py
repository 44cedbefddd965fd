"""Time an update and a log-prob pass against plain matrix products, and against a padded Hugging Face update.

    .venv/bin/python -m megappo.torchrun tools/bench/update.py
    .venv/bin/python -m megappo.torchrun tools/bench/update.py --threads 1 --json FILE

A Qwen2 of 110M parameters (12 layers, hidden size 768, 12 heads, a tied vocabulary of 32,000), fp32, on one rank. Rows
of 22 to 181 tokens, 1,646 in all, 1,240 of them in responses. Each repeat runs these one after the other:

- the update: `TrainedEngine.train_batch`, which is forward and backward pass, PPO's loss, clipping and Adam, on the
  packed rows; the pass: `MegatronEngine.forward`, log-probs and entropy of the responses.
- the products: torch.mm into preallocated memory, for all products of the model's linear layers: QKV, output
  projection, gate and up, and down for all tokens; the head's only for tokens that predict a response. The pass has
  each once; the update also has the backward pass's products by weights and by inputs. Each layer has its own weights
  and gradients, as in the model: one layer's, used twelve times, would stay in the caches and take 2 to 4 % less time.
  Attention is not counted.
- Hugging Face: an update of the same model on the same rows padded to the longest (1.76 times the tokens), with the
  same loss, entropy as a metric, clipping and AdamW, in torch's own operations on the logits of all tokens. It runs in
  a plain Python process, without megappo.torchrun's settings of the allocator.
- updates of twice the tokens: in twice the rows, and in rows twice as long.

A ratio to the products is their seconds over the measured ones: 1 would be a model that computes nothing else. The bars
are for two idle cores.
"""

import os
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import cache, partial
from multiprocessing import get_context
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[2]))
os.environ["CUDA_VISIBLE_DEVICES"] = ""

import torch
import torch.distributed as dist

from megappo.runtime import megatron_setup, platform

megatron_setup.install()

from timed import (  # noqa: E402
    HIDDEN,
    INTERMEDIATE,
    LAYERS,
    VOCABULARY,
    Row,
    check_keeps_memory,
    medians,
    parser_of,
    report,
    write_qwen2,
)
from torch.nn.utils.rnn import pad_sequence  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

from megappo.batch.rows import Rows  # noqa: E402
from megappo.config.schema import Config  # noqa: E402
from megappo.models.train_engine import LossFn, TrainedEngine  # noqa: E402
from megappo.placement.components import components_of  # noqa: E402
from megappo.placement.groups import build_groups  # noqa: E402
from megappo.placement.layout import Layout  # noqa: E402
from megappo.trainer.models import build_engine  # noqa: E402
from megappo.trainer.objectives import ActorLoss  # noqa: E402

PROMPTS = (12, 30, 22, 41, 17, 28, 9, 35, 25, 36, 38, 20, 31, 26, 22, 14)
RESPONSES = tuple(10 + 9 * (7 * i % 16) for i in range(16))
GROWN = {"twice the rows": {"copies": 2}, "rows twice as long": {"stretched": 2}}
"""Arguments of `make_rows` for twice the tokens, of which an update should take twice as long."""
BARS = {"update": "at least 0.68", "pass": "at least 0.78"}
SETTINGS = {
    "placement": {"actor": "0", "rollout": "0"},
    "actor": {"optim": {"lr": 1e-5, "clip_grad": 0.1}},
    "algorithm": {"adv_estimator": "grpo", "use_kl_in_reward": False},
    "data": {"train_files": ["fixed"]},
}


def make_rows(*, copies: int = 1, stretched: int = 1) -> Rows:
    """Return random rows with all inputs of the policy's loss, scaled in number and in length."""
    generator = torch.Generator().manual_seed(0)
    prompts, responses = (stretched * torch.tensor(lengths * copies) for lengths in (PROMPTS, RESPONSES))
    mask = (torch.arange(int(responses.max())) < responses[:, None]).float()
    tokens = torch.randint(VOCABULARY, (int((prompts + responses).sum()),), generator=generator)
    noise, advantages = torch.randn(2, *mask.shape, generator=generator)
    old = (0.1 * noise - torch.tensor(float(VOCABULARY)).log()) * mask
    fields = {"response_mask": mask, "old_log_probs": old, "advantages": advantages * mask}
    ids = torch.arange(len(prompts))
    return Rows(ids, ids, prompts, responses, tokens, fields)


def loss_of(rows: Rows, config: Config) -> LossFn:
    """Return the actor loss of a mini-batch of these rows."""
    return ActorLoss(config, int(rows.response_mask.sum()), len(rows))


class HuggingFace:
    """Update of a padded batch as one writes it with transformers and torch alone."""

    def __init__(self, folder: Path, config: Config, rows: Rows):
        self.rows, self.loss_fn, optim = rows, loss_of(rows, config), config.actor.optim
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).train()
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=optim.lr, betas=optim.betas, eps=optim.eps, weight_decay=optim.weight_decay
        )
        self.max_norm, self.temperature = optim.clip_grad, config.rollout.temperature
        self.tokens = pad_sequence(rows.sequences, batch_first=True)
        self.attention_mask = pad_sequence([torch.ones_like(tokens) for tokens in rows.sequences], batch_first=True)

    def update(self) -> None:
        self.optimizer.zero_grad()
        logits = self.model(self.tokens, attention_mask=self.attention_mask).logits[:, :-1] / self.temperature
        log_p = logits.log_softmax(-1)
        with torch.no_grad():
            entropy = self._of_responses(-(log_p.exp() * log_p).sum(-1))
        log_probs = self._of_responses(log_p.gather(-1, self.tokens[:, 1:, None])[..., 0])
        loss, _ = self.loss_fn({"log_probs": log_probs, "entropy": entropy}, self.rows)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.max_norm)
        self.optimizer.step()

    def _of_responses(self, of_all: torch.Tensor) -> torch.Tensor:
        mask = self.rows.response_mask
        places = self.rows.prompt_lengths[:, None] - 1 + torch.arange(mask.shape[1])
        return of_all.gather(1, places.clamp(max=of_all.shape[1] - 1)) * mask


@cache
def hugging_face_here(folder: Path, threads: int) -> HuggingFace:
    """Return this process's Hugging Face model and optimizer, built once."""
    torch.set_num_threads(threads)
    return HuggingFace(folder, config_of(folder), make_rows())


def update_here(folder: Path, threads: int) -> None:
    """Run one Hugging Face update in this process."""
    hugging_face_here(folder, threads).update()


class Product:
    """A linear layer's products: outputs of inputs, and the gradients by both.

    Args:
        tokens, inputs, outputs: inputs [tokens, inputs] are multiplied by weights [outputs, inputs].
        times: number of layers that have this shape.
    """

    def __init__(self, tokens: int, inputs: int, outputs: int, times: int):
        self.x, self.y = torch.randn(tokens, inputs), torch.empty(tokens, outputs)
        self.weights = torch.randn(times, outputs, inputs)
        self.grad_y, self.grad_x, self.grad_weights = map(torch.randn_like, (self.y, self.x, self.weights))

    def forward(self) -> None:
        for weights in self.weights:
            torch.mm(self.x, weights.T, out=self.y)

    def backward(self) -> None:
        for weights, grad_weights in zip(self.weights, self.grad_weights, strict=True):
            torch.mm(self.grad_y, weights, out=self.grad_x)
            torch.mm(self.grad_y.T, self.x, out=grad_weights)


class Products:
    """All matrix products of the model."""

    def __init__(self, rows: Rows):
        tokens, predicting = len(rows.input_ids), int(rows.response_mask.sum())
        shapes = ((HIDDEN, 3 * HIDDEN), (HIDDEN, HIDDEN), (HIDDEN, 2 * INTERMEDIATE), (INTERMEDIATE, HIDDEN))
        self.products = [Product(tokens, *shape, LAYERS) for shape in shapes]
        self.products.append(Product(predicting, HIDDEN, VOCABULARY, 1))

    def forward(self) -> None:
        for product in self.products:
            product.forward()

    def update(self) -> None:
        for product in self.products:
            product.forward()
            product.backward()


def config_of(folder: Path) -> Config:
    """Return the config of a run with the model in `folder`."""
    sections = {"model": {"path": str(folder), "dtype": "fp32"}, "trainer": {"output_dir": str(folder)}}
    return Config.model_validate(SETTINGS | sections)


def make_engine(config: Config) -> TrainedEngine:
    """Return the actor of a run that has no other component."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    groups = build_groups({"actor": Layout((0,))}, seed=0)
    return build_engine(config, components_of(config)["actor"], groups["actor"])


def hugging_face(folder: Path, threads: int) -> Callable[[], object]:
    """Return a function that runs Hugging Face's update in a process of its own."""
    for name in platform.KEPT_MEMORY:
        del os.environ[name]
    process = ProcessPoolExecutor(1, get_context("spawn"))
    update = lambda: process.submit(update_here, folder, threads).result()  # noqa: E731
    for _ in range(3):  # as many until its allocator has settled; the process starts here
        update()
    return update


def make_actions(folder: Path, threads: int) -> dict[str, Callable[[], object]]:
    """Return the actions to time, by name."""
    write_qwen2(folder)
    rows, config = make_rows(), config_of(folder)
    engine = make_engine(config)
    products = Products(rows)
    trained_on = {"update": rows, **{name: make_rows(**more) for name, more in GROWN.items()}}
    return {
        **{name: partial(engine.train_batch, these, loss_of(these, config)) for name, these in trained_on.items()},
        "products of the update": products.update,
        "pass": lambda: engine.forward(rows),
        "products of the pass": products.forward,
        "Hugging Face's update": hugging_face(folder, threads),
    }


def compare(actions: dict[str, Callable[[], object]], repeats: int) -> list[Row]:
    """Return the shares of the products' rate, and the update's speedup over Hugging Face."""
    took = medians(actions, repeats)
    update, hugging_face = took["update"], took["Hugging Face's update"]
    return [
        *(
            Row(name, took[f"products of the {name}"] / took[name], bar, "the rate of its products", took[name])
            for name, bar in BARS.items()
        ),
        Row("update", hugging_face / update, "at least 3", "Hugging Face's, padded", update),
        *(Row(f"update of {name}", took[name] / update, "at most 2.1", "an update", took[name]) for name in GROWN),
    ]


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="of torch (default: one per core)")
    args = parser.parse_args()
    check_keeps_memory()
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as folder:
        report(compare(make_actions(Path(folder), args.threads), args.repeats), args.json)


if __name__ == "__main__":
    main()
