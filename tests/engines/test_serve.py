"""`megappo serve`: what it answers, what it refuses, and that nothing is left of it."""

import os
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest
import torch
from program import REPOSITORY
from served_folder import COMMAND, save_character_tokenizer, served
from transformers import AutoTokenizer

from megappo.data.tokenizer import load_tokenizer
from megappo.engines.sglang_patches import as_given

PROMPTS = ["37+45=", "(12+a)*b"]
TEMPLATE = "{{ tools | tojson }}{% for m in messages %}\n<{{ m.role }}>  {{ m.content }}{% endfor %}"
TOOLS = [{"parameters": {"a": {"default": None}}, "name": "f", "return": {}}, {"name": "g"}]


@pytest.fixture(scope="module")
def folder(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shared checkpoint with a tokenizer of characters, as transformers saves one."""
    folder = tmp_path_factory.mktemp("export") / "hf_actor"
    shutil.copytree(checkpoint, folder)
    save_character_tokenizer(folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture
def home() -> Iterator[Path]:
    """A temporary folder for the command: sockets lie in it, whose names may have 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="serve-") as folder:
        yield Path(folder)


@pytest.fixture
def server(folder: Path, home: Path) -> Iterator[tuple[subprocess.Popen, httpx.Client]]:
    """The command, serving, and a client."""
    with served(folder, home) as found:
        yield found


def greedy(model: torch.nn.Module, tokens: list[int], count: int) -> list[int]:
    """Hugging Face's choice, without a cache."""
    for _ in range(count):
        with torch.no_grad():
            tokens = [*tokens, int(model(torch.tensor([tokens])).logits[0, -1].argmax())]
    return tokens[-count:]


def test_it_answers_text_as_hugging_face_does_and_leaves_nothing_behind(folder, server, hf_model, home):
    process, client = server
    tokenizer = AutoTokenizer.from_pretrained(folder)
    sampling = {"temperature": 0, "max_new_tokens": 12}
    empty = client.post("/generate", json={"text": "", "sampling_params": sampling})
    assert empty.status_code == 400 and "the prompt has no token" in empty.text
    for prompt in PROMPTS:
        expected = greedy(hf_model, tokenizer(prompt)["input_ids"], 12)
        answer = client.post("/generate", json={"text": prompt, "sampling_params": sampling}).json()
        assert answer["output_ids"] == expected and len(set(expected)) > 2
        request = {"model": "any", "prompt": prompt, "temperature": 0, "max_tokens": 12}
        completion = client.post("/v1/completions", json=request).json()
        assert completion["choices"][0]["text"] == answer["text"] == tokenizer.decode(expected)
    for function in TOOLS:
        messages, tools = [{"role": "user", "content": "1 + 2"}], [{"type": "function", "function": function}]
        chat = {"model": "any", "messages": messages, "tools": tools, "max_tokens": 1}
        answer = client.post("/v1/chat/completions", json=chat | {"return_input_ids_in_sglext": True}).json()
        expected = load_tokenizer(str(folder)).apply_chat_template(messages, tools=tools, return_dict=False)
        assert answer["sglext"]["input_ids"] == expected, "the tokens of training, and tools as the client writes them"
    assert client.post("/v1/completions", json=request | {"n": 2000}).status_code == 400
    assert client.get("/flush_cache").status_code == client.post("/configure_logging", json={}).status_code == 401
    arguments = client.get("/server_info").json()
    assert arguments["admin_api_key"] == "***"
    given = {"max_total_tokens": 2048, "host": "127.0.0.1", "dtype": "float32", "attention_backend": "torch_native"}
    assert given.items() <= arguments.items(), "flags and the defaults for a CPU"

    processes = psutil.Process(process.pid).children(recursive=True)
    [temporary] = home.glob("megappo-engine-*")
    memory = list(Path("/dev/shm").glob(f"sgl*{temporary.name}*"))
    assert len(processes) >= 4 and memory and all(path.exists() for path in memory)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does on Ctrl-C
    assert process.wait(20) == 128 + signal.SIGINT
    assert psutil.wait_procs(processes, timeout=10)[1] == []
    assert not any(path.exists() for path in memory) and not list(home.glob("megappo-engine-*"))
    output = (home / "output.txt").read_text()
    assert "Uvicorn running on http://127.0.0.1:" in output and "Traceback" not in output
    kinds = ("INFO: ", "Multi-thread loading shards", "importing torch and SGLang")
    others = [line for line in output.splitlines() if line and not any(kind in line for kind in kinds)]
    assert len(others) == 1 and "the prompt has no token" in others[0], "of the empty prompt above"


def refused(*arguments: object) -> str:
    """The one line that the command ends with."""
    result = subprocess.run(
        [*COMMAND, *map(str, arguments)], cwd=REPOSITORY, capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 2, result.stderr
    [line] = [line for line in result.stderr.splitlines() if "error" in line]
    assert "Traceback" not in result.stderr and line.startswith("error: ")
    return line


@pytest.mark.slow  # the next test has a refusal of the same kind
def test_what_is_no_folder_of_a_model_is_refused(tmp_path):
    assert "expected a model first, found nothing" in refused()
    assert "found --port; usage: megappo serve MODEL" in refused("--port", 1)
    assert f"no folder {tmp_path}/none" in refused(tmp_path / "none")
    assert "it has no config.json" in refused(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    assert "it has no *.safetensors" in refused(tmp_path)


@pytest.mark.slow  # SGLang's parser, which the next test but one starts
def test_an_unknown_argument_is_refused_before_anything_is_loaded(folder):
    assert "unrecognized arguments: --no-such-flag" in refused(folder, "--no-such-flag")


def test_a_taken_port_is_refused_before_anything_is_loaded(folder):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert f"port {port} is in use: end the server that listens on it, or choose" in refused(folder, "--port", port)


@pytest.mark.slow  # two starts of Python with SGLang; the test before shows that arguments reach its parser
def test_the_short_help_shows_how_to_list_sglangs_arguments():
    short, full = (
        subprocess.run([*COMMAND, *words, "--help"], cwd=REPOSITORY, capture_output=True, text=True, timeout=120)
        for words in ((), ("MODEL",))
    )
    assert short.returncode == full.returncode == 0
    assert "usage: megappo serve MODEL [SGLang's arguments; megappo serve MODEL --help lists them]" in short.stdout
    assert "usage: megappo serve MODEL" in full.stdout
    assert "--host" in full.stdout and "--max-total-tokens" in full.stdout


def test_tools_keep_the_fields_of_their_client_however_sglang_dumps_them():
    assert as_given(lambda tool, **options: options, None) == {"exclude_unset": True}
    assert as_given(lambda tool, **options: options, None, by_alias=True) == {"exclude_unset": True, "by_alias": True}
