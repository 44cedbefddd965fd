"""Kept rollouts: the Parquet file of a step, and the command that shows it."""

import contextlib
import io
import json
from pathlib import Path

import pytest
import torch.distributed as dist
from engine_handles import restarts_of
from pyarrow import parquet
from samples_of import sample_of
from scored_responses import ScoredResponses, step_of
from spawn import run_ranks
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerFast

from megappo.batch.exchange import Exchange
from megappo.commands.samples_command import main
from megappo.config.schema import Config
from megappo.data.prompts import Prompt
from megappo.data.tokenizer import load_tokenizer, token_texts
from megappo.engines.handle import EngineHandle
from megappo.observe.files import kept_file
from megappo.rollouts.datasets import Datasets
from megappo.rollouts.kept import KEPT_ROWS, keep_rollouts
from megappo.rollouts.rollouts import Rollouts
from megappo.rollouts.row_builder import RowBuilder
from megappo.rollouts.sample_rows import Sample, Segment, shown_facts
from megappo.userland.grades import Grade

NUM_PROMPTS = 40
"""With two responses each, more than KEPT_ROWS."""


def keep(rank: int, world_size: int, model: str, folder: str) -> None:
    """Each rank has every second prompt's responses; responses to even prompts are episodes that a limit ended."""
    tokenizer = load_tokenizer(model)
    config = Config.model_validate(
        {
            "model": {"path": model},
            "data": {"train_files": ["f"], "train_batch_size": NUM_PROMPTS},
            "trainer": {"output_dir": folder},
            "rollout": {"n": 2, "max_response_length": 4},
            "algorithm": {"adv_estimator": "gae"},
        }
    )
    exchange = Exchange(dist.group.WORLD)
    prompts = [Prompt(index, tokenizer.encode(f"{index}="), "", index) for index in range(NUM_PROMPTS)]
    samples, grades = [], []
    for index in range(rank, NUM_PROMPTS, world_size):
        for order in (1, 0):
            tokens = tokenizer.encode(f"{index}{'+' * order}")
            ending = "length" if order else "stop"
            samples.append(sample_of(index, order, tokens, [-0.5] * len(tokens), ending, prompt=prompts[index].tokens))
            grades.append(Grade([1.0 - order], {"pluses": float(order)}))
    datasets, restarts = Datasets(tokenizer, (), 30, None, {}), restarts_of(EngineHandle(rank), exchange)
    rollouts = Rollouts(config, datasets, restarts, exchange, workers={}, num_engines=1)
    step = step_of(ScoredResponses(prompts, samples, grades))
    batch, _ = RowBuilder(config, 30, tokenizer, exchange).build(step)
    keep_rollouts(Path(folder), 7, batch, step, rollouts)
    keep_rollouts(Path(folder), 8, batch, None, rollouts)
    with contextlib.redirect_stdout(io.StringIO()) as output:
        keep_rollouts(Path(folder, "rollouts", "step_00000008.parquet"), 9, batch, step, rollouts)  # no folder
    assert output.getvalue().startswith("WARNING: the rollouts of step 9 are not kept: [Errno" if rank == 0 else "")


def test_a_file_has_the_first_rows_of_all_ranks_with_what_each_is_known_by(config, tmp_path, capsys):
    model = config.parent / "model"
    run_ranks(2, keep, str(model), str(tmp_path))
    rows = parquet.read_table(kept_file(tmp_path, 7)).to_pylist(maps_as_pydicts="strict")
    assert len(rows) == KEPT_ROWS < 2 * NUM_PROMPTS
    for number, row in enumerate(rows):
        index, order = divmod(number, 2)
        response = f"{index}{'+' * order}"
        expected = {
            "step": 7,
            "dataset": None,
            "prompt": f"{index}=",
            "response": response,
            "label": str(index),
            "score": 1.0 - order,
            "parts": {"pluses": order},
            "passed": not order,
            "finish_reason": "length" if order else "stop",
            "texts": list(response),
            "rollout_log_probs": [-0.5] * len(response),
            "response_mask": [1] * len(response),
            "advantages": None,
        }
        assert {name: row[name] for name in expected} == expected
        assert len(row["tokens"]) == len(response)

    [replayed, *_] = parquet.read_table(kept_file(tmp_path, 8)).to_pylist(maps_as_pydicts="strict")
    assert (replayed["label"], replayed["parts"], replayed["finish_reason"]) == (None, {}, "stop")

    with pytest.raises(SystemExit, match="2"):
        main([str(tmp_path), "--dataset", "foo"])
    assert "--dataset foo: step 8 has responses of training" in capsys.readouterr().err
    assert main([str(tmp_path), "--step", "7", "--wrong", "--search", "13", "--dataset", "training"]) == 0
    assert capsys.readouterr().out == (
        "-- training, score 0, not passed, ended by length, pluses 1\n"
        "   prompt    13=\n"
        "   response  13+\n"
        "   label     13\n"
        "\n"
        "step 7 (of 7, 8): 1 of 64 match, 1 shown\n"
    )
    with pytest.raises(SystemExit, match="2"):
        main([str(tmp_path), "--step", "9"])
    assert "has no responses of step 9, but of 7, 8" in capsys.readouterr().err


def test_the_texts_of_tokens_join_to_the_text(config):
    tokenizer = load_tokenizer(str(config.parent / "model"))
    assert token_texts(tokenizer.encode("12+3=15"), tokenizer) == list("12+3=15")

    backend = Tokenizer(BPE(vocab={byte: number for number, byte in enumerate(ByteLevel.alphabet())}, merges=[]))
    backend.pre_tokenizer, backend.decoder = ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    by_bytes = PreTrainedTokenizerFast(tokenizer_object=backend)
    assert token_texts(by_bytes.encode("a \u00e9"), by_bytes) == ["a", " ", "", "\u00e9"]


def test_an_episode_is_shown_as_turns_with_their_rewards(config):
    tokenizer = load_tokenizer(str(config.parent / "model"))
    tokens = tokenizer.encode("1+23")
    first = Segment([5], tokens=tokens, turns=[1, 1, 0, 2], rewards=[0.0, 0.5, 0.0, 1.0])
    second = Segment(tokenizer.encode("7="), tokens=tokens[:1], turns=[3], rewards=[0.0], parent=2)
    shown = shown_facts(Sample(0, 0, [first, second], "done", {"tool_calls": 2.0}), tokenizer)
    expected = [(1, "1+", 0.5), (0, "2", 0.0), (2, "3", 1.0), (0, "7=", 0.0, "new prompt", 2, 0), (3, "1", 0.0)]
    assert [tuple(turn.values()) for turn in shown.pop("turns")] == expected
    assert shown == {"finish_reason": "done", "parts": {"tool_calls": 2.0}}
    assert shown_facts(Sample(0, 0, [Segment([5], tokens=tokens)], "stop"), tokenizer) == {"finish_reason": "stop"}


def test_the_command_reads_episodes_as_such_and_escapes_the_names_of_data_sets(tmp_path, capsys):
    turns = [{"turn": 1, "text": "43*68", "reward": 0.0}, {"turn": 0, "text": "2924\n!", "reward": 0.0}]
    turns.append({"turn": 2, "text": "=2924", "reward": 0.5})
    sample = {"step": 3, "dataset": "v\x1b[2J", "prompt": "43*68=", "response": "?", "label": "2924", "passed": False}
    lines = [json.dumps(sample | {"score": score, "turns": turns, "parts": {"n\r": 1}}) + "\n" for score in (0.5, 0.75)]
    (tmp_path / "rollouts").mkdir()
    (tmp_path / "rollouts" / "step_00000003.jsonl").write_text("".join(lines))
    assert main([str(tmp_path), "--order", "best", "--num", "1"]) == 0
    assert capsys.readouterr().out.splitlines()[:-2] == [
        "-- v\\x1b[2J, score 0.75, n\\r 1",
        "   prompt               43*68=",
        "   policy 1             43*68",
        "   environment          2924",
        "                        !",
        "   policy 2, reward 0.5 =2924",
        "   label                2924",
    ]
    assert main([str(tmp_path), "--wrong"]) == 0
    assert "more than right or wrong" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="2"):
        main([str(tmp_path), "--dataset", "foo"])
    assert "step 3 has responses of v\\x1b[2J" in capsys.readouterr().err
