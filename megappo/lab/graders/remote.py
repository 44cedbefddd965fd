"""Scores from servers: a scoring server over HTTP, a reward model that SGLang serves, or a language model as a judge
over an OpenAI-style API."""

import asyncio
import json
import os
import re
from functools import cache
from typing import Any

import httpx

from megappo.runtime.machine import proxy_for
from megappo.userland.model_text import ModelTextFormatter
from megappo.userland.user_code import BadFunction, JsonObject

FIRST_PAUSE_SECONDS = 0.5
"""Pause before the second try; each further pause is twice as long."""
MAX_SHOWN = 300
TEMPLATE = """Judge the response to a task. Here is the task:

{prompt}

The reference answer: {label}

The response:

{response}

Give the response a score from 0 (wrong) to 1 (right). End with a line "Score: " and the number."""
SCORE = (
    r"(?i)score(?:\s*\([^()]*\))?[^\w.+\-\u2212\u2013]{0,5}"
    r"([-+]?(?:\d+(?:\.\d*)?|\.\d+)(?:e[-+]?\d+)?)(?!\w|[.,]?\d|\s*[-/%]\s*\d|%)"
)
"""A number with its sign and all its digits; no fraction, range or percentage, of which it would be a part."""


async def http(
    prompts: list[str],
    responses: list[str],
    labels: list[Any],
    data_source: list[Any] | None = None,
    extra_info: list[Any] | None = None,
    *,
    url: str,
    api_key_env: str = "",
    seconds: float = 15.0,
    retries: int = 2,
) -> list[Any]:
    """Return the scores that a server gives, with up to 64 responses in a request.

    It is sent {"prompts": [...], "responses": [...], "labels": [...]} as JSON, with "data_source" and "extra_info"
    where records have these, and answers with {"scores": [...]}, as many, each as a reward function may return it: a
    number, a list of them, or an object with "score".

    Args:
        url: address to which a request is posted.
        api_key_env: environment variable with a key, sent as a bearer's; reward.pass_env must name it.
        seconds: time limit of each try; retries: further tries where no answer comes in time, or one of HTTP 429 or
            5xx.
    Raises:
        RuntimeError: there is no answer, or it has no scores.
    """
    body = {"prompts": prompts, "responses": responses, "labels": labels}
    body |= {"data_source": data_source} if data_source else {}
    body |= {"extra_info": extra_info} if extra_info else {}
    answer = await _posted(url, body, api_key_env, seconds, retries)
    match answer:
        case {"scores": list(scores)} if len(scores) == len(responses):
            return scores
    expected = f"{{'scores': [...]}} with {len(responses)} of them"
    raise RuntimeError(f"{url} answered with {_cut(answer)}; expected {expected}")


async def engine(
    prompts: list[str],
    responses: list[str],
    *,
    url: str,
    begin: str = "",
    end: str = "",
    api_key_env: str = "",
    seconds: float = 15.0,
    retries: int = 2,
) -> list[float]:
    """Return the scores of a reward model that an SGLang server serves, of up to 64 conversations in a request.

    A conversation is the prompt as the policy sees it, the response and `end`.

    Args:
        url: address of the server, such as http://judge:30000; requests go to /classify below it.
        begin: text to remove from the beginning of prompts, which the server's tokenizer adds by itself.
        end: text behind a response, such as <|im_end|>, as the reward model has been trained on.
        api_key_env, seconds, retries: as for `http`.
    Raises:
        RuntimeError: there is no answer, or it is not one number for each conversation.
    """
    texts = [
        f"{prompt.removeprefix(begin)}{response}{end}" for prompt, response in zip(prompts, responses, strict=True)
    ]
    answer = await _posted(f"{url.rstrip('/')}/classify", {"text": texts}, api_key_env, seconds, retries)
    scores = []
    for one in answer if isinstance(answer, list) else ():
        match one:
            case {"embedding": [float(score)]}:
                scores.append(score)
    if len(scores) != len(texts):
        expected = f"{len(texts)} embeddings of one number: serve a reward model with one label, by --is-embedding"
        raise RuntimeError(f"{url} answered with {_cut(answer)}; expected {expected}")
    return scores


async def judge(
    solution_str: str,
    ground_truth: Any,
    prompt_str: str,
    *,
    url: str,
    model: str,
    template: str = TEMPLATE,
    score_pattern: str = SCORE,
    temperature: float = 0.0,
    max_tokens: int = 512,
    api_key_env: str = "",
    seconds: float = 15.0,
    retries: int = 2,
    concurrency: int = 32,
) -> float:
    """The score that a language model gives a response: the last that `score_pattern` finds in what it writes.

    Args:
        url: address of the API, such as http://judge:30000/v1; requests go to /chat/completions below it.
        template: template of the request; {prompt}, {response} and {label} stand for these, {{ for a brace.
        score_pattern: a regular expression whose first group is the number.
        api_key_env, seconds, retries: as for `http`; an answer without a score is requested again, too.
        concurrency: requests of a worker at once.
    Raises:
        RuntimeError: there is no answer, or it has no score.
    """
    values = {"prompt": prompt_str, "response": solution_str, "label": ground_truth}
    try:
        question = ModelTextFormatter().format(template, **values)
        num_groups = re.compile(score_pattern).groups
    except (AttributeError, LookupError, TypeError, ValueError, re.error) as error:
        needs = "needs a template of {prompt}, {response}, {label} and a score_pattern that Python reads"
        raise BadFunction(f"{needs}: {error!r}") from error
    if not num_groups:
        raise BadFunction(f"has a score_pattern without a group, {score_pattern!r}: put the number in parentheses")
    settings = {"model": model, "temperature": temperature, "max_tokens": max_tokens}
    body = settings | {"messages": [{"role": "user", "content": question}]}
    text = ""
    for _ in range(1 + retries):
        async with _free(concurrency):
            answer = await _posted(f"{url.rstrip('/')}/chat/completions", body, api_key_env, seconds, retries)
        match answer:
            case {"choices": [{"message": {"content": str(text)}}, *_]}:
                scores = re.findall(score_pattern, text)
            case _:
                raise RuntimeError(f"{url} answered with something other than a chat completion: {_cut(answer)}")
        if scores:
            return float(scores[-1] if isinstance(scores[-1], str) else scores[-1][0])
    raise RuntimeError(f"the judge {model} at {url} gave no score ({score_pattern}): {_cut(text)}")


async def _posted(
    url: str,
    body: JsonObject,
    api_key_env: str,
    seconds: float,
    retries: int,
) -> Any:
    """Return a server's answer, parsed as JSON.

    Raises:
        RuntimeError: nothing, or no JSON.
    """
    headers = {"Authorization": f"Bearer {_key(api_key_env)}"} if api_key_env else {}
    proxy = proxy_for(url)
    failure = ""
    for i in range(1 + retries):
        await asyncio.sleep(FIRST_PAUSE_SECONDS * 2 ** (i - 1) if i else 0)
        try:
            async with asyncio.timeout(seconds):
                answer = await _client(proxy).post(
                    url,
                    json=body,
                    headers=headers,
                    timeout=None,
                )
        except TimeoutError:
            failure = f"gave no answer in {seconds:g} seconds"
            continue
        except httpx.TransportError as error:
            failure = f"does not answer ({type(error).__name__}: {error})"
            continue
        if answer.status_code == httpx.codes.OK:
            return _parsed(answer, url)
        failure = f"refused (HTTP {answer.status_code}): {_cut(answer.text)}"
        if (
            answer.status_code < httpx.codes.INTERNAL_SERVER_ERROR
            and answer.status_code != httpx.codes.TOO_MANY_REQUESTS
        ):
            break
    raise RuntimeError(f"{url} {failure}{_through(proxy)}")


def _key(variable: str) -> str:
    if variable not in os.environ:
        raise RuntimeError(f"{variable} is not set here: set it, and name it in reward.pass_env")
    return os.environ[variable]


@cache
def _client(proxy: str | None) -> httpx.AsyncClient:
    """Return a client that sends requests through this proxy, or directly, whatever the environment variables are."""
    limits = httpx.Limits(max_connections=None)
    return httpx.AsyncClient(transport=httpx.AsyncHTTPTransport(limits=limits, proxy=proxy))


def _through(proxy: str | None) -> str:
    """Return the proxy, without its password, as the end of an error."""
    if proxy is None:
        return ""
    shown = re.sub("//[^/]*@", "//", proxy)
    return f", through the proxy {shown} of http_proxy, https_proxy or all_proxy (no_proxy=HOST avoids it)"


@cache
def _free(concurrency: int) -> asyncio.Semaphore:
    return asyncio.Semaphore(concurrency)


def _parsed(answer: httpx.Response, url: str) -> Any:
    try:
        return answer.json()
    except ValueError as error:
        raise RuntimeError(f"{url} answered with no JSON: {_cut(answer.text)}") from error


def _cut(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}... ({len(text)} characters)"
