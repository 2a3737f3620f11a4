"""The training engine: torchtitan's Trainer, driven from Python by a resolved segment.

Importing this package installs the CPU shim, so it comes before anything of torchtitan.
"""

import apertus_model.device  # noqa: F401
