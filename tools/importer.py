"""Translate a training script of verl, TRL or OpenRLHF into a config.

    megappo import {verl,trl,openrlhf} SCRIPT [--output CONFIG]

The script is read, never run. Variables that it sets are followed. The config's comments name the settings without a
counterpart; `megappo plan` checks the result. Exits with 2 if the script holds no settings.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from megappo.config.config_error import ConfigError, counted
from megappo.config.elsewhere import systems
from megappo_tools.importing.script_settings import read_settings
from megappo_tools.importing.translation import Translation, as_yaml


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the config; return the process's exit code."""
    parser = argparse.ArgumentParser("megappo import", description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("system", choices=systems())
    parser.add_argument("script", type=Path, metavar="SCRIPT", help="shell script; for trl, a Python file, too")
    parser.add_argument("--output", type=Path, metavar="CONFIG", help="file to write (default: standard output)")
    args = parser.parse_args(arguments)
    system = systems()[args.system]
    try:
        if args.output and args.output.exists():
            raise ConfigError(f"--output {args.output}: it exists already: name another file")
        translation = Translation(system, read_settings(args.script, system))
    except ConfigError as error:
        print(error.report(0), file=sys.stderr)
        return error.exit_code
    text = as_yaml(translation, args.script.name)
    if args.output:
        args.output.write_text(text, "utf-8")
    else:
        print(text, end="")
    for reason, settings in translation.missing.items():
        print(f"no counterpart: {', '.join(settings)}: {reason}", file=sys.stderr)
    remedy = f"check the config: megappo plan {args.output or 'CONFIG'}"
    print(f"read {counted(len(translation.theirs), 'setting')} of {system.title}; {remedy}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
