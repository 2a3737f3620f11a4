"""Work that is cut into independent, restartable units, and the workers that share them: processes on this
machine, a Slurm job array, or an Indexed Job of Kubernetes.

A stage module whose work is cut into units has `work_of(job, attempt)`, which returns its `Work`; a worker
calls the same function. The stage calls `run_units` and reads the results. A new kind needs nothing else.
"""

from apertus_model.work.executors import run_units
from apertus_model.work.units import CommittedUnit, Result, Work

__all__ = ["CommittedUnit", "Result", "Work", "run_units"]
