"""On a GPU machine with an older torch, torchtitan's Trainer does not import; the model, its optimizer and
its losses still work."""

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import importlib.abc
import sys

class Blocked(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "torchtitan.trainer":
            raise ImportError(f"{name} does not import here")

sys.meta_path.insert(0, Blocked())
import torch
import torch.distributed.fsdp
del torch.distributed.fsdp.DataParallelMeshDims  # as in torch 2.11

from apertus_model.losses import cross_entropy, divergence, preference, sequences
from apertus_model.model import hf, hf_folder, hf_layers, lora
from apertus_model.model.model import model_config
from apertus_model.optimizers.ademamix import AdEMAMix
from specs.model import ModelSpec

torch.set_num_threads(1)
spec = ModelSpec(flavour="mini")
model = model_config(spec, sequence_length=32, attention="sdpa", seed=1).build()
model.init_weights()
optimizer = AdEMAMix(model.parameters(), lr=1e-2)
tokens = torch.randint(0, spec.vocab_size, (2, 33), generator=torch.Generator().manual_seed(0))
losses = []
for _ in range(3):
    logits = model(tokens[:, :-1])
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
assert losses[2] < losses[1] < losses[0], losses
assert "torchtitan.trainer" not in sys.modules
print("trained")
"""


@pytest.mark.slow
def test_the_model_trains_where_the_trainer_does_not_import() -> None:
    root = Path(__file__).resolve().parents[3]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=root, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout.endswith("trained\n"), done.stdout + done.stderr
