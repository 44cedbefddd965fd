"""Kinds of run, a file each: `build` makes the parts of the run, `loop` runs its steps.

The table is in `megappo/config/recipes.py`.
"""
