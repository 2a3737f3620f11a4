"""Apertus as a torchtitan model.

The trainer package is imported first because it installs the CPU shim that torchtitan's modules copy at import.
"""

import apertus_model.trainer  # noqa: F401
