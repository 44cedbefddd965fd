"""The report of a run that hangs, and which rank it names first."""

from concurrent.futures import ThreadPoolExecutor

from megappo.observe.timers import Timers
from megappo.runtime.heartbeat import Heartbeat
from megappo.runtime.watchdog import RankState, describe_hang, rank_state

NAMES = [f"rank {rank} (pid {100 + rank}, host)" for rank in range(8)]
REDUCES, GATHERS = "all_reduce (torch/distributed/d.py line 1)", "all_gather (torch/distributed/d.py line 2)"
PEER = RankState(REDUCES, 7, "update_actor", "MainThread:\n  update\n")
AHEAD = RankState(GATHERS, 9, "gather_metrics", "MainThread:\n  share\n")
ASLEEP = RankState("", 7, "update_actor", "MainThread:\n  sleep\n")


def lines_of(*places: RankState | None) -> list[str]:
    return describe_hang(places, NAMES[: len(places)], 900.0).splitlines()


def test_each_state_is_reported_once_with_its_ranks():
    assert lines_of(AHEAD, PEER, AHEAD, ASLEEP, AHEAD, AHEAD) == [
        "error: no rank has made progress for 900 s (trainer.hang_timeout_seconds): check rank 3 first",
        "rank 3 (pid 103, host) is in update_actor and waits for no other rank:",
        "  MainThread:",
        "    sleep",
        f"rank 1 (pid 101, host) is in update_actor and waits in {REDUCES}:",
        "  MainThread:",
        "    update",
        f"ranks 0, 2, 4, 5, as rank 0 (pid 100, host), is in gather_metrics and waits in {GATHERS}:",
        "  MainThread:",
        "    share",
    ]


def test_whom_to_look_at_first():
    first = [lines_of(*places)[0].rpartition(": ")[2] for places in ((PEER, AHEAD), (ASLEEP, None), (AHEAD, AHEAD))]
    assert first == ["check rank 0 first", "check rank 1 first", "all wait alike"]
    assert lines_of(ASLEEP, None)[1].startswith("rank 1 (pid 101, host) does not answer: it was stopped")


def test_where_a_process_is(monkeypatch):
    beats = Heartbeat()
    for module in ("megappo.observe.timers", "megappo.runtime.watchdog"):
        monkeypatch.setattr(f"{module}.heartbeat", beats)
    timers = Timers()
    with timers("sync"), timers("open"), ThreadPoolExecutor(1) as watchdog:
        place = watchdog.submit(rank_state).result()
        assert (place.phase, place.num_phases, place.call) == ("sync/open", 2, "")
        assert place.stacks.startswith("MainThread:\n") and "test_where_a_process_is" in place.stacks
    assert (beats.phase, beats.num_phases, beats.num_beats) == ("the part after sync", 4, 4)
    with beats.waiting():
        assert beats.is_waiting
    assert not beats.is_waiting
