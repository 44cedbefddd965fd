"""The error of a checkpoint that cannot be used."""


class CheckpointError(RuntimeError):
    """What is wrong with a checkpoint, and what to do about it."""
