"""Rotary positions of SGLang's own models, built in one process without weights or a server.

`python sglang_ropes.py PORT FOLDER ...` prints for each folder the table of each layer: [POSITIONS, cosines and sines].
"""

import json
import sys

POSITIONS = 12


def main(port: str, *folders: str) -> None:
    from megappo.engines.sglang_patches import prepare_import

    prepare_import()
    from sglang.srt import runtime_context
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.distributed import bootstrap
    from sglang.srt.models.registry import ModelRegistry
    from sglang.srt.server_args import ServerArgs

    tables = {}
    for folder in folders:
        options = {"model_path": folder, "device": "cpu", "dtype": "float32", "load_format": "dummy"}
        # GPT-OSS takes no other backend; nothing attends here.
        args = ServerArgs(**options, skip_tokenizer_init=True, attention_backend="triton")
        runtime_context.publish(args, role="scheduler", ranks=runtime_context.SpawnRanks(0))
        if not tables:
            address = f"tcp://127.0.0.1:{port}"
            bootstrap._init_parallel_groups(backend="gloo", dist_init_method=address, server_args=args, gpu_id=0)
        config = ModelConfig.from_server_args(args).hf_config
        kind, _ = ModelRegistry.resolve_model_cls(config.architectures)
        rotary = [module for name, module in kind(config).named_modules() if name.endswith("self_attn.rotary_emb")]
        tables[folder] = [
            getattr(module, "short_cos_sin_cache", getattr(module, "cos_sin_cache", None))[:POSITIONS].tolist()
            for module in rotary
        ]
    print(json.dumps(tables))


if __name__ == "__main__":
    main(*sys.argv[1:])
