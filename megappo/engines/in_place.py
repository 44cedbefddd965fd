"""Runs in the workers of an engine: copies the actor's weights from where its ranks have them, in shared memory.

SGLang calls `load`, its `custom_weight_loader`. Where each weight goes, the model's own `load_weights` says: run
with tensors that have no memory, what it would copy is written down instead. A sync then is those copies.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

LOADER = f"{__name__}.load"
ANSWER_BYTES = 4096
PIECE_BYTES = 2**20
"""That a thread copies at a time. More than an AMD EPYC's L2 of 512 KiB: up to that it copies through its caches,
whatever `megappo.engines.launch.STREAMED_COPIES` says."""
_NUMBERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""What holds as many bytes and is known to numpy, which bf16 is not."""
_COPY, _FILL, _ZERO, _TO = (
    torch.ops.aten.copy_.default,
    torch.ops.aten.fill_.Scalar,
    torch.ops.aten.zero_.default,
    torch.ops.aten._to_copy.default,
)
Index = tuple[int, ...]


class NoCopies(Exception):
    """The model's `load_weights` does something else than to copy."""


@dataclass(frozen=True)
class Region:
    """A part of a Hugging Face tensor, and memory for it or of it: `tensor`, of the part's shape.

    Attributes:
        start: its first element's index in each dimension of the Hugging Face tensor.
    """

    name: str
    start: Index
    tensor: torch.Tensor

    def overlap(self, other: "Region") -> tuple[torch.Tensor, torch.Tensor] | None:
        """What both have of the same Hugging Face tensor, in the memory of either."""
        bounds = [
            (max(mine, its), min(mine + my_size, its + its_size))
            for mine, its, my_size, its_size in zip(
                self.start, other.start, self.tensor.shape, other.tensor.shape, strict=True
            )
        ]
        if any(low >= high for low, high in bounds):
            return None
        return self._cut(bounds), other._cut(bounds)

    def _cut(self, bounds: Sequence[tuple[int, int]]) -> torch.Tensor:
        pairs = zip(bounds, self.start, strict=True)
        return self.tensor[tuple(slice(low - start, high - start) for (low, high), start in pairs)]


class Copy(NamedTuple):
    """A piece of a Hugging Face tensor, which `make` copies to `target` from `source`."""

    name: str
    make: Callable[[Any, Any], object]
    target: Any
    source: Any


@dataclass
class Copies:
    """What this worker copies in each sync.

    Attributes:
        generation: of the memory that it copies from; see `Listing`.
        listing: of it; see `Listing.as_json`. storages: it, by handle.
        targets: where the model's parameters are.
        copies: in pieces for threads. fills: targets and what to fill them with.
    """

    generation: str = ""
    listing: dict[str, Any] = field(default_factory=dict)
    storages: dict[str, torch.UntypedStorage] = field(default_factory=dict)
    targets: list[int] = field(default_factory=list)
    copies: list[Copy] = field(default_factory=list)
    fills: list[tuple[torch.Tensor, float]] = field(default_factory=list)

    def learn(self, generation: str, listing: dict[str, Any]) -> None:
        """Copy from there from now on."""
        self.generation, self.listing, self.targets = generation, listing, []

    def prepare(self, model: torch.nn.Module) -> None:
        """Find out what to copy, unless the parameters are where they were then.

        Raises:
            NoCopies: the weights of this model cannot be had so.
        """
        targets, listing = [parameter.data_ptr() for parameter in model.parameters()], self.listing
        if targets == self.targets:
            return
        recorder = _Recorder({name: _without_memory(*like) for name, like in listing["tensors"].items()})
        with recorder, torch.no_grad():
            model.load_weights(list(recorder.sources.items()))
        recorder.check_all_set(model)
        opened = {handle: self.storages.get(handle) or _opened(*rest) for handle, *rest in listing["storages"]}
        self.storages, handles = opened, list(opened)
        parts: dict[str, list[Region]] = {}
        for name, number, dtype, offset, shape, stride, start in listing["parts"]:
            tensor = torch.empty(0, dtype=getattr(torch, dtype))
            tensor.set_(opened[handles[number]], offset, shape, stride)
            parts.setdefault(name, []).append(Region(name, tuple(start), tensor))
        found = [copy for target in recorder.copies for copy in _from_parts(target, parts.get(target.name, ()))]
        self.copies = [piece for copy in found for piece in _pieces(*copy)]
        self.fills, self.targets = recorder.fills, targets

    def make(self, leaving: frozenset[str]) -> None:
        """Copy all but the tensors of these names."""
        for target, value in self.fills:
            target.fill_(value)
        left = iter([copy for copy in self.copies if copy.name not in leaving])
        num_threads = torch.get_num_threads()
        with ThreadPoolExecutor(num_threads) as threads:
            list(threads.map(_make_left, [left] * num_threads))


_COPIES = Copies()


def load(model: torch.nn.Module, named_tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
    """Set the model's weights.

    Args:
        named_tensors: one, named by the request, JSON: {"generation", "leaving", "listing" unless it is known}; its
            memory, uint8 [ANSWER_BYTES], takes the answer, JSON: {}, or {"refused": why} where the model cannot have
            its weights so, or {"failed": why}. An exception would end the engine.
    """
    [(text, memory)] = named_tensors
    answer = {}
    try:
        request = json.loads(text)
        if "listing" in request:
            _COPIES.learn(request["generation"], request["listing"])
        if request["generation"] != _COPIES.generation:
            raise RuntimeError("the trainer's memory is not that which it has listed")
        _COPIES.prepare(model)
        _COPIES.make(frozenset(request["leaving"]))
    except NoCopies as error:
        answer = {"refused": str(error)}
    except Exception as error:
        answer = {"failed": repr(error)}
    told = json.dumps({kind: why[: ANSWER_BYTES // 8] for kind, why in answer.items()}).encode()
    memory.zero_()
    memory[: len(told)] = torch.frombuffer(bytearray(told), dtype=torch.uint8)


class _Recorder(TorchDispatchMode):
    """Inside, copies are not made but written down.

    Attributes:
        sources: Hugging Face name -> what stands for the tensor.
        copies: what goes where. fills: the same of numbers.
    """

    def __init__(self, sources: dict[str, torch.Tensor]):
        super().__init__()
        self.sources = sources
        self.copies: list[Region] = []
        self.fills: list[tuple[torch.Tensor, float]] = []
        self._names = {source.untyped_storage()._cdata: name for name, source in sources.items()}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if _is_view(func) or _is_empty(*args[:1]):
            return func(*args, **kwargs)
        if func is _COPY:
            self.copies.append(self._region(*args[:2]))
        elif func in (_FILL, _ZERO):
            self.fills.append((args[0], 0.0 if func is _ZERO else args[1]))
        elif func is _TO and args[0].is_meta and kwargs.get("dtype") in (None, args[0].dtype):
            pass  # from the device where it is read to that of the model
        else:
            raise NoCopies(f"it also computes ({func})")
        return args[0]

    def check_all_set(self, model: torch.nn.Module) -> None:
        """See that every element of every parameter is set once.

        Raises:
            NoCopies: one is not; each parameter named.
        """
        targets = [region.tensor for region in self.copies] + [target for target, _ in self.fills]
        found, wanted, names = Counter[int](), Counter[int](), {}
        for target in targets:
            found[target.untyped_storage()._cdata] += target.numel()
        for name, parameter in model.named_parameters():
            storage = parameter.untyped_storage()._cdata
            wanted[storage] += parameter.numel()
            names[storage] = name
        unlike = sorted(names[storage] for storage, size in wanted.items() if found[storage] != size)
        if unlike:
            raise NoCopies(f"it does not set {', '.join(unlike[:5])} once")

    def _region(self, target: torch.Tensor, source: torch.Tensor) -> Region:
        """What goes to `target`."""
        name = self._names.get(source.untyped_storage()._cdata)
        if name is None or source.shape != target.shape:
            raise NoCopies("it copies what is no part of a tensor")
        whole = self.sources[name]
        strides = zip(source.shape, source.stride(), whole.stride(), strict=False)
        if source.dim() != whole.dim() or any(size > 1 and mine != its for size, mine, its in strides):
            raise NoCopies(f"it turns {name} around")
        start, offset = [], source.storage_offset()
        for stride in whole.stride():
            start.append(offset // stride)
            offset %= stride
        return Region(name, tuple(start), target)


def _is_view(func: Any) -> bool:
    """Whether it returns nothing but views of its arguments."""
    returns = func._schema.returns
    return bool(returns) and all(one.alias_info is not None and not one.alias_info.is_write for one in returns)


def _is_empty(value: Any = None) -> bool:
    """Whether it is a tensor without elements: a layer's that has nothing but padding on this rank."""
    return isinstance(value, torch.Tensor) and value.numel() == 0


def _from_parts(target: Region, parts: Sequence[Region]) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """The copies that fill a target."""
    left = target.tensor.numel()
    for part in parts:
        if (found := target.overlap(part)) is not None:
            yield target.name, *found
            left -= found[0].numel()
    if left:
        raise RuntimeError(f"of {target.name} {left} elements are on no rank, or on several")


def _pieces(name: str, target: torch.Tensor, source: torch.Tensor) -> Iterator[Copy]:
    """A copy in pieces: by numpy, as torch's copies read what they overwrite, too."""
    if target.dtype != source.dtype:
        yield Copy(name, torch.Tensor.copy_, target, source)
        return
    into, of = (tensor.detach().view(_NUMBERS[tensor.element_size()]).numpy() for tensor in (target, source))
    if into.flags.c_contiguous and of.flags.c_contiguous:
        into, of = into.reshape(-1), of.reshape(-1)
    size = max(1, PIECE_BYTES // into[0].nbytes)
    for start in range(0, len(into), size):
        piece = slice(start, start + size)
        yield Copy(name, np.copyto, into[piece], of[piece])


def _make_left(left: Iterator[Copy]) -> None:
    """What other threads leave of these."""
    for copy in left:
        copy.make(copy.target, copy.source)


def _without_memory(shape: Sequence[int], dtype: str) -> torch.Tensor:
    return torch.empty(shape, dtype=getattr(torch, dtype), device="meta")


def _opened(manager: str, name: str, size: int) -> torch.UntypedStorage:
    """Shared memory of another process, by torch's handle of it."""
    return torch.UntypedStorage._new_shared_filename_cpu(manager.encode(), name.encode(), size)
