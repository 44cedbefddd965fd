"""Requests for responses as SGLang spells them, and its replies, which are checked."""

import contextlib
import math
from base64 import b64decode
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import numpy as np

from megappo.architecture.architecture import Architecture, expert_number_bytes
from megappo.errors import ActionableError
from megappo.userland.user_code import JsonObject

FINISH_REASONS = ("stop", "length")
RAW_BYTES = b'"latin-1":"'
"""Key of a JSON string that holds bytes, of which only line feed, quote and backslash are escaped: such a reply is in
latin-1, with other strings in ASCII. Base64 would make them a third longer."""
INCOMPLETE = "incomplete"
"""SGLang's version of weights that are part old, part new: `checked` refuses what they write."""


class EngineError(ActionableError, RuntimeError):
    """An SGLang engine that does not start, has ended, or refuses a request."""


class EngineFault(EngineError):
    """An engine that has ended, hangs, or answers nonsense; after a restart it may answer the same request."""


@dataclass(frozen=True)
class SamplingParams:
    """Sampling settings; rollout's keys of the same names explain each. temperature 0 = greedy (log-probs as at 1).

    With `replayed`, the policy, the engine also returns the experts that each token went to.
    """

    max_response_length: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    stop_token_ids: tuple[int, ...] = ()
    replayed: Architecture | None = None


@dataclass(frozen=True)
class WeightVersion:
    """Version of the weights of an engine that samples ahead of training.

    Attributes:
        number: training steps that the weights have had.
        keeps_cache: keys and values that other versions have cached stay in the engine, apart from this version's.
    """

    number: int
    keeps_cache: bool = False


@dataclass(frozen=True)
class Generation:
    """One response.

    tokens include the stop token; an aborted response has its tokens so far. log_probs[t] is log p(tokens[t] |
    all before), after temperature, over the whole vocabulary even where top_p or top_k cut it. num_cached tokens of the
    prompt needed no computing. versions[t] is the version of the weights that wrote tokens[t]; empty where the engine
    does not sample ahead of training. choices are the experts that each token of prompt and response, except the last,
    went to, if they were requested of a response that has ended: `Architecture.choice_bytes` for each.
    """

    tokens: list[int]
    log_probs: list[float]
    finish_reason: Literal["stop", "length", "abort"]
    num_cached: int = 0
    versions: Sequence[int] = ()
    choices: bytes = b""

    def __add__(self, rest: "Generation") -> "Generation":
        """Return the response as a whole; `rest` was requested with the tokens of this part after its prompt."""
        tokens = self.tokens + rest.tokens
        log_probs = self.log_probs + rest.log_probs
        return replace(
            rest,
            tokens=tokens,
            log_probs=log_probs,
            versions=[*self.versions, *rest.versions],
        )

    def first(self, num_tokens: int, prompt_length: int) -> "Generation":
        """Return the first tokens of the response to a prompt of this length."""
        num_before = prompt_length - 1
        choice_bytes = len(self.choices) // max(1, num_before + len(self.tokens))
        return replace(
            self,
            tokens=self.tokens[:num_tokens],
            log_probs=self.log_probs[:num_tokens],
            versions=self.versions[:num_tokens],
            choices=self.choices[: (num_before + num_tokens) * choice_bytes],
        )

    def without_last_token(self) -> "Generation":
        """Return an aborted response, which has no `choices`, without its last token."""
        return self.first(len(self.tokens) - 1, 1)


class SentImages(NamedTuple):
    """Images of a prompt, and its tokens as engines get them.

    SGLang 0.5.23 does not count: it drops an image without a token, and hangs or crashes by a token without an image. A
    prompt with all tokens of its images is read as if each were an image, or its text is encoded again
    (multimodal/processors/base_processor.py).

    Attributes:
        num_tokens: tokens of the prompt, with as many for each image as training has.
        tokens: the same with one token for each image, which SGLang replaces by as many as the image has.
        urls: the image files, as data URLs.
    """

    num_tokens: int
    tokens: list[int]
    urls: list[str]


def generate_body(
    prompts: Sequence[list[int]],
    params: SamplingParams,
    adapter: str | None = None,
    version: WeightVersion | None = None,
    images: Sequence[SentImages] = (),
) -> JsonObject:
    """Return the body of a request for one response to each prompt, in SGLang's spelling.

    Args:
        adapter: name of the adapter that is added to the engine's model.
        version: version of the engine's weights.
        images: images of the prompt that each of `prompts` begins with; empty for a model without vision.
    """
    sampling = {
        "max_new_tokens": params.max_response_length,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k,
        "stop_token_ids": list(params.stop_token_ids),
    }
    body = {"input_ids": list(prompts), "sampling_params": sampling, "return_logprob": True}
    if images:
        body["input_ids"] = [one.tokens + whole[one.num_tokens :] for one, whole in zip(images, prompts, strict=True)]
        body["image_data"] = [one.urls for one in images]
    if params.replayed:
        body["return_routed_experts"] = True
    if adapter:
        body["lora_path"] = adapter
    if version is not None and version.keeps_cache:
        body["extra_key"] = str(version.number)  # SGLang finds cached keys and values by it, besides the tokens
    return body


def check_prompt_length(reply: Any, num_tokens: int) -> None:
    """Check that the engine has made as many tokens of a prompt with images as training does. It has made none yet of a
    request that was aborted while it waited.

    Raises:
        EngineError: it has other settings of images.
    """
    meta = reply["meta_info"]
    if meta["finish_reason"]["type"] == "abort":
        return
    found = meta["prompt_tokens"]
    if found != num_tokens:
        raise EngineError(
            f"the engine made {found} tokens of a prompt with images that has {num_tokens} in training: both must read "
            "the same preprocessor_config.json. Start a server of rollout.engines from model.path, with the version of "
            "transformers that this run has, and with --mm-process-config if data.max_image_pixels is set"
        )


def checked(
    reply: Any,
    *,
    may_abort: bool = False,
    version: WeightVersion | None = None,
    replayed: Architecture | None = None,
) -> Generation:
    """Return the response in one reply.

    Args:
        may_abort: the request may have been aborted.
        version: version of the engine's weights when the request was sent.
        replayed: as of its `SamplingParams`.
    Raises:
        EngineError: the reply holds none. EngineFault: by the engine's fault.
    """
    with expecting_response(reply):
        tokens = reply["output_ids"]
        meta = reply["meta_info"]
        end = meta["finish_reason"]
        is_aborted = may_abort and end["type"] == "abort"
        if is_aborted and not tokens:
            return Generation([], [], "abort")
        if end["type"] not in FINISH_REASONS and not is_aborted:
            kind = EngineFault if (end.get("status_code") or 500) >= 500 else EngineError
            raise kind(f"expected a response to end by {' or '.join(FINISH_REASONS)}, got {end}")
        count = meta["completion_tokens"]
        if count != len(tokens):
            raise EngineFault(f"expected all {count} tokens of a response at once, got {len(tokens)}")
        entries = meta["output_token_logprobs"]
        log_probs = [entry[0] for entry in entries]
        if [entry[1] for entry in entries] != tokens:
            raise EngineFault(f"the engine's tokens {tokens} and the tokens of its log-probs {entries} differ")
        if any(value is None or not math.isfinite(value) for value in log_probs):
            raise EngineFault(f"the engine returned a log-prob that is no number: {log_probs}; are its weights finite?")
        versions = [] if version is None else _token_versions(meta["weight_versions"], count, version)
        choices = b"" if replayed is None or is_aborted else _choices(meta, replayed)
        return Generation(tokens, log_probs, end["type"], meta.get("cached_tokens", 0), versions, choices)


def _choices(meta: JsonObject, replayed: Architecture) -> bytes:
    """Return `Generation.choices` from SGLang's `routed_experts`, [tokens - 1, layers, top_k], numbered from 0: int32
    in base64, or what `sglang_patches.send_few_bytes` makes of them."""
    experts = replayed.experts
    assert experts is not None, "preflight refuses the replay of a dense model"
    num_tokens = meta["prompt_tokens"] + meta["completion_tokens"] - 1
    sent = meta.get("routed_experts", "")
    raw = b64decode(sent) if isinstance(sent, str) else sent["latin-1"].encode("latin-1")
    number_bytes = len(raw) // (num_tokens * replayed.num_layers * experts.top_k)
    numbers = np.frombuffer(raw, f"<u{number_bytes or 4}").reshape(num_tokens, -1, experts.top_k)
    chosen = numbers[:, experts.num_dense_layers :]
    # Kernels that choose the experts themselves leave zeros.
    if (
        not chosen.size
        or chosen.max() >= experts.count
        or (experts.top_k > 1 and (chosen[..., 0] == chosen[..., 1]).any())
    ):
        raise EngineError(
            "the engine does not return the experts that it chose, which rollout.routing_replay needs: start a server "
            "of rollout.engines with --enable-return-routed-experts; otherwise set another moe_runner_backend in "
            "rollout.server_args"
        )
    return (chosen + 1).astype(f"<u{expert_number_bytes(experts.count, experts.top_k)}").tobytes()


def _token_versions(spans: Sequence[JsonObject], num_tokens: int, requested: WeightVersion) -> list[int]:
    """Return the version of the weights that wrote each token, from SGLang's spans of a response."""
    versions: list[int] = []
    for span in spans:
        if span["start"] != len(versions):
            raise EngineFault(f"expected spans of weight versions without gaps, got {spans}")
        versions += [int(span["version"])] * (span["end"] - span["start"])
    if len(versions) != num_tokens:
        raise EngineFault(f"expected weight versions of all {num_tokens} tokens, got {spans}")
    if requested.keeps_cache and versions:
        # The weights may have changed before the first token, but after keys and values of the prompt were computed.
        versions[0] = min(versions[0], requested.number)
    return versions


@contextlib.contextmanager
def expecting_response(reply: Any) -> Iterator[None]:
    """Turn errors about the reply's structure into the engine's fault."""
    try:
        yield
    except (LookupError, TypeError, ValueError) as error:
        raise EngineFault(f"the engine's reply is no response ({error!r}): {str(reply)[:500]}") from error
