"""The share of labels that the hash of Goldfish masks."""

from __future__ import annotations

import numpy as np
import pytest

from apertus_model.data.tokens.goldfish import goldfish_mask
from flows.inspection.goldfish import masked_share
from specs.settings import Goldfish


def test_the_hash_of_goldfish_masks_less_than_one_label_in_k() -> None:
    share = masked_share(Goldfish(k=50, h=50), 4096, 2**17)
    labels = np.random.default_rng(0).integers(0, 2**17, size=(400, 4096))
    # neighbouring windows share 49 of their 50 ids
    assert share == pytest.approx(goldfish_mask(labels, 50, 50).mean(), abs=4e-4)
    assert share == pytest.approx(0.0161, abs=1e-4)
