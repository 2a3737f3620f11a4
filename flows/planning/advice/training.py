"""Checks of training: optimizers, rates, data, lengths."""

import math
from collections.abc import Iterator
from itertools import pairwise

from flows.planning.advice.given import Advice, Context
from specs.settings import MixtureTraining
from specs.stages import CHAT
from specs.units import REST

PASSES = 4  # arXiv 2305.16264
JUMP = 1.5

# Lengths L, and about the least base with sum_i cos(m base^(-2 i / 128)) >= 0 at all distances m < L, where a
# query prefers a similar token to a random one. Published for heads of 128 without scaling of frequencies
# (arXiv 2405.14591).
ROPE_BOUNDS = (
    (1024, 4.3e3), (2048, 1.6e4), (4096, 2.7e4), (8192, 8.4e4), (16_384, 3.1e5), (32_768, 6.4e5),
    (65_536, 2.1e6), (131_072, 7.8e6),
    (262_144, 3.6e7), (524_288, 6.4e7), (1_048_576, 5.1e8),
)  # fmt: skip


def sft_optimizer(context: Context) -> Iterator[Advice]:
    for name, trajectory in context.phases():
        ancestors = [parent for _, parent in context.ancestry(trajectory)]
        pretrained = [parent for parent in ancestors if context.kind(parent.stage) not in (*CHAT, "")]
        if not pretrained or context.kind(trajectory.stage) not in CHAT:
            continue
        own, first = trajectory.settings.optimizer.name, pretrained[-1].settings.optimizer.name
        if own != first:
            yield Advice(
                "sft-optimizer",
                trajectory.stage,
                f"'{name}' is trained with {own}, but '{pretrained[-1].stage}' was pretrained with {first};"
                " use that, or compare both",
                {"optimizer": own, "pretraining_optimizer": first},
            )


def decay_before_sft(context: Context) -> Iterator[Advice]:
    for name, trajectory in context.phases():
        if context.kind(trajectory.stage) != "sft":
            continue
        for start, parent in context.ancestry(trajectory):
            if context.kind(parent.stage) in CHAT or parent.origin in ("merge", "import"):
                continue
            peak, last = parent.settings.optimizer.lr or 0.0, parent.lr_at(start.step)
            schedule = parent.schedule
            decays = schedule.offset + parent.tokens_at(start.step) > schedule.decay_start
            if schedule.decay != "none" and decays and last < peak:
                yield Advice(
                    "decay-before-sft",
                    trajectory.stage,
                    f"'{name}' begins after '{start.phase}' has decayed the learning rate from {peak:g} to "
                    f"{last:g}; branching off before the decay, or decay: none, may give a better model "
                    "after SFT",
                    {"peak_lr": peak, "final_lr": last},
                )
                break


def learning_rate_jump(context: Context) -> Iterator[Advice]:
    for name, trajectory in context.phases():
        start = trajectory.parent
        if start is None or context.kind(trajectory.stage) in CHAT:
            continue
        parent = context.graph.trajectories[start.phase]
        if parent.origin in ("merge", "import"):
            continue
        before, schedule = parent.lr_at(start.step), trajectory.segments[0].schedule
        first, peak = trajectory.lr_at(0), trajectory.settings.optimizer.lr or 0.0
        if not before or first == before:
            continue
        up = first > JUMP * before and not schedule.warmup_tokens
        down = max(first, peak) < before / JUMP
        if up or down:
            after = first if up else peak
            fix = "resume from the rate there, and decay from it"
            if up:
                fix = "warm up to it (schedule.warmup), or begin lower"
            yield Advice(
                "learning-rate-jump",
                trajectory.stage,
                f"the learning rate goes from {before:g} at step {start.step} of '{start.phase}' to {after:g}"
                f" at the first step of '{name}'; {fix}",
                {"before": before, "after": after},
            )


def slow_warmup(context: Context) -> Iterator[Advice]:
    for name, trajectory in context.phases():
        optimizer = trajectory.settings.optimizer
        if optimizer.name != "ademamix":
            continue
        steps, later = trajectory.steps, trajectory
        for start, parent in context.ancestry(trajectory):
            if "optimizer" not in later.carry:
                break
            steps, later = steps + start.step, parent
        continued = any(
            other.parent is not None and other.parent.phase == name and "optimizer" in other.carry
            for _, other in context.phases()
        )
        longest = max((optimizer.alpha_warmup or 0) if optimizer.alpha else 0, optimizer.beta3_warmup or 0)
        if longest > steps and not continued:
            share = min(1.0, steps / optimizer.alpha_warmup) if optimizer.alpha_warmup else 1.0
            reached = (optimizer.alpha or 0.0) * share
            yield Advice(
                "slow-warmup",
                trajectory.stage,
                f"the states of AdEMAMix are kept for {steps:,} steps until the end of '{name}', but its "
                f"warm-ups take {optimizer.alpha_warmup:,} (alpha, which reaches {reached:.3g} of "
                f"{optimizer.alpha:g}) and {optimizer.beta3_warmup:,} (b3) steps; shorten them to "
                f"{steps:,}, or carry: [weights, optimizer]",
                {
                    "steps": steps,
                    "alpha_warmup": optimizer.alpha_warmup,
                    "beta3_warmup": optimizer.beta3_warmup,
                    "alpha_reached": reached,
                },
            )


def never_reached(context: Context) -> Iterator[Advice]:
    milestones = {phase.name: phase.training.checkpoint.milestones for phase, _ in context.stated_phases()}
    for name, trajectory in context.phases():
        planned = trajectory.planned[-1].end_step
        late = [step for step in milestones.get(name, []) if step > planned]
        if late:
            yield Advice(
                "never-reached",
                trajectory.stage,
                f"'{name}' has {planned:,} steps and ends before its milestones"
                f" {', '.join(f'{step:,}' for step in late)}; raise its budget, or leave them out",
                {"steps": planned, "milestones": late},
            )
        schedule, tokens = trajectory.schedule, trajectory.planned_tokens
        warmup = schedule.warmup_tokens - schedule.offset
        if warmup > tokens:
            reached = schedule.factor(tokens)
            yield Advice(
                "never-reached",
                trajectory.stage,
                f"the warm-up of '{name}' takes {warmup:,} of its {tokens:,} tokens: its rate reaches"
                f" {reached:.3g} of the peak; shorten it",
                {"tokens": tokens, "warmup_tokens": warmup, "reached": reached},
            )


def repetition(context: Context) -> Iterator[Advice]:
    for usage in context.usages:
        if usage.passes > PASSES and usage.passes != math.inf:
            yield Advice(
                "repetition",
                usage.stage,
                f"'{usage.source}' has been seen {usage.passes:.1f} times at the end of '{usage.stage}'; add"
                f" data, or lower its weight to {PASSES / usage.passes:.0%} of its value",
                {"source": usage.source, "passes": usage.passes, "worth_repeating": PASSES},
            )


def goldfish_off(context: Context) -> Iterator[Advice]:
    for usage in context.usages:
        segments = [trajectory for _, trajectory in context.phases() if trajectory.stage == usage.stage]
        if usage.passes > 1 and any(trajectory.settings.goldfish is None for trajectory in segments):
            yield Advice(
                "goldfish-off",
                usage.stage,
                f"'{usage.source}' has been seen {usage.passes:.1f} times at the end of '{usage.stage}',"
                " which trains on all of its labels; set goldfish: {}",
                {"source": usage.source, "passes": usage.passes},
            )


def rope_theta(context: Context) -> Iterator[Advice]:
    for name, trajectory in context.phases():
        model, length = trajectory.model, trajectory.settings.sequence_length
        bound = rope_bound(length)
        if model.rope_theta < bound:
            yield Advice(
                "rope-theta",
                trajectory.stage,
                f"'{name}' has sequences of {length:,} tokens and rope_theta {model.rope_theta:g}; the bound"
                f" for them is about {bound:.2g}",
                {"sequence_length": length, "rope_theta": model.rope_theta, "bound": bound},
            )
            continue
        before = [parent for _, parent in context.ancestry(trajectory)][:1]
        if before and length > before[0].context_length and model.rope_theta <= before[0].model.rope_theta:
            yield Advice(
                "rope-theta",
                trajectory.stage,
                f"'{name}' extends sequences from {before[0].context_length:,} to {length:,} tokens and "
                f"keeps rope_theta {model.rope_theta:g}; the published runs raise it with the length (a "
                "long_context stage states it per step)",
                {
                    "sequence_length": length,
                    "rope_theta": model.rope_theta,
                    "context_before": before[0].context_length,
                },
            )


def rope_bound(length: int) -> float:
    """The least base for sequences of `length` tokens, by power laws between and beyond the entries of the
    table; 0 below the shortest. Scaled frequencies (Llama 3), which turn slower, only lower it."""
    if length < ROPE_BOUNDS[0][0]:
        return 0.0
    pairs = list(pairwise(ROPE_BOUNDS))
    (short, low), (long, high) = next((pair for pair in pairs if length <= pair[1][0]), pairs[-1])
    return float(low * (high / low) ** (math.log(length / short) / math.log(long / short)))


def tokens_per_batch(context: Context) -> Iterator[Advice]:
    for phase, trajectory in context.stated_phases():
        if trajectory.parent is None or not isinstance(phase.training, MixtureTraining):
            continue
        parent = context.graph.trajectories[trajectory.parent.phase]
        batch = trajectory.segments[0].batch
        old, new = parent.settings.sequence_length, trajectory.settings.sequence_length
        before, after = batch * old, batch * new
        inherits = phase.training.global_batch_size in (None, REST)
        if inherits and before != after and parent.origin != "import":
            yield Advice(
                "tokens-per-batch",
                phase.stage,
                f"'{phase.name}' inherits {batch} sequences per step, whose length changes from {old:,} to"
                f" {new:,}: {after:,} tokens per step in place of {before:,}; set global_batch_size,"
                f" {max(1, before // new)} for as many tokens as before",
                {"tokens_per_step_before": before, "tokens_per_step": after, "global_batch_size": batch},
            )


def not_deterministic(context: Context) -> Iterator[Advice]:
    for phase, trajectory in context.stated_phases():
        if not phase.training.deterministic:
            yield Advice(
                "not-deterministic",
                phase.stage,
                f"'{phase.name}' trains {trajectory.steps:,} steps without deterministic kernels: after an"
                " interruption it ends with other bits; leave out deterministic: false where that matters",
                {"steps": trajectory.steps},
            )
