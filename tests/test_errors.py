"""Errors that people can act on, as a terminal shows them."""

from megappo.errors import ActionableError
from megappo.observe.files import no_run


def test_texts_of_models_files_and_servers_cannot_command_the_terminal(tmp_path):
    error = ActionableError("reward function failed on 'x\x1b[2J\x07'\nfix it")
    assert error.report(1) == "error (rank 1): reward function failed on 'x\\x1b[2J\\x07'\nfix it"
    (tmp_path / "r\x1b[31m").mkdir()
    (tmp_path / "r\x1b[31m" / "metrics.jsonl").touch()
    assert no_run(tmp_path, "metrics.jsonl").endswith("did you mean " + str(tmp_path / "r\\x1b[31m") + "?")
