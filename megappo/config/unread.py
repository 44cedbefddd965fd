"""Keys that were set where nothing reads them, by the conditions of their sections."""

from collections.abc import Iterator
from operator import attrgetter

from megappo.config.conditions import ReadIf
from megappo.config.describe import show
from megappo.config.errors import shorten
from megappo.config.schema import Config
from megappo.config.section import Section


def unread_errors(config: Config) -> Iterator[str]:
    """An error for each key that is not at its default and that nothing reads.

    A base may hold keys of a method that the file above it, or the command line, does not choose.
    """
    yield from _unread(config, config, "", [])


def _unread(config: Config, section: Section, prefix: str, above: list[ReadIf]) -> Iterator[str]:
    for name, field in type(section).model_fields.items():
        key, value = prefix + name, getattr(section, name)
        conditions = above + [one for one in section.read_if if name in one.keys.split()]
        if isinstance(value, Section) and field.default is not None:
            yield from _unread(config, value, f"{key}.", conditions)
        elif value != field.default:
            for condition in conditions:
                switches = condition.switches.split()
                if not condition.reads(config, name) and not config.is_below(key, switches):
                    switch, found = switches[0], show(attrgetter(switches[0])(config)).strip('"')
                    reason = condition.reason.format(switch, found)
                    yield f"{key} {shorten(show(value))} has no effect, as {reason}: drop it, or change {switch}"
                    break
