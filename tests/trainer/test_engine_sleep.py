"""The order in which engines sleep, wake and take the weights, seen by a recording client."""

from types import SimpleNamespace

import pytest
import torch.distributed as dist
from spawn import run_ranks

from megappo.batch.exchange import Exchange
from megappo.observe.observer import NullObserver
from megappo.rollout.client import EngineClient, EngineFault
from megappo.sync.sync import SyncStats
from megappo.trainer.inference import InferenceEngines
from megappo.trainer.loop import Trainer
from megappo.trainer.phases import Phases
from megappo.trainer.restarts import Restarts
from megappo.trainer.run import Run

WAKING = [
    "resume_memory_occupation ['weights']",
    "weights",
    "resume_memory_occupation ['kv_cache', 'cuda_graph']",
]


class Recorder(EngineClient):
    """Notes what it is asked; of what `fails` names, it does the first not."""

    fails = ""
    hang_seconds = 300.0

    def __init__(self, asked: list[str]):
        self.asked = asked
        self._check_alive = lambda: None

    def _ask(self, method, path, body=None, timeout=None):
        if body is None:
            self._fail(path)
            return
        line = " ".join([path.split("?")[0].removeprefix("/"), *map(str, body.values())])
        self._fail(line)
        self.asked.append(line)

    def _fail(self, line):
        if self.fails and line.startswith(self.fails):
            self.fails = ""
            self.asked.append(f"{line} fails")
            raise EngineFault("it ended")


@pytest.fixture
def asked(monkeypatch) -> list[str]:
    asked: list[str] = []
    monkeypatch.setattr("megappo.platform.empty_cache", lambda: asked.append("empty_cache"))
    return asked


def engines(asked: list[str], *, sleeps: bool = True) -> InferenceEngines:
    def weight_sync(*, changed=True):
        found.client.post("weights", {})
        return SyncStats(8, 1.0)

    def probe():
        asked.append("probe")
        return {}

    exchange = SimpleNamespace(share=lambda value: asked.append("barrier") or [value])
    own = SimpleNamespace(stop=lambda: asked.append("stop"), restart=lambda: asked.append("restart"))
    own.number, own.part_of = 0, None
    restarts = Restarts(own, exchange, NullObserver(), limit=3)
    found = InferenceEngines(exchange, Recorder(asked), sleeps, weight_sync, probe)
    probe.rollouts = SimpleNamespace(restarts=restarts)
    restarts.give_weights = lambda: found.reconnect(lambda: found.weight_sync)
    weight_sync.senders, weight_sync.forget = [], lambda: asked.append("forget")
    return found


def test_an_engine_wakes_for_its_weights_first_and_only_then_for_its_caches(asked):
    found = engines(asked)
    found.sleep()
    assert asked == ["flush_cache", "release_memory_occupation", "barrier"]
    asked.clear()
    assert found.sync()["sync/bytes"] == 8
    ready = ["empty_cache", "barrier"]  # what any rank keeps free, the engine cannot have
    nobody_failed = "barrier"
    waking = [*ready, WAKING[0], nobody_failed, WAKING[1], *ready, WAKING[2], nobody_failed]
    assert asked == [*waking, "barrier", "probe"]


def test_an_engine_that_does_not_sleep_is_asked_for_nothing(asked):
    found = engines(asked, sleeps=False)
    found.sleep()
    found.sync()
    assert [line for line in asked if line not in ("empty_cache", "barrier")] == ["weights", "probe"]


def test_engines_that_are_ended_are_asked_for_nothing(asked):
    """They may hang, or have ended: a run that is interrupted saves all the same."""
    found = engines(asked)
    found.end()
    found.sleep()
    assert asked == ["stop", "barrier"]


ANEW = ("stop", "restart")
FAILS = {
    "asleep": ("release", ["release_memory_occupation fails", "stop", *ANEW, "weights", "probe"]),
    "meanwhile": ("/health", [WAKING[0], "/health fails", *ANEW, "weights", "probe"]),
    "as it wakes": (WAKING[0], [f"{WAKING[0]} fails", *ANEW, "weights", "probe"]),
    "in the sync": ("weights", [WAKING[0], "weights fails", *ANEW, "weights", "probe"]),
    "as it wakes wholly": (WAKING[2], [*WAKING[:2], f"{WAKING[2]} fails", *ANEW, "weights", "probe"]),
}


@pytest.mark.parametrize(("fails", "expected"), FAILS.values(), ids=FAILS)
def test_an_engine_that_fails_outside_a_rollout_is_started_anew(asked, fails, expected):
    found = engines(asked)
    found.client.fails = fails
    found.sleep()
    assert found.sync()["sync/bytes"] == 8
    told = [line for line in asked if line not in ("empty_cache", "barrier", "flush_cache")]
    assert told[-len(expected) - 1 :] == [*expected, "probe"]
    assert found.restarts.take_count() == 1
    asked.clear()
    found.sleep()
    found.wake()
    assert "restart" not in asked and asked.count("weights") == 1


@pytest.mark.parametrize("fails", ["weights_checker checksum", "weights_checker reset", "weights"])
def test_an_engine_that_fails_in_the_first_sync_is_started_anew_and_the_sync_proven_then(asked, fails):
    found = engines(asked)
    found.client.fails = fails
    found.first_sync(verify=True, as_loaded=True)
    told = [line for line in asked if line not in ("empty_cache", "barrier")]
    [failed] = [number for number, line in enumerate(told) if line.endswith("fails")]
    checksum, reset = "weights_checker checksum", "weights_checker reset_tensors"
    proof = (checksum, "weights", checksum)
    assert told[failed + 1 :] == [*ANEW, "weights", "probe", "forget", checksum, reset, *proof, "probe"]


def fall_asleep(rank: int, world_size: int) -> None:
    """Rank 0 owns an engine of which rank 1 has a part, on another node; rank 2 owns another engine."""
    asked: list[str] = []
    found = engines(asked)
    found.exchange, own = Exchange(dist.group.WORLD), found.restarts.own
    own.number, own.part_of = (0, None, 1)[rank], (None, 0, None)[rank]
    found.client.fails = "release" if rank == 0 else ""
    if rank == 1:
        found.client = None
    found.sleep()
    assert ("stop" in asked) == (rank < 2)


def test_of_an_engine_that_fails_as_it_falls_asleep_no_part_keeps_its_memory():
    run_ranks(3, fall_asleep)


class Steps(Trainer):
    """Does nothing in a step."""

    def step(self, step):
        return {"rollout/num_tokens": 1}


@pytest.mark.parametrize("servers", [(), ("http://10.0.0.7:30000",)])
def test_engines_sleep_while_a_checkpoint_is_written(asked, servers):
    steps = {"total_steps": 3, "save_interval": 2, "async_save": True, "time_limit": None, "grace_seconds": 0.0}
    config = SimpleNamespace(
        rollout=SimpleNamespace(engines=servers),
        proves_weights=True,
        trainer=SimpleNamespace(**steps, export_hf=False),
        eval_interval=0,
    )
    found = engines(asked)
    save = {"failed_saves": 0, "is_overdue": False, "store": SimpleNamespace(is_written=lambda: False, is_saving=False)}
    save |= {
        "begin_save": lambda models, in_background: asked.append("save"),
    }
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
