"""Files of trainer.extensions run once, before the config is read. A fault of one is an error like any other."""

import subprocess
import sys
from pathlib import Path

import pytest

from megappo.config.config_error import ConfigError
from megappo.config.loading import load_config

REGISTERS = """
from megappo.config.methods import ESTIMATORS, Estimator
ESTIMATORS.register({name!r}, Estimator("own:estimate", compares_responses=True))
"""
LOSS = """
from megappo.config.methods import POLICY_LOSSES, PolicyLoss
POLICY_LOSSES.register("squashed", PolicyLoss("own:squashed", ("clip_ratio",)))
"""


def config_file(folder: Path, *extensions: Path) -> Path:
    file = folder / "run.yaml"
    names = ", ".join(map(str, extensions))
    file.write_text(
        f"model: {{path: m}}\ndata: {{train_files: [d]}}\nalgorithm: {{adv_estimator: own}}\n"
        f"trainer: {{output_dir: o, extensions: [{names}]}}\n"
    )
    return file


def test_what_an_extension_registers_is_a_value_of_its_key(tmp_path):
    """In a process of its own, as tables are for the whole process; read twice, as a launcher's check and a run do."""
    extension = tmp_path / "mine.py"
    extension.write_text(REGISTERS.format(name="own") + LOSS)
    code = "import sys; from megappo.config.loading import load_config as load\n"
    code += "from megappo.config.describe import config_help; config_help()\n"  # as a command's parser does first
    code += "for _ in range(2): assert load(sys.argv[1]).algorithm.adv_estimator == 'own'\n"
    code += "try: load(sys.argv[1], ['algorithm.adv_estimator=owm'])\nexcept Exception as error: print(error)\n"
    code += "from megappo.config.checks import config_errors\n"
    code += "print(*config_errors(load(sys.argv[1], ['actor.policy_loss=squashed', 'actor.clip_ratio_c=2'])))"
    done = subprocess.run(
        [sys.executable, "-c", code, config_file(tmp_path, extension)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert " | own, found" in done.stdout
    assert "actor.clip_ratio_c 2.0 has no effect, as actor.policy_loss squashed does not read it" in done.stdout


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "raised ImportError: no Python file"),
        ("x = 1\nraise OSError('gone')\n", "raised OSError: gone (line 2): correct the file"),
        ("x = 1\ndef f(:\n", "raised SyntaxError: invalid syntax (line 2): correct the file"),
        ("import sys\nsys.exit('stop')\n", "raised SystemExit: stop (line 2)"),
        ("raise ValueError\n", "raised ValueError (line 1): correct the file"),
        (
            "class E(Exception):\n    def __str__(self): return 1 / 0\nraise E\n",
            "raised mine.E: <exception str() failed> (line 3): correct the file",
        ),
        (
            "class E(Exception):\n    def __str__(self): return None\nraise E\n",
            "raised mine.E: <exception str() failed> (line 3)",
        ),
        (
            "import asyncio\nraise asyncio.CancelledError('by whom')\n",
            "raised asyncio.exceptions.CancelledError: by whom (line 2)",
        ),
        ("import sys\nsys.exit()\n", "raised SystemExit (line 2): correct the file"),
        ("raise OSError(chr(0xd800) + chr(27) + '\\n')\n", "raised OSError: \\ud800\\x1b (line 1)"),
        (REGISTERS.format(name="gae"), "the advantage estimator 'gae' exists already"),
    ],
)
def test_a_fault_of_an_extension_is_reported_with_its_key(tmp_path, text, message):
    extension = tmp_path / "mine.py"
    if text is not None:
        extension.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(config_file(tmp_path, extension))
    [error] = [line for line in caught.value.errors if "trainer.extensions" in line]
    assert message in error and str(extension)[:20] in error and error.startswith(str(tmp_path)), error
