"""Record the numbers of two PPO steps on fixed rollouts before a refactoring, and compare them after it.

    .venv/bin/python tools/bench/same_numbers.py record FILE
    .venv/bin/python tools/bench/same_numbers.py compare FILE

Covers every method in several layouts. FILE (JSON) has every metric of the steps, and the sum, the norm and a hash of
every trained weight. Engines are left out: their samples are fixed, and everything else is the program itself. Numbers
are only comparable on one machine, because other processors' vector units round sums differently. Takes about six
minutes.
"""

import argparse
import hashlib
import json
import math
import os
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

os.environ["CUDA_VISIBLE_DEVICES"] = ""
os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from megappo.runtime import megatron_setup

megatron_setup.install()

from transformers import AutoConfig, AutoModelForCausalLM  # noqa: E402

from megappo.batch.exchange import Exchange  # noqa: E402
from megappo.config.methods import ESTIMATORS, POLICY_LOSSES  # noqa: E402
from megappo.config.schema import Config  # noqa: E402
from megappo.data.prompts import Prompt  # noqa: E402
from megappo.data.record_dataset import share  # noqa: E402
from megappo.engines.handle import EngineHandle  # noqa: E402
from megappo.engines.restarts import EngineRestarts  # noqa: E402
from megappo.observe.observer import NullObserver  # noqa: E402
from megappo.placement.components import components_of  # noqa: E402
from megappo.placement.placing import place  # noqa: E402
from megappo.placement.run_plan import RunPlan  # noqa: E402
from megappo.ppo.conventions import PRESETS  # noqa: E402
from megappo.recipes.ppo import ppo_step  # noqa: E402
from megappo.rollouts.datasets import Datasets  # noqa: E402
from megappo.rollouts.journal import NoJournal  # noqa: E402
from megappo.rollouts.responses import Responses  # noqa: E402
from megappo.rollouts.rollouts import Rollouts  # noqa: E402
from megappo.rollouts.sample_rows import Sample, Segment  # noqa: E402
from megappo.rollouts.step_responses import StepResponses  # noqa: E402
from megappo.trainer.batches import SampledBatches  # noqa: E402
from megappo.trainer.inference import NoEngines  # noqa: E402
from megappo.trainer.models import Phases, architecture_of, build_models  # noqa: E402
from megappo.trainer.progress import Progress  # noqa: E402
from megappo.trainer.run import Run  # noqa: E402
from megappo.trainer.statistics import Utilisation  # noqa: E402
from megappo.userland.grades import Grade  # noqa: E402
from megappo.weights.export import Export  # noqa: E402

WORLD_SIZE, STEPS, VOCABULARY = 4, 2, 61
OF_TIME = re.compile("^(timing|memory|sync)|/mfu$|/(tokens_per_second|running_requests|cached_prompt_frac)$")
PROMPTS, RESPONSES, LONGEST_PROMPT, LONGEST_RESPONSE = 6, 4, 5, 9
TOLERANCE = 1e-6
LAYOUTS = {
    "one rank": {"placement": {"actor": "0", "critic": "0"}},
    "actor tp2, critic pp2": {
        "placement": {"actor": "0-1", "critic": "0-1"},
        "actor": {"parallel": {"tensor": 2}},
        "critic": {"parallel": {"pipeline": 2}},
    },
    "actor dp2, critic elsewhere tp2 sp": {
        "placement": {"actor": "0-1", "critic": "2-3"},
        "critic": {"parallel": {"tensor": 2, "sequence": True}},
    },
    "tp2 dp2 sp": {
        "placement": {"actor": "0-3", "critic": "0-3"},
        "actor": {"parallel": {"tensor": 2, "sequence": True}},
        "critic": {"parallel": {"tensor": 2, "sequence": True}},
    },
    "actor pp2 vpp2, critic dp4": {
        "placement": {"actor": "1-2", "critic": "0-3"},
        "actor": {"parallel": {"pipeline": 2, "virtual_pipeline": 2}},
    },
    "actor cp2 dp2, critic tp2 pp2": {
        "placement": {"actor": "0-3", "critic": "0-3"},
        "actor": {"parallel": {"context": 2}},
        "critic": {"parallel": {"tensor": 2, "pipeline": 2}},
    },
}
GROUPED = {"adv_estimator": "grpo"}
WEIGHTED = {"rollout_correction": {"level": "token", "mode": "mask", "threshold": 1.4}}
LOSS_KEYS = {"clip_cov": {"clip_cov_ratio": 0.2, "clip_cov_lb": 0.0}, "kl_cov": {"kl_cov_ratio": 0.2}}
SINGLE_TURN = [name for name, loss in POLICY_LOSSES.items() if not loss.needs_turns]
METHODS: dict[str, dict] = {
    **{name: {"algorithm": {"adv_estimator": name}} for name in ESTIMATORS},
    **{f"loss {name}": {"actor": {"policy_loss": name, **LOSS_KEYS.get(name, {})}} for name in SINGLE_TURN},
    "loss dis": {"actor": {"policy_loss": "dis"}, "algorithm": {"old_log_probs": "engine"}},
    "frozen attention": {"critic": {"freeze": ["attention"]}},
    "two critics": {"critic": {"ensemble": 2}},
    **{f"preset {name}": {"algorithm": {"preset": name}} for name in PRESETS},
    "KL in the reward": {"algorithm": {"use_kl_in_reward": True, "kl_ctrl": {"type": "adaptive", "kl_coef": 0.1}}},
    "KL loss": {"actor": {"use_kl_loss": True, "kl_loss_type": "k3+", "kl_loss_coef": 0.1, "entropy_coeff": 0.01}},
    "full KL": {"actor": {"use_kl_loss": True, "kl_loss_type": "full", "kl_loss_coef": 0.1}},
    "shared backbone": {"algorithm": {"shared_backbone": True, "bootstrap_truncated": True}},
    "values at the end": {"algorithm": {"bootstrap_truncated": True, "gamma": 0.9, "lam": 0.8, "critic_lam": 1.0}},
    "target_kl": {"actor": {"target_kl": 1e-4, "ppo_epochs": 3}},
    "correction": {"algorithm": WEIGHTED | GROUPED},
    "sequences": {"actor": {"loss_agg_mode": "seq-mean-token-sum-norm"}, "critic": {"huber_delta": 0.3}},
    "rewards": {"reward": {"normalize": "running", "length_penalty": "linear", "clip": 2.0}},
}
"""Settings of each method on top of `settings`."""


def settings(folder: Path) -> dict:
    """Return the settings that all cases share."""
    trained = {
        "optim": {"lr": 1e-2, "eps": 1e-4, "clip_grad": 0.05},
        "ppo_mini_batch_size": PROMPTS // 2,
        "max_tokens_per_micro_batch": 40,
    }
    return {
        "model": {"path": str(folder), "dtype": "fp32"},
        "placement": {"rollout": "0-3"},
        "actor": {**trained, "ppo_epochs": 2},
        "critic": trained,
        "algorithm": {"use_kl_in_reward": False},
        "rollout": {
            "n": RESPONSES,
            "max_response_length": LONGEST_RESPONSE,
            "temperature": 0.8,
            "sync": {"probe_tolerance": 100.0},
        },
        "data": {"train_files": ["fixed"], "train_batch_size": PROMPTS, "max_prompt_length": LONGEST_PROMPT},
        "trainer": {"output_dir": str(folder), "total_steps": STEPS, "export_hf": False, "keep_rollouts": 0},
    }


def merged(*parts: dict) -> dict:
    """Merge nested mappings; later ones override."""
    whole: dict = {}
    for part in parts:
        for key, value in part.items():
            whole[key] = merged(whole.get(key, {}), value) if isinstance(value, dict) else value
    return whole


def cases(folder: Path) -> Iterator[tuple[str, Config]]:
    """Yield every method in every layout."""
    for layout, placed in LAYOUTS.items():
        for method, changes in METHODS.items():
            keys = merged(settings(folder), placed, changes)
            config = Config.model_validate(keys)
            if not config.has_critic:  # its keys would be refused, as nothing reads them
                config = Config.model_validate({name: section for name, section in keys.items() if name != "critic"})
            if method == "full KL" and config.actor.parallel.pipeline > 1:  # where it cannot be had
                continue
            yield f"{layout}: {method}", config


class FixedPrompts:
    """Data set that gives the same prompts for each step."""

    def batch(self, num_drawn: int, rank: int = 0, world_size: int = 1) -> list[Prompt]:
        generator = torch.Generator().manual_seed(100 + num_drawn // PROMPTS)
        return share([self._prompt(i, generator) for i in range(PROMPTS)], rank, world_size)

    def _prompt(self, index: int, generator: torch.Generator) -> Prompt:
        length = 1 + index % LONGEST_PROMPT
        tokens = torch.randint(VOCABULARY, (length,), generator=generator).tolist()
        return Prompt(index, tokens, "", None, teacher=1 + index % 2)


class FixedResponses(Responses):
    """Responses with a fixed number of scores per sample, which depend on its tokens alone."""

    def __init__(self, prompts: Sequence[Prompt], num_scores: int):
        super().__init__(prompts, None, None)
        self.num_scores = num_scores

    def fill_grades(self) -> None:
        for one in self.samples:
            scores = [sum(one.tokens) % 7 / 3 - 1, float(one.tokens[0] % 2)]
            one.grade = Grade(scores[: self.num_scores], {})


class FixedRollouts(Rollouts):
    """Samples and scores that depend on the prompts alone, all on rank 0, which owns the engine."""

    def sample(self, prompts: Sequence[Prompt], n: int, *_: object) -> Responses:
        responses = FixedResponses(prompts, 1 + self.config.algorithm.method.needs_score_components)
        for prompt in prompts if self.exchange.rank == 0 else ():
            generator = torch.Generator().manual_seed(sum(prompt.tokens) * 10 + n)
            for i in range(n):
                length = int(torch.randint(1, LONGEST_RESPONSE + 1, (1,), generator=generator))
                tokens = torch.randint(VOCABULARY, (length,), generator=generator).tolist()
                noise = 0.3 * torch.randn(length, generator=generator)
                log_probs = (noise - torch.tensor(float(VOCABULARY)).log()).tolist()
                reason = "length" if length == LONGEST_RESPONSE else "stop"
                segment = Segment(prompt.tokens, tokens=tokens, log_probs=log_probs)
                responses.add([Sample(prompt.index, i, [segment], reason)])
        return responses


class FixedBatches(SampledBatches):
    """All prompts of each draw, without a queue."""

    def sample(self, step: int, phase: Phases) -> StepResponses:
        prompts = self._draw()
        with phase("rollout"):
            responses = self._rollouts.sample(prompts, self._config.rollout.n)
            step_responses = StepResponses(prompts, responses.samples, [responses], responses.usage)
            if self._config.algorithm.method.needs_greedy_baseline:
                step_responses.greedy = self._rollouts.sample(prompts, 1)
        step_responses.seconds = phase.seconds("rollout")
        return step_responses


def build(config: Config) -> Run:
    """Build a run without engines, checkpoints and files."""
    exchange, observer = Exchange(dist.group.WORLD), NullObserver()
    components, world_size = components_of(config), dist.get_world_size()
    # Not by plan_run: tests set keys that nothing reads, such as the offload of a model that only some cases have.
    layouts = place(config, components, world_size, ranks_per_node=world_size)
    models = build_models(RunPlan(config, config, world_size, world_size, components, layouts), exchange)
    datasets = Datasets(None, (), VOCABULARY, FixedPrompts(), {})
    restarts = EngineRestarts(EngineHandle(), exchange, observer.message, limit=0)
    rollouts = FixedRollouts(config, datasets, restarts, exchange, workers={}, num_engines=1)
    engines = NoEngines()
    batches = FixedBatches(datasets, rollouts, engines.sleep, journal=NoJournal())
    progress, utilisation = Progress(config, exchange), Utilisation(models, exchange)
    return Run(
        *(config, exchange, datasets, models, engines, rollouts, batches, progress, observer),
        *(Phases(models), utilisation),
    )


def numbers_of(config: Config) -> dict[str, object]:
    """Return the steps' metrics as `step/name`, and [sum, norm, hash] of each trained weight.

    Only the ranks that have them return them.
    """
    run = build(config)
    found: dict[str, object] = {}
    for step in range(1, STEPS + 1):
        metrics = {name: value for name, value in ppo_step(run, step).items() if not OF_TIME.search(name)}
        found |= {f"{step}/{name}": float(value) for name, value in metrics.items() if isinstance(value, float | int)}
    for component, engine in run.models.trained.items():
        if engine is None:
            continue
        spec = run.models.specs[component]
        for bucket in Export(engine.chunks, architecture_of(spec), engine.groups).buckets(2**20):
            for name, tensor in bucket:
                found[f"{component}.{name}"] = described(tensor)
    agreed: dict[str, object] = {}
    for part in run.exchange.all_gather(found):
        for name, value in part.items():
            if agreed.setdefault(name, value) != value:
                raise ValueError(f"ranks disagree about {name}: {agreed[name]}, {value}")
    return agreed


def described(tensor: torch.Tensor) -> list:
    exact = hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest()[:16]
    return [float(tensor.double().sum()), float(tensor.double().norm()), exact]


def rank_main(rank: int, folder: str, names: Sequence[str]) -> None:
    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(WORLD_SIZE), LOCAL_WORLD_SIZE=str(WORLD_SIZE)
    )
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD_SIZE)
    found = {}
    for name, config in cases(Path(folder)):
        if name in names:
            found[name] = numbers_of(config)
            if rank == 0:
                print(f"{name}: {len(found[name])} numbers", flush=True)
    if rank == 0:
        Path(folder, "found.json").write_text(json.dumps(found))
    dist.barrier()


def measure(only: str) -> dict[str, dict]:
    """Return the numbers of every case whose name contains `only`."""
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder))
        names = [name for name, _ in cases(Path(folder)) if only in name]
        if not names:
            raise SystemExit(f"error: no case has {only!r} in its name")
        found = {}
        for layout in LAYOUTS:  # each in processes of its own: the threads of process groups that are done with add up
            of_layout = [name for name in names if name.startswith(f"{layout}: ")]
            if of_layout:
                mp.spawn(rank_main, (folder, of_layout), nprocs=WORLD_SIZE)
                found |= json.loads(Path(folder, "found.json").read_text())
                Path(folder, "store").unlink(missing_ok=True)
        return found


def write_model(folder: Path) -> None:
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "qwen2",
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        initializer_range=0.2,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def difference(before: object, after: object) -> float:
    """Return 0 for bitwise equality; else the difference relative to the larger value, or absolute below 1."""
    if before == after:
        return 0.0
    if before is None or after is None:
        return float("inf")
    pairs = list(zip(before[:2], after[:2], strict=True)) if isinstance(before, list) else [(before, after)]
    if not all(math.isfinite(number) for pair in pairs for number in pair):
        return float("inf")
    return max(abs(a - b) / max(1.0, abs(a), abs(b)) for a, b in pairs) or 1e-300  # equal sums, other bits


def compare(before: dict[str, dict], after: dict[str, dict]) -> int:
    """Print the differences from the recorded numbers; return 1 if any is larger than TOLERANCE."""
    worst = {}
    for name, one in before.items():
        other = after.get(name, {})
        differences = {key: difference(one[key], other.get(key)) for key in one}
        key = max(differences, key=lambda key: differences[key])
        worst[name] = (differences[key], key)
    equal = [name for name, (found, _) in worst.items() if found == 0]
    print(f"{len(equal)} of {len(worst)} cases are equal to the bit")
    for name, (found, key) in sorted(worst.items(), key=lambda item: -item[1][0]):
        if found:
            print(f"{name}: {found:.2g} ({key})")
    return int(any(found > TOLERANCE for found, _ in worst.values()))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["record", "compare"])
    parser.add_argument("file", type=Path)
    parser.add_argument("--only", default="", help="cases with this in their name, 'LAYOUT: METHOD'")
    args = parser.parse_args()
    if args.command == "record":
        args.file.write_text(json.dumps(measure(args.only), indent=1))
        return 0
    before = {name: numbers for name, numbers in json.loads(args.file.read_text()).items() if args.only in name}
    return compare(before, measure(args.only))


if __name__ == "__main__":
    sys.exit(main())
