"""Number formats by the names of config keys: their names in torch, config.json and safetensors, and their size."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Dtype:
    """A number format.

    Attributes:
        torch: its name in torch, in config.json and to SGLang.
        safetensors: its name in the header of a safetensors file.
        nbytes: bytes of one number.
    """

    torch: str
    safetensors: str
    nbytes: int


DTYPES = {
    "fp32": Dtype("float32", "F32", 4),
    "bf16": Dtype("bfloat16", "BF16", 2),
    "fp16": Dtype("float16", "F16", 2),
    "fp64": Dtype("float64", "F64", 8),
    "int32": Dtype("int32", "I32", 4),
    "int64": Dtype("int64", "I64", 8),
}
"""The first two are those that models compute in (`model.dtype`)."""
BY_SAFETENSORS = {dtype.safetensors: name for name, dtype in DTYPES.items()}
BY_TORCH = {dtype.torch: name for name, dtype in DTYPES.items()}


def dtype_name(dtype: object) -> str:
    """Return the config's name of a torch dtype."""
    return BY_TORCH[str(dtype).removeprefix("torch.")]
