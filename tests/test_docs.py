"""The pages describe the program: everything that exists is described, and everything described exists."""

import ast
import itertools
import re
import shlex
from collections.abc import Iterator
from typing import Literal, get_args, get_origin
from xml.etree import ElementTree

import pytest
import torch
from page_blocks import BLOCKS, PAGES, ROOT, RUN
from policy_oracles import policy_loss

from megappo.architecture.families import FAMILIES
from megappo.batch.row_metrics import ROW_METRICS
from megappo.commands.cli import COMMANDS as OF_MEGAPPO
from megappo.config.describe import declared, keys
from megappo.config.loading import load_config
from megappo.config.methods import ESTIMATORS, LENGTH_PENALTIES, POLICY_LOSSES, TRANSPORTS, VALUE_LOSSES
from megappo.config.schema import Actor, Algorithm, Config, Critic
from megappo.config.values import Aggregation, KLKind, Rejection
from megappo.lab.report.health import RULES
from megappo.observe.loggers import LOGGERS
from megappo.placement.components import components_of
from megappo.placement.placing import smallest_world
from megappo.placement.run_plan import plan_run
from megappo.ppo.conventions import PRESETS
from megappo.ppo.corrections import rollout_is_weights
from megappo.ppo.losses import entropy_loss, kl_loss, value_loss
from megappo.ppo.value_losses import ERRORS, ValueInputs, token_errors
from megappo.userland.spec import BUILTIN

OF_EVERY_PAGE = pytest.mark.parametrize("page", PAGES)
KEYS = {key.path for key in keys()} | {"eval.datasets.NAME"}
OF_OTHERS = "docs/coming_from.md"
"""Its tables have keys of other systems in their first column."""
OWN_FOLDERS = ("megappo/", "tests/", "tools/", "launch/", "configs/", "docs/")


LANGUAGES = {"bash", "text", "python", "yaml", "json"}
COMMAND = re.compile(r"([A-Z_]+=\S* )*(bash|sbatch|srun|source|docker|megappo|hf|\.venv|torchrun|python|pip|curl)\b ?")


def code_blocks(page: str) -> list[str]:
    return [block.text for block in BLOCKS[page]]


def code_spans(text: str) -> list[str]:
    return re.findall(r"`([^`\n]+)`", re.sub(r"^ *```.*?^ *```", "", text, flags=re.MULTILINE | re.DOTALL))


def commands(page: str) -> Iterator[list[str]]:
    """The words of every command shown, without variables before it, comments and what it is piped to."""
    shown = [block.text for block in BLOCKS[page] if block.language == "bash"]
    for line in "\n".join(shown).replace("\\\n", " ").splitlines():
        if COMMAND.match(line):
            words = shlex.split(re.split(r" [|>] ", line)[0], comments=True)
            yield list(itertools.dropwhile(lambda word: re.fullmatch(r"[A-Z_]+=.*", word), words))


def braces(text: str) -> list[str]:
    """`{a,b}.c` as `a.c`, `b.c`."""
    found = re.match(r"(.*?)\{([^{}]*)\}(.*)", text)
    return [text] if not found else [one for part in found[2].split(",") for one in braces(found[1] + part + found[3])]


def literals(annotation: object) -> tuple[str, ...]:
    """The words that a key may be."""
    if get_origin(annotation) is Literal:
        return get_args(annotation)
    return tuple(word for part in get_args(annotation) for word in literals(part))


def metric_names() -> set[str]:
    """Return the names of all metrics.

    Names of losses and corrections come from calling them, names of rows from their table, the others from the source.
    """
    ones = torch.ones(1, 2)
    actor = {
        "pg_loss",
        "positive_nll_loss",
        *entropy_loss(ones, ones, Actor())[1],
        *kl_loss(ones, ones, ones, Actor())[1],
    }
    for name in POLICY_LOSSES:
        actor |= policy_loss(ones, ones, ones, ones, Actor(policy_loss=name, opsm_delta=1))[1].keys()
    critic = {"vf_loss", *value_loss(ones, ones, ones, ones, Critic())[1]}
    distribution = ValueInputs(torch.ones(1, 2), torch.ones(1), torch.tensor([0.0, 1.0]))
    critic |= token_errors(distribution, Critic(value_loss="hl_gauss")).keys() - {ERRORS}
    corrections = rollout_is_weights(ones, ones, ones, Algorithm().rollout_correction)[1]
    written = {f"actor/{name}" for name in actor} | {f"critic/{name}" for name in critic} | corrections.keys()
    return written | ROW_METRICS.keys() | set(literal_metrics())


def literal_metrics() -> Iterator[str]:
    """Names that the source writes as they are; of a statistic without its kind, of a timer the phase alone."""
    name = re.compile(r"(actor|critic|reward|rollout|advantages|sync|timing|timing_s|memory)/[a-z_/]*[a-z_]")
    for path in sorted((ROOT / "megappo").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Constant) and name.fullmatch(str(node.value)):
                yield re.sub(r"^timing_s/|/(mean|max|min)$", "", str(node.value))


def phases() -> set[str]:
    folders = (ROOT / "megappo" / "trainer", ROOT / "megappo" / "recipes")
    sources = [path.read_text("utf-8") for folder in folders for path in folder.glob("*.py")]
    found = re.findall(r'with (?:self\.|run\.)?phase\("(\w+)"\)', "\n".join(sources))
    assert {"rollout", "sync"} <= set(found)
    required = {"model": {"path": "m"}, "data": {"train_files": ["f"]}, "trainer": {"output_dir": "o"}}
    components = components_of(Config.model_validate(required))
    assert {"actor", "critic", "ref"} <= components.keys()
    of_forward = {spec.forward.phase for spec in components.values() if spec.forward}
    return {*found, *of_forward, *(f"update_{name}" for name, spec in components.items() if spec.training)}


def health_table() -> list[str]:
    """Return the rows of the table of health rules in docs/metrics.md."""
    rows = ["| rule | holds if | what to do |", "| --- | --- | --- |"]
    for name, rule in RULES.items():
        page, _, anchor = rule.page.removeprefix("docs/").partition("#")
        remedy = re.sub(r"[a-z]+\.(\w+\.)*\w+(=[\w.]+)?", r"`\g<0>`", rule.remedy)
        meaning = re.sub(r"[a-z]+\.\w+", r"`\g<0>`", rule.meaning)
        rows.append(f"| `{name}` | {meaning} | {remedy}: [{anchor.replace('-', ' ')}]({page}#{anchor}) |")
    return rows


def test_the_table_of_health_rules_is_the_one_that_runs():
    section = PAGES["docs/metrics.md"].partition("\n## Health\n")[2].partition("\n## ")[0]
    assert [line for line in section.splitlines() if line.startswith("|")] == health_table()


def rooms() -> set[str]:
    entries = (path for path in (ROOT / "megappo").iterdir() if not path.name.startswith("__"))
    return {f"megappo/{path.name}" + ("/" if path.is_dir() else "") for path in entries}


def mentioned(page: str) -> str:
    """All code of a page: what a name must stand in to be described."""
    return " ".join([*code_spans(PAGES[page]), *code_blocks(page)])


def undescribed(page: str, names: set[str]) -> list[str]:
    text = mentioned(page)
    return sorted(name for name in names if not re.search(rf"(?<![\w-]){re.escape(name)}(?![\w-])", text))


@pytest.mark.parametrize(
    ("page", "names"),
    [
        ("docs/methods.md", {*ESTIMATORS, *POLICY_LOSSES, *PRESETS, *LENGTH_PENALTIES}),
        ("docs/methods.md", {*literals(KLKind), *literals(Aggregation), *literals(Rejection)}),
        ("docs/methods.md", {f"algorithm.{key}" for method in ESTIMATORS.values() for key in method.reads}),
        ("docs/methods.md", {f"actor.{key}" for method in POLICY_LOSSES.values() for key in method.reads}),
        ("docs/critic.md", {*VALUE_LOSSES, *(f"critic.{key}" for loss in VALUE_LOSSES.values() for key in loss.reads)}),
        ("docs/placement.md", {"auto", *TRANSPORTS}),
        ("docs/rewards.md", set(BUILTIN)),
        ("docs/configuration.md", set(Config.model_fields) - {"ref"}),
        ("docs/models.md", set(FAMILIES)),
        ("docs/metrics.md", metric_names() | phases()),
        ("docs/metrics.md", set(LOGGERS)),
        ("docs/troubleshooting.md", set(RULES)),
        ("docs/design.md", rooms()),
        ("docs/design.md", phases() - {"evaluate", "save", "export"}),
    ],
    ids=lambda value: value if isinstance(value, str) else min(value),
)
def test_what_exists_is_described(page, names):
    assert undescribed(page, names) == []


def test_the_extension_that_is_shown_is_the_one_that_runs():
    tree = ast.parse((ROOT / "tests" / "run" / "test_extensions.py").read_text("utf-8"))
    text = next(node.value for node in tree.body if isinstance(node, ast.Assign) and node.targets[0].id == "EXTENSION")
    assert code_blocks("docs/extending.md")[0].strip() == f"# mine.py\n{text.value.strip()}"


def test_the_algorithm_that_is_shown_is_the_one_that_runs():
    source = (ROOT / "megappo" / "recipes" / "ppo.py").read_text("utf-8")
    functions = {node.name: node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)}
    steps = functions["ppo_step"], functions["sample_experience"]
    lines = source.splitlines()[steps[0].lineno - 1 : steps[1].end_lineno]
    assert len(lines) <= 50
    assert code_blocks("docs/algorithm.md")[0] == "\n".join(lines) + "\n"


def test_the_readme_stays_what_a_newcomer_reads():
    readme = PAGES["README.md"]
    assert len(readme.splitlines()) <= 150
    assert [page for page in PAGES if page.startswith("docs/") and not re.search(rf"\({page}[)#]", readme)] == []
    assert readme.index("docs/images/report.png") < readme.index("## Quickstart") < readme.index("**Status.**")


def test_pictures_are_readable_in_dark_mode_and_load_nothing():
    pictures = sorted((ROOT / "docs" / "images").glob("*.svg"))
    pages = "".join(PAGES.values())
    assert [picture.name for picture in pictures if f"images/{picture.name})" not in pages] == []
    for picture in pictures:
        text = picture.read_text("utf-8")
        width, height = map(float, ElementTree.fromstring(text).attrib["viewBox"].split()[2:])
        assert "prefers-color-scheme: dark" in text and not re.search(r"(href|src)=|@import|url\(http", text)
        places = [(float(x), float(y)) for x, y in re.findall(r'<text[^>]* x="([\d.]+)" y="([\d.]+)"', text)]
        assert places and all(0 < x < width and 0 < y < height for x, y in places)


@OF_EVERY_PAGE
def test_pages_are_read_in_one_go(page):
    assert len(PAGES[page].splitlines()) <= 250


@OF_EVERY_PAGE
def test_blocks_name_their_language_and_commands_are_in_blocks_of_commands(page):
    assert {block.language for block in BLOCKS[page]} <= LANGUAGES
    for block in BLOCKS[page]:
        lines = block.text.splitlines()
        assert [line for line in lines if line.startswith("$ ")] == []
        assert block.language != "text" or [line for line in lines if COMMAND.match(line)] == []


@OF_EVERY_PAGE
def test_blocks_of_commands_are_run_or_name_what_they_need(page):
    """tests/run/test_pages.py runs the pages of RUN; a test without GPU and network cannot run the others."""
    for block in BLOCKS[page]:
        comments = [line for line in block.text.splitlines() if line.startswith("# Needs ")]
        assert block.language != "bash" or comments == [block.needs] * bool(block.needs), block.text
    placeholders = [word for block in RUN[page] for word in re.findall(r"\b[A-Z]{4,}\b(?!=)|\[key", block.text)]
    assert placeholders == []


@OF_EVERY_PAGE
def test_pages_are_ascii_and_their_lines_short(page):
    assert PAGES[page].isascii()
    assert [line for line in PAGES[page].splitlines() if len(line) > 120 and not line.startswith("|")] == []


def anchors(text: str) -> set[str]:
    """Return the anchors of the headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}


@OF_EVERY_PAGE
def test_links_lead_somewhere(page):
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", PAGES[page]):
        if link.startswith("https://"):
            continue
        path, _, anchor = link.partition("#")
        target = (ROOT / page).parent / path if path else ROOT / page
        if not target.exists() or (anchor and anchor not in anchors(target.read_text("utf-8"))):
            broken.append(link)
    assert broken == []


@OF_EVERY_PAGE
def test_named_files_exist(page):
    named = {span.partition(":")[0] for span in code_spans(PAGES[page]) if span.startswith(OWN_FOLDERS)}
    assert [name for name in sorted(named) if " " not in name and not (ROOT / name).exists()] == []


@OF_EVERY_PAGE
def test_named_keys_exist(page):
    sections = tuple(f"{name}." for name in Config.model_fields)
    text = re.sub(r"^\| [^|]+ \|", "", PAGES[page], flags=re.MULTILINE) if page == OF_OTHERS else PAGES[page]
    words = [word for span in code_spans(text) for word in re.split(r",? (?!\w+[,}])", span)]
    words += [word for command in commands(page) for word in command]
    named = {key for word in words for key in braces(re.split(r"[=:]", word)[0]) if key.startswith(sections)}
    named = {key for key in named if not key.startswith("rollout.server_args.")}  # SGLang's
    assert sorted(key for key in named if declared(key) not in KEYS) == []


REGISTERS = "trainer.extensions="
"""A key that registers names for the whole process; tests/run/test_pages.py runs what is shown with it."""
SHOWN_OVERRIDES = sorted(
    span
    for span in {span for text in PAGES.values() for span in code_spans(text)}
    if re.fullmatch(r"(\w+\.[\w.]+=\S+ ?)+", span) and not span.startswith(REGISTERS)
)


@pytest.mark.parametrize("overrides", SHOWN_OVERRIDES)
def test_overrides_that_are_shown_load(overrides):
    load_config(ROOT / "configs" / "quickstart.yaml", overrides.split())


COMMANDS = [(page, command) for page in PAGES for command in commands(page)]


def script(command: list[str]) -> str | None:
    """The file of this repository that a command starts."""
    if command[0] == "bash":
        return command[1]
    if "pytest" in command:
        return None
    if command[0] == "megappo":
        return (
            OF_MEGAPPO[command[1]].function.partition(":")[0].replace("megappo_tools", "tools").replace(".", "/")
            + ".py"
        )
    own = [word for word in command[1:] if word.startswith(("megappo.", *OWN_FOLDERS))]
    return f"{own[0].replace('.', '/')}.py" if own and own[0].startswith("megappo.") else next(iter(own), None)


@pytest.mark.parametrize(
    ("page", "command"), COMMANDS, ids=lambda value: value if isinstance(value, str) else " ".join(value)[:60]
)
def test_commands_start_what_exists_with_configs_that_fit(page, command):
    started = script(command)
    assert started is None or (ROOT / started).is_file(), f"{page} starts {started}"
    if any(word.startswith(REGISTERS) for word in command):
        return
    configs = [word for word in command if word.startswith("configs/")]
    for path in ["configs/quickstart.yaml"] if started == "launch/quickstart.sh" else configs:
        config = load_config(ROOT / path, [word for word in command if re.match(r"[a-z_]+\.[a-z_.]+=", word)])
        plan_run(config, smallest_world(config) or 8)


def test_options_that_are_shown_exist():
    own = {"tools/convert.py", "tools/inspect_checkpoint.py", "megappo/commands/plan.py"}
    parsers = [ROOT / "megappo" / "commands" / "arguments.py", *(ROOT / "tools").rglob("*.py")]
    source = "".join(path.read_text("utf-8") for path in parsers)
    shown = {word for _, command in COMMANDS if script(command) in own for word in command if word.startswith("--")}
    assert "--hf-config" in shown
    assert sorted(option for option in shown - {"--help"} if f'"{option}"' not in source) == []


def test_every_script_is_described():
    scripts = [path.relative_to(ROOT) for folder in ("launch", "tools") for path in (ROOT / folder).glob("*.*")]
    assert [str(path) for path in scripts if str(path) not in "".join(PAGES.values())] == []
