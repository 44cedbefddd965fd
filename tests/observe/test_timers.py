import time

import pytest
import torch

from megappo.observe.metrics import Metric, reduce_ranks
from megappo.observe.timers import Timers


def test_phases_and_other_add_up_to_the_wall_time_of_the_step():
    timers = Timers()
    before_start = time.perf_counter()
    timers.restart()
    start = time.perf_counter()
    with timers("rollout"):
        time.sleep(0.02)
        with timers("reward"):
            time.sleep(0.02)
    with timers("update_actor"):
        time.sleep(0.02)
    with timers("rollout"):
        time.sleep(0.02)
    between = time.perf_counter()
    time.sleep(0.02)
    end = time.perf_counter()
    metrics = timers.lap()
    after_end = time.perf_counter()

    assert end - start <= metrics["timing_s/step"] <= after_end - before_start
    phases = metrics["timing_s/rollout"] + metrics["timing_s/update_actor"]
    assert 0.08 <= phases <= between - start
    assert phases + metrics["timing_s/other"] == pytest.approx(metrics["timing_s/step"], rel=1e-9)
    assert metrics["timing_s/other"] >= 0.02
    assert 0.02 <= metrics["timing_s/rollout/reward"] <= metrics["timing_s/rollout"] - 0.04
    names = ("rollout", "rollout/reward", "update_actor", "other", "step")
    assert set(metrics) == {f"timing_s/{name}" for name in names}


def test_steps_follow_each_other_without_a_gap():
    timers = Timers()
    before_start = time.perf_counter()
    timers.restart()
    start = time.perf_counter()
    total = 0.0
    for _ in range(3):
        with timers("phase"):
            time.sleep(0.01)
        total += timers.lap()["timing_s/step"]
        time.sleep(0.01)
    end = time.perf_counter()
    last = timers.lap()
    total += last["timing_s/step"]
    assert end - start <= total <= time.perf_counter() - before_start
    assert "timing_s/phase" not in last


def test_the_thread_that_samples_memory_ends_with_its_timers():
    timers = Timers()
    sampler = timers._memory._sampler
    assert sampler.is_alive()
    del timers
    sampler.join(10)
    assert not sampler.is_alive()


def test_a_phase_that_raises_is_closed():
    timers = Timers()
    with pytest.raises(KeyError), timers("rollout"):
        raise KeyError("x")
    with timers("next"):
        pass
    assert {"timing_s/rollout", "timing_s/next"} <= set(timers.lap())


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU the phase's peak is the GPU's")
def test_the_peak_of_a_phase_holds_what_was_allocated_in_it_and_not_in_the_next():
    timers = Timers()
    timers.restart()
    with timers("large"):
        block = torch.ones(128 * 2**20, dtype=torch.uint8)
        time.sleep(0.5)
        del block
    with timers("small"):
        time.sleep(0.05)
    memory, next_step = timers.memory(), timers.memory()

    large, small = (memory[f"memory/{phase}_peak_gib"].value for phase in ("large", "small"))
    assert large - small == pytest.approx(0.125, abs=0.03)
    assert memory["memory/host_peak_gib/sum"].value == large
    assert "memory/large_peak_gib" not in next_step

    others = {"memory/large_peak_gib": Metric.of(large + 1, "max"), "memory/host_peak_gib/sum": Metric.of(2.0, "sum")}
    assert reduce_ranks([memory, others, {}]) == {
        "memory/large_peak_gib": large + 1,
        "memory/small_peak_gib": small,
        "memory/host_peak_gib/sum": large + 2,
    }
