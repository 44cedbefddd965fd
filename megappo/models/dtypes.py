"""torch's dtypes by the names of config keys."""

import torch

from megappo.architecture.dtypes import DTYPES

TORCH_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, dtype.torch) for name, dtype in DTYPES.items()}
NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}
