"""The order in which engines sleep, wake and take the weights, seen by a recording client."""

from types import SimpleNamespace

import pytest

from megappo.rollout.client import EngineClient
from megappo.sync.sync import SyncStats
from megappo.trainer.inference import InferenceEngines
from megappo.trainer.loop import Trainer
from megappo.trainer.phases import Phases
from megappo.trainer.run import Run

WAKING = [
    "resume_memory_occupation ['weights']",
    "weights",
    "resume_memory_occupation ['kv_cache', 'cuda_graph']",
]


class Recorder(EngineClient):
    """Notes what it is asked."""

    def __init__(self, asked: list[str]):
        self.asked = asked

    def post(self, path, body):
        self.asked.append(" ".join([path.split("?")[0].removeprefix("/"), *map(str, body.values())]))


@pytest.fixture
def asked(monkeypatch) -> list[str]:
    asked: list[str] = []
    monkeypatch.setattr("megappo.platform.empty_cache", lambda: asked.append("empty_cache"))
    return asked


def engines(asked: list[str], *, sleeps: bool = True) -> InferenceEngines:
    def weight_sync(*, changed):
        asked.append("weights")
        return SyncStats(8, 1.0)

    def probe():
        asked.append("probe")
        return {}

    exchange = SimpleNamespace(share=lambda value: asked.append("barrier") or [value])
    return InferenceEngines(exchange, Recorder(asked), sleeps, weight_sync, probe)


def test_an_engine_wakes_for_its_weights_first_and_only_then_for_its_caches(asked):
    found = engines(asked)
    found.sleep()
    assert asked == ["flush_cache", "release_memory_occupation", "barrier"]
    asked.clear()
    assert found.sync()["sync/bytes"] == 8
    ready = ["empty_cache", "barrier"]  # what any rank keeps free, the engine cannot have
    assert asked == [*ready, WAKING[0], WAKING[1], *ready, WAKING[2], "barrier", "probe"]


def test_an_engine_that_does_not_sleep_is_asked_for_nothing(asked):
    found = engines(asked, sleeps=False)
    found.sleep()
    found.sync()
    assert [line for line in asked if line not in ("empty_cache", "barrier")] == ["weights", "probe"]


def test_engines_that_are_ended_are_asked_for_nothing(asked):
    """They may hang, or have ended: a run that is interrupted saves all the same."""
    found = engines(asked)
    own = SimpleNamespace(stop=lambda: asked.append("stop"))
    found.probe = SimpleNamespace(rollouts=SimpleNamespace(restarts=SimpleNamespace(own=own)))
    found.end()
    found.sleep()
    assert asked == ["stop", "barrier"]


class Steps(Trainer):
    """Does nothing in a step."""

    def step(self, step):
        return {"rollout/num_tokens": 1}


@pytest.mark.parametrize("servers", [(), ("http://10.0.0.7:30000",)])
def test_engines_sleep_while_a_checkpoint_is_written(asked, servers):
    steps = {"total_steps": 3, "save_interval": 2, "async_save": True, "time_limit": None, "grace_seconds": 0.0}
    config = SimpleNamespace(
        rollout=SimpleNamespace(sync=SimpleNamespace(verify=True), engines=servers),
        trainer=SimpleNamespace(**steps, export_hf=False),
        eval_interval=0,
    )
    found = engines(asked)
    save = {"failed_saves": 0, "is_overdue": False, "store": SimpleNamespace(is_written=lambda: False)}
    save |= {"begin_save": lambda models, in_background: asked.append("save"), "finish_save": lambda: None}
    run = Run(
        *(config, found.exchange, None),
        models=SimpleNamespace(check_finite=lambda exchange: None),
        engines=found,
        rollouts=None,
        batches=None,
        progress=SimpleNamespace(checkpoint=None, start_step=0, **save),
        observer=SimpleNamespace(
            log=lambda step, metrics: asked.append(f"step {step}"), message=lambda text: None, finish=lambda: None
        ),
        phase=Phases(SimpleNamespace(offloads={}, specs={})),
        utilisation=None,
    )
    first_syncs = []
    run.engines.first_sync = lambda **given: first_syncs.append(given)
    Steps(config, run).train()
    assert first_syncs == [{"verify": True, "as_loaded": not servers}], "a run before may have left them other weights"
    asleep = ["flush_cache", "release_memory_occupation", "save"]
    told = [line for line in asked if line not in ("empty_cache", "barrier")]
    assert told == ["step 1", "step 2", *asleep, *WAKING, "step 3", *asleep]
