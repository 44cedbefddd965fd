"""Trajectories with scores: the tokens and rewards that records of every form give, and the faults of records."""

import json
from pathlib import Path

import pytest
from character_tokenizer import CHARACTERS, EOS, TALK, character_tokenizer
from transformers import PreTrainedTokenizerFast

from megappo.config.schema import Data
from megappo.data.examples import Example
from megappo.data.scored_examples import ScoredDataset

QUESTION = "[user]2+2?~\n[assistant]"
TALKED = f"{QUESTION}4~\n[user]+1?~\n[assistant]5.~"
SEVEN = {"prompt_tokens": [5, 6], "response_tokens": [7, 8, 9, 10, 11], "score": 1}


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return character_tokenizer()


def dataset(folder: Path, tokenizer: PreTrainedTokenizerFast, *records: dict, **keys: object) -> ScoredDataset:
    shapings = keys.pop("shapings", ())
    path = folder / "scored.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    config = Data.model_validate({"train_files": str(path), "shuffle": False, "train_batch_size": 1, **keys})
    return ScoredDataset([str(path)], tokenizer, [0], config, seed=0, shapings=shapings)


def credited(tokenizer: PreTrainedTokenizerFast, example: Example) -> dict[str, float]:
    """Return the reward of each token that has one, by the text up to the token's end."""
    ends = {end: reward for end, reward in enumerate(example.fields["turn_rewards"], 1) if reward}
    return {tokenizer.decode(example.tokens[:end]).replace(EOS, "~"): reward for end, reward in ends.items()}


@pytest.mark.parametrize(
    ("record", "keys", "score", "rewards"),
    [
        ({"prompt": "2+2=", "response": "4", "score": -1}, {}, -1, {}),
        ({"prompt": "2+2=", "response": "=4 .", "steps": [[2, 0.5], [4, -1]]}, {}, 0.5,
         {"2+2==4": 0.5, "2+2==4 .": -1}),
        ({"prompt": "2+2=", "response": " 4", "steps": [[2.0, 2.0]]}, {}, 3, {"2+2= 4": 2}),
        ({"prompt": TALK[:1], "response": "4.", "steps": [[1, 2]]}, {}, 3, {f"{QUESTION}4": 2}),
        ({"q": "2+2=", "a": "4", "reward": 2, "process": [[1, 1]]},
         {"columns": {"prompt": "q", "response": "a", "score": "reward", "steps": "process"}}, 3, {"2+2=4": 1}),
        ({"messages": TALK, "steps": None}, {}, 1, {}),
        ({"messages": TALK, "steps": [[2, 0.5], [4, 0.25]]}, {}, 1.75, {f"{QUESTION}4~": 0.5, TALKED: 0.25}),
        ({"messages": TALK, "steps": [[3, 0.5]]}, {"system_prompt": "Add."}, 1.5,
         {f"[system]Add.~\n{QUESTION}4~": 0.5}),  # a reward that comes with the user's answer is the turn's before it
        ({"messages": TALK, "steps": [[2, 0.5], [4, 0.25]]}, {"train_on": "last"}, 1.25, {TALKED: 0.25}),
        ({"messages": [TALK[0], TALK[1] | {"weight": 0}, *TALK[2:]], "steps": [[1, 9], [2, 9]]}, {}, 1, {}),
        ({"prompt": TALK[:1], "response": TALK[1:], "steps": [[1, 0.5], [3, 0.25]]}, {}, 1.75,
         {f"{QUESTION}4~": 0.5, TALKED: 0.25}),
    ],
)  # fmt: skip
def test_a_step_is_rewarded_at_the_token_that_ends_it(tmp_path, tokenizer, record, keys, score, rewards):
    of = dataset(tmp_path, tokenizer, {"score": 1} | record, **keys)
    assert of.errors([of.check(len(CHARACTERS) + 1)]) == []
    [example] = of.at([0])
    assert credited(tokenizer, example) == rewards
    assert example.fields["scores"] == score


def test_turns_are_the_messages_with_a_loss(tmp_path, tokenizer):
    [example] = dataset(tmp_path, tokenizer, {"messages": TALK, "score": 1}).at([0])
    turns = example.fields["turns"]
    assert [bool(turn) for turn in turns] == [bool(learned) for learned in example.mask]
    assert [turn for turn in turns if turn] == [1, 1, 2, 2, 2]


def test_tokens_are_taken_as_they_are(tmp_path, tokenizer):
    masked = SEVEN | {"prompt": "ab", "response_mask": [1, 0, 0, 1, 0], "steps": [[3, 0.5], [4, 2]], "truncated": True}
    of = dataset(tmp_path, tokenizer, SEVEN, masked)
    assert of.errors([of.check(len(CHARACTERS) + 1)]) == []
    whole, part = of.at([0, 1])
    assert whole.tokens == part.tokens == [5, 6, 7, 8, 9, 10, 11]
    assert whole.mask == whole.fields["turns"] == [0, 0, 1, 1, 1, 1, 1] and part.mask == [0, 0, 1, 0, 0, 1, 0]
    assert part.fields["turn_rewards"] == [0, 0, 0.5, 0, 0, 2, 0] and part.fields["turns"] == [0, 0, 1, 0, 0, 2, 0]
    assert [one.fields["scores"] for one in (whole, part)] == [1, 3.5]
    assert [one.fields["truncated"] for one in (whole, part)] == [0, 1]


@pytest.mark.parametrize(("record", "end"), [({"prompt": "2+2=", "response": "4"}, "=4"), ({"messages": TALK}, "5.")])
def test_a_response_that_was_cut_off_has_no_end_token(tmp_path, tokenizer, record, end):
    [example] = dataset(tmp_path, tokenizer, record | {"score": 1, "truncated": True}).at([0])
    assert tokenizer.decode(example.tokens[-2:]) == end


@pytest.mark.parametrize(
    ("record", "fault"),
    [
        ({"messages": TALK}, "no field 'score': correct data.columns, or add it"),
        ({"messages": TALK, "score": "1"}, "expected a number as the score, found '1'"),
        ({"messages": TALK, "score": True}, "expected a number as the score, found True"),
        ({"messages": TALK, "score": float("nan")}, "NaN"),
        ({"messages": TALK[:1], "score": 1}, "no message of the assistant, which could be learned: add one"),
        ({"messages": TALK, "score": 1, "steps": [[5, 1.0]]},
         "expected a list of [end, score] as steps, with ascending ends from 1 to 4, its length, found [5, 1.0]"),
        ({"prompt": "1+1=", "response": "2", "score": 1, "steps": [[2, 1.0]]},
         "with ascending ends from 1 to 1, its length, found [2, 1.0]"),
        ({"prompt": "1+1=", "response": "2", "score": 1, "steps": {"1": 1.0}}, "expected a list of [end, score]"),
        (SEVEN | {"steps": [[6, 1.0]]}, "from 1 to 5, its length, found [6, 1.0]"),
        (SEVEN | {"steps": [[2.5, 1.0]]}, "from 1 to 5, its length, found [2.5, 1.0]"),
        (SEVEN | {"response_mask": [1, 0]}, "each as response_mask, found ([5, 6], [7, 8, 9, 10, 11], [1, 0])"),
        (SEVEN | {"response_mask": [0] * 5}, "the response is empty: it has no token"),
        (SEVEN | {"response_tokens": [700]}, "the trajectory has token 700, for which a model has no embedding"),
        (SEVEN | {"response_tokens": [7] * 60}, "the trajectory has more tokens than data.max_length 60 (62)"),
        ({"prompt": "1", "response": "2", "score": 1, "response_mask": [1]}, "expected tokens as prompt and"),
        ({"messages": [], "score": 1}, "expected a list of {'role': str,"),
        ({"messages": None, "score": 1}, "expected a list of {'role': str,"),
        ({"prompt": "1", "response": "2", "score": 1, "truncated": "no"}, "expected true or false as truncated"),
        (SEVEN | {"response_tokens": "ab"}, "expected tokens as prompt and response, and 0 or 1 for"),
    ],
)  # fmt: skip
def test_a_broken_record_is_named_by_file_and_line(tmp_path, tokenizer, record, fault):
    fine = {"messages": TALK, "prompt": "1+1=", "response": "2"} | SEVEN
    of = dataset(
        tmp_path,
        tokenizer,
        {name: fine[name] for name in fine if name in {**record, "score": 1}},
        record,
        max_length=60,
    )
    [error] = of.errors([of.check(len(CHARACTERS) + 1)])
    assert error.startswith(f"data.train_files: {tmp_path / 'scored.jsonl'} line 2: ") and fault in error


def test_shaping_that_cannot_apply_to_steps_is_refused_where_there_are_some(tmp_path, tokenizer):
    records = [SEVEN, SEVEN | {"steps": [[1, 1.0]]}]
    of = dataset(tmp_path, tokenizer, *records, shapings=["reward.clip 1.0"])
    [error] = of.errors([of.check(len(CHARACTERS) + 1)])
    assert " line 2: reward.clip 1.0 changes the score, not the rewards of steps: drop one" in error
