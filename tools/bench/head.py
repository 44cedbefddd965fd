"""Measure what a policy's head takes over a large vocabulary: extra memory, and time against plain matrix products.

    .venv/bin/python tools/bench/head.py
    .venv/bin/python tools/bench/head.py --threads 1 --json FILE

A vocabulary of 151,936, hidden size 768, 8,192 tokens of which a quarter are of responses; fp32, on one rank. Compared:

- memory: the peak above what was held before (hidden states, the weight and its gradient), of a forward and a backward
  pass of `policy_head` with log-probs and entropy, with the float32 logits of the responses alone, which it never has.
- time: of the same passes with torch.mm of what must be multiplied: hidden states by the weight, and for the backward
  pass the logits' gradient by either. The head does one more product, as it recomputes logits.
"""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[2]))
os.environ["CUDA_VISIBLE_DEVICES"] = ""

import torch
import torch.distributed as dist

from megappo.runtime import megatron_setup

megatron_setup.install()

from peak_memory import MIB, PeakMemory  # noqa: E402
from timed import Row, medians, parser_of, report  # noqa: E402

from megappo.batch.packing import PackedBatch, pack  # noqa: E402
from megappo.batch.rows import Rows  # noqa: E402
from megappo.models.heads import policy_head  # noqa: E402

VOCABULARY, HIDDEN, ROWS, PROMPT, RESPONSE = 151_936, 768, 16, 384, 128


def make_pack() -> PackedBatch:
    """Return a pack of random rows."""
    prompts, responses = torch.full((ROWS,), PROMPT), torch.full((ROWS,), RESPONSE)
    tokens = torch.randint(VOCABULARY, (ROWS * (PROMPT + RESPONSE),))
    fields = {"response_mask": torch.ones(ROWS, RESPONSE)}
    ids = torch.arange(ROWS)
    return pack(Rows(ids, ids, prompts, responses, tokens, fields), 1, torch.device("cpu"))


class Head:
    """A policy's head with its inputs."""

    def __init__(self) -> None:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        self.packed = make_pack()
        self.weight = torch.randn(VOCABULARY, HIDDEN).mul_(HIDDEN**-0.5).requires_grad_()
        self.weight.main_grad = torch.ones(VOCABULARY, HIDDEN)
        self.output = torch.randn(1, self.packed.input_ids.shape[1], HIDDEN, requires_grad=True)
        self.head = policy_head(lambda: self.weight, dist.group.WORLD, VOCABULARY, 1.0)

    def passes(self) -> None:
        """Run a forward and a backward pass."""
        self.output.grad = None
        outputs = self.head(self.output, self.packed)
        (outputs["log_probs"].sum() - 0.01 * outputs["entropy"].sum()).backward()


class Products:
    """The matrix products by torch.mm, in chunks of the vocabulary that fit into 64 MiB."""

    def __init__(self, head: Head) -> None:
        self.hidden, self.weight = head.output.detach()[0, head.packed.predictor_index], head.weight.detach()
        self.words = 2**24 // len(self.hidden)
        self.logits = torch.empty(len(self.hidden), self.words)
        self.grad_hidden, self.grad_weight = torch.empty_like(self.hidden), torch.empty(self.words, HIDDEN)

    def passes(self) -> None:
        for weight in self.weight.split(self.words):
            logits, grad_weight = self.logits[:, : len(weight)], self.grad_weight[: len(weight)]
            torch.mm(self.hidden, weight.T, out=logits)
            torch.mm(logits, weight, out=self.grad_hidden)
            torch.mm(logits.T, self.hidden, out=grad_weight)


def measure(repeats: int) -> list[Row]:
    """Measure the memory of the first passes and the time of the later ones."""
    head = Head()
    memory = PeakMemory()
    head.passes()
    peak = memory.take() / MIB
    logits = ROWS * RESPONSE * VOCABULARY * 4 / MIB
    took = medians({"head": head.passes, "products": Products(head).passes}, repeats)
    return [
        Row("Head, extra memory", peak / logits, "at most 0.1", f"{logits:.0f} MiB, logits of responses", 0.0),
        Row("Head, both passes", took["products"] / took["head"], "at least 0.6", "plain products", took["head"]),
    ]


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="of torch (default: one per core)")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    report(measure(args.repeats), args.json)


if __name__ == "__main__":
    main()
