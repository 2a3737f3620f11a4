"""Every number of a recipe has limits, and what lies outside of them is refused by the plan, with the
field."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from typing import Any

import pytest

from flows.planning.plan import make
from infra.store import Store
from specs.base import Spec
from specs.compose import compose
from specs.document import Document
from specs.errors import FieldPath, SpecError
from specs.recipe import validate
from tests.recipes import CHAT, write_recipe
from tools.reference import models

SOURCES = """\
sources:
  rows:
    url: "{documents}"
    format: jsonl
    include: ["*.jsonl"]
    metadata: [score, language, toxic_score]
    limit: 5
    declared: {{tokens: 5k tokens, documents: 5}}
  lines: {{url: "{documents}", format: jsonl, include: ["*.jsonl"], id_column: id, metadata: [language]}}
  own: {{url: "{documents}", format: documents, reader: "package.module:name", version: 1}}
"""
OPTIMIZERS = """\
  small:
    kind: pretrain
    model: {{dim: 32, n_layers: 2, n_heads: 2, n_kv_heads: 1, head_dim: 16, ffn_dim: 64, vocab_size: 512,
      depth_average: {{dilation: 1, period: 1}}}}
    mixture: {{0 steps: main}}
    sequence_length: 32
    global_batch_size: {{0 steps: 4}}
    budget: 16 steps
    schedule: {{warmup: 4 steps, decay: linear, decay_over: 4 steps, final: 0.1}}
    optimizer: {{lr: 1e-3, eps: 1e-8, weight_decay: 0.1, grad_clip: 1.0}}
    micro_batch_size: 1
    goldfish: {{k: 50, h: 50}}
    z_loss: 1e-4
    checkpoint: {{interval: 5, keep: 2, keep_every: 8, milestones: [3, 5]}}
    launch: {{processes: 1, threads: 1, workers: {{count: 1, cpus: 2}}, mfu: 0.3, parallel: {{dp_shard: 1,
      tp: 1, pp_schedule: interleaved-1f1b, virtual_stages: 2}}}}
    matrix:
      ademamix: {{optimizer: {{betas: [0.9, 0.99, 0.99], alpha: 8, alpha_warmup: 10 steps,
        beta3_warmup: 10}}}}
      hashed: {{model: {{attention: {{sparse: hash, buckets: 2, seed: 1}}}}}}
      dropped: {{model: {{attention: {{sparse: drop, queries: 0.5, keys: 0.5, seed: 1}}}}}}
      hybrid: {{model: {{depth_average: null, mamba: {{layers: [0], conv_width: 2, chunk: 16}}}}}}
      windowed: {{model: {{attention: {{sparse: window, window: 2}}}}}}
      muon: {{optimizer: {{name: muon, betas: [0.9, 0.99], momentum: 0.9, adamw_lr_ratio: 0.1}}}}
      soap: {{optimizer: {{name: soap, precondition_frequency: 10}}}}
      prodigy: {{optimizer: {{name: prodigy, d_coef: 1}}}}
      mars: {{optimizer: {{name: mars, gamma: 0.1}}}}
      sophia: {{optimizer: {{name: sophia, rho: 0.04, hessian_interval: 10}}}}
"""
FILTERS = """\
  filtered:
    kind: corpus
    tokenizer: tokenizer
    sources:
      rows:
        repeats: {{buckets: [0, 2], per_bucket: 2, length: 16}}
        planted:
          codes: {{buckets: [0, 2], seed: 1,
            canaries: {{template: "{{secret}}", length: 4, count: 2, seed: 1}}}}
        filters:
          - {{filter: length, min_characters: 2, max_characters: 1000, by: language, cutoffs: {{de: 3}}}}
          - {{filter: alphabetic, by: language, cutoffs: {{de: 0.5}}}}
          - {{filter: repeated-lines}}
          - {{filter: toxicity, classifier: c, thresholds: {{de: 0.9}}}}
          - {{filter: language, model: "{documents}", languages: [de], min_scores: {{de: 0.5}}}}
          - {{filter: score, column: score, min: 0, max: 1, by: language, cutoffs: {{de: 0.5}},
              ceilings: {{de: 0.9}}}}
          - {{filter: score, column: other, max: 1,
              model: {{url: nowhere/classifier, label: a, max_tokens: 8}}}}
          - {{filter: sample, rate: 0.5, by: language, rates: {{de: 0.5}}}}
          - {{filter: near-duplicates}}
          - {{filter: decontaminate, against: [{{url: "{documents}", format: text}}]}}
"""
OTHERS = """\
  words:
    kind: classifier
    sources: {{rows: {{label: a}}, own: {{label: b}}}}
    training: {{method: fasttext, dim: 10, epochs: 2, lr: 0.1, word_ngrams: 2, shortest_ngram: 2,
      longest_ngram: 3, buckets: 100, min_count: 1, max_characters: 1000}}
    validation: 0.2
    percentiles: [90]
    seed: 1
    files_per_task: 2
  embedded:
    kind: classifier
    sources: {{rows: {{label: a}}, own: {{label: b}}}}
    training: {{method: mlp, encoder: nowhere/encoder, max_tokens: 16, hidden: 4, dropout: 0.1,
      epochs: 1, lr: 1e-3, weight_decay: 0.1, batch_size: 2, warmup_steps: 1}}
  compared: {{kind: evaluate_tokenizers, tokenizers: {{ours: tokenizer}}, sources: [lines], lines: 5, seed: 1,
    parity_to: en}}
  curated:
    kind: conversations
    tokenizer: tokenizer
    sources: {{questions: {{share: 0.5, holdout: 0.2}}}}
  counted: {{kind: conversations, tokenizer: tokenizer, sources: {{questions: {{count: 5, holdout: 0.2}}}}}}
  scored:
    kind: reward_model
    from: pretrain
    pairs: [chat]
    budget: 2 steps
    global_batch_size: 1
    optimizer: {{lr: 1e-4}}
    loss: {{centring: 0.1}}
    max_repetition: 2
  imitated:
    kind: sft
    from: pretrain
    conversations: {{chat: 1}}
    budget: 4 steps
    optimizer: {{lr: 1e-3}}
    inverse_rl: {{weight: 0.5, discount: 0.9}}
  weighted:
    kind: mixture
    weights: {{corpus/notes: {{weight: 1, max_repetition: 2}}, filtered/rows: {{weight: 2}}}}
    anneal: {{to: {{corpus/notes: {{weight: 2}}}}, over: 8 steps, pieces: 2}}
  measured:
    kind: evaluate
    from: pretrain
    sources: [corpus/notes]
    sequence_length: 16
    by_position: {{sequence_length: 32, buckets: 4}}
    memorisation: {{probes: filtered/rows, prefixes: [8], suffix: 8, nucleus: {{top_p: 0.5}},
      planted: codes, exposure: {{alternatives: 3, seed: 1}}}}
    harness:
      include: installed:examples/tasks
      suites:
        own:
          tasks: [stdlib_functions]
          limit: 5
          few_shot: 1
          seed: 1
          max_length: 64
          sequence_lengths: [4096]
          generation: {{max_gen_toks: 4, do_sample: true, temperature: 1, top_p: 1, top_k: 1}}
          expected: {{requests: 10, tokens: 20, new_tokens: 4}}
          classifier: {{model: "installed:examples/own_data/texts", label: toxic, max_tokens: 8}}
    gates: [{{metric: perplexity, min: 1, max: 1000}}]
    reference: {{perplexity: {{value: 9.5, unit: metric, stderr: 0.5, source: a report}}}}
  agreed:
    kind: evaluate_reward
    pairs: [chat]
    limit: 10
    seed: 1
    reward:
      judge:
        from: sft
        constitution: installed:specs/recipes/shared/constitution.md
        scale: [1, 5]
        pairwise: {{best: 3}}
      max_tokens: 32
  sharpness: {{kind: probe, from: pretrain, sources: [corpus/notes], sequence_length: 16}}
  averaged: {{kind: merge, checkpoints: [qrpo, dpo], weights: [1, 2], method: ties, base: sft, scale: 0.5,
    density: 0.5}}
  adapted:
    kind: sft
    from: pretrain
    conversations: {{chat: 1}}
    budget: 4 steps
    optimizer: {{lr: 1e-3}}
    lora: {{rank: 4}}
    anomalies: {{spike: skip}}
    validation: {{interval: 2}}
  preferred:
    kind: preference_data
    from: sft
    prompts: [chat]
    limit: 100
    max_tokens: 64
    sequence_length: 128
    completions: {{n: 4, max_new_tokens: 16}}
    generators:
      other:
        from: sft
        completions: {{n: 1, max_new_tokens: 16}}
        personas: {{url: "{documents}", format: text, include: ["*.txt"], seed: 1}}
    reward: {{function: package.module:name, version: 1}}
  rewarded: {{kind: rewarded_completions, from: sft, completions: [chat], reward: score, max_tokens: 64}}
  paired: {{kind: rewrite, from: pretrain, layer_pairs: {{start: 0, layers: 2}}}}
  taught:
    kind: distill
    teacher: pretrain
    model: {{dim: 32, n_layers: 2, n_heads: 2, n_kv_heads: 1, head_dim: 16, ffn_dim: 64, vocab_size: 512,
      repeats: {{start: 0, layers: 1, times: 2}}}}
    mixture: {{0 steps: main}}
    sequence_length: 32
    global_batch_size: {{0 steps: 4}}
    budget: 16 steps
    seed: 1
    optimizer: {{lr: 1e-3}}
    loss: {{temperature: 2, weight: 0.5}}
    top_k: 8
  halves: {{kind: mixture, weights: {{corpus/notes: 1, filtered/rows: 1}}, max_repetition: 100}}
  proxy:
    kind: domain_weights
    model: {{dim: 32, n_layers: 2, n_heads: 2, n_kv_heads: 1, head_dim: 16, ffn_dim: 64, vocab_size: 512}}
    mixture: {{0 steps: halves}}
    sequence_length: 32
    global_batch_size: {{0 steps: 4}}
    budget: 2 steps
    seed: 1
    optimizer: {{lr: 1e-3}}
    update: {{mu: 0.1, largest: 4, smoothing: 0.1}}
  learned: {{kind: mixture, learned: {{from: proxy}}, max_repetition: 100}}
  judged:
    kind: preference_data
    from: sft
    prompts: [chat]
    sequence_length: 128
    completions:
      max_new_tokens: 16
      expected_tokens: 8
      expected_prompt_tokens: 8
      engine: server
      server: {{url: "http://127.0.0.1:1/v1", model: ours, requests: 4, timeout: 60s}}
    reward: {{model: "installed:examples/own_data/texts", parameters: 1000}}
cluster:
  gpu: H100
  mfu: 0.4
  price_per_gpu_hour: 2
  power_per_gpu: 700
  storage_price: 20
  storage_bandwidth: 5
  host_bandwidth: 5
figures:
  losses:
    title: Losses
    x: {{stage: "{{variant}}", metric: tokens}}
    y: {{stage: "{{variant}}", metric: val_loss}}
    series: {{a: pretrain, b: sft}}
    claims: {{a is below b: {{paper: no number, of: a, than: b, at: 1e9, expected: below}}}}
assumed_inputs: {{files: [nowhere], models: {{"hf:a/b": {{model: {{flavour: mini}}}}}}}}
"""
MAY_BE_NEGATIVE = {
    "at",
    "seed",
    "data_seed",
    "min",
    "max",
    "thresholds",
    "cutoffs",
    "dp_shard",
    "value",
    "ceilings",
    "weights",
    "scale",
}


def numbers(value: Any, path: FieldPath = ()) -> Iterator[tuple[FieldPath, float, tuple[str, str]]]:
    """Every number of a pipeline: where it stands, the number, and the model and field that it belongs to."""

    def inside(
        item: Any, at: FieldPath, owner: tuple[str, str]
    ) -> Iterator[tuple[FieldPath, float, tuple[str, str]]]:
        if isinstance(item, Spec):
            yield from numbers(item, at)
        elif isinstance(item, (dict, list, tuple)):
            for key, entry in item.items() if isinstance(item, dict) else enumerate(item):
                yield from inside(entry, (*at, key), owner)
        elif isinstance(item, (int, float)) and not isinstance(item, bool):
            yield at, item, owner

    for name, field in type(value).model_fields.items():
        owner = next(
            model for model in reversed(type(value).__mro__) if name in getattr(model, "__annotations__", {})
        )
        yield from inside(getattr(value, name), (*path, field.alias or name), (owner.__name__, name))


def put(data: Any, path: FieldPath, value: Any) -> Any:
    """A copy with `value` at a path, whose mappings are made where the recipe states a short form or
    nothing."""
    copied = copy.deepcopy(data)
    container = copied
    for key in path[:-1]:
        if isinstance(container, dict) and not isinstance(container.get(key), (dict, list)):
            container[key] = {}
        container = container[key]
    container[path[-1]] = value
    return copied


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Document:
    """A recipe that states every number that a recipe can have."""
    head, stages = CHAT.split("sources:\n", 1)[0], CHAT.split("sources:\n", 1)[1]
    path = write_recipe(
        tmp_path_factory.mktemp("full"), head + SOURCES + stages + FILTERS + OPTIMIZERS + OTHERS
    )
    return compose(path)


def first_of_each(document: Document) -> dict[tuple[str, str], tuple[FieldPath, float]]:
    """By model and field, one place where a number of it stands, and the number."""
    return {owner: (path, number) for path, number, owner in reversed(list(numbers(validate(document))))}


def refused(document: Document, store: Store, places: list[FieldPath], value: Any) -> set[FieldPath]:
    """The places at which `value` is refused, when it stands at all of them at once or, for the others,
    alone."""

    def problems(*at: FieldPath) -> list[FieldPath]:
        data = document.data
        for path in at:
            data = put(data, path, value)
        try:
            make(validate(Document(document.name, data, document.origins, document.variants)), store)
        except SpecError as error:
            return [found.path for found in error.problems]
        return []

    together = set(problems(*places)) & set(places)
    return together | {
        path for path in places if path not in together and {path, path[:-1]} & set(problems(path))
    }


def test_recipe_can_state_the_largest_numbers(full: Document, store: Store) -> None:
    pipeline = validate(full)
    make(pipeline, store)
    seen = {owner for _, _, owner in numbers(pipeline)}
    for model in models():
        for name, field in model.model_fields.items():
            if re.search(r"\b(int|float|ByteSize)\b", str(field.annotation)) and "specs." not in str(
                field.annotation
            ):
                owner = next(
                    made for made in reversed(model.__mro__) if name in getattr(made, "__annotations__", {})
                )
                assert (
                    owner.__name__,
                    name,
                ) in seen, f"{owner.__name__}.{name} is not in the recipe of this test"


def test_a_negative_integer_is_refused_at_its_field(full: Document, store: Store) -> None:
    """One that does not fit into 64 bits is refused wherever it is written (tests/specs/test_document.py)."""
    fields = first_of_each(full)
    places = [
        path
        for (_, name), (path, number) in fields.items()
        if isinstance(number, int) and name not in MAY_BE_NEGATIVE
    ]
    assert set(places) - refused(full, store, places, -1) == set()


@pytest.mark.slow
@pytest.mark.parametrize("value", [2**63 - 1, -(2**63) + 1])
def test_the_largest_integers_are_planned_or_refused_with_problems(
    full: Document, store: Store, value: int
) -> None:
    refused(full, store, [path for path, _ in first_of_each(full).values()], value)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), "nan", ".nan", "-inf", -1.0])
def test_nan_is_refused_at_its_field(full: Document, store: Store, value: float | str) -> None:
    may_be = MAY_BE_NEGATIVE if value == -1.0 else set()
    fields = first_of_each(full)
    places = [
        path
        for (_, name), (path, number) in fields.items()
        if isinstance(number, float) and name not in may_be
    ]
    assert set(places) - refused(full, store, places, value) == set()


@pytest.mark.slow
def test_zero_is_planned_or_refused_with_problems(full: Document, store: Store) -> None:
    refused(full, store, [path for path, _ in first_of_each(full).values()], 0)
