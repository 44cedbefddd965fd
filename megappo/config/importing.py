"""Settings of another system in our keys, by the table of `elsewhere`, as a commented config."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import yaml
from jinja2 import Environment, UndefinedError
from pydantic import ValidationError

from megappo.config.checks import unread_keys
from megappo.config.config_error import show
from megappo.config.describe import keys
from megappo.config.elsewhere import System
from megappo.config.loading import nested
from megappo.config.schema import Config

OFF = (None, False, "", 0)
"""Values with which a setting needs no counterpart."""
PLACEHOLDERS = {"model.path": "unset", "data.train_files": "unset", "trainer.output_dir": "unset"}


class Translation:
    """Settings of another system, and what becomes of them.

    Attributes:
        theirs: its keys -> values.
        values: our keys -> values.
        origins: our key -> its keys from which the value comes, or "SYSTEM's default".
        missing: what to do -> the settings without a counterpart for which to do it.
        unneeded: the reason -> the settings that need no key.
    """

    def __init__(self, system: System, settings: Mapping[str, Any]):
        self.system = system
        self.theirs = {system.aliases.get(key, key): value for key, value in settings.items()}
        self.values: dict[str, Any] = {}
        self.origins: dict[str, str] = {}
        self.missing: dict[str, list[str]] = {}
        self.unneeded: dict[str, list[str]] = {}
        self._default = f"{system.title}'s default"
        self._defaults: dict[str, Any] = {}
        for key, value in self.theirs.items():
            self._rename(key, value)
        method = self._evaluate(system.method, [], "")
        self._defaults = {**system.defaults[""], **system.defaults.get(method, {})}
        for key, formula in system.formulas.items():
            origins: list[str] = []
            value = self._evaluate(formula, origins, method)
            if isinstance(value, float):
                value = float(f"{value:.6g}")
            if value is not None and key not in self.values:
                self.values[key], self.origins[key] = value, ", ".join(dict.fromkeys(origins)) or self._default
        self.values = self._defaults | {key: value for key, value in self.values.items() if key[0] != "_"}
        self._sort_unused()
        self._drop_unread()

    def _rename(self, key: str, value: Any) -> None:
        """Translate a setting that has one of our keys for itself."""
        found, row = self.system.find(key)
        if row is None or row.note or row.missing or row.computed:
            return
        ours, origin = row.key, key
        if isinstance(value, list | dict) or value not in row.values:
            if row.values and not row.others:
                return
            ours += key.removeprefix(found.removesuffix(".*")) if found != key else ""
        else:
            value = row.values[value]
            if value is None:
                return
        if isinstance(value, list) and ours in self.values and row.values:  # such as the kinds of tensors to offload
            value, origin = [*self.values[ours], *value], f"{self.origins[ours]}, {key}"
        self.values[ours], self.origins[ours] = value, origin

    def _evaluate(self, formula: str, origins: list[str], method: str) -> Any:
        """Return the result of a formula, or None; add to `origins` the settings that it takes."""
        expression = Environment().compile_expression(formula)
        their, our = partial(self._their, origins), partial(self._our, origins)
        try:
            return expression(their=their, our=our, method=method, zip=zip)
        except (TypeError, ArithmeticError, LookupError, UndefinedError):  # a setting is missing, or no number
            return None

    def _their(self, origins: list[str], key: str, default: Any = None) -> Any:
        origins += [key] if key in self.theirs else []
        return self.theirs.get(key, default)

    def _our(self, origins: list[str], key: str, default: Any = None) -> Any:
        origin = self.origins.get(key, self._default)
        origins += [] if origin == self._default else origin.split(", ")
        return self.values.get(key, self._defaults.get(key, default))

    def _sort_unused(self) -> None:
        """Sort the settings that set no key into those without a counterpart and those that need none."""
        used = ", ".join(self.origins.values()).split(", ")
        for key, value in self.theirs.items():
            if key in used:
                continue
            _, row = self.system.find(key)
            setting = f"{key}={value if isinstance(value, str) else show(value)}"
            if row is None:
                self.missing.setdefault("it is not in the importer's table", []).append(setting)
            elif row.note or value in OFF or (not isinstance(value, list) and value in row.values):
                self.unneeded.setdefault(row.note or "it is off, or the default here", []).append(setting)
            else:
                self.missing.setdefault(row.missing or f"set {row.key}", []).append(setting)
        if "reward.function" not in self.values:
            self.missing["name one for these data"] = ["reward.function"]

    def _drop_unread(self) -> None:
        """Leave out the keys that nothing would read, such as those of a critic without one."""
        components = "placement."  # several may share a key, which only a file may hold
        given = {key: value for key, value in self.values.items() if not key.startswith(components)}
        readable = {key: "unset" if "$" in f"{value}" else value for key, value in given.items()}
        try:
            config = Config.model_validate(nested(PLACEHOLDERS | readable))
        except ValidationError:  # plan names what is wrong
            return
        for key, _, reason in unread_keys(config):
            del self.values[key]
            if self.origins.get(key, self._default) != self._default:
                self.unneeded.setdefault(reason.partition(": ")[0], []).append(self.origins[key])


def as_yaml(translation: Translation, script: str) -> str:
    """Return a commented config; `script` is named in its first line."""
    order = {key.path: number for number, key in enumerate(keys())}
    lines = [f"# From {script}, for {translation.system.title}."]
    above: list[str] = []
    for key in sorted(translation.values, key=lambda key: order[max(filter(key.startswith, order), key=len)]):
        *sections, name = key.split(".")
        for depth, section in enumerate(sections):
            if sections[: depth + 1] != above[: depth + 1]:
                lines.append(f"{'  ' * depth}{section}:")
        above = sections
        value = yaml.safe_dump(translation.values[key], default_flow_style=True, width=10**6).partition("\n")[0]
        origin = translation.origins.get(key, f"{translation.system.title}'s default")
        lines.append(f"{'  ' * len(sections)}{name}: {value}  # {origin}")
    for title, settings in {"No counterpart": translation.missing, "Not needed": translation.unneeded}.items():
        lines += [f"\n# {title}:", *(f"#   {', '.join(names)}: {reason}" for reason, names in settings.items())]
    return "\n".join(lines) + "\n"
