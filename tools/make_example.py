"""Make the data and the model of an example.

`grid` is a game, for configs/grid.yaml; `calculator` is multiplication by a tool, for configs/calculator.yaml;
`compaction` is the same with notes, for configs/compaction.yaml; `smollm2` is a public model with sums, for
configs/smollm2.yaml: see tools/smollm2.py; `squares` is counting in pictures, for configs/squares.yaml: see
tools/squares.py.

For the first three, as in tools/make_quickstart.py, a small Qwen2 is warm-started by supervised steps on the dialogues
of a careless player. The walker of the grid mistakes left for right with probability CONFUSE, so that the model
greedily walks the wrong way, while its samples often reach the goal. The pupil with the calculator guesses with
probability GUESS instead of using it; the pupil who must take notes writes none with probability FORGET. No held-out
game or product is used in training.
"""

import itertools
import json
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "configs"))
sys.path.insert(0, str(Path(__file__).parent))

import make_quickstart as quickstart
import smollm2
import squares
import torch
from grid_environment import SIZE, STEPS, shown
from tokenizers import Tokenizer
from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM
from voyage_environment import DAYS, GOODS, HARBOURS, IDLE, REFUSED, SEA, SOLD, START, STORM, STORMS, WANTED, trade
from voyage_environment import shown as seen

from megappo.runtime.status import STATUS

PAD, EOS, UNKNOWN = quickstart.PAD, quickstart.EOS, quickstart.UNKNOWN
TOOLS = "<s>"
ROLES = {"user": "<u>", "assistant": "<a>", "tool": "<t>"}
TEMPLATE = (
    "{% if tools %}<s>{% endif %}{% for one in messages %}"
    "{{ {'user': '<u>', 'assistant': '<a>', 'tool': '<t>'}[one.role] + one.content + '<eos>' }}"
    "{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)
CONFUSE = 0.65
WANDER = 0.1
HELD_OUT = 0.2
BATCH_SIZE = 64
Turns = list[tuple[str, str]]
"""(role, content) each."""


@dataclass(frozen=True)
class Example:
    """Task, vocabulary and warm start of an example.

    Attributes:
        tokens: the vocabulary without special tokens; the longest match is taken first.
        records: all prompts, with their labels.
        play: returns the dialogue of a careless player for a record.
        prefix: text before every dialogue.
        num_steps: steps of the warm start.
        held_out: share of the records that is held out.
        learns_all: the warm start learns the other side's turns, too, as a language model learns all of its texts.
    """

    tokens: tuple[str, ...]
    records: list[dict[str, Any]]
    play: Callable[[dict[str, Any], random.Random], Turns]
    prefix: str = ""
    num_steps: int = 800
    held_out: float = HELD_OUT
    learns_all: bool = False


# --- the grid game ---


def grid() -> Example:
    """Return the grid's example: all games of two different places."""
    places = list(itertools.product(range(SIZE), repeat=2))
    games = [{"start": a, "goal": b} for a, b in itertools.permutations(places, 2)]
    records = [{"prompt": _user(shown(game["start"], game["goal"])), "label": None, **game} for game in games]
    return Example((*map(str, range(SIZE)), ">", *STEPS), records, _walk)


def _walk(game: dict[str, Any], rng: random.Random) -> Turns:
    """Return the turns of a walker who sometimes wanders, and mistakes left for right."""
    (row, column), goal = game["start"], game["goal"]
    turns = [("user", shown((row, column), goal))]
    while (row, column) != goal and len(turns) < 16:
        vertical, horizontal = goal[0] - row, goal[1] - column
        if rng.random() < WANDER:
            step = rng.choice(list(STEPS))
        elif vertical and (not horizontal or rng.random() < 0.5):
            step = "D" if vertical > 0 else "U"
        else:
            step = "LR"[(horizontal > 0) != (rng.random() < CONFUSE)]
        row, column = (min(max(at + by, 0), SIZE - 1) for at, by in zip((row, column), STEPS[step], strict=True))
        turns += [("assistant", step), ("user", shown((row, column), goal))]
    return turns[:-1]


# --- products by a calculator ---

CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "', '"}}\n</tool_call>'
GUESS = 0.65
FACTORS = range(32, 100)


def calculator() -> Example:
    """Return the calculator's example: all four-digit products of two numbers."""
    products = [(f"{a}*{b}", str(a * b)) for a in FACTORS for b in FACTORS]
    records = [{"prompt": _user(f"{product}="), "label": answer} for product, answer in products]
    return Example((*"0123456789*=", *CALL), records, _calculate, TOOLS, 1500)


def _calculate(record: dict[str, Any], rng: random.Random) -> Turns:
    """Return the turns of a pupil who mostly guesses."""
    asked, answer = record["prompt"][0]["content"], record["label"]
    turns = [("user", asked)]
    if rng.random() < GUESS:
        return [*turns, ("assistant", f"={rng.randrange(1000, 10000)}")]
    opened, closed = CALL
    return [*turns, ("assistant", opened + asked[:-1] + closed), ("tool", answer), ("assistant", f"={answer}")]


# --- products behind a compaction ---

NOTE, NOTHING, ASKED = "note", "nothing", "?"
FORGET = 0.65


def compaction() -> Example:
    """Return the example of configs/compaction_agent.py, whose agent erases the calculator's answer."""
    example = calculator()
    return replace(example, tokens=(*example.tokens, NOTE, NOTHING, ASKED), play=_remember, held_out=0.05)


def _remember(record: dict[str, Any], rng: random.Random) -> Turns:
    """Return one of the two conversations of a pupil who mostly notes nothing, and then has to guess."""
    asked, answer = record["prompt"][0]["content"], record["label"]
    note = NOTHING if rng.random() < FORGET else answer
    if rng.random() < 0.5:
        known = f"{rng.randrange(1000, 10000)}" if note == NOTHING else answer
        return [("user", asked + note + ASKED), ("assistant", f"={known}")]
    opened, closed = CALL
    call = opened + asked[:-1] + closed
    return [("user", asked), ("assistant", call), ("tool", answer), ("user", NOTE), ("assistant", note)]


# --- voyages ---

NUM_VOYAGES = 1200
RIGHT, MISTAKEN = 0.3, 0.4


def voyage() -> Example:
    """Return the voyage's example: routes with some harbours and storms, drawn at random."""
    rng = random.Random(0)
    records = []
    for _ in range(NUM_VOYAGES):
        quiet = [SEA] * (DAYS - HARBOURS - STORMS)
        route = [*quiet, *[STORM] * STORMS, *rng.choices(list(WANTED), k=HARBOURS)]
        rng.shuffle(route)
        records.append({"prompt": _user(seen(route[0], START)), "label": None, "route": route})
    purses = [f"{purse:02}" for purse in range(2 * START + 1)]
    tokens = (SEA, STORM, *WANTED, *GOODS, SOLD, REFUSED, IDLE, *purses)
    return Example(tokens, records, _offer, num_steps=600, held_out=0.04, learns_all=True)


def _offer(record: dict[str, Any], rng: random.Random) -> Turns:
    """Return the turns of a trader who offers a certain wrong good most often."""
    turns = []
    purse, news = START, IDLE
    for place in record["route"]:
        offered = rng.choice(GOODS)
        if place in WANTED:
            wanted = GOODS.index(WANTED[place])
            right, mistaken, *others = GOODS[wanted:] + GOODS[:wanted]
            offered = rng.choices([right, mistaken, *others], [RIGHT, MISTAKEN, *[(1 - RIGHT - MISTAKEN) / 2] * 2])[0]
        turns += [("user", seen(place, purse, news)), ("assistant", offered)]
        gain, news = trade(place, offered)
        purse += gain
    return turns


# --- for all ---


def _user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def write_tokenizer(folder: Path, tokens: tuple[str, ...]) -> list[str]:
    """Write a tokenizer with one token for each text; return all tokens, indexed by id."""
    special = [PAD, EOS, UNKNOWN, TOOLS, *ROLES.values()]
    vocabulary = [*special, *tokens]
    longest_first = "|".join(_escaped(token) for token in sorted(tokens, key=len, reverse=True))
    settings = {"additional_special_tokens": [TOOLS, *ROLES.values()], "chat_template": TEMPLATE}
    quickstart.save_tokenizer(folder, vocabulary, special, f"{longest_first}|.", **settings)
    return vocabulary


def _escaped(token: str) -> str:
    return "".join(f"\\x{{{ord(character):x}}}" for character in token)


def warm_start(model: Qwen2ForCausalLM, tokenizer: Tokenizer, example: Example, dialogues: Iterator[Turns]) -> None:
    """Train on the dialogues; the loss covers the player's turns only, or all turns."""

    def batch(*_: int) -> dict[str, torch.Tensor]:
        rows = [_labelled(tokenizer, example, turns) for turns in itertools.islice(dialogues, BATCH_SIZE)]
        tokens, labels = (torch.nn.utils.rnn.pad_sequence(part, batch_first=True) for part in zip(*rows, strict=True))
        return {"input_ids": tokens, "labels": labels.masked_fill(labels == 0, quickstart.IGNORED)}

    num_steps = example.num_steps
    batches = map(batch, itertools.count())
    quickstart.supervise(model, batches, num_steps, lambda step: quickstart.lr_factor(step + 1, num_steps))


def _labelled(tokenizer: Tokenizer, example: Example, turns: Turns) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens and labels; the labels are 0 where there is no loss."""
    tokens = tokenizer.encode(example.prefix).ids
    labels = [0] * len(tokens)
    for role, content in turns:
        ids = tokenizer.encode(f"{ROLES[role]}{content}{EOS}").ids
        tokens += ids
        labels += [0, *ids[1:]] if role == "assistant" or example.learns_all else [0] * len(ids)
    return torch.tensor(tokens), torch.tensor(labels)


def build(folder: Path, example: Example, seed: int) -> None:
    """Write all files of the example into `folder`."""
    torch.manual_seed(seed)
    rng = random.Random(seed)
    rng.shuffle(example.records)
    held_out = int(example.held_out * len(example.records))
    parts = {"val.jsonl": example.records[:held_out], "train.jsonl": example.records[held_out:]}
    for name, records in parts.items():
        (folder / name).write_text("".join(json.dumps(record) + "\n" for record in records))
    (folder / "model").mkdir()
    vocabulary = write_tokenizer(folder / "model", example.tokens)
    model = Qwen2ForCausalLM(
        Qwen2Config(**(quickstart.SHAPE | {"vocab_size": len(vocabulary), "max_position_embeddings": 256}))
    )
    records = parts["train.jsonl"]
    dialogues = (example.play(rng.choice(records), rng) for _ in itertools.count())
    warm_start(model, Tokenizer.from_file(str(folder / "model" / "tokenizer.json")), example, dialogues)
    model.generation_config = GenerationConfig(eos_token_id=1, pad_token_id=0)
    model.save_pretrained(folder / "model")


EXAMPLES: dict[str, Callable[[Path, int], None]] = {
    "grid": lambda folder, seed: build(folder, grid(), seed),
    "calculator": lambda folder, seed: build(folder, calculator(), seed),
    "compaction": lambda folder, seed: build(folder, compaction(), seed),
    "voyage": lambda folder, seed: build(folder, voyage(), seed),
    "smollm2": smollm2.build,
    "squares": squares.build,
}
"""Name -> writes all files of the example into a folder, by a seed."""


def main() -> None:
    """Build the example named on the command line."""
    parts = f"{', '.join(quickstart.PARTS)}, for smollm2 also critic, for squares images"
    args = quickstart.parse_args(__doc__, parts, example=EXAMPLES)
    STATUS.start("the model")
    with quickstart.building(args.output) as folder:
        EXAMPLES[args.example](folder, args.seed)
    STATUS.stop()


if __name__ == "__main__":
    main()
