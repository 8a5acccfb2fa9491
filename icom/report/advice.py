"""What to try next: a few plain rules, each with what was measured that speaks for it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass

from icom.report.facts import Facts
from icom.training.outcome import STOPPED
from icom.training.stopping import best, chosen, fell, is_learned

FEWEST_STEPS = 40
"""Below so many, quarters of the loss are too few numbers to compare."""
FEWEST_PICTURES = 3
GROWN = 5.0
"""Times the norm at the first saved step from which it is worth a word."""


@dataclass(frozen=True)
class Advice:
    """Attributes: what to do, and why."""

    what: str
    why: str


def advise(facts: Facts) -> list[Advice]:
    """What the measured numbers suggest, the most important first."""
    return [*_stopped(facts), *_of_loss(facts), *_of_pictures(facts), *_of_rows(facts), *_of_watching(facts)]


def _stopped(facts: Facts) -> Iterator[Advice]:
    outcome = facts.outcome
    if outcome.state == STOPPED:
        yield Advice(
            "Go on with it: the same command with --resume_from_checkpoint latest.",
            f"It was stopped after {outcome.step} of {outcome.steps} steps; what it had learned is saved.",
        )


def _of_loss(facts: Facts) -> Iterator[Advice]:
    given = facts.settings.get("learning_rate")
    rate = given if isinstance(given, float | int) else None
    rows = facts.outcome.training == "train"
    find = "`icom tune`, which finds a learning rate, or a higher" if rows else "A higher"
    if len(facts.validation) > 1:
        yield from _of_validation(facts, f"Try {find} --learning_rate than {rate:g}." if rate else f"Try {find} rate.")
        return
    losses = [row["loss"] for row in facts.rows]
    if len(losses) < FEWEST_STEPS:
        yield Advice(
            "Train for more steps (--max_train_steps) before judging it.",
            f"{len(losses)} steps are too few to say whether the loss falls.",
        )
        return
    (early, late), noise = change(losses)
    measured = f"The mean loss was {early:.4f} in the first quarter of the steps and {late:.4f} in the last"
    if late - early > 2 * noise:
        yield Advice(
            f"Try a lower --learning_rate than {rate:g}." if rate else "Try a lower learning rate.",
            f"{measured}: it rose by more than its noise (± {2 * noise:.4f}).",
        )
    elif early - late <= 2 * noise:
        yield Advice(
            (f"Try {find} --learning_rate than {rate:g}." if rate else f"Try {find} rate.")
            + (" With --validation_share 0.1 the loss has no noise, and shows whether it falls." if rows else ""),
            f"{measured}: no more than its noise (± {2 * noise:.4f}) apart.",
        )
    elif rows:
        yield Advice(
            "Add --stop auto: it ends a run when the word is learned, and keeps the best rows.",
            f"{measured}: it fell. Where it stopped falling, single steps' losses do not show.",
        )


def change(losses: list[float]) -> tuple[tuple[float, float], float]:
    """How the loss changed.

    Returns:
        ((its mean in the first quarter, in the last), the standard error of their difference).
    """
    quarter = max(2, len(losses) // 4)
    parts = (losses[:quarter], losses[-quarter:])
    early, late = (statistics.mean(part) for part in parts)
    return (early, late), math.sqrt(sum(statistics.variance(part) / quarter for part in parts))


def _of_validation(facts: Facts, higher: str) -> Iterator[Advice]:
    curve = facts.validation
    start, lowest = curve[0][1], best(curve)[1]
    if not fell(curve):
        if curve[-1][1] > start:
            yield Advice(
                "Try a lower --learning_rate.",
                f"The validation loss rose from {start:.4f} to {curve[-1][1]:.4f}, and was never well below its start.",
            )
        else:
            yield Advice(higher, f"The validation loss began with {start:.4f} and was {lowest:.4f} at best: no fall.")
        return
    step, loss = chosen(curve)
    last = curve[-1][0]
    measured = f"The validation loss fell from {start:.4f} to {loss:.4f} (step {step})"
    if not is_learned(curve):
        if facts.outcome.state != STOPPED:
            more = f"Try more --max_train_steps than {facts.outcome.steps}, or a higher --learning_rate."
            yield Advice(more, f"{measured}, and was still falling.")
    elif facts.settings.get("stop") == "auto":
        yield Advice(
            "Nothing about the steps: this run has learned.", f"{measured}, and hardly since step {last // 2}."
        )
    else:
        yield Advice(
            "Add --stop auto, which would have ended it, and kept the rows of the step that is best.",
            f"{measured}, and hardly since step {last // 2}.",
        )


def _of_pictures(facts: Facts) -> Iterator[Advice]:
    count = facts.noted.get("pictures")
    if isinstance(count, int) and count < FEWEST_PICTURES:
        yield Advice(
            "Add pictures: three to thirty, on different backgrounds.",
            f"There {'is one' if count == 1 else f'are {count}'}. What all of them have in common, the background "
            "too, is learned with the word.",
        )
    if cut := facts.noted.get("captions_cut"):
        yield Advice(
            "Shorten the captions that are cut.",
            f"The text encoder does not read the ends of {len(cut)} of them: {', '.join(map(str, cut[:5]))}"
            + (" and others." if len(cut) > 5 else "."),
        )


def _of_rows(facts: Facts) -> Iterator[Advice]:
    if len(facts.norms) > 1:
        (first, before), (last, after) = facts.norms[0], facts.norms[-1]
        if after > GROWN * before:
            yield Advice(
                "If prompts around the word are ignored, try --preserve_embedding_norm 0.1, or fewer steps.",
                f"The rows' norm grew from {before:.2f} (step {first}) to {after:.2f} (step {last}).",
            )


def _of_watching(facts: Facts) -> Iterator[Advice]:
    if facts.outcome.training != "train":
        return
    word = facts.settings.get("placeholder_token")
    if not facts.settings.get("sample_prompts") and not facts.settings.get("validation_prompt"):
        yield Advice(
            '--sample_prompts "a photo of [name]" "[name] on the beach" shows on the way what is learned.',
            "This run drew nothing on its way.",
        )
    if (facts.outcome.folder / "learned_embeds.safetensors").exists():
        of_several = f"={word}" if facts.settings.get("further_words") else ""
        yield Advice(
            f"icom evaluate --embedding {facts.outcome.folder}{of_several} scores {word} at each step that was saved.",
            "A loss says little of how like the pictures are; a score of drawn ones says more.",
        )
