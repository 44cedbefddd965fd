"""The tree of turns: each sampled token is trained once, after the prompt that the engine saw."""

import random
from collections import Counter
from itertools import count

import pytest
from byte_tokenizers import byte_tokenizer

from megappo.config.schema import Data
from megappo.data.chat import Chat
from megappo.engines.generations import Generation
from megappo.rollouts.conversation import Turn, TurnTree
from megappo.rollouts.sample_rows import Sample

END = "<|end|>"
PLAIN = (
    "{% if tools %}[tools]{{ tools | tojson }}<|end|>{% endif %}"
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
CONTENT = "{{ m.content }}"
DROPS_THOUGHTS = PLAIN.replace(
    CONTENT,
    "{% set after = messages[loop.index:] | selectattr('role', 'equalto', 'user') | list %}"
    "{{ m.content.split('</think>')[-1] if after else m.content }}",
)
"""As Qwen3's: thoughts before the last message of the user are dropped."""
OPENS_THOUGHTS = DROPS_THOUGHTS.replace("[assistant]{% endif %}", "[assistant]<think>\n{% endif %}").replace(
    "else m.content",
    "else (m.content if '<think>' in m.content or m.role != 'assistant' else '<think></think>' + m.content)",
)
"""As Nemotron 3's: the generation prompt opens a thought, which messages without one get closed."""
TRIMS = PLAIN.replace(CONTENT, "{{ m.content | trim }}")
NEEDS_CALLS = PLAIN.replace(
    CONTENT,
    "{% if m.role == 'tool' and not messages[loop.index0 - 1].tool_calls %}{{ raise_exception('no call') }}{% endif %}"
    "{{ m.content }}{% for c in m.tool_calls or [] %}<call>{{ c.function.name }}</call>{% endfor %}",
)
"""As Mistral's and GPT-OSS's: the result of a tool needs a call before it."""
TOOLS = [{"type": "function", "function": {"name": "add", "description": "Add.", "parameters": {"type": "object"}}}]


def user(text: str) -> dict:
    return {"role": "user", "content": text}


def tree_of(template: str) -> tuple[TurnTree, object]:
    tokenizer = byte_tokenizer(END)
    tokenizer.chat_template = template
    return TurnTree(Chat(tokenizer, Data(train_files=("f.jsonl",))), tokenizer), tokenizer


def written(tokenizer: object, text: str) -> Generation:
    tokens = tokenizer.encode(text, add_special_tokens=False)
    return Generation(tokens, [-1.0] * len(tokens), "stop")


class Agents:
    """Random agents: they go on, branch, sample siblings, change tools, rewrite their history and repeat requests."""

    def __init__(self, template: str, seed: int):
        self.random = random.Random(seed)
        self.tree, self.tokenizer = tree_of(template)
        self.threads: list[tuple[list, list, list]] = []
        self.numbers = count(1)
        self.seen: dict[int, tuple[list[int], Generation]] = {}
        self.kinds: Counter[str] = Counter()

    def text(self) -> str:
        return "".join(self.random.choices("ab \u00e9\n", k=self.random.randint(1, 6)))

    def generation(self, number: int) -> Generation:
        """A turn with a thought or none, ended or truncated, even within a character."""
        text = self.random.choice(["", "<think>t</think>", "t</think>\n"]) + self.text()
        tokens = self.tokenizer.encode(text + END, add_special_tokens=False)
        tokens = tokens[: max(1, len(tokens) - self.random.randint(1, 2))] if self.random.random() < 0.2 else tokens
        log_probs = [-number - position / 1000 for position in range(len(tokens))]
        return Generation(tokens, log_probs, "stop", versions=[number] * len(tokens))

    def request(self, messages: list, turns: list, tools: list) -> list[Turn]:
        place = self.tree.place(messages, turns, tools)
        known = [
            message if turn is None else {"role": "assistant", "content": turn.begun + turn.content}
            for message, turn in zip(messages, turns, strict=True)
        ]
        expected = self.tokenizer.apply_chat_template(
            known, tools=tools or None, tokenize=False, add_generation_prompt=True
        )
        assert self.tokenizer.decode(place.tokens) == place.text == expected
        self.kinds["root" if place.parent is None else "extends"] += 1
        found = []
        for number in [next(self.numbers) for _ in range(self.random.choice([1, 1, 1, 2]))]:
            generation = self.generation(number)
            self.seen[number] = place.tokens, generation
            found.append(self.tree.write(place, generation, number))
            found[-1].reward = float(number)
        return found

    def step(self) -> None:
        if not self.threads or self.random.random() < 0.15:  # another agent, or a rewritten history
            self.threads.append(([user(self.text())], [None], self.random.choice([[], TOOLS])))
        messages, turns, tools = self.random.choice(self.threads)
        answers = self.request(messages, turns, tools)
        if self.random.random() < 0.2:  # the answer was lost, so the client sends the request again
            for turn in answers:
                self.tree.drop(turn)
                del self.seen[turn.number]
                self.kinds["dropped"] += 1
            answers = self.request(messages, turns, tools)
        for turn in answers if self.random.random() < 0.3 else answers[:1]:
            message = {"role": "assistant", "content": self.random.choice([turn.content, "parsed"])}
            replay = turn if message["content"] == "parsed" or self.random.random() < 0.9 else None
            role = self.random.choice(["user", "tool"])
            self.threads.append(
                ([*messages, message, {"role": role, "content": self.text()}], [*turns, replay, None], tools)
            )


@pytest.mark.parametrize("template", [PLAIN, DROPS_THOUGHTS, OPENS_THOUGHTS], ids=["plain", "drops", "opens"])
@pytest.mark.parametrize("seed", range(5))
def test_each_token_is_trained_once_after_the_prompt_that_the_engine_saw(template, seed):
    agents = Agents(template, seed)
    for _ in range(60):
        agents.step()
    assert min(agents.kinds[kind] for kind in ("root", "extends", "dropped")) > 3
    trained: Counter[int] = Counter()
    segments = agents.tree.segments()
    for segment in segments:
        is_own = [log_prob is not None for log_prob in segment.log_probs]
        assert is_own == [turn > 0 for turn in segment.turns] == [version is not None for version in segment.versions]
        assert segment.parent == 0 or segment.parent < segment.turns[0]
        for number in dict.fromkeys(filter(None, segment.turns)):
            trained[number] += 1
            start, length = segment.turns.index(number), segment.turns.count(number)
            prompt, generation = agents.seen[number]
            assert segment.context[: len(segment.prompt) + start] == prompt
            assert segment.tokens[start : start + length] == generation.tokens
            assert segment.log_probs[start : start + length] == generation.log_probs
            assert segment.rewards[start : start + length] == [0.0] * (length - 1) + [float(number)]
    assert trained == dict.fromkeys(agents.seen, 1)
    assert len(segments) < len(trained), "turns were appended"
    assert Sample(0, 0, segments, "done", {}).num_turns == max(agents.seen)


@pytest.mark.parametrize(
    ("template", "turn", "parsed", "expected"),
    [
        (PLAIN, "<think>t</think>a", "a", "yyy"),
        (DROPS_THOUGHTS, "<think>t</think>a", "a", "yny"),
        (OPENS_THOUGHTS, "t</think>a", "a", "yny"),
        (TRIMS, "a\n", "a", "yyy"),
        (NEEDS_CALLS, "<call>add</call>", "", "yyy"),
        (PLAIN.replace("<|end|>", "."), "a", "a", "nnn"),
    ],
    ids=["plain", "drops", "opens", "trims", "needs calls", "another end"],
)
def test_turns_of_an_agent_extend_each_other_where_the_template_shows_them(template, turn, parsed, expected):
    """The client replays what a parser made of each turn. The second message after a turn is of the user."""
    tree, tokenizer = tree_of(template)
    messages, turns, found = [user("hi")], [None], ""
    for number, role in enumerate(("tool", "user", "tool"), start=1):
        place = tree.place(messages, turns)
        turns += [tree.write(place, written(tokenizer, turn + END), number), None]
        call = {"tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {}}}]}
        messages += [{"role": "assistant", "content": parsed, **call}, {"role": role, "content": "more"}]
        after = tree.place(messages, turns)
        found += "n" if after.parent is None else "y"
        assert after.follows.number == number
        if after.parent:
            assert after.tokens[: len(place.tokens)] == place.tokens
            assert after.text.startswith(f"{place.text}{turn}{END}[{role}]more")
    assert found == expected
