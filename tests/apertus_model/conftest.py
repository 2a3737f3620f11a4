"""`harness`, which runs the engine in forked processes, is shared by the tests of several folders."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
