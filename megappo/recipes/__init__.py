"""Kinds of run, a file each: `build` makes the parts of the run, `loop` runs its steps.

`megappo/config/recipes.py` has the table. Importing a recipe prepares megatron-core, before anything imports it.
"""

from megappo.runtime import megatron_setup

megatron_setup.install()
