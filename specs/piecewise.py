"""The arithmetic of pieces: breakpoints of batch, mixture and schedule in samples and tokens, floored to
whole batches.

Invariant: the arithmetic is in integers, from the spec alone. Every breakpoint and the end of the budget lie
between whole batches; the tokens left over are kept for messages.
"""

from collections.abc import Mapping
from itertools import pairwise

from specs.errors import FieldPath, SpecError
from specs.schedule import Schedule, ScheduleSpec
from specs.settings import Training
from specs.stages.mixture import Anneal
from specs.units import Budget

MOST_STEPS = 10**8  # of a phase
MOST_CHECKPOINTS = 10**6
Pieces = list[tuple[int, int]]  # (first sample, batch), in order


def _samples(budget: Budget, pieces: Pieces, length: int) -> int:
    """A budget in samples, floored to a whole number. Steps are counted along the batches."""
    if budget.unit == "tokens":
        return budget.amount // length
    if budget.unit == "samples":
        return budget.amount
    steps, position = budget.amount, pieces[0][0]
    for (begin, batch), following in zip(pieces, [*pieces[1:], None], strict=True):
        inside = (following[0] - begin) // batch if following else steps
        if steps <= inside:
            return begin + steps * batch
        steps, position = steps - inside, following[0] if following else position
    return position


def whole_batches(sample: int, pieces: Pieces) -> int:
    """The end of the last whole batch at or before `sample`."""
    begin, batch = [piece for piece in pieces if piece[0] <= sample][-1]
    return begin + (sample - begin) // batch * batch


def _begins(path: FieldPath, keys: list[str]) -> list[Budget]:
    begins = []
    for key in keys:
        try:
            begins.append(Budget.parse(key))
        except ValueError as error:
            raise SpecError.of((*path, key), str(error)) from None
    if not begins or begins[0].amount != 0:
        raise SpecError.of(
            path, "the first piece must begin at 0", "write for example {0 tokens: ..., 7.038T tokens: ...}."
        )
    return begins


def _increasing(path: FieldPath, keys: list[str], positions: list[int]) -> None:
    for key, before, after in zip(keys[1:], positions, positions[1:], strict=False):
        if after <= before:
            message = "this breakpoint is less than one whole batch after the breakpoint before it"
            raise SpecError.of((*path, key), message, "order the breakpoints, at least a batch apart.")


def batch_pieces(at: FieldPath, batches: dict[str, int], length: int) -> Pieces:
    """The first sample of each batch size. Raises SpecError for breakpoints that are out of order or less
    than a batch apart."""
    path = (*at, "global_batch_size")
    pieces: Pieces = []
    for budget, batch in zip(_begins(path, list(batches)), batches.values(), strict=True):
        if batch < 1:
            raise SpecError.of(path, f"a batch of {batch} sequences is not possible", "use 1 or more.")
        pieces.append((whole_batches(_samples(budget, pieces, length), pieces) if pieces else 0, batch))
    _increasing(path, list(batches), [begin for begin, _ in pieces])
    return pieces


def mixture_pieces(
    at: FieldPath, mixtures: dict[str, str], pieces: Pieces, length: int
) -> list[tuple[int, str]]:
    """The first sample of each mixture, as in `batch_pieces`."""
    path = (*at, "mixture")
    begins = [
        whole_batches(_samples(budget, pieces, length), pieces) for budget in _begins(path, list(mixtures))
    ]
    _increasing(path, list(mixtures), begins)
    return list(zip(begins, mixtures.values(), strict=True))


def annealed_pieces(
    at: FieldPath,
    mixtures: list[tuple[int, str]],
    annealed: Mapping[str, Anneal],
    pieces: Pieces,
    length: int,
    total: int,
) -> list[tuple[int, str]]:
    """The first sample of each mixture, with annealed mixtures cut into pieces: piece k of n begins k/n of
    the way, floored to whole batches."""
    path = (*at, "mixture")
    begins: list[tuple[int, str]] = []
    for (begin, name), following in zip(mixtures, [*mixtures[1:], None], strict=True):
        anneal = annealed.get(name)
        if anneal is None:
            begins.append((begin, name))
            continue
        over, end = anneal.over, following[0] if following else total
        if over.unit == "steps":
            over = Budget(over.amount + _steps(begin, pieces), "steps")
        finish = _samples(over, pieces, length) + (0 if over.unit == "steps" else begin)
        if finish > end:
            message = (
                f"'{name}' is annealed over {anneal.over}, {(end - begin) * length:,} tokens are trained"
                " on it"
            )
            raise SpecError.of(path, message, "shorten anneal.over, or train longer on it.")
        starts = [
            whole_batches(begin + (finish - begin) * piece // anneal.pieces, pieces)
            for piece in range(anneal.pieces + 1)
        ]
        if any(after <= before for before, after in pairwise(starts)):
            message = (
                f"'{name}' has {anneal.pieces} pieces over {anneal.over}, which is less than a batch for each"
            )
            raise SpecError.of(path, message, "set fewer anneal.pieces.")
        begins += [(start, f"{name}/{piece}") for piece, start in enumerate(starts, start=1) if start < end]
    return begins


def _steps(sample: int, pieces: Pieces) -> int:
    """Whole steps up to a sample at which a step ends."""
    ends = [begin for begin, _ in pieces[1:]] + [sample]
    return sum(
        (min(end, sample) - begin) // batch
        for (begin, batch), end in zip(pieces, ends, strict=True)
        if begin < sample
    )


def whole_budget(path: FieldPath, budget: Budget, pieces: Pieces, length: int) -> tuple[int, int]:
    """The samples of a budget in whole batches, and the tokens left over. `path`: where it is stated."""
    exact = budget.amount if budget.unit == "tokens" else _samples(budget, pieces, length) * length
    total = whole_batches(exact // length, pieces)
    if total <= 0:
        smallest = pieces[0][1] * length
        raise SpecError.of(path, f"{budget} is less than one step of {smallest:,} tokens", "raise it.")
    return total, exact - total * length


def full_schedule(at: FieldPath, spec: ScheduleSpec, budget: Budget, pieces: Pieces, length: int) -> Schedule:
    """The schedule of a whole stage, in tokens. Raises SpecError if warm-up and decay do not fit into it."""

    def tokens(amount: Budget) -> int:
        return amount.amount if amount.unit == "tokens" else _samples(amount, pieces, length) * length

    total, warmup = tokens(budget), tokens(spec.warmup) if spec.warmup else 0
    if warmup > total:
        message = f"a warm-up of {warmup:,} tokens does not fit into the budget of {total:,} tokens"
        raise SpecError.of((*at, "schedule", "warmup"), message, "shorten it, or raise the budget.")
    decaying = spec.decay != "none"
    decay = (tokens(spec.decay_over) if spec.decay_over else total - warmup) if decaying else 0
    if decaying and warmup + decay > total:
        message = f"warm-up of {warmup:,} and decay of {decay:,} tokens do not fit into {total:,} tokens"
        raise SpecError.of((*at, "schedule", "decay_over"), message, "shorten one of them.")
    return Schedule(
        warmup_tokens=warmup,
        warmup_from=spec.warmup_from if warmup else 0.0,
        decay=spec.decay,
        decay_start=total - decay if decaying else 0,
        decay_tokens=decay,
        final=spec.final if decaying else 1.0,
    )


def seen_within(full: Schedule, begin: int, end: int) -> Schedule:
    """The part of a schedule that matters for the tokens `[begin, end)`: the warm-up unless it is over at
    `begin`, the decay if it starts before `end`."""
    seen: dict[str, object] = {}
    if full.offset + begin < full.warmup_tokens:
        seen |= {name: getattr(full, name) for name in ("offset", "warmup_tokens", "warmup_from")}
    if full.decay != "none" and full.offset + end > full.decay_start:
        seen |= {
            name: getattr(full, name) for name in ("offset", "decay", "decay_start", "decay_tokens", "final")
        }
    return Schedule.model_validate(seen)


def check_steps(at: FieldPath, stage: Training, steps: int) -> None:
    """Raises SpecError for more steps or checkpoints than any real run has: such a number is a typo."""
    if steps > MOST_STEPS:
        message = f"{stage.budget} are {steps:,} steps; the limit is {MOST_STEPS:,}"
        raise SpecError.of((*at, "budget"), message, "lower it, or raise the batch.")
    rollback = stage.anomalies.rollback_interval if stage.anomalies.rolls_back else None
    intervals = {
        ("checkpoint", "interval"): stage.checkpoint.interval,
        ("checkpoint", "keep_every"): stage.checkpoint.keep_every,
        ("anomalies", "rollback_interval"): rollback,
    }
    for field, every in intervals.items():
        if isinstance(every, int) and steps // every > MOST_CHECKPOINTS:
            message = f"{steps // every:,} checkpoints in {steps:,} steps; the limit is {MOST_CHECKPOINTS:,}"
            raise SpecError.of((*at, *field), message, f"set {-(-steps // MOST_CHECKPOINTS)} or more.")
