"""Settings of another system in our keys, by the table of `elsewhere`, as a commented config."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from jinja2 import Environment, UndefinedError
from pydantic import ValidationError

from megappo.config.checks import unread_keys
from megappo.config.config_error import show
from megappo.config.describe import keys, yaml_lines
from megappo.config.elsewhere import System
from megappo.config.loading import nested
from megappo.config.schema import Config

OFF = (None, False, "", 0)
"""Values with which a setting needs no counterpart; where a row names true, None alone."""
PLACEHOLDERS = {"model.path": "unset", "data.train_files": "unset", "trainer.output_dir": "unset"}


class Translation:
    """Settings of another system, and what becomes of them.

    Attributes:
        theirs: its keys -> values.
        values: our keys -> values.
        origins: our key -> its keys from which the value comes; none for its default.
        missing: what to do -> the settings without a counterpart for which to do it.
        unneeded: the reason -> the settings that need no key.
    """

    def __init__(self, system: System, settings: Mapping[str, Any]):
        self.system = system
        self.theirs = {system.aliases.get(key, key): value for key, value in settings.items()}
        self.values: dict[str, Any] = {}
        self.origins: defaultdict[str, list[str]] = defaultdict(list)
        self.missing: defaultdict[str, list[str]] = defaultdict(list)
        self.unneeded: defaultdict[str, list[str]] = defaultdict(list)
        self._unread: dict[str, str] = {}
        self._method: Any = ""
        self._method, _ = self._evaluate(system.method)
        self.values |= system.defaults[""] | system.defaults.get(self._method, {})
        for key, value in self.theirs.items():
            self._rename(key, value)
        for key, formula in system.formulas.items():
            value, origins = self._evaluate(formula)
            if value is not None and not self.origins[key]:
                self.values[key], self.origins[key] = value, origins
        for step in [key for key in self.values if key[0] == "_"]:
            del self.values[step]
            self.origins.pop(step, None)
        self._drop_unread()
        self._sort_unused()

    def _rename(self, key: str, value: Any) -> None:
        """Translate a setting that has one of our keys for itself."""
        _, row = self.system.find(key)
        if row is None or not row.is_renamed:
            return
        ours = row.key
        if row.values:
            value = row.translated(value)
            if value is None:
                return
            if isinstance(value, list):  # such as the kinds of tensors to offload
                value = [*self.values.get(ours, ()), *value]
        self.values[ours] = value
        self.origins[ours].append(key)

    def _evaluate(self, formula: str) -> tuple[Any, list[str]]:
        """Return the result of a formula, None if it has none, and the settings that it takes."""
        origins: dict[str, None] = {}
        their, our = partial(self._their, origins), partial(self._our, origins)
        functions = {"method": self._method, "zip": zip, "functions": _functions}
        try:
            value = Environment().compile_expression(formula)(their=their, our=our, **functions)
        except (TypeError, ArithmeticError, LookupError, UndefinedError):  # a setting is missing, or no number
            value = None
        return float(f"{value:.6g}") if isinstance(value, float) else value, list(origins)

    def _their(self, origins: dict[str, None], key: str, default: Any = None) -> Any:
        if key in self.theirs:
            origins[key] = None
        return self.theirs.get(key, default)

    def _our(self, origins: dict[str, None], key: str, default: Any = None) -> Any:
        origins |= dict.fromkeys(self.origins[key])
        return self.values.get(key, default)

    def _drop_unread(self) -> None:
        """Leave out the keys that nothing would read, such as a critic's keys without a critic; note the reasons."""
        readable = {key: "unset" if "$" in f"{value}" else value for key, value in self.values.items()}
        single = {key: value for key, value in readable.items() if "," not in key}  # only a file names several at once
        try:
            config = Config.model_validate(nested(PLACEHOLDERS | single))
        except ValidationError:  # plan names what is wrong
            return
        for key, _, reason in unread_keys(config):
            del self.values[key]
            for origin in self.origins.pop(key, ()):
                self._unread[origin] = reason.partition(": ")[0]

    def _sort_unused(self) -> None:
        """Sort the settings that set no key into settings without a counterpart and settings that need none."""
        used = {key for keys in self.origins.values() for key in keys}
        for key, value in self.theirs.items():
            _, row = self.system.find(key)
            if key in used and not (row and row.missing):
                continue
            setting = f"{key}={value if isinstance(value, str) else show(value)}"
            if row is None:
                self.missing["it is not in the importer's table"].append(setting)
            elif key in self._unread:
                self.unneeded[self._unread[key]].append(key)
            elif row.note or value in [*(OFF if True not in row.values else (None,)), *row.values]:
                self.unneeded[row.note or "it is off, or the default here"].append(setting)
            elif not row.missing and self.origins[row.key]:
                self.unneeded[f"{row.key} is {', '.join(self.origins[row.key])}"].append(setting)
            else:
                condition = f" ({row.computed})" if row.computed else ""
                self.missing[row.missing or f"set {row.key}{condition}"].append(setting)
        if not self.values.keys() & {"reward.function", "reward_model.model_path", "trainer.kind"}:
            self.missing["name one for these data"].append("reward.function")


def _functions(names: Sequence[str], here: Mapping[str, str]) -> list[str]:
    """Return the functions in our notation: as `here` has them, `package.module.NAME` as `package.module:NAME`."""
    places = [name if ":" in name else ":".join(name.rsplit(".", 1)) for name in names]
    return [here.get(place, place) for place in places]


def as_yaml(translation: Translation, script: str) -> str:
    """Return a commented config; `script` is named in its first line."""
    order = {key.path: number for number, key in enumerate(keys())}
    default = f"{translation.system.title}'s default"
    lines = [f"# From {script}, for {translation.system.title}."]
    chosen = sorted(translation.values, key=lambda key: order[max(filter(key.startswith, order), key=len)])
    for key, line in yaml_lines({key: translation.values[key] for key in chosen}):
        lines.append(f"{line}  # {', '.join(translation.origins[key]) or default}" if key else line)
    for title, settings in {"No counterpart": translation.missing, "Not needed": translation.unneeded}.items():
        lines += [f"\n# {title}:", *(f"#   {', '.join(names)}: {reason}" for reason, names in settings.items())]
    return "\n".join(lines) + "\n"
