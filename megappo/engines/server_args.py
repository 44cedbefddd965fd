"""Check the names in rollout.server_args: SGLang must know them, and megappo must not set them itself.

SGLang's names are read from its source, as importing it takes seconds.
"""

import difflib
import importlib.util
import re
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

# Set in `launch` and in Engine; a user's value would break the client, the safety or the placement.
RESERVED = {"model_path", "host", "port", "api_key", "admin_api_key", "skip_tokenizer_init", "tokenizer_worker_num"}
RESERVED |= {"tp_size", "random_seed", "nnodes", "node_rank", "dist_init_addr", "base_gpu_id", "gpu_id_step"}
RESERVED |= {"incremental_streaming_output"}
RESERVED |= {"enable_lora", "max_lora_rank", "lora_target_modules", "lora_paths", "max_loras_per_batch"}
RESERVED |= {"lora_strict_loading", "enable_weights_cpu_backup"}
FIELDS = "srt/arg_groups/fields"
"""SGLang's folder with the classes that declare the fields of ServerArgs."""


def server_args_errors(names: Iterable[str]) -> Iterator[str]:
    """Yield what is wrong with the names in rollout.server_args, one line each."""
    known = known_names()
    for name in names:
        if name in RESERVED:
            yield f"rollout.server_args: {name} may not be set: megappo sets it itself; remove it"
        elif known and name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            advice = f"did you mean {near[0]}?" if near else "remove it"
            yield f"rollout.server_args: SGLang does not know {name}: {advice}"


@cache
def known_names() -> frozenset[str]:
    """Return the fields of the installed SGLang's ServerArgs; none where SGLang is not installed."""
    spec = importlib.util.find_spec("sglang")
    if spec is None or spec.origin is None:
        return frozenset()
    folder = Path(spec.origin).parent / FIELDS
    source = "\n".join(file.read_text() for file in folder.glob("[a-z]*.py"))
    return frozenset(re.findall(r"^    (\w+): \w", source, re.M))
