"""Reading Hugging Face folders of safetensors lazily, and writing them a bounded number of bytes at a time."""

import json
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open

from megappo.architecture.architecture import Architecture
from megappo.architecture.model_folder import ADAPTERS, INDEX, PEFT_PREFIX, SINGLE, tensor_files
from megappo.architecture.parameters import ExpertStack, expert_stacks, hf_shapes
from megappo.architecture.vision import unnested_name
from megappo.batch.rows_file import write_tensors
from megappo.errors import ActionableError
from megappo.weights.buckets import all_finite

FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
"""Positive numbers of the format E2M1, by their bits; a fourth bit is the sign."""


class _Stored(NamedTuple):
    """Place of a tensor: `rows` of a tensor of a file or, with `expert`, of one expert's matrix in it.

    Attributes:
        shape: shape of a matrix, or bias, in an `ExpertStack`; () for other tensors.
        scales: tensor beside a stack in MXFP4, whose `name` holds the blocks.
    """

    file: str
    name: str
    expert: int | None = None
    rows: slice = slice(None)
    shape: tuple[int, ...] = ()
    scales: "_Stored | None" = None


class HFFolder(AbstractContextManager):
    """The tensors of a Hugging Face folder by name, of which only the requested slices are read.

    A context manager: the files stay open (memory-mapped) while the block runs.

    Args:
        architecture: its matrices have one tensor each, also matrices that a family stacks in its files
            (`Family.fused`, `expert_stacks`), and matrices of experts where the folder keeps the experts of a layer in
            two 3-D tensors. transformers 5 holds a mixture of experts so, and writes it so in its own format:

                mlp.experts.gate_up_proj [experts, 2 x ffn, hidden]     mlp.experts.down_proj [experts, hidden, ffn]
    Raises:
        ActionableError: the folder, its safetensors, or a file that its index names is missing, cannot be read, is
            damaged or truncated, or lacks a tensor that the index lists there; or a 3-D tensor has another shape than
            config.json gives.
    """

    def __init__(self, folder: str | Path, architecture: Architecture | None = None):
        self.folder = Path(folder)
        files = tensor_files(self.folder)
        self._stored = {name: _Stored(file, name) for name, file in files.items()}
        self._files = {file: safe_open(self.folder / file, framework="pt") for file in sorted(set(files.values()))}
        if architecture is None:
            return
        if architecture.linear or architecture.vision:
            self.rename({name: unnested_name(name) for name in self.names()})
        for name, stack in expert_stacks(architecture).items():
            self._split_stack(name, stack)
        for layer in range(architecture.num_layers):
            if architecture.experts:
                self._split_experts(f"model.layers.{layer}.", architecture)
        self._split_fused(architecture)

    def __exit__(self, *error: object) -> None:
        self._files.clear()

    def rename(self, names: Mapping[str, str]) -> None:
        """Call tensors by other names from now on: `names` maps the file's name to the new one."""
        for old, new in names.items():
            self._stored[new] = self._stored.pop(old)

    def leave_out(self, names: Iterable[str]) -> None:
        """Leave out the tensors of these names from now on."""
        for name in names:
            self._stored.pop(name, None)

    def add_adapters(self, folder: str) -> None:
        """Add the tensors of a folder of adapters; a value head there takes the place of the model's."""
        file = f"{folder}/{ADAPTERS}"
        names = tensor_files(Path(folder), ADAPTERS)
        self._stored |= {name.removeprefix(PEFT_PREFIX): _Stored(file, name) for name in names}
        self._files[file] = safe_open(file, framework="pt")

    def names(self) -> set[str]:
        """Return the names of all tensors."""
        return set(self._stored)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor, from the file's header."""
        if self._stored[name].shape:
            return self._stored[name].shape
        stored = self._stored[name]
        shape = tuple(self._slice(name).get_shape())
        rows, *others = shape if stored.expert is None else shape[1:]
        return len(range(rows)[stored.rows]), *others

    def dtype(self, name: str) -> str:
        """Return the dtype of a tensor, as safetensors spells it: F32, BF16, ..."""
        return self._slice(name).get_dtype()

    def read(
        self,
        name: str,
        dim: int = 0,
        start: int = 0,
        stop: int | None = None,
    ) -> torch.Tensor:
        """Read elements start:stop (default: all) of a tensor along dimension 0 or 1, on a CPU in the file's dtype."""
        stored = self._stored[name]
        stop = self.shape(name)[dim] if stop is None else stop
        if stored.shape:
            return self._part_of_stack(stored).narrow(dim, start, stop - start)
        expert = () if stored.expert is None else (stored.expert,)
        if dim == 1:
            return self._slice(name)[*expert, stored.rows, start:stop]
        first = stored.rows.start or 0
        return self._slice(name)[*expert, first + start : first + stop]

    def read_finite(self, name: str, *part: int) -> torch.Tensor:
        """Read weights.

        Args:
            part: dim, start and stop of `read`.
        Raises:
            ActionableError: they are not finite, or quantised.
        """
        read = self.read(name, *part)
        if not read.is_floating_point() or read.itemsize == 1 or not all_finite(read):
            raise ActionableError(
                f"{name} in {self.folder} holds values that are not finite numbers of 16 bits or more ({read.dtype}): "
                "the model is corrupt or quantised, or its file damaged; take an earlier one, or copy it again"
            )
        return read

    def _slice(self, name: str) -> Any:
        return self._slice_of(self._stored[name])

    def _slice_of(self, stored: _Stored) -> Any:
        return self._files[stored.file].get_slice(stored.name)

    def _part_of_stack(self, stored: _Stored) -> torch.Tensor:
        """Read a matrix [out, in], or a bias [out], in a stack."""
        whole = self._slice_of(stored)[stored.expert]
        if stored.scales:
            whole = dequantize(whole, self._slice_of(stored.scales)[stored.expert])
        elif whole.ndim == 2:
            whole = whole.T
        return whole[stored.rows]

    def _split_stack(self, name: str, stack: ExpertStack) -> None:
        """Give each matrix, or bias, of a stack its own name. MXFP4 has numbers in blocks of 32, two to a byte, along
        the matrices' inputs."""
        (count, *into, out), scales = stack.shape, None
        if f"{name}_blocks" in self._stored:
            name, quantized = f"{name}_blocks", f"{name}_scales"
            self._check_shape(quantized, (count, out, into[0] // 32))
            self._check_shape(name, (count, out, into[0] // 32, 16))
            scales = self._stored.pop(quantized)
        elif name in self._stored:
            self._check_shape(name, stack.shape)
        else:
            return  # reported when the model is loaded
        file = self._stored.pop(name).file
        step = len(stack.parts) // count
        for index, part in enumerate(stack.parts):
            expert, number = divmod(index, step)
            rows = slice(number, None, step)
            self._stored[part] = _Stored(file, name, expert, rows, (out // step, *into), scales)

    def _split_experts(self, layer: str, architecture: Architecture) -> None:
        """Give each matrix of each expert of a layer its name in the format of the hub."""
        experts = architecture.experts
        names = architecture.family.experts
        gate_up = f"{layer}mlp.experts.gate_up_proj"
        down = f"{layer}mlp.experts.down_proj"
        if gate_up not in self._stored:
            return
        ffn = experts.ffn_size
        hidden = architecture.hidden_size
        self._check_shape(gate_up, (experts.count, 2 * ffn, hidden))
        self._check_shape(down, (experts.count, hidden, ffn))
        block = f"{layer}{names.block}."
        gate_and_up = self._stored.pop(gate_up)
        downs = self._stored.pop(down)
        for expert in range(experts.count):
            name = f"{block}experts.{expert}."
            self._stored[f"{name}{names.gate}.weight"] = gate_and_up._replace(expert=expert, rows=slice(0, ffn))
            self._stored[f"{name}{names.up}.weight"] = gate_and_up._replace(expert=expert, rows=slice(ffn, 2 * ffn))
            self._stored[f"{name}{names.down}.weight"] = downs._replace(expert=expert)
        of_router = {f"{layer}mlp.{name}": block + name for name in ("gate.weight", names.bias_name)}
        self.rename({old: new for old, new in of_router.items() if old in self._stored})

    def _split_fused(self, architecture: Architecture) -> None:
        """Give each matrix of a stack its own name."""
        shapes = hf_shapes(architecture) if architecture.stacks else {}
        for stack, parts in architecture.stacks.items():
            name = f"{stack}.weight"
            sizes = [shapes[f"{part}.weight"] for part in parts]
            if name in self._stored:
                self._check_shape(name, (sum(rows for rows, *_ in sizes), *sizes[0][1:]))
                stored = self._stored.pop(name)
                start = 0
                for part, (rows, *_) in zip(parts, sizes, strict=True):
                    self._stored[f"{part}.weight"] = stored._replace(rows=slice(start, start + rows))
                    start += rows

    def _check_shape(self, name: str, expected: tuple[int, ...]) -> None:
        if name not in self._stored:
            raise ActionableError(
                f"{self.folder} lacks {name}, which goes with the fused experts it has; copy it again"
            )
        if self.shape(name) != expected:
            raise ActionableError(
                f"{name} in {self.folder} has shape {[*self.shape(name)]}, but its config.json gives {[*expected]}"
            )


def dequantize(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return bf16 numbers of MXFP4: [..., 32 x blocks].

    Args:
        blocks: uint8 [..., blocks, 16], of two numbers each, the first in the lower bits.
        scales: uint8 [..., blocks], powers of two to multiply by, 127 above.
    Source: Open Compute Project, "OCP Microscaling Formats (MX) Specification" 1.0, sections 5.2, 5.3.3 and 5.4.1.
    """
    halves = torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(-2).int()
    numbers = torch.cat((FP4, -FP4))[halves]
    return torch.ldexp(numbers, scales.int()[..., None] - 127).flatten(-2).bfloat16()


class ShardedWriter:
    """Writes tensors into a folder as numbered safetensors files with an index, or as one file when they fit.

    It keeps copies of the tensors of the file that is not full yet.

    Args:
        folder: an existing folder.
        max_shard_bytes: bytes of tensors put into one file; a larger tensor has its own.
    """

    def __init__(self, folder: Path, max_shard_bytes: int):
        self.folder = folder
        self.max_shard_bytes = max_shard_bytes
        self._shard: dict[str, torch.Tensor] = {}
        self._shard_bytes = self._total_bytes = 0
        self._written: list[list[str]] = []

    def add(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Add tensors; write a file whenever the next one would not fit.

        Raises:
            OSError: a file cannot be written.
        """
        for name, tensor in tensors:
            if self._shard_bytes + tensor.nbytes > self.max_shard_bytes:
                self._write_shard()
            self._shard[name] = tensor.detach().to("cpu", copy=True).contiguous()
            self._shard_bytes += tensor.nbytes

    def finish(self) -> None:
        """Write the last file, give the files their final names, and write the index."""
        self._write_shard()
        if len(self._written) == 1:
            self._path(0).rename(self.folder / SINGLE)
            return
        weight_map = {}
        for number, names in enumerate(self._written):
            file = f"model-{number + 1:05d}-of-{len(self._written):05d}.safetensors"
            self._path(number).rename(self.folder / file)
            weight_map.update(dict.fromkeys(names, file))
        index = {"metadata": {"total_size": self._total_bytes}, "weight_map": dict(sorted(weight_map.items()))}
        (self.folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")

    def _write_shard(self) -> None:
        if self._shard:
            write_tensors(self._path(len(self._written)), self._shard, {"format": "pt"})
            self._written.append(list(self._shard))
            self._total_bytes += self._shard_bytes
            self._shard = {}
            self._shard_bytes = 0

    def _path(self, number: int) -> Path:
        return self.folder / f"part-{number}.safetensors"
