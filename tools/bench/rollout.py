"""Time the responses to prompts of mixed lengths against the client of SGLang's own serving benchmark.

    .venv/bin/python tools/bench/rollout.py
    .venv/bin/python tools/bench/rollout.py --prompts 128 --repeats 3 --json FILE

A random Llama of 10M parameters and 512 prompts of 4 to 64 tokens, greedy, with at most 32 tokens per response. A
random part of the vocabulary ends a response, so that lengths vary. Each repeat runs both, for one engine and for two:

- ours: `RolloutSession` of megappo.rollouts.sampler, as the ranks that own the engines call it (one thread each here).
- SGLang's: a task of `async_request_sglang_generate` per prompt, with as many at a time as an engine decodes at once,
  prompts assigned to the engines in turn, with log-probs, without streaming.

The engines' caches are flushed before each. A ratio is SGLang's seconds over ours.
"""

import argparse
import asyncio
import os
import random
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[2]))
os.environ["CUDA_VISIBLE_DEVICES"] = ""

import torch.distributed as dist

from megappo.engines import sglang_patches

sglang_patches.prepare_import()  # before sglang is imported
sys.modules.setdefault("datasets", SimpleNamespace(load_dataset=None))  # of which its benchmark needs none here

from sglang.benchmark import serving  # noqa: E402
from timed import Row, medians, parser_of, report, write_llama  # noqa: E402

from megappo.config.schema import Rollout  # noqa: E402
from megappo.engines.client import EngineClient, SamplingParams  # noqa: E402
from megappo.engines.generations import generate_body  # noqa: E402
from megappo.engines.process import Engine  # noqa: E402
from megappo.rollouts.sample_rows import Sample  # noqa: E402
from megappo.rollouts.sampler import EngineUsage, RolloutSession, SharedPrompts, store_counter  # noqa: E402

VOCABULARY, HIDDEN, PARAMETERS = 4096, 256, 10e6
LONGEST = 32
ROLLOUT = Rollout(max_running_requests=64, max_response_length=LONGEST)
Prompts = Sequence[tuple[int, list[int]]]


class Ours:
    """Rollouts by the ranks of a run that own engines."""

    def __init__(self, clients: Sequence[EngineClient], prompts: Prompts, params: SamplingParams):
        self.clients, self.prompts, self.params = clients, prompts, params

    def __call__(self) -> list[Sample]:
        take = store_counter(dist.HashStore(), "prompts")

        def rank(client: EngineClient) -> list[Sample]:
            samples: list[Sample] = []
            session = RolloutSession(
                SharedPrompts(self.prompts, 1, take),
                1,
                self.params,
                client,
                max_running_requests=ROLLOUT.max_running_requests,
                most_open=len(self.prompts) // len(self.clients),
                usage=EngineUsage(),
                on_sample=samples.append,
            )
            if fault := session.run():
                raise fault
            return samples

        with ThreadPoolExecutor(len(self.clients)) as pool:
            return [one for samples in pool.map(rank, self.clients) for one in samples]


class Theirs:
    """Rollouts by SGLang's serving benchmark."""

    def __init__(self, engines: Sequence[Engine], prompts: Prompts, params: SamplingParams):
        self.engines, self.prompts, self.params = engines, prompts, params

    def __call__(self) -> None:
        asyncio.run(self._ask_all())

    async def _ask_all(self) -> None:
        free = [asyncio.Semaphore(ROLLOUT.max_running_requests) for _ in self.engines]
        requests = (self._generate(number % len(free), tokens, free) for number, (_, tokens) in enumerate(self.prompts))
        for output in await asyncio.gather(*requests):
            if not output.success:
                raise RuntimeError(output.error)

    async def _generate(
        self, number: int, tokens: list[int], free: Sequence[asyncio.Semaphore]
    ) -> serving.RequestFuncOutput:
        engine, body = self.engines[number], {"sampling_params": generate_body([], self.params)["sampling_params"]}
        request = serving.RequestFuncInput(tokens, f"{engine.url}/generate", len(tokens), LONGEST, "", "", None, body)
        async with free[number]:
            serving.set_global_args(arguments(engine))
            return await serving.async_request_sglang_generate(request)


def arguments(engine: Engine) -> argparse.Namespace:
    """Return the command-line options that SGLang's benchmark client reads."""
    return argparse.Namespace(
        temperature=0.0,
        top_p=1.0,
        disable_ignore_eos=True,
        disable_stream=True,
        return_logprob=True,
        return_routed_experts=False,
        logprob_start_len=-1,
        top_logprobs_num=0,
        token_ids_logprob=None,
        header=[f"Authorization=Bearer {engine._api_key}"],
    )


def make_prompts(number: int) -> Prompts:
    rng = random.Random(0)
    return [(i, [rng.randrange(VOCABULARY) for _ in range(rng.randint(4, 64))]) for i in range(number)]


def measure(number: int, repeats: int, folder: Path, stack: ExitStack) -> list[Row]:
    """Measure the throughput of one engine and of two."""
    write_llama(folder / "model", PARAMETERS, hidden=HIDDEN, vocabulary=VOCABULARY)
    engines = [
        Engine(folder / "model", ROLLOUT, "fp32", index=i, gpu_ids=[], log_path=folder / f"{i}.log", seed=i)
        for i in range(2)
    ]
    for engine in engines:
        stack.callback(engine.stop)
        engine.start()
    clients = [engine.wait_ready() for engine in engines]
    ends = random.Random(1).sample(range(VOCABULARY), VOCABULARY // 15)
    params, prompts = SamplingParams(LONGEST, temperature=0.0, stop_token_ids=tuple(ends)), make_prompts(number)
    rows = []
    for count in (1, 2):
        ours, theirs = Ours(clients[:count], prompts, params), Theirs(engines[:count], prompts, params)

        def afresh(call: Callable[[], object], count: int = count) -> None:
            for client in clients[:count]:
                client.flush_cache()
            call()

        took = medians({"ours": partial(afresh, ours), "theirs": partial(afresh, theirs)}, repeats)
        name = f"Rollout of {number} prompts, {count} engine{'s' * (count > 1)}"
        rows.append(Row(name, took["theirs"] / took["ours"], "at least 0.95", "SGLang's own client", took["ours"]))
    return rows


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--prompts", type=int, default=512, help="default 512")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        found = measure(args.prompts, args.repeats, Path(folder), stack)
    report(found, args.json)


if __name__ == "__main__":
    main()
