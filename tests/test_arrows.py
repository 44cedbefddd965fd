"""The house keeps its shape: which package may import which, and sizes of files and functions."""

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
MIDDLE = frozenset(
    {
        *("models", "engines", "weights", "checkpoint", "userland"),
        *("data", "batch", "placement", "observe", "rollouts"),
    }
)
BOTTOM = frozenset({"architecture", "config", "table", "runtime", "moments", "user_modules", "errors"})
APART = frozenset({"weights", "engines", "checkpoint"})
ENTRIES = frozenset({"__main__", "cli", "train", "sft", "reward_model", "torchrun"})
"""Names under which people start a command, `python -m megappo.NAME` and the like: files of a few lines."""
FROM_TOOLS = BOTTOM | {"commands"} | {"batch", "weights", "checkpoint", "models", "placement", "data", "observe"}
FROM_TOOLS |= {"userland", "lab", "rollouts", "preflight"}
FROM_BENCHES = MIDDLE | BOTTOM | {"sync", "lab", "ppo", "preflight", "trainer", "recipes"}
HEAVY = {
    "megatron": (
        "megappo/models/",
        "megappo/weights/",
        "megappo/checkpoint/",
        "megappo/placement/groups.py",
        "megappo/runtime/megatron_setup.py",
        "megappo/runtime/megatron_patches.py",
    ),
    "sglang": ("megappo/engines/",),
}
WITHOUT_TORCH = (
    "megappo/commands/plan.py",
    "megappo/commands/report_command.py",
    "megappo/commands/timeline_command.py",
    "megappo/architecture/",
    "megappo/batch/fields.py",
    "megappo/batch/row_metrics.py",
    "megappo/config/",
    "megappo/lab/estimate/",
    "megappo/lab/plan/",
    "megappo/lab/report/",
    "megappo/placement/placing.py",
    "megappo/placement/components.py",
    "megappo/placement/layout.py",
    "megappo/placement/route.py",
    "megappo/placement/run_plan.py",
    "megappo/checkpoint/checksums.py",
    "megappo/checkpoint/folders.py",
    "megappo/observe/charts.py",
    "megappo/observe/files.py",
    "megappo/observe/metrics_file.py",
    "megappo/observe/run_file.py",
    "megappo/observe/run_summary.py",
    "megappo/observe/loggers.py",
    "megappo/observe/timeline.py",
    "megappo/preflight/output_folder.py",
    "megappo/data/",
    "megappo/runtime/gpus.py",
    "megappo/runtime/machine.py",
)
ARCHITECTURE = "megappo/architecture/"
RAW_CONFIG = ("hf_config", "HFConfig", "read_model_config", "raw_config")
PICKLES = ("_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal")
UNPICKLES = ("pickle.load", "pickle.loads", "pickle.Unpickler")
UNPICKLERS = ("megappo/checkpoint/metadata.py",)
"""It reads a pickle that may name nothing but descriptions of tensors."""
LONGEST_FILE, LONGEST_FUNCTION = 500, 70
EVERYTHING, CORE = 312_250, 254_620
"""The most syntax nodes, counted by `ast.walk`, of all files, and of the core: all except lab/, commands/, recipes/ and
agents/. CONTRIBUTING.md, "Size", has what a feature may cost."""
BESIDE_THE_CORE = ("megappo/lab/", "megappo/commands/", "megappo/recipes/", "megappo/agents/")
EXPLAINS = re.compile(r"megappo\.(lab|commands)\b")


def allowed(package: str) -> frozenset[str]:
    """First-party packages that `package` (a folder of megappo, or a module directly in it) may import."""
    if package in ENTRIES:
        return frozenset({"commands"})
    if package == "commands":
        return MIDDLE | BOTTOM | {"commands", "lab", "preflight", "trainer", "sync", "ppo", "recipes"}
    if package == "lab":
        return MIDDLE | BOTTOM | {"lab", "preflight"}
    if package == "recipes":
        return MIDDLE | BOTTOM | {"recipes", "preflight", "trainer", "sync", "ppo"}
    if package == "trainer":
        return MIDDLE | BOTTOM | {"preflight", "trainer", "sync", "ppo"}
    if package == "preflight":
        return MIDDLE | BOTTOM | {"preflight"}
    if package == "sync":
        return MIDDLE | BOTTOM | {"sync"}
    if package in MIDDLE:
        return (MIDDLE - (APART if package in APART else frozenset())) | BOTTOM | {package}
    within = {
        "agents": {"agents", "userland", "runtime"},
        "ppo": {"ppo", "moments"},
        "config": {"config", "errors", "table", "user_modules"},
        "architecture": {"architecture", "config", "errors", "table"},
        "runtime": {"errors", "runtime"},
    }
    return frozenset(within.get(package, ()))


def permitted_in(path: str) -> frozenset[str]:
    """First-party packages that a file may import."""
    if path.startswith("tools/bench/"):
        return FROM_BENCHES
    return FROM_TOOLS if path.startswith("tools/") else allowed(path.split("/")[1].removesuffix(".py"))


def imports(tree: ast.AST) -> Iterator[tuple[ast.stmt, str]]:
    """Every import statement with the dotted name it imports, `from a import b` as `a.b`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            start = "." * node.level + (node.module or "")
            yield from ((node, f"{start}.{alias.name}") for alias in node.names)


def faults(path: str, source: str) -> list[str]:
    """Return the violations of the house rules in a file; `path` is relative to the repository."""
    tree = ast.parse(source)
    found = [f"line {node.lineno}: {fault}" for node, name in imports(tree) for fault in _import_faults(path, name)]
    found += [f"line {node.lineno}: imports {name} inside a function" for node, name in _first_party_inside(tree)]
    found += list(_raw_configs(tree)) if not path.startswith(ARCHITECTURE) else []
    found += list(_unpickling(path, tree))
    found += list(_named_modules(path, tree))
    if path.startswith("megappo/"):
        found += list(_sizes(tree, source))
    return found


def _unpickling(path: str, tree: ast.AST) -> Iterator[str]:
    """Yield the reads of files that can run code: pickles."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            given = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
            if called == "torch.load" and given.get("weights_only") != "True":
                yield f"line {node.lineno}: torch.load without weights_only=True"
            if given.get("allow_pickle", "False") != "False":
                yield f"line {node.lineno}: {called} unpickles"
        if isinstance(node, ast.Attribute) and ast.unparse(node) in UNPICKLES and path not in UNPICKLERS:
            yield f"line {node.lineno}: {ast.unparse(node)}, which only {' and '.join(UNPICKLERS)} may use"
    for node, name in imports(tree):
        if name.split(".")[0] in PICKLES or name in UNPICKLES:
            yield f"line {node.lineno}: imports {name}"


def _named_modules(path: str, tree: ast.AST) -> Iterator[str]:
    """Yield the "module:name" strings that bring into the core what only explains runs or starts them."""
    top = path.split("/")[1].removesuffix(".py")
    if path.startswith(("tools/", "megappo/lab/", "megappo/commands/")) or top in (*ENTRIES, "__init__"):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and EXPLAINS.match(node.value):
            yield f"line {node.lineno}: names {node.value}, which only commands/ and lab/ may"


def _raw_configs(tree: ast.AST) -> Iterator[str]:
    """Yield the places that read, write or pass config.json as a dictionary."""
    for node in ast.walk(tree):
        names = {getattr(node, field, None) for field in ("id", "arg", "attr", "name")}  # of a name, ..., an import
        is_flag = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "args"
        if names & set(RAW_CONFIG) and not is_flag:
            yield f"line {node.lineno}: has {', '.join(names & set(RAW_CONFIG))}, a raw config.json"
        if isinstance(node, ast.Constant) and node.value == "config.json":
            yield f"line {node.lineno}: names config.json, which only {ARCHITECTURE} reads and writes"


def _import_faults(path: str, name: str) -> Iterator[str]:
    first, *rest = name.split(".")
    if name.startswith("."):
        yield f"imports {name} relatively"
    if first == "megappo" and rest:
        permitted = permitted_in(path)
        if rest[0] not in permitted:
            yield f"imports {name}; it may import {', '.join(sorted(permitted))}"
    if path.startswith("megappo/") and first in HEAVY and not path.startswith(HEAVY[first]):
        yield f"imports {first}, which only {', '.join(HEAVY[first])} may"
    if first == "torch" and path.startswith(WITHOUT_TORCH):
        yield "imports torch"


def _first_party_inside(tree: ast.AST) -> Iterator[tuple[ast.stmt, str]]:
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from ((node, name) for node, name in imports(function) if name.split(".")[0] == "megappo")


def _sizes(tree: ast.AST, source: str) -> Iterator[str]:
    if len(source.splitlines()) > LONGEST_FILE:
        yield f"{len(source.splitlines())} lines, more than {LONGEST_FILE}"
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > LONGEST_FUNCTION:
                yield f"line {node.lineno}: {node.name} has {length} lines, more than {LONGEST_FUNCTION}"


SOURCES = [*(REPOSITORY / "megappo").rglob("*.py"), *(REPOSITORY / "tools").rglob("*.py")]
FILES = sorted(str(path.relative_to(REPOSITORY)) for path in SOURCES)


@pytest.mark.parametrize("path", FILES)
def test_the_file_keeps_the_rules(path):
    assert faults(path, (REPOSITORY / path).read_text("utf-8")) == []


def num_nodes(path: Path) -> int:
    return sum(1 for _ in ast.walk(ast.parse(path.read_text("utf-8"))))


def test_the_program_keeps_its_size():
    sizes = {path: num_nodes(REPOSITORY / path) for path in FILES if path.startswith("megappo/")}
    core = sum(size for path, size in sizes.items() if not path.startswith(BESIDE_THE_CORE))
    assert sum(sizes.values()) <= EVERYTHING and core <= CORE, (sum(sizes.values()), core)


def test_no_two_files_and_no_two_types_share_a_name():
    files = [path for path in (REPOSITORY / "megappo").rglob("*.py") if path.name != "__init__.py"]
    names = Counter(path.name for path in files if path.parent.name != "megappo" or path.stem not in ENTRIES)
    for path in (REPOSITORY / "megappo").rglob("*.py"):
        classes = [node for node in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(node, ast.ClassDef)]
        names.update({node.name.lstrip("_") for node in classes})
    assert [name for name, count in names.items() if count > 1] == []


def test_files_do_not_import_in_circles():
    """Imports for type checkers count, too."""
    modules = {path.removesuffix(".py").replace("/", "."): path for path in FILES if path.startswith("megappo/")}
    graph: dict[str, set[str]] = {}
    for module, path in modules.items():
        names = {name for _, name in imports(ast.parse((REPOSITORY / path).read_text("utf-8")))}
        graph[module] = (names | {name.rpartition(".")[0] for name in names}) & modules.keys()
    assert "megappo.trainer.experience" in graph["megappo.trainer.run"]
    while leaves := {module for module, needed in graph.items() if not needed & graph.keys()}:
        graph = {module: needed for module, needed in graph.items() if module not in leaves}
    assert graph == {}


@pytest.mark.parametrize(
    ("path", "source", "fault"),
    [
        ("megappo/config/x.py", "from megappo.data import y", "imports megappo.data.y; it may import config"),
        ("megappo/config/x.py", "import torch", "imports torch"),
        ("megappo/placement/layout.py", "from torch import distributed", "imports torch"),
        (
            "megappo/ppo/x.py",
            "import megappo.models.train_engine",
            "imports megappo.models.train_engine; it may import moments, ppo",
        ),
        ("megappo/models/x.py", "from megappo.ppo import losses", "imports megappo.ppo.losses"),
        ("megappo/models/x.py", "from megappo import ppo", "imports megappo.ppo;"),
        ("megappo/weights/x.py", "from megappo.engines.client import C", "imports megappo.engines.client.C;"),
        ("megappo/models/x.py", "from megappo.trainer import loop", "imports megappo.trainer.loop;"),
        ("megappo/trainer/x.py", "import megappo.train", "imports megappo.train;"),
        ("megappo/trainer/x.py", "from megappo.recipes import ppo", "imports megappo.recipes.ppo;"),
        ("megappo/recipes/x.py", "from megappo.lab.plan import y", "imports megappo.lab.plan.y;"),
        ("megappo/recipes/x.py", "from megappo.commands import y", "imports megappo.commands.y;"),
        (
            "megappo/trainer/x.py",
            "if TYPE_CHECKING:\n    from megappo.lab.plan import y",
            "imports megappo.lab.plan.y;",
        ),
        ("megappo/preflight/x.py", "import megappo.lab.report.report", "imports megappo.lab.report.report;"),
        (
            "megappo/observe/x.py",
            "resolved('megappo.lab.report.report:Report')",
            "names megappo.lab.report.report:Report",
        ),
        ("megappo/trainer/x.py", "from megatron.core import y", "imports megatron, which only"),
        ("megappo/placement/layout.py", "import megatron.core", "imports megatron, which only"),
        ("megappo/models/x.py", "def f():\n    import sglang", "imports sglang, which only"),
        ("megappo/data/x.py", "from . import y", "imports ..y relatively"),
        (
            "megappo/data/x.py",
            "class A:\n  def f(self):\n    from megappo.config import y",
            "imports megappo.config.y inside",
        ),
        ("megappo/data/x.py", "\n" * 501, "501 lines, more than 500"),
        ("megappo/data/x.py", "def f():\n" + "    pass\n" * 70, "line 1: f has 71 lines, more than 70"),
        ("tools/x.py", "from megappo.trainer import loop", "imports megappo.trainer.loop;"),
        ("tools/x.py", "torch.load(path)", "torch.load without weights_only=True"),
        ("tools/x.py", "torch.load(path, weights_only=False)", "torch.load without weights_only=True"),
        ("megappo/data/x.py", "numpy.load(path, allow_pickle=True)", "numpy.load unpickles"),
        ("megappo/data/x.py", "pickle.load(file)", f"pickle.load, which only {' and '.join(UNPICKLERS)} may use"),
        ("megappo/data/x.py", "from pickle import loads", "imports pickle.loads"),
        ("megappo/models/x.py", "def f(hf_config):\n    pass", "has hf_config, a raw config.json"),
        ("megappo/models/x.py", "architecture.hf_config()", "has hf_config, a raw config.json"),
        ("tools/x.py", "from megappo.architecture.x import read_model_config", "has read_model_config, a raw"),
        ("tools/x.py", "(folder / 'config.json').read_text()", "names config.json, which only"),
    ],
)
def test_a_breach_is_found(path, source, fault):
    assert any(fault in found for found in faults(path, source)), faults(path, source)
