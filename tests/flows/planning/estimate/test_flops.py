"""FLOPs of a step are the published ones; those of sampling are what torch counts."""

from __future__ import annotations

import pytest

from flows.planning.estimate import flops
from specs.hugging_face import hugging_face_config
from specs.mamba import Mamba
from specs.model import ModelSpec
from specs.stages.distill import DistillLoss, DistillSegment
from tests.flows.planning.segments import segment
from tests.models import flops_per_token


def test_flops_are_those_of_the_report() -> None:
    """arXiv 2509.14233, appendix E: 6.74e24 for 70B over 15T tokens."""
    assert flops.training(segment("70b")) * 15e12 == pytest.approx(6.74e24, rel=1e-3)


@pytest.mark.parametrize("flavour", ["1.5b", "8b", "70b"])
def test_flops_are_six_times_the_parameters_and_twelve_times_the_scores(flavour: str) -> None:
    """PaLM (arXiv 2204.02311, appendix B): 6 N + 12 L Q S, N without the input embedding; norms and
    scalars are not in matrices."""
    model = ModelSpec(flavour=flavour)
    inside = model.parameters - model.vocab_size * model.dim
    scores = 12 * model.n_layers * model.n_heads * model.head_dim * 4096
    assert flops.training(segment(flavour)) == pytest.approx(6 * inside + scores, rel=1e-4)
    assert flops.training(segment(flavour)) == flops_per_token(model, 4096)


@pytest.mark.parametrize("mamba", [None, Mamba(layers=[0], chunk=7)])
def test_sampling_makes_the_products_that_are_expected(mamba: Mamba | None) -> None:
    """The model of transformers, with its key-value cache: a prefill, then a step a token."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    from apertus_model.model.hf_classes import config_class, model_class

    model = ModelSpec(
        dim=64, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=16, ffn_dim=96, vocab_size=256, mamba=mamba
    )
    config = hugging_face_config(model, max_position_embeddings=128, bos_token_id=1, eos_token_id=2)
    network = model_class(model)(config_class(model)(**config)).eval()
    prompts = torch.randint(3, 256, (3, 17))
    for new in (1, 2, 9):
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            found = network.generate(prompts, max_new_tokens=new, min_new_tokens=new, do_sample=False)
        assert found.shape == (3, 17 + new)
        expected = flops.prefill(model, 17) + flops.decode(model, 17, new)
        if mamba is not None:  # what one token writes, and mixes alone, is no sum that the counter knows
            expected -= (new - 1) * 2 * 4 * 16 * (16 + 1)
        assert counter.get_total_flops() == 3 * expected
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter, torch.no_grad():
        network(prompts)
    if mamba is None:  # else as in training, by chunks that are filled up
        assert counter.get_total_flops() == flops.scored(model, 3 * 17, 17)


@pytest.mark.parametrize("compare", ["logits", "hidden", "matrix"])
def test_a_rank_without_a_pipeline_has_its_part_of_all_operations(compare: str) -> None:
    """Also of mixers that are compared with a teacher's attention, where no output layer runs."""
    model = ModelSpec(flavour="1.5b").model_copy(update={"mamba": Mamba(layers=[0, 2])})
    fields = segment("1.5b").model_dump() | {
        "model": model,
        "teacher": ModelSpec(flavour="1.5b"),
        "loss": DistillLoss(compare=compare),
    }
    one = DistillSegment.model_validate(fields)
    assert flops.of_rank(one, 8, 0) * 8 == one.tokens_per_step * (
        flops.training(one) + flops.recomputation(one)
    )
