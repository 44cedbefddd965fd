"""Scripts pass what bash passes, and reach nothing outside of their jail."""

import os
import subprocess
from pathlib import Path

import pytest

from megappo.config.config_error import ConfigError
from megappo.config.elsewhere import systems
from megappo_tools import importer
from megappo_tools.importing import shell_commands
from megappo_tools.importing.script_settings import read_settings
from megappo_tools.importing.shell_commands import ShellScript

TRAIN = "python3 -m verl.trainer.main_ppo"
FORMS = {
    "if and case": """
        DEVICE=${DEVICE:-$(python3 -c 'import no_such_module' 2>/dev/null && echo npu || echo gpu)}
        if [ "$DEVICE" = npu ]; then N=16; elif [[ $DEVICE == g* ]]; then N=8; else N=1; fi
        case $DEVICE in npu) M=a ;; gpu | cuda) M=b ;; *) exit 1 ;; esac
        TRAIN a.n=$N a.m=$M""",
    "arrays": """
        A=(a.x=1 "a.y=b c")
        A+=(a.z="['$HOME/d', 'e']")
        declare -A MORE=([k]=v)
        TRAIN "${A[@]}" a.k=${MORE[k]} a.count=${#A[@]} ${A[0]/x/q} "$@" """,
    "defaults": """
        set -euo pipefail
        A=${A:-}
        B=${B:-$((2 * 4))}
        TRAIN a.a=${A:-8} a.b=$B a.c=${C-} a.d="${D:-${E:-x y}}" a.e=${B:+set}""",
    "arithmetic and text": """
        max=$((1024 * 8))
        name=$(echo "Qwen/Qwen3-8B" | tr '[:upper:]' '[:lower:]' | sed 's#/#_#')
        TRAIN a.half=$((max / 3)) a.base=${name##*_} a.name=$name a.hex=$((16#ff)) a.n=$(seq 3 | wc -l)""",
    "functions and loops": """
        add() { local what=$1; shift; ARGS+=("$what=$*"); }
        ARGS=()
        for one in x y; do add a.$one 1 2; done
        while read -r key value; do add "$key" "$value"; done <<< "a.z 5"
        TRAIN "${ARGS[@]}" """,
    "quotes and continued lines": """
        X='a $HOME'  # a comment
        TRAIN \\
            a.x="$X" a.q=\\"q\\" 'a.l=["console", "wandb"]' \\
            a.s="it's" a.t=`echo 4` a.none=""",
    "redirections": """
        mkdir -p logs
        echo start > logs/note.txt 2>&1
        TRAIN a.x=1 > logs/run.log 2>&1 &
        wait""",
    "a pipeline and an exit": """
        set -x
        TRAIN a.x=1 2>&1 | tee run.log
        exit 0
        TRAIN a.x=2""",
    "other shells": """
        X=5
        bash -c "TRAIN a.x=$X a.y='b c'" """,
    "a document": """
        X=$(cat <<EOF
        {"a": $((1 + 1))}
        EOF
        )
        eval "Y=4"
        TRAIN a.x="$X" a.y=$Y""",
    "exec": "exec TRAIN a.x=1",
}


def script_of(folder: Path, text: str) -> Path:
    lines = [line.removeprefix("        ") for line in text.replace("TRAIN", TRAIN).split("\n")]
    path = folder / "run.sh"
    path.write_text("\n".join(lines).strip("\n") + "\n")
    return path


def words_by_bash(script: Path) -> list[list[str]]:
    """Return the arguments that bash itself passes to a program python3, which fails for `-c`."""
    program = script.parent / "bin" / "python3"
    program.parent.mkdir()
    program.write_text('#!/bin/bash\n[ "$1" != -c ] && printf "%s\\0" "$@" > "$OUT.$$"\n')
    program.chmod(0o755)
    (script.parent / "elsewhere").mkdir()
    environment = {"HOME": "~", "PATH": f"{program.parent}:{os.defpath}", "OUT": str(script.parent / "out")}
    subprocess.run(["bash", script], cwd=script.parent / "elsewhere", env=environment, check=True, capture_output=True)
    return [one.read_text().split("\0")[:-1] for one in script.parent.glob("out.*")]


@pytest.mark.parametrize("form", FORMS)
def test_a_script_passes_what_bash_passes(form: str, tmp_path: Path) -> None:
    script = script_of(tmp_path, FORMS[form])
    assert [one.words[1:] for one in ShellScript(script).commands()] == words_by_bash(script)


HOSTILE = {
    "rm": "/bin/rm -rf {home}; rm -rf {home}; command rm -rf {home}",
    "a redirection": "echo x > {home}/victim; : > {home}/made; cat /dev/null >| {home}/victim",
    "a program of the path": "PATH=/usr/bin:/bin; touch {home}/made; cp {home}/victim {home}/made",
    "a tool's program": "X=$(awk 'BEGIN {{ system(\"touch {home}/made\") }}'); sed -n 'w {home}/made' {home}/victim",
    "a tool that writes": "mkdir -p {home}/made; tee {home}/victim < /dev/null; sort -o {home}/victim /dev/null",
    "Python": 'python3 -c \'open("{home}/made", "w")\'; python3 -c \'import os; print(os.system("id > {home}/made"))\'',
    "signals": "kill -9 {pid}; builtin kill -9 {pid}; command kill -9 -1; builtin kill -9 -1",
    "the network": "exec 5<>/dev/tcp/127.0.0.1/{port}; read x < /dev/tcp/127.0.0.1/{port}; : > /dev/udp/127.0.0.1/9",
    "a fork bomb": "bomb() {{ bomb | bomb & }}; set -m; bomb; wait",
    "an endless loop": "while :; do :; done",
    "many files": "for i in {{1..5000}}; do : > file$i; done",
    "a long text": "while :; do echo yyyyyyyyyyyyyyyy; done",
    "memory": "X=x; while :; do X=$X$X; done",
    "another record": "printf '1\\0x\\0' >&$IMPORT_RECORD",
}


@pytest.mark.parametrize("attack", HOSTILE)
def test_a_hostile_script_changes_nothing(attack: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shell_commands, "MAX_SECONDS", 2)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "victim").write_text("precious")
    text = HOSTILE[attack].format(home=tmp_path, pid=os.getpid(), port=22)
    script = script_of(tmp_path, f"{text}\nTRAIN a.x=1")
    try:
        commands = ShellScript(script).commands()
    except ConfigError as error:
        assert all(line.startswith(f"{script}:") for line in error.errors)
    else:
        assert not commands or commands[-1].words[-1] == "a.x=1"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run.sh", "victim"]
    assert (tmp_path / "victim").read_text() == "precious"


def settings_of(script: Path, *arguments: str, **variables: str) -> dict[str, object]:
    return read_settings(ShellScript(script, arguments, variables), [systems()["verl"]])[1]


def test_what_the_script_misses_is_named(tmp_path: Path) -> None:
    variables = {"HOME": "/home/me"}
    script = script_of(tmp_path, "TRAIN a.x=$HOME a.y=$MISSING")
    assert [one.words[3:] for one in ShellScript(script, (), variables).commands()] == [
        ["a.x=/home/me", "a.y=$MISSING"]
    ]
    assert variables == {"HOME": "/home/me"}
    script = script_of(tmp_path, 'if [ -n "$MORE" ]; then X=3; fi\nTRAIN a.x=${X:-4} a.p=$MODEL_PATH/a a.n=$(nproc)')
    assert settings_of(script) == {"a.x": 4, "a.p": "$MODEL_PATH/a", "a.n": "$(nproc)"}
    assert settings_of(script, MODEL_PATH="m", MORE="1") == {"a.x": 3, "a.p": "m/a", "a.n": "$(nproc)"}


def test_the_files_of_the_folder_and_of_the_script_are_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "conf").symlink_to(tmp_path)
    (tmp_path / "logs").mkdir()
    (tmp_path / "conf" / "env.sh").write_text("export X=5\n")
    (tmp_path / "inner.sh").write_text('/opt/conda/bin/python -m verl.trainer.main_ppo a.here=$HERE a.x=$X "$@"\n')
    text = (
        'HERE=$(cd "$(dirname "$0")" && pwd)\nexport HERE\n[ -f conf/env.sh ] && source conf/env.sh\n'
        "./inner.sh a.y=1 > logs/run.log"
    )
    monkeypatch.chdir(tmp_path)
    assert settings_of(script_of(tmp_path, text)) == {"a.here": str(tmp_path), "a.x": 5, "a.y": 1}


UNDECIDED = {
    "if nvidia-smi | grep -q H100; then N=8; else N=4; fi\nTRAIN a.n=$N": "the exit code .* nvidia-smi \\(line 1\\)",
    "N=$(nvidia-smi -L | wc -l)\nTRAIN a.n=$((N * 2))": "run.sh:2: bash reports: .*nvidia-smi.*NAME=VALUE",
    "TRAIN \\\n  a.x=1\nTRAIN a.x=2": r"starts 2 trainings that differ \(lines 1, 3\)",
    "if true; then\nTRAIN a.x=1": "run.sh:3: bash reports: syntax error",
    "X=${MODEL:?name a model}\nTRAIN": "run.sh:1: bash reports: MODEL: name a model",
    "N=$1\nTRAIN a.n=$N": r"run.sh:1: bash reports: \$1: unbound variable.*the script's arguments",
    'if [ "$#" -lt 1 ]; then echo "Usage: run.sh N"; exit 1; fi\nTRAIN': "that it prints: Usage: run.sh N",
    "TRAIN > /no/such/place 2>&1": "run.sh:1: bash reports: /no/such/place",
}


@pytest.mark.parametrize("text", UNDECIDED)
def test_what_bash_cannot_decide_is_an_error(text: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=UNDECIDED[text]):
        settings_of(script_of(tmp_path, text))


def test_arguments_and_variables_stand_behind_the_script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = script_of(tmp_path, 'N=$1\nshift\nTRAIN trainer.n_gpus_per_node=$N data.seed=$SEED "$@"')
    assert importer.main(["verl", str(script), "4", "SEED=7", "data.train_files=x.jsonl"]) == 0
    printed = capsys.readouterr().out
    assert "actor, critic, rollout: 0-3" in printed and "seed: 7" in printed and "x.jsonl" in printed


def test_without_a_jail_the_script_runs_only_if_requested(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unprotected(*_: object, **__: object) -> None:
        raise shell_commands.Unprotected("the kernel has no Landlock")

    monkeypatch.setattr(shell_commands, "confine", unprotected)
    script = script_of(tmp_path, "TRAIN a.x=1")
    with pytest.raises(ConfigError, match="the kernel has no Landlock: .* --unprotected"):
        settings_of(script)
    assert [one.words[-1] for one in ShellScript(script, is_protected=False).commands()] == ["a.x=1"]
