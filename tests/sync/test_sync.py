"""The weights that an engine gets, and when; that it computes with them is tested with real engines in
tests/sync/test_weight_update.py and test_sync.py."""

import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from weight_sources import Given, specs

from megappo.engines.client import EngineClient
from megappo.engines.generations import WeightVersion
from megappo.sync.disk import DiskReader
from megappo.sync.sync import WeightSync
from megappo.sync.transport import Receiver, Sender
from megappo.weights.buckets import Bucket, views

WEIGHTS = {
    "model.embed_tokens.weight": torch.arange(32.0).view(8, 4),
    "model.norm.weight": torch.ones(4, dtype=torch.bfloat16),
    "lm_head.weight": torch.arange(32.0, 64.0).view(8, 4),
}
SHAPES = {name: tuple(tensor.shape) for name, tensor in WEIGHTS.items()}


class Recorder(Sender):
    """Keeps what it is handed, as an engine would: its values at the time."""

    def __init__(self) -> None:
        self.buckets: list[dict[str, torch.Tensor]] = []
        self.calls: list[str] = []

    def open(self) -> None:
        self.calls.append("open")

    def send(self, bucket: Bucket, flat: torch.Tensor) -> None:
        self.calls.append("send")
        self.buckets.append({name: tensor.clone() for name, tensor in views(bucket, flat)})

    def close(self) -> None:
        self.calls.append("close")


class Notified(Receiver):
    """Records its closing in a recorder."""

    def __init__(self, recorder: Recorder):
        self.recorder = recorder

    def send(self, bucket: Bucket) -> None:
        pass

    def close(self) -> None:
        self.recorder.calls.append("received")


class Announced(Receiver):
    """Keeps the names of the tensors that are announced."""

    def __init__(self) -> None:
        self.buckets: list[list[str]] = []

    def send(self, bucket: Bucket) -> None:
        self.buckets.append([tensor.name for tensor in bucket])


def make(weights: dict[str, torch.Tensor], recorder: Recorder, bucket_bytes: int = 200, **options) -> WeightSync:
    items = list(weights.items())
    options = {"barrier": lambda: recorder.calls.append("barrier"), "engines_keep": False} | options
    endpoints = [recorder], [Notified(recorder)]
    return WeightSync(specs(items), Given(items), *endpoints, SHAPES, bucket_bytes=bucket_bytes, **options)


def test_every_tensor_arrives_once_in_buckets_of_one_dtype():
    recorder = Recorder()
    stats = make(WEIGHTS, recorder, 10**6)()
    assert [len(bucket) for bucket in recorder.buckets] == [1, 1, 1]
    received = {name: tensor for bucket in recorder.buckets for name, tensor in bucket.items()}
    assert received.keys() == WEIGHTS.keys()
    assert all(torch.equal(received[name], tensor) for name, tensor in WEIGHTS.items())
    assert stats.bytes == 4 * 32 + 2 * 4 + 4 * 32
    assert recorder.calls == ["open", "send", "send", "send", "close", "barrier", "received"]


def test_tensors_of_one_dtype_share_buckets_up_to_the_limit():
    weights = {f"{number}": torch.full((10,), float(number)) for number in range(7)}
    items, recorder = list(weights.items()), Recorder()
    shapes = dict.fromkeys(weights, (10,))
    options = {"bucket_bytes": 120, "barrier": lambda: None, "engines_keep": False}
    WeightSync(specs(items), Given(items), [recorder], [], shapes, **options)()
    assert [list(bucket) for bucket in recorder.buckets] == [["0", "1", "2"], ["3", "4", "5"], ["6"]]


def test_of_several_senders_each_sends_its_own_in_turns():
    weights = {f"{number}": torch.full((10,), float(number)) for number in range(8)}
    tensors = [replace(tensor, sender_index=int(tensor.name in "257")) for tensor in specs(list(weights.items()))]
    turns = [["0", "1"], ["2", "5"], ["3", "4"], ["7"], ["6"]]
    options = {"bucket_bytes": 80, "barrier": lambda: None, "engines_keep": False}
    for number, own in enumerate((turns[::2], turns[1::2])):
        recorder, announced = Recorder(), Announced()
        for receivers in ([], [announced]):
            recorder.buckets.clear()
            source, shapes = Given(list(weights.items())), dict.fromkeys(weights, (10,))
            WeightSync(tensors, source, [recorder], receivers, shapes, sender_index=number, **options)()
            assert [list(bucket) for bucket in recorder.buckets] == own
        assert announced.buckets == turns, "an engine's owner announces all"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w | {"model.extra.weight": torch.zeros(1)}, "no tensor model.extra.weight"),
        (
            lambda w: {n: t for n, t in w.items() if "norm" not in n},
            "1 of the engine's 3 tensors are not the model's: model.norm.weight",
        ),
        (
            lambda w: w | {"model.norm.weight": torch.zeros(5)},
            r"model.norm.weight has shape \(5,\), but the engine's is \(4,\)",
        ),
    ],
)
def test_another_model_is_refused_by_name_before_anything_is_sent(change, message):
    recorder = Recorder()
    with pytest.raises(ValueError, match=message):
        make(change(WEIGHTS), recorder)
    assert recorder.calls == []


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("name", WEIGHTS)
def test_a_value_that_is_no_number_is_refused_by_name(name, value):
    weights = {key: tensor.clone() for key, tensor in WEIGHTS.items()}
    weights[name].view(-1)[2] = value
    with pytest.raises(FloatingPointError, match=f"{name} holds values that are not finite"):
        make(weights, Recorder(), 10**6)()


def test_large_values_are_numbers():
    weights = WEIGHTS | {"lm_head.weight": torch.full((8, 4), 3e38)}
    recorder = Recorder()
    make(weights, recorder)()
    assert torch.equal(recorder.buckets[-1]["lm_head.weight"], weights["lm_head.weight"])


def test_what_has_not_changed_is_not_sent_again_to_engines_that_keep_it():
    recorder = Recorder()
    sync = make(WEIGHTS, recorder, engines_keep=True)
    assert sync(changed=False).bytes > 0, "the first time it is new to the engine"
    assert sync(changed=False).bytes == 0
    assert sync(changed=True).bytes == sum(tensor.nbytes for tensor in WEIGHTS.values())


def test_a_frozen_tensor_is_sent_once_to_engines_that_keep_it():
    items, recorder = list(WEIGHTS.items()), Recorder()
    tensors = [replace(tensor, is_frozen="norm" in tensor.name) for tensor in specs(items)]
    options = {"bucket_bytes": 10**6, "barrier": lambda: None, "engines_keep": True}
    sync = WeightSync(tensors, Given(items), [recorder], [], SHAPES, **options)
    sync()
    assert {name for bucket in recorder.buckets for name in bucket} == WEIGHTS.keys()
    recorder.buckets.clear()
    assert sync().bytes == 2 * 4 * 32
    assert {name for bucket in recorder.buckets for name in bucket} == WEIGHTS.keys() - {"model.norm.weight"}


def test_engines_that_lose_their_weights_get_all_of_them():
    sync = make(WEIGHTS, Recorder())
    sync()
    assert sync(changed=False).bytes == sum(tensor.nbytes for tensor in WEIGHTS.values())


def test_a_failed_hand_over_fails_the_sync():
    class Broken(Recorder):
        def send(self, bucket: Bucket, flat: torch.Tensor) -> None:
            raise ConnectionError("the engine is gone")

        def abort(self) -> None:
            self.calls.append("abort")

    recorder = Broken()
    with pytest.raises(ConnectionError, match="the engine is gone"):
        make(WEIGHTS, recorder)()
    assert recorder.calls == ["open", "abort"], "an update that failed must not be closed as if it were whole"


def test_a_hand_over_that_would_wait_for_ever_does_not_hide_another_ones_error():
    class Waiting(Recorder):
        def send(self, bucket: Bucket, flat: torch.Tensor) -> None:
            released.wait(60)

    class Refused(Recorder):
        def send(self, bucket: Bucket, flat: torch.Tensor) -> None:
            raise ConnectionError("the engine refuses")

    released = threading.Event()
    items, started = list(WEIGHTS.items()), time.monotonic()
    options = {"bucket_bytes": 10**6, "barrier": lambda: None, "engines_keep": False}
    sync = WeightSync(specs(items), Given(items), [Waiting(), Refused()], [], SHAPES, **options)
    try:
        with pytest.raises(ConnectionError, match="the engine refuses"):
            sync()
        assert time.monotonic() - started < 10
    finally:
        released.set()


@pytest.mark.parametrize("version", [None, WeightVersion(3), WeightVersion(3, keeps_cache=True)])
def test_an_engine_that_reads_weights_from_a_folder_forgets_what_the_old_ones_cached(
    version: WeightVersion | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = EngineClient("http://127.0.0.1:9", "key", 1.0)
    client.version = version
    sent = {}
    monkeypatch.setattr(client, "post", lambda path, body, timeout: sent.update({path: body}))
    DiskReader(SimpleNamespace(folder=tmp_path), client).close()
    body = sent["/update_weights_from_disk"]
    assert body["flush_cache"] == (version is None or not version.keeps_cache), "SGLang keeps its cache by default"
