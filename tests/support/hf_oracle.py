"""Expected results of an engine's weights, computed by Hugging Face."""

import torch


@torch.no_grad()
def log_probs_of(
    model: torch.nn.Module, prompt: list[int], response: list[int], temperature: float = 1.0
) -> list[float]:
    """Return log p(response[t] | prompt, response[:t]) by Hugging Face, in one full forward pass."""
    logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1] / temperature
    return logits.log_softmax(-1).gather(1, torch.tensor(response)[:, None])[:, 0].tolist()


def named_weights(model: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Return the weights of a model with tied embeddings, as an engine takes them."""
    return [(name, tensor) for name, tensor in model.state_dict().items() if name != "lm_head.weight"]
