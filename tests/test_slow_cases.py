"""The table of slow cases names tests that there are."""

from pathlib import Path

TESTS = Path(__file__).parent


def test_each_line_names_a_test() -> None:
    lines = (TESTS / "slow_cases.txt").read_text("utf-8").splitlines()
    for line in (line for line in lines if line and not line.startswith("#")):
        file, _, name = line.partition("::")
        assert f"def {name.partition('[')[0]}(" in (TESTS.parent / file).read_text("utf-8"), line
