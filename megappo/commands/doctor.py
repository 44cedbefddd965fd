"""Check in about a minute that this machine can run megappo: megappo doctor [CHECK ...]

Prints a line per check, and a remedy under each problem. Exits with 1 if there is a problem. Without a GPU, the same
checks try what a CPU uses instead.
"""

from collections.abc import Sequence

from megappo.commands.arguments import doctor_arguments
from megappo.lab.doctor_checks import CHECKS


def main(arguments: Sequence[str]) -> int:
    """Print the table; return 1 if there is a problem."""
    names = doctor_arguments(arguments).checks or list(CHECKS)
    num_wrong = 0
    for name in names:
        check, remedy = CHECKS[name]
        try:
            print(f"{name:<15}{'ok':<9}{check()}", flush=True)
        except Exception as error:  # of any kind: the other checks still run
            num_wrong += 1
            print(f"{name:<15}{'PROBLEM':<9}{type(error).__name__}: {error}".rstrip(), flush=True)
            print(f"{'':<15}{'remedy':<9}{remedy}", flush=True)
    print(f"wrong: {num_wrong} of {len(names)}" if num_wrong else "nothing is wrong", flush=True)
    return int(num_wrong > 0)
