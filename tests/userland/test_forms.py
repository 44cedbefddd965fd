"""The forms of reward functions: this project's, verl's, TRL's and OpenRLHF's, what each gets, and what no form is."""

import time
from pathlib import Path

import pytest
from planning import write_run
from reward_pools import load, rows_of, scores_of
from verl_style import CHAT_TEMPLATE, record, write_compute_score, write_gsm8k

from megappo.config.schema import Data
from megappo.data.prompts import Prompt, PromptDataset
from megappo.data.tokenizer import load_tokenizer
from megappo.userland.grades import combined, grades_of
from megappo.userland.rewards import RewardError, RewardPool, load_reward
from megappo.userland.signatures import InputSpec

COLUMNS = [{"level": 1, "tags": ["a"]}, {"level": 2}, {"level": 3, "tags": None}]


def score(pool: RewardPool, columns: list[dict] = COLUMNS) -> list[float]:
    """Return the scores of three responses."""
    return [one.scores[0] for one in pool.score(rows_of(["p0", "p1", "p2"], ["r0", "r1", "r2"], [0, 1, 2], columns))]


TAKES = {
    "def f(prompts, responses, labels): pass": InputSpec(),
    "def f(responses): pass": InputSpec(),
    "def f(p, r, l): pass": InputSpec(),
    "def f(p, r, l, x=1): pass": InputSpec(),
    "def f(*args): pass": InputSpec(),
    "f = lambda p, r, l, /: None": InputSpec(),
    "class C:\n    def __call__(self, prompts, responses, labels, level): pass\nf = C()": InputSpec(("level",)),
    "def f(prompts, responses, level, tags=None): pass": InputSpec(("level",), ("tags",)),
    "def f(prompts, responses, *, level, **columns): pass": InputSpec(("level",), None),
    "def f(data_source, solution_str, ground_truth, extra_info=None, **kwargs): pass": InputSpec(
        ("data_source",), ("extra_info",)
    ),
    "def f(solution_str, ground_truth, method='strict', score=1.0): pass": InputSpec(),
    "async def f(solution_str, **kwargs): pass": InputSpec((), ("data_source", "extra_info")),
    "def f(solution_str, ground_truth, level): pass": InputSpec(("level",)),
    "def f(prompts, completions, **kwargs): pass": InputSpec((), None, raw_prompts=True),
    "def f(completions, answer, level=0): pass": InputSpec(("answer",), ("level",), raw_prompts=True),
}


@pytest.mark.parametrize(("body", "takes"), TAKES.items())
def test_the_signature_shows_what_a_function_takes(tmp_path: Path, body: str, takes: InputSpec):
    with load(tmp_path, body) as pool:
        assert pool.takes == takes


def test_columns_come_by_name_and_none_where_a_row_has_none(tmp_path: Path):
    body = """
        def f(prompts, responses, level, tags="absent", **columns):
            assert (prompts, responses) == (["p0", "p1", "p2"], ["r0", "r1", "r2"])
            assert (tags, columns) == ([["a"], None, None], {"labels": [0, 1, 2]})
            return level
    """
    with load(tmp_path, body) as pool:
        assert score(pool) == [1.0, 2.0, 3.0]


def test_a_column_that_no_row_has_is_left_to_its_default_and_own_names_win(tmp_path: Path):
    body = """
        def f(responses, labels, tags="absent"):
            assert tags == "absent"
            return labels
    """
    with load(tmp_path, body, num_workers=2) as pool:
        assert score(pool, [{"labels": 7}] * 3) == [0.0, 1.0, 2.0]


def test_each_worker_gets_the_columns_of_its_rows(tmp_path: Path):
    body = "def f(responses, labels, level):\n    assert level == [n + 1 for n in labels]\n    return level\n"
    with load(tmp_path, body, num_workers=3) as pool:
        assert score(pool) == [1.0, 2.0, 3.0]


CHAT = [{"role": "user", "content": "hello"}]


def test_trls_form_gets_texts_after_texts_and_messages_after_messages(tmp_path: Path):
    body = """
        def f(completions, prompts, level, **kwargs):
            assert kwargs == {"tags": [["a"], None, None]}
            return [float(len(c if p == "hello" else c[0]["content"] + c[0]["role"] + p[-1]["content"]))
                    for p, c in zip(prompts, completions, strict=True)]
    """
    raw = ["hello", CHAT, "hello"]
    with load(tmp_path, body) as pool:
        columns = [{**row, "prompts": prompt} for row, prompt in zip(COLUMNS, raw, strict=True)]
        assert score(pool, columns) == [2.0, len("r1" + "assistant" + "hello"), 2.0]


def test_trls_form_need_not_take_prompts(tmp_path: Path):
    body = "def f(completions, level):\n    return [len(c[0]['content']) * n for c, n in zip(completions, level)]\n"
    with load(tmp_path, body) as pool:
        assert score(pool, [{**row, "prompts": CHAT} for row in COLUMNS]) == [2.0, 4.0, 6.0]


def test_none_from_trls_form_leaves_a_row_out(tmp_path: Path):
    """As in TRL, where nansum adds the functions up; a row that no function scores has no loss."""
    body = "def f(completions, level):\n    return [None, 2.0, None]\n"
    columns = [{**row, "prompts": "p"} for row in COLUMNS]
    with load(tmp_path, body) as pool:
        grades = pool.score(rows_of(["p0", "p1", "p2"], ["r0", "r1", "r2"], [0, 1, 2], columns))
    assert [(one.scores, one.loss_weight) for one in grades] == [([0.0], 0.0), ([2.0], None), ([0.0], 0.0)]
    assert [one.parts.get("unscored") for one in grades] == [1.0, None, 1.0]
    unscored, scored = grades[0], grades[1]
    both = combined([[unscored, scored], [unscored, unscored]], ["f", "g"])
    assert [(sum(one.scores), one.loss_weight) for one in both] == [(2.0, None), (0.0, 0.0)]
    own_part = grades_of([{"score": 1.0, "loss_weight": 0.5, "unscored": 1.0}], ["r0"], weight=1.0)[0]
    assert combined([[own_part, scored]], ["f", "g"])[0].loss_weight == 0.5


def test_verls_form_is_called_for_each_row_and_of_a_dictionary_the_score_counts(tmp_path: Path):
    body = """
        def f(data_source, solution_str, ground_truth, extra_info="none", score=0.5):
            assert solution_str == f"r{ground_truth}"
            assert extra_info == ("none" if ground_truth == 1 else {"index": ground_truth})
            return [score, {"score": data_source, "acc": True}, 3][ground_truth]
    """
    rows = [{"data_source": 8, "extra_info": {"index": 0}}, {"data_source": 8}, {"data_source": 8}]
    rows[2]["extra_info"] = {"index": 2}
    with load(tmp_path, body, num_workers=2) as pool:
        assert score(pool, rows) == [0.5, 8.0, 3.0]


def test_openrlhfs_form_gets_one_row_in_lists_with_the_whole_text(tmp_path: Path):
    body = """
        import numpy as np
        def f(queries, texts, labels, level, limit, **kwargs):
            assert (queries, kwargs) == ([texts[0] + f"r{labels[0]}"], {})
            assert (level, limit) == ([labels[0] + 1], 3)
            if labels[0] == 2:
                return np.array([0.25])
            return {"rewards": np.array([labels[0]]), "scores": [9.0], "extra_logs": {"length": np.array(4.0)}}
    """
    with load(tmp_path, body, options={f"{tmp_path}/reward.py:f": {"limit": 3}}) as pool:
        assert pool.takes == InputSpec(("level",))
        assert score(pool) == [0.0, 1.0, 0.25]


def test_async_functions_run_for_all_rows_at_the_same_time(tmp_path: Path):
    body = """
        import asyncio
        async def f(solution_str, ground_truth):
            await asyncio.sleep(0.5)
            return ground_truth / 2
    """
    with load(tmp_path, body) as pool:
        start = time.monotonic()
        scores = scores_of(pool.score(rows_of([""] * 40, [""] * 40, list(range(40)))))
        assert time.monotonic() - start < 10
    assert scores == [[n / 2] for n in range(40)]


def test_an_async_function_may_take_all_rows(tmp_path: Path):
    with load(tmp_path, "async def f(responses, labels):\n    return labels\n") as pool:
        assert score(pool) == [0.0, 1.0, 2.0]


NO_FORM = {
    "def f(prompt, response): pass": r"takes \(prompt, response\); expected f\(prompts, responses, labels, ",
    "def f(a, b, c, d): pass": r"takes \(a, b, c, d\); expected f\(prompts, responses",
    "def f(**columns): pass": r"takes \(\*\*columns\); expected f\(",
    "def f(): pass": r"takes \(\); expected .*, or compute_score\(data_source, .*, or f\(prompts, completions, ",
    f"def f({'x' * 50_000}): pass": rf"takes \({'x' * 199}; expected",
    "f = type": "raised ValueError: no signature found for builtin",
}


@pytest.mark.parametrize(("body", "message"), NO_FORM.items(), ids=range(len(NO_FORM)))
def test_an_error_about_a_function_without_a_form_lists_the_forms(tmp_path: Path, body: str, message: str):
    with pytest.raises(RewardError, match=message):
        load(tmp_path, body)


RESULTS = {
    "no score": ("{'reward': 1.0}", r"returned {'reward': 1.0} .*: expected a finite number .* as score, found None"),
    "text": ("{'score': 'right'}", r"expected a finite number .* as score, found 'right'"),
    "no number": ("float('nan')", r"returned nan \(value 0\): expected a finite number"),
    "a fault": ("{}[solution_str]", r"raised KeyError: 'r0'\n(?s:.*)reward.py\", line 2, in f"),
}


@pytest.mark.parametrize(("result", "message"), RESULTS.values(), ids=RESULTS)
@pytest.mark.parametrize("word", ["def", "async def"])
def test_a_broken_result_of_verls_form_is_reported(tmp_path: Path, word: str, result: str, message: str):
    pool = load(tmp_path, f"{word} f(solution_str, **kwargs):\n    return {result}\n")
    with pytest.raises(RewardError, match=message):
        score(pool)


def prompts_of(file: str, folder: Path, takes: InputSpec) -> list[Prompt]:
    tokenizer = load_tokenizer(str(write_run(folder) / "model"))
    tokenizer.chat_template = CHAT_TEMPLATE
    config = Data(train_files=(file,), label_key="reward_model.ground_truth")
    dataset = PromptDataset([file], tokenizer, config, 0, takes=takes)
    assert dataset.errors([dataset.check(1000)]) == []
    return dataset.at(dataset.kept)


def test_verls_data_and_function_work_as_they_are(tmp_path: Path):
    """Every kind of answer to 200 questions; what each is worth is known from how it was written."""
    file = write_gsm8k(tmp_path / "train.parquet")
    answers = {  # what is written of the right number -> its score
        "It is {:,}.\n#### {:,}": 1.0,
        "#### {}": 1.0,
        "#### {} or so. #### 1": 1.0,
        "#### 1 #### {}": 0.1,
        "The answer is {}": 0.0,
        "####{}": 0.0,
        "#### -{}": 0.1,
        "": 0.0,
    }
    kinds = list(answers)
    numbers = [int(record(i)["reward_model"]["ground_truth"]) for i in range(200)]
    responses = [kinds[i % len(kinds)].format(number, number) for i, number in enumerate(numbers)]
    with load_reward(write_compute_score(tmp_path / "gsm8k.py"), num_workers=3, timeout_seconds=20) as pool:
        prompts = prompts_of(file, tmp_path, pool.takes)
        texts, labels, columns = zip(*((prompt.text, prompt.label, prompt.columns) for prompt in prompts), strict=True)
        grades = pool.score(rows_of(texts, responses, labels, columns))
    assert [one.scores for one in grades] == [[answers[kinds[i % len(kinds)]]] for i in range(200)]
    parts = [{} if one.scores == [0.0] else {"acc": float(one.scores == [1.0])} for one in grades]
    assert [one.parts for one in grades] == parts and {"acc": 1.0} in parts
    assert columns[3] == {"data_source": "openai/gsm8k", "extra_info": record(3)["extra_info"]}
    assert texts[3] == f"user:{record(3)['prompt'][0]['content']}\nassistant:" and labels[3] == str(numbers[3])


def test_trls_form_gets_the_chat_of_the_file(tmp_path: Path):
    file = write_gsm8k(tmp_path / "train.parquet", 4)
    body = """
        def f(prompts, completions, **kwargs):
            assert list(kwargs) == ["data_source", "ability", "reward_model", "extra_info"]
            assert all(p[0]["content"].startswith(e["question"]) for p, e in zip(prompts, kwargs["extra_info"]))
            return [float(c[0]["content"] == r["ground_truth"]) for c, r in zip(completions, kwargs["reward_model"])]
    """
    with load(tmp_path, body) as pool:
        prompts = prompts_of(file, tmp_path, pool.takes)
        responses = [prompts[0].label, "", "no", prompts[3].label]
        texts, labels, columns = zip(*((prompt.text, prompt.label, prompt.columns) for prompt in prompts), strict=True)
        assert scores_of(pool.score(rows_of(texts, responses, labels, columns))) == [[1.0], [0.0], [0.0], [1.0]]
