"""Translate a training script of verl, TRL or OpenRLHF into a config.

    megappo import {verl,trl,openrlhf} SCRIPT [NAME=VALUE ...] [ARGUMENT ...] [--output CONFIG]

Bash runs a shell script in a jail: no network, an empty folder to write into, and no programs except a few text tools.
The training command and every other command are recorded, not started. A Python file is only read. The config's
comments name the settings without a counterpart; `megappo plan` checks the result. Exits with 2 if the script holds no
settings.
"""

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from megappo.config.config_error import ConfigError, counted
from megappo.config.elsewhere import systems
from megappo_tools.importing.script_settings import read_settings
from megappo_tools.importing.shell_commands import ShellScript
from megappo_tools.importing.translation import Translation, as_yaml

VARIABLE = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the config; return the process's exit code."""
    parser = argparse.ArgumentParser("megappo import", description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("system", choices=[name for name in systems() if "_" not in name])
    parser.add_argument("script", type=Path, metavar="SCRIPT", help="shell script; for trl, a Python file, too")
    parser.add_argument("words", nargs="*", metavar="NAME=VALUE", help="variables of the script, and its arguments")
    parser.add_argument("--output", type=Path, metavar="CONFIG", help="file to write (default: standard output)")
    parser.add_argument("--unprotected", action="store_true", help="without the jail, which some kernels lack")
    args = parser.parse_intermixed_args(arguments)
    variables = {match[1]: match[2] for word in args.words if (match := VARIABLE.fullmatch(word))}
    others = [word for word in args.words if not VARIABLE.fullmatch(word)]
    candidates = [system for name, system in systems().items() if name.partition("_")[0] == args.system]
    try:
        if args.output and args.output.exists():
            raise ConfigError(f"--output {args.output}: it exists already: name another file")
        script = ShellScript(args.script, others, variables, is_protected=not args.unprotected)
        system, settings = read_settings(script, candidates)
        translation = Translation(system, settings)
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
