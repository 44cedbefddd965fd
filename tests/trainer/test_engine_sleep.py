"""The order in which engines sleep, wake and take the weights, seen by a recording client."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from spawn import run_ranks

from megappo.batch.exchange import Exchange
from megappo.config.model_sections import Lora
from megappo.config.schema import Config
from megappo.config.trainer_section import Profile
from megappo.engines.client import UNCHECKED, EngineClient, EngineError, EngineFault
from megappo.engines.handle import EngineHandle, Footprint
from megappo.engines.restarts import EngineRestarts
from megappo.placement.run_plan import plan_run
from megappo.sync.proof import Checksums
from megappo.sync.sync import SyncStats
from megappo.trainer.inference import InferenceEngines
from megappo.trainer.loop import train
from megappo.trainer.models import Phases
from megappo.trainer.progress import Experience
from megappo.trainer.run import Run

URL = "http://10.0.0.7:30000"
NO_MODELS = SimpleNamespace(components={}, specs={})
WAKING = [
    "resume_memory_occupation ['weights']",
    "weights",
    "resume_memory_occupation ['kv_cache', 'cuda_graph']",
]


class Recorder(EngineClient):
    """Records requests; the first that starts with `fails` fails."""

    fails = ""
    hang_seconds = 300.0

    def __init__(self, events: list[str]):
        self.events = events
        self._check_alive = lambda: None

    def request(self, method, path, body=None, timeout=None):
        if body is None:
            self._fail(path)
            return
        values = [str(value) for name, value in body.items() if name not in UNCHECKED]
        line = " ".join([path.split("?")[0].removeprefix("/"), *values])
        self._fail(line)
        self.events.append(line)

    def _fail(self, line):
        if self.fails and line.startswith(self.fails):
            self.fails = ""
            self.events.append(f"{line} fails")
            raise EngineFault("it ended")


@pytest.fixture
def events(monkeypatch) -> list[str]:
    events: list[str] = []
    monkeypatch.setattr("megappo.runtime.platform.empty_cache", lambda: events.append("empty_cache"))
    return events


def engines(events: list[str], *, sleeps: bool = True) -> InferenceEngines:
    def weight_sync(*, changed=True):
        found.client.post("weights", {})
        return SyncStats(8, 1.0)

    def probe():
        events.append("probe")
        return {}

    exchange = SimpleNamespace(rank=0, all_gather=lambda value: events.append("barrier") or [value])
    own = SimpleNamespace(stop=lambda: events.append("stop"), restart=lambda: events.append("restart"))
    own.number, own.part_of, own.client = 0, None, Recorder(events)
    own.engine = SimpleNamespace(explain=str)
    restarts = EngineRestarts(own, exchange, print, limit=3)
    found = InferenceEngines(plan_run(CONFIG, 1), own, exchange, is_new=True)
    found.sleeps, found.phase, found.restarts, found.probe = sleeps, Phases(NO_MODELS), restarts, probe
    found.weight_sync, found.make_sync = weight_sync, lambda: weight_sync
    restarts.give_weights = found.give_weights
    weight_sync.senders, weight_sync.forget = [], lambda: events.append("forget")
    return found


def test_an_engine_wakes_for_its_weights_first_and_only_then_for_its_caches(events):
    found = engines(events)
    found.sleep()
    assert events == ["flush_cache", "release_memory_occupation", "barrier"]
    events.clear()
    assert found.sync(1)["sync/bytes"] == 8
    ready = ["empty_cache", "barrier"]  # what any rank keeps free, the engine cannot have
    nobody_failed = "barrier"
    waking = [*ready, WAKING[0], nobody_failed, WAKING[1], *ready, WAKING[2], nobody_failed]
    assert events == [*waking, "barrier", "probe"]


def test_an_engine_that_does_not_sleep_gets_no_request(events):
    found = engines(events, sleeps=False)
    found.sleep()
    found.sync(1)
    assert [line for line in events if line not in ("empty_cache", "barrier")] == ["weights", "probe"]


def test_engines_that_are_ended_get_no_request(events):
    """They may hang, or have ended: a run that is interrupted saves all the same."""
    found = engines(events)
    found.stop()
    found.sleep()
    assert events == ["stop", "barrier"]


RESTART = ("stop", "restart")
RESTARTED = (*RESTART, "weights", "probe", "weights")
FAILS = {
    "asleep": ("release", ["release_memory_occupation fails", "stop", *RESTARTED]),
    "meanwhile": ("/health", [WAKING[0], "/health fails", *RESTARTED]),
    "as it wakes": (WAKING[0], [f"{WAKING[0]} fails", *RESTARTED]),
    "in the sync": ("weights", [WAKING[0], "weights fails", *RESTARTED]),
    "as it wakes wholly": (WAKING[2], [*WAKING[:2], f"{WAKING[2]} fails", *RESTARTED]),
}


@pytest.mark.parametrize(("fails", "expected"), FAILS.values(), ids=FAILS)
def test_an_engine_that_fails_outside_a_rollout_is_restarted(events, fails, expected):
    found = engines(events)
    found.client.fails = fails
    found.sleep()
    assert found.sync(1)["sync/bytes"] == 8
    requests = [line for line in events if line not in ("empty_cache", "barrier", "flush_cache")]
    assert requests[-len(expected) - 1 :] == [*expected, "probe"]
    assert found.restarts.take_count() == 1
    events.clear()
    found.sleep()
    found.wake()
    assert "restart" not in events and events.count("weights") == 1


@pytest.mark.parametrize("fails", ["weights_checker checksum", "weights_checker reset", "weights"])
def test_an_engine_that_fails_in_the_first_sync_is_restarted_and_the_sync_proven_then(events, fails):
    found = engines(events)
    found.client.fails = fails
    found.first_sync(0)
    requests = [line for line in events if line not in ("empty_cache", "barrier")]
    [failed] = [number for number, line in enumerate(requests) if line.endswith("fails")]
    checksum, reset = "weights_checker checksum", "weights_checker reset_tensors"
    proof = (checksum, "weights", checksum)
    assert requests[failed + 1 :] == [*RESTART, "weights", "probe", "forget", checksum, reset, *proof, "probe"]


def sampling_ahead(events: list[str], **rollout: object) -> InferenceEngines:
    settings = {"placement": {"actor": "0", "critic": "0", "rollout": "1"}, "rollout": {"max_staleness": 2, **rollout}}
    found = engines(events, sleeps=False)
    found.plan = plan_run(Config.model_validate(CONFIG.model_dump(exclude_unset=True) | settings), 2)
    found.weight_sync.pending = lambda *, changed: changed

    @contextmanager
    def hold():
        events.append("hold")
        yield
        events.append("let go")

    found.hold = hold
    return found


def requests_of(events: list[str]) -> list[str]:
    return [line for line in events if line not in ("empty_cache", "barrier")]


def taken(mode: str, weights: str = "weights") -> list[str]:
    """The requests of a sync while the engine samples; its version is step 5's."""
    after = [] if weights.endswith("fails") else ["update_weight_version 5 False", "continue_generation"]
    return ["hold", f"pause_generation {mode}", weights, *after, "let go"]


@pytest.mark.parametrize(("recompute", "mode"), [(True, "retract"), (False, "in_place")])
def test_an_engine_that_samples_ahead_pauses_while_it_takes_weights(events, recompute, mode):
    found = sampling_ahead(events, recompute_cache=recompute)
    found.sync(4)
    assert ("flush_cache" in events) == (mode == "in_place"), "a server may have the cache of a run before"
    events.clear()
    found.sync(5)
    assert requests_of(events) == [*taken(mode), "probe"]
    events.clear()
    found.wake()
    assert requests_of(events) == ["weights", "update_weight_version 5 False"], "nothing is sent"


def test_an_engine_that_fails_while_it_is_paused_is_restarted(events):
    found = sampling_ahead(events)
    found.client.fails = "weights"
    found.sync(5)
    again = taken("retract")
    assert requests_of(events) == [*taken("retract", "weights fails"), *RESTART, *again, "probe", *again, "probe"]


def fall_asleep(rank: int, world_size: int) -> None:
    """Rank 0 owns an engine of which rank 1 has a part, on another node; rank 2 owns another engine."""
    events: list[str] = []
    found = engines(events)
    found.exchange, own = Exchange(dist.group.WORLD), found.engine_handle
    own.number, own.part_of = (0, None, 1)[rank], (None, 0, None)[rank]
    found.client.fails = "release" if rank == 0 else ""
    if rank == 1:
        own.client = None
    found.sleep()
    assert ("stop" in events) == (rank < 2)


def test_of_an_engine_that_fails_as_it_falls_asleep_no_part_keeps_its_memory():
    run_ranks(3, fall_asleep)


@pytest.mark.parametrize(
    ("servers", "is_new", "lora", "as_loaded"),
    [
        ([], True, None, True),
        ([], False, None, False),
        ([URL], True, None, False),
        ([], False, Lora(), True),
        ([URL], True, Lora(), False),
    ],
)
def test_engines_that_a_run_starts_have_loaded_the_first_weights_of_a_new_actor(servers, is_new, lora, as_loaded):
    """A run before may have left other weights in servers. Adapters leave the folder's weights as they are."""
    plan = plan_run(CONFIG.changed("rollout.engines", servers).changed("actor.lora", lora), 1)
    assert InferenceEngines(plan, EngineHandle(), None, is_new=is_new).as_loaded == as_loaded


def test_engines_sleep_while_a_checkpoint_is_written(events, tmp_path):
    steps = {"total_steps": 3, "save_interval": 2, "async_save": True, "time_limit": None, "grace_seconds": 0.0}
    steps["stop_on"] = ()
    config = SimpleNamespace(
        trainer=SimpleNamespace(**steps, export_hf=False, output_dir=str(tmp_path), profile=Profile()),
        eval_interval=0,
    )
    found = engines(events)
    found.exchange.on_rank_0 = lambda check: None  # the folder has no lock
    save = {"failed_saves": 0, "is_overdue": False, "store": SimpleNamespace(is_written=lambda: False, is_saving=False)}
    save |= {
        "begin_save": lambda models, in_background: events.append("save"),
    }
    run = Run(
        *(config, found.exchange, None),
        models=SimpleNamespace(check_finite=lambda exchange: None),
        engines=found,
        rollouts=None,
        batches=SimpleNamespace(prepare_save=lambda: None),
        progress=SimpleNamespace(checkpoint=None, is_new=True, start_step=0, **save),
        observer=SimpleNamespace(
            log=lambda step, metrics, examples=(): events.append(f"step {step}"),
            message=lambda text: None,
            end=lambda end: None,
        ),
        phase=Phases(NO_MODELS),
        utilisation=None,
    )
    run.engines.first_sync = lambda step: None
    train(run, lambda run, step: {"rollout/num_tokens": 1})
    asleep = ["flush_cache", "release_memory_occupation", "save"]
    requests = [line for line in events if line not in ("empty_cache", "barrier")]
    assert requests == ["step 1", "step 2", *asleep, *WAKING, "step 3", *asleep]


LOADED, CORRUPT = [{"norm": "a", "embed": "b"}], [{"norm": "x", "embed": "y"}]
CONFIG = Config.model_validate(
    {
        "model": {"path": "m"},
        "placement": {"actor": "0", "critic": "0", "rollout": "0"},
        "data": {"train_files": "d.jsonl"},
        "trainer": {"output_dir": "o"},
    }
)


class Checked(Recorder):
    """Has weights, whose checksums it gives, and a KV cache."""

    weights = LOADED

    def request(self, method, path, body=None, timeout=None):
        super().request(method, path, body, timeout)
        if path == "/server_info":
            return {"internal_states": [{"memory_usage": {"weight": 2.0, "kvcache": 40.0}}]}
        if path == "/weights_checker" and body["action"] == "reset_tensors":
            self.weights = CORRUPT
        if path == "/resume_memory_occupation" and body["tags"] == ["weights"]:
            self.weights = [{"norm": "?", "embed": "?"}]  # whatever was there before
        if path == "weights":
            self.weights = self.synced
        return {"ranks": [{"checksums": one} for one in self.weights]}


@pytest.fixture
def on_a_gpu(monkeypatch, events):
    """A rank on whose GPU other processes have `others`, in GiB, one number for each measurement."""

    def of(others: list[float], *, sleeps: bool = True) -> None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
        monkeypatch.setattr("megappo.trainer.inference.engine_sleeps", lambda route, number: sleeps)
        numbers = iter(others)
        monkeypatch.setattr("megappo.runtime.platform.bytes_of_others", lambda: next(numbers) * 2**30)
        monkeypatch.setattr("megappo.engines.handle.ASLEEP_SECONDS", 0.0)

    return of


def started(events: list[str], *, as_loaded: bool = True, fails: str = "") -> tuple[Checksums, Checked]:
    """The start of an engine by the only rank."""
    client = Checked(events)
    client.fails = fails
    own = SimpleNamespace(number=0, part_of=None, client=client, stop=lambda: events.append("stop"))
    own.wait_ready = lambda: events.append("ready") or client
    exchange = SimpleNamespace(rank=0, all_gather=lambda value: events.append("barrier") or [value])
    found = InferenceEngines(plan_run(CONFIG, 1), own, exchange, is_new=as_loaded)
    found.start()
    return found.loaded, client


CHECKSUM, RESET = "weights_checker checksum", "weights_checker reset_tensors"


def test_an_engine_sleeps_before_models_are_built_and_its_weights_are_noted_before(events, on_a_gpu):
    on_a_gpu([45.0, 45.0, 20.0, 3.0])
    found, _ = started(events)
    assert events == ["ready", CHECKSUM, *["barrier"] * 2, "flush_cache", "release_memory_occupation", "barrier"]
    assert found == LOADED


def test_an_engine_on_gpus_of_its_own_stays_awake(events, on_a_gpu):
    on_a_gpu([], sleeps=False)
    found, _ = started(events, as_loaded=False)
    assert events == ["ready", *["barrier"] * 3] and found == ()


@pytest.mark.parametrize("fails", ["weights_checker", "flush_cache", "release_memory_occupation"])
def test_an_engine_that_fails_before_models_are_built_keeps_no_memory(events, on_a_gpu, fails):
    on_a_gpu([45.0, 3.0])
    _, client = started(events, fails=fails)
    assert events[-2:] == ["stop", "barrier"] and client.has_failed


def first_sync_of(events: list[str], loaded: Checksums, client: Checked, synced: list[dict[str, str]]) -> None:
    made = engines(events)
    made.engine_handle.client, made.asleep, made.loaded = client, True, loaded
    client.synced = synced
    events.clear()
    made.first_sync(0)


def test_the_first_sync_wakes_an_engine_and_proves_it_by_what_it_had_loaded(events, on_a_gpu):
    on_a_gpu([45.0, 3.0])
    found, client = started(events)
    first_sync_of(events, found, client, LOADED)
    requests = [line for line in events if line not in ("empty_cache", "barrier")]
    assert requests == [WAKING[0], "forget", RESET, CHECKSUM, "weights", CHECKSUM, WAKING[2], "probe"]


@pytest.mark.parametrize(
    ("synced", "message"),
    [
        ([{"norm": "a", "embed": "other"}], "differ from the folder's after the first weight sync: embed"),
        ([{"norm": "x", "embed": "b"}], "were not set by the first weight sync: norm"),
    ],
)
def test_what_an_engine_lost_as_it_slept_and_did_not_get_back_is_named(events, on_a_gpu, synced, message):
    on_a_gpu([45.0, 3.0])
    found, client = started(events)
    with pytest.raises(EngineError, match=message):
        first_sync_of(events, found, client, synced)


@pytest.mark.parametrize("woken", [LOADED, [{"norm": "a", "embed": "?"}]])
def test_weights_beside_adapters_must_come_back_from_the_hosts_copy(events, on_a_gpu, woken):
    """They are not sent, and a sync would not restore them if the proof overwrote them."""
    on_a_gpu([45.0, 3.0])
    loaded, client = started(events)
    made = engines(events)
    made.plan = plan_run(CONFIG.changed("actor.lora", Lora()), 1)
    made.engine_handle.client, made.asleep, made.loaded = client, True, loaded
    client.synced = woken
    events.clear()
    if woken == LOADED:
        made.first_sync(0)
    else:
        with pytest.raises(EngineError, match="differ from the folder's after the first weight sync: embed"):
            made.first_sync(0)
    assert CHECKSUM in events and RESET not in events


def test_an_engine_that_keeps_its_memory_is_reported_with_who_holds_it(events, on_a_gpu, capsys):
    on_a_gpu([45.0, *[44.0] * 1000])
    started(events)
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("WARNING: cpu: other processes hold 44.0 GiB 0 s after") and "at most 11.4" in line
    assert "nvidia-smi" in line and "rollout.mem_fraction_static" in line


def test_memory_that_comes_back_late_is_waited_for(monkeypatch, capsys):
    """Memory that the trainer has taken since makes no difference: it is counted again at each waking."""
    numbers = iter([45.0, 45.0, 45.0, 9.0, 50.0, 30.0, 17.0, 16.0])
    monkeypatch.setattr("megappo.runtime.platform.bytes_of_others", lambda: next(numbers) * 2**30)
    footprint = Footprint(40 * 2**30)
    for _ in range(2):
        footprint.note_awake()
        footprint.wait_asleep()
    assert next(numbers) == 16.0 and capsys.readouterr().out == ""


def test_without_memory_to_come_back_nothing_is_looked_at(monkeypatch):
    monkeypatch.setattr("megappo.runtime.platform.bytes_of_others", lambda: pytest.fail("looked"))
    footprint = Footprint(0)
    footprint.note_awake()
    footprint.wait_asleep()


def test_an_engine_that_is_awake_is_not_woken(events):
    """SGLang 0.5.23 ends with a KeyError then."""
    found = engines(events)
    found.wake()
    assert [line for line in events if line not in ("empty_cache", "barrier")] == ["weights"]


def test_a_step_that_was_interrupted_goes_on_with_engines_asleep(events):
    """The first sync wakes them, and the updates need their memory."""
    found = engines(events)
    experience, shard = Experience(1, "rows", {}, num_updates={"actor": 3}), SimpleNamespace(num_updates=0)
    run = SimpleNamespace(
        engines=found,
        phase=Phases(NO_MODELS),
        progress=SimpleNamespace(experience=experience),
        models=SimpleNamespace(scatter=lambda batch: events.append(f"scatter {batch}") or {"actor": shard}),
    )
    resumed = Run.experience(run, 1, lambda run, step: pytest.fail("made again"))
    assert resumed == (experience, {"actor": shard}) and shard.num_updates == 3
    assert events == ["flush_cache", "release_memory_occupation", "barrier", "scatter rows"]
