"""When a word has been learned: what `--stop auto` reads off the validation loss, as pure functions of the curve."""

from __future__ import annotations

from collections.abc import Sequence

Curve = Sequence[tuple[int, float]]
"""(optimizer step, validation loss) in order of the steps, from step 0 on."""

GAINED = 0.02
"""Of the fall so far: what the later half of a run has to bring for it to go on."""
NEAR = 0.1
"""Of the fall: losses that lie so near to the lowest are as good. The lowest of all may be an early step's by chance:
such a one's rows drew 31 % right pictures, those of the last step of its run all (orange-ring, seed 2)."""
LEAST = 0.005
"""Of the loss at the start: a smaller fall is no sign of learning. The bundled concepts' is 0.06 to 0.09."""
FEWEST = 4
"""Losses after step 0 before which nothing is decided."""


def best(curve: Curve) -> tuple[int, float]:
    """The step with the lowest loss, the first of those that are equal, and that loss."""
    return min(curve, key=lambda point: point[1])


def chosen(curve: Curve) -> tuple[int, float]:
    """The step whose rows are kept, and its loss: the latest of those whose loss is about the lowest."""
    start, lowest = curve[0][1], best(curve)[1]
    return next(point for point in reversed(curve) if point[1] - lowest <= NEAR * (start - lowest))


def fell(curve: Curve) -> bool:
    """Whether the loss fell by more than next to nothing."""
    start = curve[0][1]
    return start - best(curve)[1] > LEAST * start


def is_learned(curve: Curve) -> bool:
    """Whether the later half of the steps so far brought next to nothing of what the loss has fallen by in all.

    As the half grows with the run, one that learns slowly is given longer than one that learns fast, and nobody has to
    know a window. A loss that hardly ever fell below its start is no sign of learning, however long it has stood still.
    """
    if len(curve) <= FEWEST:
        return False
    start, now = curve[0][1], curve[-1][0]
    lowest = best(curve)[1]
    earlier = min(loss for step, loss in curve if 2 * step <= now)
    return fell(curve) and earlier - lowest <= GAINED * (start - lowest)


def verdict(curve: Curve, *, stopped: bool) -> str:
    """What the curve says of the run, and what to do about it.

    Args:
        curve: of the whole run.
        stopped: whether it ended because `is_learned`; else by --max_train_steps.
    """
    (_, start), (last, _) = curve[0], curve[-1]
    lowest = best(curve)[1]
    step, loss = chosen(curve)
    if not fell(curve):
        return (
            f"the validation loss began with {start:.4f} and was {lowest:.4f} at best: next to nothing was learned. "
            "Try a higher --learning_rate, or a lower one if the loss rose; `icom tune` finds one"
        )
    found = f"the validation loss fell from {start:.4f} to {loss:.4f} (step {step})"
    if stopped:
        return f"{found}, and by at most {GAINED:.0%} of that since step {last // 2}: learned"
    if is_learned(curve):
        return f"{found}, and by at most {GAINED:.0%} of that since step {last // 2}: --stop auto would end here"
    return f"{found} and was still falling: more --max_train_steps, or a higher --learning_rate, may teach more"
