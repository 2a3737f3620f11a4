"""Apertus as a torchtitan model.

Two modules are imported first: one installs the CPU shim, which torchtitan copies when it is imported, the
other what torchtitan lacks in an older torch.
"""

import apertus_model.device
import apertus_model.model.older_torch  # noqa: F401
