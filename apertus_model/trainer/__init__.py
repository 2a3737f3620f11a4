"""The training engine: torchtitan's Trainer, driven from Python by a resolved segment.

Importing this package installs the CPU shim, and what torchtitan lacks in an older torch, so it comes before
anything of torchtitan.
"""

import apertus_model.device
import apertus_model.model.older_torch  # noqa: F401
