"""The program of docs/python.md: PPO written by hand on the public names."""

import subprocess
import sys

import pytest
from program import REPOSITORY, Program, logged

PAGE = (REPOSITORY / "docs" / "python.md").read_text("utf-8")
BY_HAND = PAGE.split("```python\n")[1].split("```")[0]
pytestmark = pytest.mark.timeout(300)


def test_ppo_by_hand_trains(config, folder):
    assert len(BY_HAND.splitlines()) <= 75
    script = folder / "my_ppo.py"
    script.write_text(BY_HAND)
    command = (sys.executable, "-m", "megappo.torchrun", "--standalone", "--nproc-per-node", "2", script)
    words = (config, f"trainer.output_dir={folder / 'out'}", "trainer.total_steps=2", "trainer.eval_interval=0")
    with Program(folder / "program", *words, command=command) as program:
        assert program.wait() == 0, program.output
    steps = logged(folder / "out")
    assert [step["step"] for step in steps] == [1, 2]
    # The second step's sync compares the engine with an actor whose weights the loss above has changed.
    assert all(step["sync/bytes"] > 0 for step in steps)
    assert (folder / "out" / "hf_actor" / "model.safetensors").is_file()


def test_importing_megappo_is_light():
    heavy = "{'torch', 'pydantic', 'yaml', 'numpy', 'typer', 'transformers'}"
    code = f"import megappo, sys; print(*{heavy} & set(sys.modules)); print(megappo.load_config.__module__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "\nmegappo.config.loading\n", done.stderr
