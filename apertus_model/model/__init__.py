"""Apertus as a torchtitan model.

The device module is imported first: it installs the CPU shim, which torchtitan copies when it is imported.
"""

import apertus_model.device  # noqa: F401
