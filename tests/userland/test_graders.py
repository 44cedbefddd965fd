"""The built-in graders, beside verl's and math-verify, on strings that a person has graded.

graded.jsonl: a grader's label and response; whether it is `right`; the grades of the grader here (`ours`), of verl's
(gsm8k.compute_score, strict, or math_reward.compute_score of verl/utils/reward_score in verl 0.9.1, recorded), and of
math-verify for the whole response, called as verl's math_verify.py calls it; `why`, if they differ.
"""

import json
import time
from pathlib import Path

import pytest
from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify
from reward_pools import rows_of, scores_of

from megappo.userland.graders.answers import (
    exact_match,
    gsm8k,
    last_boxed,
    math,
    multiple_choice,
    regex_match,
)
from megappo.userland.graders.formats import repetition, think_answer
from megappo.userland.rewards import load_reward

GRADED = [json.loads(line) for line in (Path(__file__).parent / "graded.jsonl").read_text().splitlines()]
GRADERS = {"gsm8k": gsm8k, "math": math}
VERDICTS = ("right", "ours", "verl", "math_verify")


def of(grader: str) -> list[dict]:
    return [row for row in GRADED if row["grader"] == grader]


@pytest.mark.parametrize("grader", GRADERS)
def test_strings_get_the_grade_that_is_noted(grader):
    rows = of(grader)
    assert [row for row in rows if GRADERS[grader](row["response"], row["label"])["score"] != row["ours"]] == []


def test_math_verify_finds_what_is_noted():
    def grade(row: dict) -> bool:
        label = parse(f"\\boxed{{{row['label']}}}", (LatexExtractionConfig(),))
        return verify(label, parse(row["response"], (ExprExtractionConfig(), LatexExtractionConfig())))

    assert [row for row in of("math") if grade(row) != bool(row["math_verify"])] == []


def test_every_disagreement_is_noted_with_who_is_right_and_why():
    assert len({(row["grader"], row["label"], row["response"]) for row in GRADED}) >= 300
    for row in GRADED:
        agree = len({row[name] for name in VERDICTS if name in row}) == 1
        assert agree == ("why" not in row), row


def test_a_wrong_grade_is_never_of_our_own_making():
    """A grader that is wrong here agrees with math-verify; there are few."""
    wrong = [row for row in GRADED if row["ours"] != row["right"]]
    assert all(row["ours"] == row["math_verify"] for row in wrong)
    assert len(wrong) < 0.05 * len(GRADED)


@pytest.mark.parametrize(
    "label", [None, True, "", "none", "5 or 6", "#### ", [42], float("nan"), pytest.param("9" * 5000, id="9s")]
)
def test_a_label_without_a_number_is_no_label_of_gsm8k(label):
    with pytest.raises(ValueError, match="gsm8k needs a number as label"):
        gsm8k("#### 42", label)


@pytest.mark.parametrize(
    "response",
    ["#### " + "9" * 5000, "#### 1/" + "9" * 5000, "#" * 10_000, "#### 42e99999"],
    ids=["digits", "divisor", "marks", "exponent"],
)
def test_numbers_without_end_are_no_answers(response):
    assert gsm8k(response, 42) == {"score": False, "pred": None}


@pytest.mark.parametrize(("label", "response"), [(42, "#### 42"), (4.5, "#### 4.50"), (-0.5, "#### -1/2")])
def test_labels_of_gsm8k_may_be_numbers(label, response):
    assert gsm8k(response, label)["score"] and not gsm8k("#### 7", label)["score"]


@pytest.mark.parametrize("label", [None, False, "", " ", "\\boxed{}", "so \\boxed{1", {"answer": 1}])
def test_a_label_without_an_answer_is_no_label_of_math(label):
    with pytest.raises(ValueError, match="math needs an answer as label"):
        math("\\boxed{1}", label)


@pytest.mark.parametrize(
    ("text", "boxed"),
    [
        ("\\boxed{a{b}{c{d}}e}", "a{b}{c{d}}e"),
        ("\\boxed{\\{1, 2\\}} and so on", "\\{1, 2\\}"),
        ("\\boxed{\\left\\{ x }", "\\left\\{ x "),
        ("\\boxed {1}", "1"),
        ("$\\boxed 12$ it is", "12"),
        ("\\boxed{1} then \\boxed{2", None),
        ("\\unboxed{1}", None),
        ("", None),
    ],
)
def test_the_last_box(text, boxed):
    assert last_boxed(text) == boxed


@pytest.mark.parametrize("answer", ["9^{9^{9^{9}}}", "(" * 400, "1" * 100_000], ids=["tower", "brackets", "digits"])
def test_an_answer_that_takes_for_ever_is_wrong_within_its_time(answer):
    started = time.monotonic()
    with load_reward("math", num_workers=1, timeout_seconds=60, memory_limit_gib=4) as pool:
        rows = rows_of([""] * 2, [f"\\boxed{{{answer}}}", "\\boxed{42}"], ["42"] * 2)
        assert scores_of(pool.score(rows)) == [[0.0], [1.0]]
    assert time.monotonic() - started < 30


def test_an_answer_that_takes_for_ever_does_so_once():
    started = time.monotonic()
    assert not any(math("\\boxed{9^{9^{9}}}", "42")["score"] for _ in range(100))
    assert time.monotonic() - started < 20


def test_labels_of_math_may_be_numbers():
    for response, label in (("\\boxed{10^{-7}}", 1e-7), ("\\boxed{\\frac{1}{2}}", 0.5), ("\\boxed{7}", 7)):
        assert math(response, label)["score"]
    assert not math("\\boxed{8}", 7)["score"]


def test_exact_match():
    for response, label in ((" 4\n", "4"), ("4", 4), ("4.5", 4.5), ("True", True)):
        assert exact_match(response, label)["score"]
    for response, label in (("5", 4), ("", "x")):
        assert not exact_match(response, label)["score"]
    for label in (None, "", " "):  # an empty response would be right
        with pytest.raises(ValueError, match="exact_match needs strings or numbers as labels, found "):
            exact_match(str(label), label)


def test_regex_match():
    assert (
        regex_match("it is 42.", r"\b4\d\b") and regex_match("a\nb", "(?m)^b$") and not regex_match("it is 42.", "^4")
    )
    with pytest.raises(ValueError, match=r"regex_match needs regular expressions as labels, found '\(': missing \)"):
        regex_match("x", "(")


@pytest.mark.parametrize(
    ("response", "letter"),
    [
        ("B", "B"),
        ("(B)", "B"),
        (" B. \n", "B"),
        ("**B**", "B"),
        ("The answer is B.", "B"),
        ("The answer is (B), because A is wrong", "B"),
        ("Answer: B", "B"),
        ("ANSWER: **B**", "B"),
        ("I think the correct answer is option B", "B"),
        ("so \\boxed{B}", "B"),
        ("so $\\boxed{\\text{B}}$", "B"),
        ("\\boxed{\\textbf{(B)}}", "B"),
        ("The answer is A. No: the answer is B", "B"),
        ("Answer: A\nwait\nAnswer: C", "C"),
        ("The answer is 'D'", "D"),
        ("The answer is B. Option A is wrong because of C", "B"),
        ("Answer: B. The choice A fails.", "B"),
        ("The best answer: A good one is B.", None),
        ("My answer: I think it is C", None),
        ("The answer is A because of that", "A"),
        ("The answer is A.", "A"),
        ("The answer is \\(\\text{C}\\)", "C"),
        ("so \\boxed{\\mathrm{C}}", "C"),
        ("The correct option is C", "C"),
        ("correct choice is: D", "D"),
        ("Option A is bad. Option D is good", "D"),
        ("The answer is a dog", None),
        ("The answer is Berlin", None),
        ("I prefer B", None),
        ("b", None),
        ("AB", None),
        ("", None),
    ],
)
def test_multiple_choice(response, letter):
    for label in ("A", "(b)", "C.", " d "):
        is_right = letter is not None and letter in label.upper()
        assert multiple_choice(response, label) == {"score": is_right, "pred": letter}


@pytest.mark.parametrize(
    "response",
    ["Answer:" + "\n" * 100_000, "answer is " * 20_000, " " * 100_000 + "B"],
    ids=["lines", "words", "blanks"],
)
def test_a_choice_is_found_in_no_time_in_whatever_a_model_writes(response):
    started = time.monotonic()
    assert not multiple_choice(response, "A")["score"]
    assert time.monotonic() - started < 5


@pytest.mark.parametrize("label", ["", "AB", "7", "K", None])
def test_a_label_of_a_choice_is_a_letter(label):
    with pytest.raises((ValueError, TypeError), match="multiple_choice needs"):
        multiple_choice("A", label)


@pytest.mark.parametrize(
    ("response", "grade"),
    [
        ("<think>a\nb</think>\n<answer>4</answer>", 1.0),
        ("a, then b</think> <answer> 4 </answer>\n", 1.0),
        ("<think>a</think><answer>4</answer> and so on", 0.0),
        ("<think>a</think> so <answer>4</answer>", 0.0),
        ("<think>a</think>", 0.0),
        ("<think> </think><answer>4</answer>", 0.0),
        ("<think>a</think><answer></answer>", 0.0),
        ("<think>a<think>b</think><answer>4</answer>", 0.0),
        ("<think>a</think>b</think><answer>4</answer>", 0.0),
        ("<think>a</think><answer>4</answer><answer>5</answer>", 0.0),
        ("<answer>4</answer>", 0.0),
        ("", 0.0),
    ],
)
def test_think_answer(response, grade):
    assert think_answer(response) == grade


@pytest.mark.parametrize(
    ("response", "grade"),
    [
        ("", 0.0),
        ("a b", 0.0),
        ("a b c d e", 0.0),
        ("a b c A b C", -0.25),
        ("so " * 102, -0.99),
        ("a b c\na\tb c", -0.25),
    ],
)
def test_repetition(response, grade):
    assert repetition(response) == pytest.approx(grade)


@pytest.mark.parametrize(
    "response",
    ["<think>" * 20_000, "</think><answer>" * 20_000, "</think>" + " " * 100_000],
    ids=["open", "closed", "blank"],
)
def test_forms_are_seen_in_no_time_in_whatever_a_model_writes(response):
    started = time.monotonic()
    assert not think_answer(response)
    assert repetition(response) <= 0
    assert time.monotonic() - started < 5
