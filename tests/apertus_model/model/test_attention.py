"""Every attention backend that this machine can run, against plain loops in float64, and by behaviour through
the whole model.

FlexAttention runs forwards on a CPU, where it is no choice for a recipe: it has no backward pass there. On
a GPU the same tests run every backend."""

import math
from collections.abc import Iterator
from itertools import accumulate

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor.experimental._attention import _HeadTailLoadBalancer
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from apertus_model.device import has_gpu
from apertus_model.model.attention import document_mask, document_offsets, gathered_order
from apertus_model.model.attention_choice import BACKENDS, AttentionBackendError, Setting, resolve_backend
from apertus_model.model.model import ApertusModel, model_config
from specs.model import ModelSpec
from tests.machine import compiles
from tests.numerics import Numerics, largest_difference

SPEC = ModelSpec(
    dim=64, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=16, ffn_dim=128, vocab_size=128, init_std=0.3
)
DEVICE = "cuda" if has_gpu() else "cpu"
HALF = ("varlen", "flash")  # these compute in bfloat16
# TF32 on a GPU
TOLERANCE = {"sdpa": 2e-6, "flex": 2e-6 if DEVICE == "cpu" else 2e-3, "varlen": 2e-2, "flash": 2e-2}


def _reason(name: str) -> str:
    """Why a backend cannot train on this machine; "" if it can."""
    try:
        resolve_backend(name, Setting("bfloat16", 1, SPEC.head_dim))
    except AttentionBackendError as error:
        return str(error)
    return ""


TRAINS = [
    pytest.param(name, marks=pytest.mark.skipif(bool(_reason(name)), reason=_reason(name) or "-"))
    for name in BACKENDS
]
RUNS = [parameter if parameter.values != ("flex",) else "flex" for parameter in TRAINS]


@pytest.fixture(autouse=True)
def _one_way_of_computing(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[None]:
    """Deterministic, with one thread, and without the seconds that FlexAttention compiles on a CPU, which
    has a slow test of its own."""
    if DEVICE == "cpu" and "compiled" not in request.node.name:
        attention = "torchtitan.models.common.attention"
        monkeypatch.setattr(f"{attention}.FlexAttention._compiled_flex_attn", staticmethod(flex_attention))
        monkeypatch.setattr(f"{attention}._compiled_create_block_mask", create_block_mask)
    deterministic, threads = torch.are_deterministic_algorithms_enabled(), torch.get_num_threads()
    torch.use_deterministic_algorithms(DEVICE == "cuda")
    torch.set_num_threads(1)
    yield
    torch.use_deterministic_algorithms(deterministic)
    torch.set_num_threads(threads)


def positions_of(lengths: list[int], first: int = 0) -> list[int]:
    """A row of documents; the first of them begins at `first`."""
    row = [position for length in lengths for position in range(length)]
    return [position + first if index < lengths[0] else position for index, position in enumerate(row)]


ROWS = {
    "one document": [positions_of([24])] * 2,
    "many documents": [positions_of([1, 1, 5, 1, 9, 7]), positions_of([10, 1, 13])],
    "documents of one token": [[0] * 24, [0] * 24],
    "rows that begin inside of a document": [
        positions_of([5, 8, 11], first=37),
        positions_of([24], first=100),
    ],
    "an empty rest": [positions_of([6, 10, 8]), positions_of([23, 1])],
}


def documents(row: list[int]) -> list[int]:
    """Number of the document of each place: it goes up where positions restart."""
    return list(accumulate(int(position == 0 and index > 0) for index, position in enumerate(row)))


def reference(q: np.ndarray, k: np.ndarray, v: np.ndarray, rows: list[list[int]], scale: float) -> np.ndarray:
    """softmax(scale q k) v over the earlier places of the same document, float64, head by head."""
    out = np.zeros_like(q)
    group = q.shape[2] // k.shape[2]
    for b, row in enumerate(rows):
        document = documents(row)
        for i in range(q.shape[1]):
            seen = [j for j in range(i + 1) if document[j] == document[i]]
            for n in range(q.shape[2]):
                scores = np.array([scale * float(q[b, i, n] @ k[b, j, n // group]) for j in seen])
                weights = np.exp(scores - scores.max())
                out[b, i, n] = sum(
                    weight * v[b, j, n // group]
                    for weight, j in zip(weights / weights.sum(), seen, strict=True)
                )
    return out


def build(backend: str) -> ApertusModel:
    model = model_config(SPEC, sequence_length=24, attention=backend, seed=1).build()
    model.init_weights()
    return model.to(DEVICE)


def attend(
    backend: str,
    rows: list[list[int]],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float | None,
) -> torch.Tensor:
    model = build(backend)
    masks = model.get_attention_masks(torch.tensor(rows, device=DEVICE))
    inner = model.layers["0"].attention.inner_attention
    return inner(q, k, v, attention_masks=masks, scale=scale, enable_gqa=True)


def inputs(heads: int, kv_heads: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(heads)
    return [
        torch.randn(2, 24, number, 16, generator=generator).bfloat16().float().to(DEVICE)
        for number in (heads, kv_heads, kv_heads)
    ]


def in_float64(*tensors: torch.Tensor) -> list[np.ndarray]:
    return [tensor.detach().cpu().double().numpy() for tensor in tensors]


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("backend", RUNS)
def test_a_backend_computes_attention_within_documents(backend: str, name: str, numerics: Numerics) -> None:
    for heads, kv_heads, scale in ((4, 2, None), (4, 4, 0.7), (4, 1, 0.1)):
        tensors = inputs(heads, kv_heads)
        with torch.no_grad():
            found = attend(backend, ROWS[name], *tensors, scale)
        expected = reference(*in_float64(*tensors), ROWS[name], scale or 1 / math.sqrt(16))
        numerics(
            "model",
            f"attention by {backend}",
            source="softmax(s q k) v over earlier places of the same document, grouped heads",
            against="loops in float64",
            difference=float(np.abs(found.cpu().double().numpy() - expected).max()),
            allowed=TOLERANCE[backend],
        )


@compiles
@pytest.mark.slow
@pytest.mark.skipif(
    DEVICE != "cpu", reason="on a GPU the compiled kernel is the one that the other tests run"
)
def test_the_compiled_flex_kernel_computes_the_same_on_a_cpu() -> None:
    tensors = inputs(4, 2)
    for name, rows in ROWS.items():
        with torch.no_grad():
            found = attend("flex", rows, *tensors, None)
        expected = reference(*in_float64(*tensors), rows, 0.25)
        assert np.abs(found.double().numpy() - expected).max() < TOLERANCE["flex"], name


@pytest.mark.parametrize("backend", TRAINS)
def test_the_gradient_of_a_backend_is_that_of_the_formula(backend: str, numerics: Numerics) -> None:
    rows = ROWS["many documents"]
    tensors = [tensor.requires_grad_() for tensor in inputs(4, 2)]
    weights = torch.randn(2, 24, 4, 16, generator=torch.Generator().manual_seed(5)).to(DEVICE)
    (attend(backend, rows, *tensors, None) * weights).sum().backward()
    q, k, v = (tensor.detach().cpu().double().requires_grad_() for tensor in tensors)
    document = torch.tensor([documents(row) for row in rows])
    places = torch.arange(24)
    seen = (document[:, :, None] == document[:, None, :]) & (places[:, None] >= places[None, :])
    scores = torch.einsum("binh,bjnh->bnij", q, k.repeat_interleave(2, dim=2)) / 4
    probabilities = scores.masked_fill(~seen[:, None], -math.inf).softmax(-1)
    out = torch.einsum("bnij,bjnh->binh", probabilities, v.repeat_interleave(2, dim=2))
    (out * weights.cpu().double()).sum().backward()
    numerics(
        "model",
        f"gradient of attention by {backend}",
        source="softmax(s q k) v over earlier places of the same document, grouped heads",
        against="autograd through the formula in float64",
        difference=largest_difference(
            [tensor.grad.cpu() for tensor in tensors], [exact.grad for exact in (q, k, v)]
        ),
        allowed=10 * TOLERANCE[backend],
    )


LENGTHS = [1, 6, 1, 1, 9, 4, 2]  # the last is a filled-up rest


def batch() -> tuple[torch.Tensor, torch.Tensor, list[range]]:
    """Two rows of the same documents, the second of which begins inside of one; and where the documents
    lie."""
    tokens = torch.randint(0, 128, (2, 24), generator=torch.Generator().manual_seed(2))
    positions = torch.tensor([positions_of(LENGTHS), positions_of(LENGTHS, first=11)])
    ends = list(accumulate(LENGTHS))
    return tokens, positions, [range(end - length, end) for length, end in zip(LENGTHS, ends, strict=True)]


def changed(tokens: torch.Tensor, document: range) -> torch.Tensor:
    other = tokens.clone()
    other[0, document.start : document.stop] = (tokens[0, document.start : document.stop] + 1) % 128
    return other


@pytest.mark.parametrize("backend", RUNS)
def test_changing_a_document_never_changes_the_logits_of_its_neighbours(backend: str) -> None:
    model = build(backend).eval()
    tokens, positions, places = batch()

    def logits(tokens: torch.Tensor) -> torch.Tensor:
        with torch.no_grad(), torch.autocast(DEVICE, torch.bfloat16, enabled=backend in HALF):
            return model(tokens.to(DEVICE), positions.to(DEVICE))

    before = logits(tokens)
    for document in places:
        after = logits(changed(tokens, document))
        untouched = torch.ones(2, 24, dtype=torch.bool)
        untouched[0, document.start : document.stop] = False
        assert torch.equal(after[untouched], before[untouched]), document
        assert not torch.equal(after[~untouched], before[~untouched]), document


@pytest.mark.parametrize("backend", TRAINS)
def test_changing_a_document_never_changes_the_gradient_of_its_neighbours(backend: str) -> None:
    model = build(backend)
    tokens, positions, places = batch()

    def gradients(tokens: torch.Tensor, left_out: range) -> dict[str, torch.Tensor]:
        model.zero_grad()
        with torch.autocast(DEVICE, torch.bfloat16, enabled=backend in HALF):
            logits = model(tokens.to(DEVICE), positions.to(DEVICE))
        labels = torch.randint(0, 128, (2, 24), generator=torch.Generator().manual_seed(3))
        labels[0, left_out.start : left_out.stop] = -100
        torch.nn.functional.cross_entropy(
            logits.float().flatten(0, 1), labels.flatten().to(DEVICE), reduction="sum"
        ).backward()
        return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}

    for document in places:
        before, after = gradients(tokens, document), gradients(changed(tokens, document), document)
        assert all(torch.equal(before[name], after[name]) for name in before), document
        assert any(gradient.any() for gradient in before.values())


row_lengths = st.lists(st.integers(1, 9), min_size=1, max_size=8)


@settings(max_examples=60)
@given(st.lists(st.tuples(row_lengths, st.integers(0, 20)), min_size=1, max_size=3))
def test_all_backends_are_given_the_same_documents(rows: list[tuple[list[int], int]]) -> None:
    length = min(sum(lengths) for lengths, _ in rows)
    table = [positions_of(lengths, first)[:length] for lengths, first in rows]
    positions = torch.tensor(table)
    allowed = [
        [[document[i] == document[j] and j <= i for j in range(length)] for i in range(length)]
        for document in map(documents, table)
    ]
    assert document_mask(positions)[:, 0].tolist() == allowed
    offsets = document_offsets(positions)
    borders = [b * length + i for b, row in enumerate(table) for i in range(length) if i == 0 or row[i] == 0]
    assert offsets.cu_seq_q.tolist() == [*borders, len(table) * length]
    assert offsets.max_q == max(
        end - begin for begin, end in zip(borders, [*borders[1:], len(table) * length], strict=True)
    )
    flex = model_config(SPEC, sequence_length=length, attention="flex").build()
    mask_mod = flex.get_attention_masks(positions).mask_mod
    b, i, j = (torch.tensor(values) for values in np.indices((len(table), length, length)).reshape(3, -1))
    assert mask_mod(b, torch.zeros_like(b), i, j).view(len(table), length, length).tolist() == allowed


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_the_order_of_gathered_keys_is_that_in_which_sequences_are_split(ranks: int) -> None:
    length = 12 * ranks
    split = _HeadTailLoadBalancer(length, ranks, "cpu")._generate_indices()[0]
    assert gathered_order(length, ranks, "headtail").tolist() == split.tolist()
    assert gathered_order(length, ranks, None).tolist() == list(range(length))


def test_the_dense_mask_of_sdpa_takes_a_byte_for_each_pair_of_places() -> None:
    mask = document_mask(torch.arange(256).expand(3, -1))
    assert mask.nbytes == 3 * 256 * 256
