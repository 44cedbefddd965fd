"""The dry run reports every error that shows without weights and engines, and checks the files that a run reads."""

import hashlib
import json
import os
import re
from pathlib import Path

import pytest
import torch
from planning import HF_CONFIG, LINE, errors_of, start_plan
from torch.distributed.checkpoint import FileSystemWriter, save

from megappo.preflight.folder_lock import lock

IMPORTED = re.compile(r"^import time: .*\| +(\w+)", re.MULTILINE)


def test_every_error_is_printed_and_the_exit_code_is_2(run_folder):
    (run_folder / "train.jsonl").unlink()
    done = start_plan(
        run_folder, "run.yaml", "critic.ppo_mini_batch_size=5", "placement.critic=0-2", "rollout.stop=['']"
    )
    assert done.returncode == 2
    lines = [line.removeprefix("error: ").split(": ", 1) for line in done.stderr.splitlines()]
    assert [(place, error.split(" ")[0]) for place, error in lines] == [
        ("command line", "critic.ppo_mini_batch_size"),
        ("command line", "rollout.stop"),
        ("command line", "placement.critic"),
        ("run.yaml:6", "data.train_files:"),
    ]
    assert "Traceback" not in done.stderr and "nothing is wrong" not in done.stdout
    assert done.stdout.splitlines()[-1] == "not ready: 4 errors, above the plan"


def test_errors_of_the_file_end_the_plan(plan, run_folder):
    done = plan(run_folder, "run.yaml", "actor.ppo_epoch=2", "rollout.n=x")
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        "error: command line: actor.ppo_epoch: unknown key; did you mean actor.ppo_epochs?",
        'error: command line: rollout.n: expected int >= 1, found "x"',
    ]


def test_all_ranks_need_a_world_size(plan, run_folder):
    everywhere = ("run.yaml", "placement.actor,critic,rollout=all")
    done = plan(run_folder, *everywhere)
    assert (done.returncode, done.stderr) == (
        2,
        "error: command line: placement: every component is on 'all' ranks: set their number with --world-size N\n",
    )
    assert "on 8 ranks" in plan(run_folder, *everywhere, "--world-size", "8").stdout
    assert "on 6 ranks" in plan(run_folder, *everywhere, WORLD_SIZE="6").stdout
    assert "on 2 ranks" in plan(run_folder, *everywhere, "--world-size=2", WORLD_SIZE="6").stdout


@pytest.mark.parametrize(("setting", "is_refused"), [("model.dtype=fp32", True), ("model.dtype=bf16", False)])
def test_fp32_is_refused_where_an_engine_would_have_gpus(plan, run_folder, setting, is_refused):
    without, planned = plan(run_folder, "run.yaml", setting), plan(run_folder, "run.yaml", setting, "--gpu", "h100")
    assert "model.dtype" not in without.stderr
    assert ("model.dtype: fp32 does not run on GPUs" in planned.stderr) == is_refused
    servers = plan(run_folder, "run.yaml", setting, "--gpu", "h100", "rollout.engines=[http://127.0.0.1:9]")
    assert "model.dtype" not in servers.stderr


def test_weights_are_never_written_under_a_forward_pass_on_gpus(plan, run_folder):
    setting, message = "rollout.recompute_cache=false", "rollout.recompute_cache: false would let engines on GPUs write"
    words = ("run.yaml", setting, "rollout.max_staleness=1", "placement.rollout=2-3", "placement.actor,critic=0-1")
    assert message in plan(run_folder, *words, "--gpu", "h100").stderr
    assert "rollout.recompute_cache" not in plan(run_folder, *words).stderr


def test_an_engine_needs_as_many_ranks_on_each_of_its_nodes(plan, run_folder):
    words = ("run.yaml", "placement.actor,critic=all", "placement.rollout=0-5", "rollout.tensor_parallel=2")
    words = (*words, "actor.parallel.tensor=1", "critic.parallel.pipeline=1")
    well = plan(run_folder, *words, "--world-size=6", "--nodes=2", "placement.rollout=1-4")
    assert "error: placement.rollout" not in well.stderr
    done = plan(run_folder, *words, "--world-size=6", "--nodes=2", "rollout.tensor_parallel=3", "placement.rollout=1-3")
    assert done.returncode == 2
    assert "engine 0 of rollout.tensor_parallel 3 would get ranks 1-3: name ranks that follow" in done.stderr
    done = plan(run_folder, *words, "--world-size=6", "--nodes=4")
    assert done.returncode == 2 and "--nodes 4 does not divide the 6 ranks" in done.stderr


@pytest.mark.parametrize("size", ["0", "-1", "two"])
def test_a_senseless_world_size(plan, run_folder, size):
    done = plan(run_folder, "run.yaml", f"--world-size={size}")
    assert done.returncode == 2
    assert "argument --world-size: " in done.stderr and size in done.stderr


def test_the_plan_lists_what_it_has_checked_and_what_not(plan, run_folder):
    lines = [line.strip() for line in plan(run_folder, "run.yaml").stdout.splitlines()]
    assert lines[lines.index("checked") + 1 :] == [
        "tokenizer of model",
        "prompts of train.jsonl: all 300",
        "80 prompts in 5 steps: 0.267 epochs",
        "exact_match: the response '2' to the first prompt scores 1",
        "not checked: weights, memory, engines",
        "",
        "nothing is wrong: ready for 4 processes of megappo.train",
    ]
    assert not (run_folder / "out").exists()
    served = plan(run_folder, "run.yaml", "teachers.a.url=http://10.0.0.7:30000")
    assert served.returncode == 0 and "not checked: weights, memory, engines, the servers of teachers" in served.stdout


def test_errors_in_tokenizer_data_and_reward_are_reported_together_and_soon(plan, run_folder):
    wrong = ('rollout.stop=["12", "="]', "data.label_key=answer", "data.max_prompt_length=3")
    done = start_plan(run_folder, "run.yaml", *wrong, PYTHONPROFILEIMPORTTIME="1")
    imported = set(IMPORTED.findall(done.stderr))
    assert "tokenizers" in imported and not imported & {"torch", "megatron", "sglang"}, "that takes seconds"
    done.stderr = "".join(line for line in done.stderr.splitlines(True) if not line.startswith("import time:"))
    assert errors_of(done) == [
        "error: rollout.stop: '12' is 2 tokens ([2, 3]) to this tokenizer, and the engine works on token ids: choose a "
        "string that is exactly one token, or leave it out",
        "error: data.train_files: train.jsonl lines 1, 2, 3 and 297 more: no field 'answer': correct data.label_key, "
        "or add it (data.on_bad_row=skip leaves such out); the file has: prompt, label",
    ]
    (run_folder / "reward.py").write_text("def f(prompts, responses):\n    return responses[2]\n")
    assert errors_of(
        plan(run_folder, "run.yaml", *wrong[2:], "reward.function=reward.py:f", "data.train_batch_size=320")
    ) == [
        "error: data.train_files: train.jsonl lines 1, 2, 3 and 297 more: the prompt has 4 tokens, more than "
        "data.max_prompt_length 3: raise it, drop this, or set data.too_long",
        "error: data.train_batch_size 320 takes 320 prompts of data.train_files, which has 300, so that a step would "
        "hold some twice: lower it, or name more files",
        "error: reward.function: reward function reward.py:f raised IndexError: list index out of range (File "
        f'"{run_folder}/reward.py", line 2, in f): fix it',
    ]


def test_many_prompts_that_are_too_long_are_one_error_with_the_longest(plan, run_folder):
    lines = [f'{{"prompt": "{"1" * length}", "label": "2"}}\n' for length in range(4, 26)]
    (run_folder / "train.jsonl").write_text("".join(lines))
    keys = ("data.max_prompt_length=3", "data.val_files=[]", "trainer.eval_interval=null", "--all")
    assert errors_of(plan(run_folder, "run.yaml", *keys)) == [
        "error: data.train_files: train.jsonl lines 1, 2, 3 and 19 more: the prompt has more tokens than "
        "data.max_prompt_length 3 (the longest has 25): raise it, drop this, or set data.too_long"
    ]


def test_data_without_a_usable_prompt_are_reported_before_the_reward_is_tried(plan, run_folder):
    keys = ("data.max_prompt_length=3", "data.too_long=skip", "data.val_files=[]", "trainer.eval_interval=null")
    assert errors_of(plan(run_folder, "run.yaml", *keys)) == [
        "error: data.train_files: no prompt remains: all 300 records that were checked are left out",
        "error: data.train_files: train.jsonl lines 1, 2, 3 and 297 more: the prompt has more tokens than "
        "data.max_prompt_length 3",
    ]


def test_a_rollout_that_ends_by_its_scores_needs_them_before_it_has_ended(plan, run_folder):
    (run_folder / "reward.py").write_text("def f(prompts, responses, labels):\n    return [0.0] * len(labels)\n")
    settings = ("rollout.n=2", "algorithm.filter_groups.enable=true", "reward.function=reward.py:f")
    assert errors_of(plan(run_folder, "run.yaml", *settings, "data.gen_batch_size=301")) == [
        "error: data.gen_batch_size 301 ends a rollout by the scores of the responses written so far, but "
        "reward.function reward.py:f is called when all are written: set reward.batch_size, such as 1",
        "error: data.gen_batch_size 301 takes 301 prompts of data.train_files, which has 300, so that a step would "
        "hold some twice: lower it, or name more files",
    ]
    found = plan(run_folder, "run.yaml", *settings, "data.gen_batch_size=300", "reward.batch_size=1").stdout
    assert "trajectories, the first finished of 300 prompts\n" in found


@pytest.mark.parametrize(
    ("found", "names"),
    [
        ("{'score': len(solution_str), 'acc': 1}", "score, acc"),
        ("1.0 * len(solution_str)", "score"),
        ("{'score': len(solution_str), 'pred': '7'}", "score"),
    ],
)
def test_groups_are_not_filtered_by_what_no_function_returns(plan, run_folder, found, names):
    (run_folder / "reward.py").write_text(f"def f(solution_str, ground_truth):\n    return {found}\n")
    filtering = ("reward.function=reward.py:f", "algorithm.filter_groups.enable=true")
    [error] = errors_of(plan(run_folder, "run.yaml", *filtering, "algorithm.filter_groups.metric=accuracy"))
    assert error == (
        "error: algorithm.filter_groups.metric accuracy: reward.function reward.py:f returns no such number of a "
        f"response: set one of {names}"
    )
    known = names.split(", ")[-1]
    assert errors_of(plan(run_folder, "run.yaml", *filtering, f"algorithm.filter_groups.metric={known}")) == []


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("def f(p, r, l):\n    return [1.0]\n", "returned 1 values for 2 responses"),
        (
            "import nowhere\n",
            "raised ModuleNotFoundError: No module named 'nowhere' (File \"FOLDER/reward.py\", line 1",
        ),
        ("f = 1\n", "does not exist: the file defines no function: fix it"),
        (
            "def f(p, r, l):\n    return {}[r[0]]\n",
            "raised KeyError: '2' (File \"FOLDER/reward.py\", line 2, in f): fix",
        ),
        (
            "def f(p, r):\n    return [1.0]\n",
            "takes (p, r); expected f(prompts, responses, labels, **columns), or comp",
        ),
        ("def f(p, r, l):\n    return 'ab'\n", "returned 'ab'; expected a list of 2 numbers: fix it"),
        ("def f(p, r, l):\n    while True: pass\n", "took longer than 0.5 seconds and was"),
    ],
)
def test_a_reward_function_that_cannot_score_is_reported(plan, run_folder, body, message):
    (run_folder / "reward.py").write_text(body + ("" if "f" in body.split() or "def f" in body else "f = nowhere\n"))
    [error] = errors_of(plan(run_folder, "run.yaml", "reward.function=reward.py:f", "reward.timeout_seconds=0.5"))
    assert error.startswith("error: reward.function: reward function reward.py:f ")
    assert message.replace("FOLDER", str(run_folder)) in error


def test_a_function_that_fails_on_empty_responses_is_warned_of(plan, run_folder):
    (run_folder / "reward.py").write_text("def f(p, r, l):\n    return [float(int(one) == 2) for one in r]\n")
    done = plan(run_folder, "run.yaml", "reward.function=reward.py:f")
    raised = "reward function reward.py:f raised ValueError: invalid literal for int() with base 10: ''"
    assert done.returncode == 0 and f"warning: for an empty response, which models write, the {raised}\n" in done.stderr
    kept_on = plan(run_folder, "run.yaml", "reward.function=reward.py:f", "reward.on_error=zero")
    assert kept_on.returncode == 0 and "empty response" not in kept_on.stderr


def test_a_home_that_cannot_be_written_is_named(plan, run_folder):
    [error] = errors_of(plan(run_folder, "run.yaml", HOME="/proc/nowhere", XDG_CACHE_HOME=""))
    assert error.startswith("error: HOME or XDG_CACHE_HOME: cannot write in /proc (")


def test_what_is_missing_follows_layout_errors_and_can_be_ignored(plan, run_folder):
    """The weights of a shape that ships are missing: its layout is checked all the same."""
    keys = ("model.path=Qwen2.5-7B", "data.train_files=trian.jsnol")
    found = errors_of(plan(run_folder, "run.yaml", *keys, "actor.parallel.tensor=3", "placement.actor=0-2"))
    is_missing = [": no f" in line for line in found]
    assert is_missing == sorted(is_missing) and is_missing.count(True) == 2 and "actor.parallel.tensor 3" in found[0]
    assert "error: data.train_files: no file trian.jsnol" in found[-1]
    (run_folder / "model" / "model.safetensors").unlink()
    for given, count in ((keys, 2), (("critic.model_path=absent",), 2)):
        done = plan(run_folder, "run.yaml", *given, "--ignore-missing")
        assert [line.split(":")[0] for line in done.stderr.splitlines()] == ["warning"] * count, done.stderr
        assert done.returncode == 0 and done.stdout.endswith(
            f"no other error, {count} warnings above the plan: ready for 4 processes of megappo.train once the missing "
            "files are here\n"
        )
        assert "not checked: tokenizer, prompts" in done.stdout
    refused = plan(run_folder, "run.yaml", *keys, "rollout.stop=['']", "--ignore-missing")
    assert refused.returncode == 2 and refused.stdout.endswith("not ready: 1 error, above the plan\n")


def test_errors_of_data_stand_beside_those_of_the_output_folder(plan, run_folder):
    (run_folder / "file").write_text("")
    with (run_folder / "train.jsonl").open("a") as file:
        file.write('{"label": "2"}\n')
    found = errors_of(plan(run_folder, "run.yaml", "trainer.output_dir=file"))
    assert [key for error in found for key in ("trainer.output_dir", "data.train_files") if f"{key}: " in error] == [
        "trainer.output_dir",
        "data.train_files",
    ]


@pytest.mark.parametrize(
    ("score", "is_warned"), [("0.0", True), ("float(one == '#### 2')", False), ("len(one) / 8", False)]
)
def test_a_reward_that_scores_right_and_wrong_answers_alike_is_warned_of(plan, run_folder, score, is_warned):
    (run_folder / "reward.py").write_text(f"def f(p, r, l):\n    return [{score} for one in r]\n")
    done = plan(run_folder, "run.yaml", "reward.function=reward.py:f")
    warned = "warning: reward.py:f: every response tried for the first prompt has score 0: '2', '', '=2', '#### 2', "
    assert done.returncode == 0 and (warned in done.stderr) == is_warned


@pytest.mark.parametrize(
    ("end", "is_warned"), [("<im_end>", True), ("</s>", False), ("", False)], ids=["other", "end", "none"]
)
def test_a_chat_template_whose_messages_end_otherwise_is_warned_of(plan, run_folder, end, is_warned):
    template = "{% for one in messages %}{{ one.content + '" + end + "' }}{% endfor %}"
    (run_folder / "model" / "chat_template.jinja").write_text(template)
    done = plan(run_folder, "run.yaml")
    assert done.returncode == 0, done.stderr
    assert ("warning: the chat template ends a message with " in done.stderr) == is_warned


GDPO = ("algorithm.adv_estimator=gdpo", "algorithm.use_kl_in_reward=false", "reward.function=reward.py:f")


def test_several_scores_are_shown_and_one_is_refused_where_the_method_needs_several(plan, run_folder):
    (run_folder / "reward.py").write_text("def f(p, r, l):\n    return [[0.5, -1]] * 2\n")
    done = plan(run_folder, "run.yaml", *GDPO)
    assert done.returncode == 0
    assert "  reward.py:f: the response '2' to the first prompt scores 0.5 + -1\n" in done.stdout
    (run_folder / "reward.py").write_text("def f(p, r, l):\n    return [0.5] * 2\n")
    [error] = errors_of(plan(run_folder, "run.yaml", *GDPO))
    assert error == (
        "error: reward.function reward.py:f returned one score per response, and algorithm.adv_estimator gdpo needs "
        "several: return a list of two or more for each response, or choose another estimator, such as grpo"
    )


def test_scores_of_steps_and_a_weight_are_shown_and_what_would_clip_their_sum_is_refused(plan, run_folder):
    grade = "{'score': 1, 'step_scores': [[1, 0.5]] if solution_str else [], 'loss_weight': 2}"
    (run_folder / "reward.py").write_text(f"def f(solution_str, ground_truth):\n    return {grade}\n")
    done = plan(run_folder, "run.yaml", "reward.function=reward.py:f")
    assert done.returncode == 0 and "reward.py:f: the response '2' to the first prompt scores 1\n" in done.stdout
    assert "  reward.py:f: returned loss_weight 2.0\n  reward.py:f: returned step_scores [[(1, 0.5)]]\n" in done.stdout
    [error] = errors_of(plan(run_folder, "run.yaml", "reward.function=reward.py:f", "reward.clip=5"))
    assert error == (
        "error: reward.clip 5.0 changes the score of a response, not the scores of its steps, which reward.function "
        "reward.py:f gives (step_scores): drop it, and do it in the function"
    )


def test_of_many_prompts_a_sample_is_looked_at_and_all_if_asked(plan, run_folder):
    lines = [LINE] * 50_000
    lines[1234] = "{\n"  # neither among the first ones nor at a round number
    (run_folder / "train.jsonl").write_text("".join(lines))
    done = plan(run_folder, "run.yaml")
    assert done.returncode == 0 and "  prompts of train.jsonl: 1,980 of 50,000 (with --all: every one)\n" in done.stdout
    [error] = errors_of(plan(run_folder, "run.yaml", "--all"))
    assert error.startswith("error: data.train_files: train.jsonl line 1235: not valid JSON: ")


def test_a_tokenizer_of_llamas_is_loaded_as_the_run_loads_it(run_folder):
    """transformers takes LlamaConfig for a tokenizer of this class, and torchvision with it wherever there is torch."""
    (run_folder / "model" / "config.json").write_text(
        json.dumps(HF_CONFIG | {"architectures": ["LlamaForCausalLM"], "model_type": "llama"})
    )
    file = run_folder / "model" / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"tokenizer_class": "TokenizersBackend"}))
    assert errors_of(start_plan(run_folder, "run.yaml")) == []


def test_odd_values_are_warned_of(plan, run_folder):
    odd = ("model.dtype=bf16", "rollout.sync.probe_tolerance=1e-3", "actor.use_kl_loss=true")
    lines = errors_of(plan(run_folder, "run.yaml", *odd))
    assert [line.split()[:2] for line in lines] == [
        ["warning:", "rollout.sync.probe_tolerance"],
        ["warning:", "actor.use_kl_loss"],
    ]
    assert "in bf16 engine and trainer differ by about 0.01 to 0.05 on average" in lines[0]


@pytest.mark.parametrize(
    ("override", "error"),
    [
        (
            "rollout.server_args={host: x}",
            "rollout.server_args: host may not be set: megappo sets it itself; remove it",
        ),
        (
            "rollout.server_args={schedul_policy: x}",
            "rollout.server_args: SGLang does not know schedul_policy: did you",
        ),
        ("trainer.output_dir=''", 'trainer.output_dir: expected text, found "" (empty paths'),
        ("trainer.output_dir=/proc/runs/1", "trainer.output_dir: cannot write in /proc ("),
        (f"trainer.output_dir=out/{'x' * 300}", "trainer.output_dir: cannot write in "),
        ("trainer.output_dir=train.jsonl/out", "trainer.output_dir: "),
        ("trainer.output_dir=nowhere", "trainer.output_dir: nowhere is a file: name a folder"),
    ],
)
def test_further_errors_in_the_config_alone(plan, run_folder, override, error):
    (run_folder / "nowhere").symlink_to("nothing")
    [line] = errors_of(plan(run_folder, "run.yaml", override))
    assert line.startswith(f"error: {error}")


def test_a_wrong_config_is_reported_before_anything_is_tried(plan, run_folder):
    (run_folder / "reward.py").write_text("open('called', 'w')\ndef f(prompts, responses, labels): return [0.0]\n")
    assert errors_of(plan(run_folder, "run.yaml", "reward.function=reward.py:f", "rollout.stop=['']")) == [
        "error: rollout.stop holds an empty string, which would end every response at once: remove it"
    ]
    assert not (run_folder / "called").exists()


def test_episodes_with_a_template_that_takes_no_sampled_turn_are_refused(plan, run_folder):
    """GPT-OSS's template raises an exception for a message with the marks of its channels."""
    (run_folder / "turns.py").write_text("class Turns:\n    async def reset(self, row): pass\n")
    refusal = "{{ raise_exception('You have passed a message containing <|channel|> tags in the content field.') }}"
    (run_folder / "model" / "chat_template.jinja").write_text(refusal)
    assert not any("<|channel|>" in line for line in errors_of(plan(run_folder, "run.yaml")))
    [line] = errors_of(plan(run_folder, "run.yaml", "rollout.environment=turns.py:Turns", "reward.function=null"))
    assert line.startswith("error: rollout.environment: the chat template in model/chat_template.jinja refuses a turn")


def checkpoint(folder: Path, name: str) -> Path:
    path = folder / "out" / "checkpoints" / name
    path.mkdir(parents=True, exist_ok=True)
    path.with_name("latest").write_text(f"{name}\n")
    return path


def test_what_is_in_the_output_folder(plan, run_folder):
    checkpoint(run_folder, "step_00000007")
    done = plan(run_folder, "run.yaml")
    assert done.returncode == 2
    assert done.stderr.startswith(
        "error: run.yaml:7: trainer.total_steps 5 is below the 7 steps that out/checkpoints/step_00000007"
    )
    done = plan(run_folder, "run.yaml", "trainer.total_steps=7", "trainer.resume=never")
    assert "out/checkpoints/step_00000007 exists, and trainer.resume is never: set it to auto" in done.stderr
    finished = ("run.yaml", "trainer.total_steps=7")
    assert plan(run_folder, *finished).stdout.splitlines()[-1].startswith("nothing is wrong")  # export and report
    state = run_folder / "out" / "checkpoints" / "step_00000007" / "state.json"
    state.write_text('{"step": 7, "models": {"critic": "a critic alone"}}')
    [line] = errors_of(plan(run_folder, *finished))
    assert "step_00000007 holds a critic alone, but this run has actor (Qwen2ForCausalLM, " in line
    state.unlink()
    begun = checkpoint(run_folder, "step_00000007_0003")
    done = plan(run_folder, *finished)
    assert "total_steps 7 is below the 8 steps that out/checkpoints/step_00000007_0003 has: raise it" in done.stderr
    begun.rmdir()
    checkpoint(run_folder, "step_00000007")
    (run_folder / "out" / "hf_actor").mkdir()
    (run_folder / "out" / "run.json").write_text('{"status": "finished"}')
    done = plan(run_folder, *finished)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1].startswith("already finished: out has all 7 steps; raise trainer.total_steps")
    record = run_folder / "out" / "config.yaml"
    record.write_text("trainer: {export_hf: false}\n")  # hf_actor is of an earlier end
    assert plan(run_folder, *finished).stdout.splitlines()[-1].startswith("nothing is wrong")
    (run_folder / "out" / "checkpoints" / "latest").write_text("step_00000003\n")
    (run_folder / "out" / "checkpoints" / "step_00000007").rmdir()
    done = plan(run_folder, *finished)
    assert "latest is there, but no checkpoint beside it: restore them, or remove" in done.stderr


def with_sums(folder: Path, step: int, **state: object) -> Path:
    """A checkpoint that has nothing but its state."""
    path = checkpoint(folder, f"step_{step:08d}")
    text = json.dumps({"step": step, "models": "actor, critic"} | state, indent=1)
    (path / "state.json").write_text(text)
    (path / "SHA256SUMS").write_text(f"{hashlib.sha256(text.encode()).hexdigest()}  state.json\n")
    return path


def flip(file: Path, at: int) -> None:
    content = bytearray(file.read_bytes())
    content[at] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize(
    ("name", "find"),
    [("state.json", b"actor"), ("state.json", b'"step'), ("state.json", b"2,"), ("SHA256SUMS", b"  state")],
)
def test_a_flipped_bit_leads_to_the_checkpoint_before(plan, run_folder, name, find):
    """The models' names, JSON's punctuation, the step or the sums are damaged; the run trusts none of them."""
    before, newest = with_sums(run_folder, 1), with_sums(run_folder, 2)
    assert errors_of(plan(run_folder, "run.yaml")) == []
    flip(newest / name, (newest / name).read_bytes().index(find))
    done = plan(run_folder, "run.yaml", "trainer.total_steps=1")
    assert done.returncode == 0, "step 1 is the last, and all of it is there"
    [line] = done.stderr.splitlines()
    assert line.startswith("warning: out/checkpoints/step_00000002") and "altered" in line
    assert line.endswith(": the run resumes from out/checkpoints/step_00000001, the newest intact one")
    flip(before / "state.json", 3)
    [error] = errors_of(plan(run_folder, "run.yaml"))
    assert "step_00000001 is damaged: state.json is altered or cut off" in error and "use another checkpoint" in error


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (Path.unlink, "latest cannot be read (No such file or directory"),
        (
            lambda pointer: pointer.write_text("step_00000009\n"),
            "latest names no checkpoint that is there: found 'step_00000009'",
        ),
        (lambda pointer: pointer.write_text("newest"), "latest names no checkpoint that is there: found 'newest'"),
    ],
)
def test_a_lost_pointer_is_reported_with_the_checkpoint_that_is_used(plan, run_folder, change, message):
    with_sums(run_folder, 1)
    change(with_sums(run_folder, 2).with_name("latest"))
    done = plan(run_folder, "run.yaml")
    assert done.returncode == 0
    [line] = done.stderr.splitlines()
    assert line.startswith(f"warning: out/checkpoints/{message}")
    assert line.endswith(": the run resumes from out/checkpoints/step_00000002, the newest intact one")


def test_a_folder_that_a_run_has(plan, run_folder):
    with lock(run_folder / "out"):
        done = plan(run_folder, "run.yaml")
        assert done.returncode == 2
        assert done.stderr.startswith("error: run.yaml:7: trainer.output_dir: out is in use by a run (")
        assert f", pid {os.getpid()}, since 2" in done.stderr
    assert plan(run_folder, "run.yaml").returncode == 0


def test_weights_from_a_megatron_folder(plan, run_folder):
    """A folder that torch wrote: the plan reads names of files alone."""
    folder = run_folder / "megatron" / "iter_0000007"
    with pytest.warns(UserWarning, match="in a single process"):
        save({"a": torch.ones(2)}, storage_writer=FileSystemWriter(folder), no_dist=True)
    (run_folder / "megatron" / "latest_checkpointed_iteration.txt").write_text("7")
    key = "model.dist_checkpointing_path"
    assert plan(run_folder, "run.yaml", f"{key}=megatron").returncode == 0
    refused = {
        (f"{key}=missing",): f"{key}: missing has no .metadata (looked in {run_folder}): name a torch_dist checkpoint",
        ("critic.dist_checkpointing_path=model",): "critic.dist_checkpointing_path: model has no .metadata",
        (f"{key}=megatron", "actor.lora={}"): f"{key}: adapters stand beside the weights of a Hugging Face folder: set",
        (f"{key}=megatron", "trainer.rollout_only=true", "trainer.record_rollouts=r"): (
            f'{key} "megatron" has no effect, as trainer.rollout_only true samples with the weights of model.path: drop'
        ),
    }
    for overrides, error in refused.items():
        assert error in plan(run_folder, "run.yaml", *overrides).stderr, overrides
    [file] = folder.glob("*.distcp")
    file.unlink()
    found = plan(run_folder, "run.yaml", f"{key}=megatron")
    assert f"megatron/iter_0000007 lacks {file.name}, which its .metadata names: copy it again" in found.stderr
