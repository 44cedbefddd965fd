"""Downloads of the models that a config names by their ids on the Hugging Face hub, into its local cache."""

import sys
from pathlib import Path

from megappo.architecture.model_folder import INDEX, read_weight_map
from megappo.config.config_error import printable
from megappo.config.hub import HUB_ID, cached_id
from megappo.config.schema import Config
from megappo.config.text_files import TextFileError

WANTED = ("*.json", "*.jinja", "*.txt", "*.model", "model*.safetensors", "adapter_model.safetensors")
"""Files that a run reads or exports; weights in other formats are left out."""


def download_models(config: Config) -> bool:
    """Download the models that a config names by id and that are missing or incomplete in the cache.

    If a download fails, print the cause: `run_checks` then reports that the model is missing.

    Returns:
        True if a model was downloaded. Then read the config again, which finds the model's folder.
    """
    reward = config.reward_model
    paths = [config.model.path, config.critic.model_path, reward.model_path, reward.adapter]
    for one in (config.ref, *config.teachers.values()):
        paths += [one.model_path, one.adapter]
    missing = [name for path in dict.fromkeys(filter(None, paths)) if (name := missing_id(path))]
    are_downloaded = [download_model(name) for name in missing]
    return any(are_downloaded)


def missing_id(path: str) -> str | None:
    """Return the id of a model that must be downloaded; None for a folder, or a path that looks like an id."""
    folder = Path(path)
    if name := cached_id(folder):
        return None if _is_whole(folder) else name
    is_path = folder.exists() or Path(folder.parts[0]).is_dir()
    return path if HUB_ID.fullmatch(path) and not is_path else None


def _is_whole(folder: Path) -> bool:
    """Return whether a model in the cache has all its weights: a download may have been interrupted, or have fetched
    config.json alone."""
    if not (folder / INDEX).is_file():
        return any(folder.glob("*.safetensors"))
    try:
        files = set(read_weight_map(folder).values())
    except TextFileError:  # `run_checks` reports it
        return True
    return all((folder / name).is_file() for name in files)


def download_model(name: str) -> bool:
    """Download the model with this id to the local cache; print the cause and return False if that fails."""
    import httpx  # the hub's client imports it, which takes a second
    from huggingface_hub import constants, get_session, set_client_factory, snapshot_download

    seconds = constants.HF_HUB_DOWNLOAD_TIMEOUT
    limits = httpx.Timeout(seconds).as_dict()
    # The hub's client waits for most answers without end (huggingface_hub 1.33, hf_api.py), whatever its default is.
    hooks = get_session().event_hooks
    hooks["request"].append(lambda request: request.extensions.update(timeout=limits))
    set_client_factory(lambda: httpx.Client(event_hooks=hooks, follow_redirects=True))
    print(f"downloading {name} to the cache of the Hugging Face hub", file=sys.stderr, flush=True)
    try:
        snapshot_download(name, allow_patterns=list(WANTED))
    except (OSError, ValueError, httpx.HTTPError) as error:
        cause = printable(f"{type(error).__name__}: {' '.join(str(error).split())}")
        if "timed out" in cause:
            cause += f" (HF_HUB_DOWNLOAD_TIMEOUT={seconds}: the hub was silent for so many seconds)"
        print(f"warning: {name} cannot be downloaded: {cause}", file=sys.stderr, flush=True)
        return False
    return True
