"""Weights that change while an engine writes: the log-prob of each token is transformers', by the weights whose version
the token names. Then adapters, of which an engine takes the next once it is idle: before and after a sleep, from which
its other weights come back out of host memory.

python tests/gpu/stages/in_flight.py
"""

import tempfile
from pathlib import Path

import torch
from common import DEVICE, one_rank, report, sized
from engines import architecture_of, model_folder, trained_engine, weights_of
from runs import engine_arguments
from safetensors.torch import load_file
from served import LENGTH, sequences, serving
from transformers import AutoModelForCausalLM
from watched_engine import Watched, writing
from weight_sources import handle_sender

from megappo.config.model_sections import Lora
from megappo.engines.client import EngineClient, taking_weights
from megappo.engines.generations import Generation, SamplingParams, WeightVersion
from megappo.models.train_engine import TrainedEngine
from megappo.placement.groups import ComponentGroups
from megappo.sync.build import adapter_shapes
from megappo.sync.sync import WeightSync
from megappo.weights.export import Export

OLD, NEW = 3, 4
BUCKET_BYTES = 2**28
LORA = Lora(rank=16, alpha=16)
PROMPTS = [tokens[: LENGTH // 4] for tokens in sequences()]
LONG, SHORT = SamplingParams(sized(LENGTH // 2, 55)), SamplingParams(LENGTH // 4)
BOUND, LEAST_RATIO = 0.05, 4
"""Limit of a token's difference from its own version's log-prob; the other version's is so many times larger."""


def weight_sync(client: EngineClient, export: Export, shapes: dict, lora: Lora | None = None) -> WeightSync:
    return WeightSync(
        export.tensors,
        export,
        [handle_sender(client, lora=lora)],
        [],
        shapes,
        bucket_bytes=BUCKET_BYTES,
        barrier=lambda: None,
        engines_keep=False,
    )


def oracle(folder: Path, weights: dict[str, torch.Tensor]) -> torch.nn.Module:
    """Return transformers' model with these weights, in fp32."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.load_state_dict(weights, strict=False)
    return model.to(DEVICE)


@torch.no_grad()
def differences(model: torch.nn.Module, generations: list[Generation]) -> list[torch.Tensor]:
    """Return |the engine's log-prob - the model's| of each response's tokens."""
    found = []
    for prompt, generation in zip(PROMPTS, generations, strict=True):
        logits = model(torch.tensor([prompt + generation.tokens], device=DEVICE)).logits[0, len(prompt) - 1 : -1]
        expected = logits.log_softmax(-1).cpu().gather(1, torch.tensor(generation.tokens)[:, None])[:, 0]
        found.append((torch.tensor(generation.log_probs) - expected).abs())
    return found


def change(engine: TrainedEngine) -> None:
    """Change all parameters that are trained by much more than an update does."""
    torch.manual_seed(1)
    for parameter in engine.chunks[0].parameters():
        if parameter.requires_grad and parameter.dim() > 1:
            parameter.data += parameter.data.std() * torch.randn_like(parameter)


def check_own_version(own: torch.Tensor, other: torch.Tensor) -> dict[str, float]:
    mean, of_other = float(own.mean()), float(other.mean())
    assert mean < BOUND and of_other > LEAST_RATIO * mean, (mean, of_other)
    return {"difference": mean, "largest": float(own.max()), "of_other_version": of_other}


def paused(folder: Path, shapes: dict, groups: ComponentGroups) -> dict[str, float]:
    """Sync while the engine writes."""
    actor = trained_engine(folder, groups)
    with serving("in_flight", folder, engine_arguments()) as server:
        server.wait_ready()
        client = Watched(server)
        sync, weights = weight_sync(client, Export(actor.chunks, architecture_of(folder), groups), shapes), {}
        with taking_weights(client, WeightVersion(OLD)):
            sync()
        weights[OLD] = weights_of(actor, folder)
        change(actor)
        with writing(client, PROMPTS, LONG) as responses:
            with taking_weights(client, WeightVersion(NEW)):
                sync()
            generations = responses.result()
        weights[NEW] = weights_of(actor, folder)
    versions = torch.tensor([version for one in generations for version in one.versions])
    assert {*versions.tolist()} == {OLD, NEW}, "the sync was not in the middle of the responses"
    of_old, of_new = (torch.cat(differences(oracle(folder, weights[one]), generations)) for one in (OLD, NEW))
    own, other = (torch.where(versions == OLD, *pair) for pair in ((of_old, of_new), (of_new, of_old)))
    return {"new_share": float((versions == NEW).float().mean()), **check_own_version(own, other)}


def adapted(folder: Path, shapes: dict, groups: ComponentGroups) -> dict[str, float]:
    """Send one adapter after the other to an engine that sleeps before each."""
    actor, found = trained_engine(folder, groups, lora=LORA), []
    export = Export(actor.chunks, architecture_of(folder, LORA), groups, adapters=True)
    with serving("adapters", folder, engine_arguments(), LORA) as server:
        client = server.wait_ready()
        sync = weight_sync(client, export, adapter_shapes(shapes, LORA), LORA)
        for _ in range(2):
            client.sleep()
            client.wake()
            sync()
            found.append((oracle(folder, weights_of(actor, folder, LORA)), client.generate(PROMPTS, SHORT)))
            change(actor)
    models = [model for model, _ in found]
    differences_of = [[torch.cat(differences(model, responses)) for model in models] for _, responses in found]
    (first, first_other), (second_other, second) = differences_of
    return check_own_version(torch.cat([first, second]), torch.cat([first_other, second_other]))


def measure() -> dict:
    figures: dict = {"stage": "in_flight"}
    with one_rank() as groups, tempfile.TemporaryDirectory() as root:
        folder = model_folder(Path(root))
        shapes = {name: tuple(one.shape) for name, one in load_file(folder / "model.safetensors").items()}
        for name, trial in {"paused": paused, "adapters": adapted}.items():
            figures |= {f"{name}_{key}": value for key, value in trial(folder, shapes, groups).items()}
    return figures


if __name__ == "__main__":
    report(measure)
