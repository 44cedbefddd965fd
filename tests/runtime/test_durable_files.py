"""Files that a run writes: errors of a full disk name them, and no link is followed."""

import errno
from pathlib import Path

import pytest

from megappo.runtime.durable_files import append, naming, write_durably
from megappo.runtime.failure import _explained

FULL = Path("/dev/full")


def test_a_full_disk_is_reported_with_the_file(tmp_path):
    with pytest.raises(OSError) as caught:
        append(FULL, "text")
    assert _explained(caught.value).startswith("No space left on device: /dev/full: make room on that disk")
    with pytest.raises(OSError) as caught, naming(tmp_path / "a"), FULL.open("w") as file:
        file.write("text")
    assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, str(tmp_path / "a"))


def test_a_link_in_the_place_of_a_partial_file_is_not_followed(tmp_path):
    (tmp_path / "notes").write_text("mine")
    (tmp_path / "run.json.tmp").symlink_to(tmp_path / "notes")
    write_durably(tmp_path / "run.json", "{}")
    assert (tmp_path / "notes").read_text() == "mine" and (tmp_path / "run.json").read_text() == "{}"
