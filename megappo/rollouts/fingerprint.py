"""Everything that sampled and scored responses depend on, by name, so that a change of it is found and named."""

import json
import os
import re
import shlex
from collections.abc import Iterator, Mapping
from hashlib import sha256
from itertools import product
from operator import attrgetter
from pathlib import Path
from typing import Any

from megappo.config.config_error import show
from megappo.config.schema import Config
from megappo.data.prompts import Prompt
from megappo.userland.spec import BUILTIN, parse_spec

SAMPLING_KEYS = (
    *("data.train_batch_size", "rollout.n", "rollout.temperature", "rollout.top_p", "rollout.top_k"),
    "rollout.max_response_length",
)
EPISODE_KEYS = (
    *("rollout.environment", "rollout.tools", "rollout.agent", "rollout.agent_command"),
    *("rollout.tool_call_parser", "rollout.reasoning_parser", "rollout.max_turns"),
)
REMAINING_KEYS = (
    *("model.path", "model.dtype", "rollout.stop", "rollout.routing_replay", "trainer.seed"),
    *("data.prompt_key", "data.label_key", "data.gen_batch_size", "data.apply_chat_template", "data.system_prompt"),
    *("data.chat_template_kwargs", "reward.function", "reward.options", "reward.skip_special_tokens"),
    *("reward.on_error", "algorithm.mask_truncated"),
)
"""Responses are sampled again if any of these keys has changed. A replay needs the recorded values of the first two
groups: log-probs and mini-batches depend on them."""
PROMPT_CONTENT = "prompts, labels or other fields of data.train_files"
"""Name of what `prompt_digest` depends on."""
IMPORT = re.compile(r"(?:^|[:;])[ \t]*(?:from|import)\b[^\n(]*(?:\([^)]*\))?", re.MULTILINE)
"""An import statement of Python, up to its end."""
WORD = re.compile(r"\w+")


def rollout_settings(config: Config) -> dict[str, Any]:
    """Return everything that scored responses depend on, as JSON, except prompts and trained weights. A reward model is
    no part of it: its scores are added to the scores of recorded rows.

    Call it at the start of a run, when workers load the users' files: later edits belong to the next run.
    """
    filters = config.algorithm.filter_groups
    played = (config.rollout.environment, *config.rollout.tools, config.rollout.agent)
    settings: dict[str, Any] = key_values(config, SAMPLING_KEYS + EPISODE_KEYS + REMAINING_KEYS)
    settings["algorithm.adv_estimator"] = config.algorithm.method.needs_greedy_baseline
    settings["algorithm.filter_groups"] = filters.model_dump() if filters.enable else None
    for spec in (*config.reward.weights, *filter(None, played)):
        if spec not in BUILTIN and (place := parse_spec(spec, builtin={})).file:
            settings |= {f"{file} of {spec}": digest for file, digest in _code(place.file)}
    for word in filter(os.path.isfile, shlex.split(config.rollout.agent_command or "")):
        settings |= {f"{file} of {word}": digest for file, digest in _code(word)}
    return settings


def key_values(config: Config, keys: tuple[str, ...]) -> dict[str, Any]:
    """Return the values of config keys as JSON has them."""
    return {key: json.loads(show(attrgetter(key)(config))) for key in keys}


def changed_settings(found: Mapping[str, Any], settings: Mapping[str, Any]) -> list[str]:
    """Return the names of the settings whose values differ."""
    return [name for name in {**settings, **found} if found.get(name) != settings.get(name)]


def prompt_digest(prompt: Prompt) -> str:
    """Return the checksum of a prompt, its images, label and further fields, whatever its place in the data files."""
    digests = [image.digest for image in prompt.images]
    content = prompt.text, prompt.tokens, prompt.label, prompt.columns, *digests
    return sha256(show(content).encode()).hexdigest()[:32]


def _code(file: str) -> Iterator[tuple[str, str]]:
    """Yield path and checksum of a file of code, and of the modules and packages that it imports, and these import,
    from its folder, their own or the working folder."""
    files = [first := Path(file)]
    for file in files:  # the list grows
        content = file.read_bytes()
        yield os.path.relpath(file, first.parent), sha256(content).hexdigest()
        words = WORD.findall(" ".join(IMPORT.findall(content.decode(errors="replace"))))
        folders = {one for one in (first.parent, file.parent, Path.cwd()) if not one.name.endswith("-packages")}
        for folder, word in product(folders, {*words} - {"megappo"}):
            found = folder / f"{word}.py", *(folder / word).rglob("*.py")
            files += [one for one in found if one.is_file() and one not in files]
