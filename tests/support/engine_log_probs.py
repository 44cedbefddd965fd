"""Log-probs that an engine computes with its present weights."""

from collections.abc import Sequence

from megappo.engines.client import EngineClient


def engine_log_probs(client: EngineClient, sequences: Sequence[list[int]]) -> list[list[float]]:
    """Return log p(token[t] | token[:t]) of each sequence for t = 1, 2, ..., at temperature 1."""
    body = {
        "input_ids": list(sequences),
        "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
        "return_logprob": True,
        "logprob_start_len": 0,
        "lora_path": client.adapter,
    }
    replies = client.post("/generate", body)
    return [[entry[0] for entry in reply["meta_info"]["input_token_logprobs"][1:]] for reply in replies]
