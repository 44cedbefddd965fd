"""Files that run code when they are unpickled: each creates a folder, whose absence shows that none was."""

import io
import os
import pickle
from pathlib import Path

import torch


class Bomb:
    """Object that creates a folder when it is unpickled."""

    def __init__(self, marker: Path):
        self.marker = marker

    def __reduce__(self) -> tuple:
        return os.mkdir, (str(self.marker),)


def bombs(marker: Path) -> dict[str, bytes]:
    """Return kind -> content of a file, as pickle and torch write it."""
    found = {"pickle": pickle.dumps(Bomb(marker)), "text pickle": pickle.dumps(Bomb(marker), protocol=0)}
    for kind, zipped in (("zip", True), ("legacy", False)):
        buffer = io.BytesIO()
        torch.save([Bomb(marker)], buffer, _use_new_zipfile_serialization=zipped)
        found[kind] = buffer.getvalue()
    return found


def is_armed(content: bytes, marker: Path) -> bool:
    """Return True if unpickling the content runs its code, by doing so."""
    for load in (pickle.loads, lambda data: torch.load(io.BytesIO(data), weights_only=False)):
        try:
            load(content)
        except Exception:
            continue
        finally:
            went_off = marker.is_dir()
            if went_off:
                marker.rmdir()
        if went_off:
            return True
    return False
