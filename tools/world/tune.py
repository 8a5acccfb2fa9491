"""Measure `icom tune` on the bundled concepts: `python -m tools.world.tune`.

From diffusers' learning rate, which learns nothing here, to a learned word without an option: how good is what it
finds, and in how many steps? And would the judge have chosen the same? For that (--all) every try is trained to its
end.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

from icom.commands.demo import INITIALIZER, TOKEN, judge_rows
from icom.config.demo import ConceptName
from icom.config.train import load_train_config
from icom.config.tune import load_tune_config
from icom.methods.embedding_file import load_embedding
from icom.training.results import EMBEDDING
from icom.training.stopping import best
from icom.training.train import train
from icom.training.tune import TRIES, tune

ONE_RUN = 500
"""Steps of a run with the bundled model's defaults."""


@dataclass(kw_only=True)
class TuneWorldConfig:
    """Tune on bundled concepts, and let the judge look at what was found."""

    concepts: tuple[ConceptName, ...] = get_args(ConceptName)
    """Concept sets."""
    seeds: tuple[int, ...] = (0,)
    """Seeds."""
    num_images: int = 16
    """Pictures of each kind that the judge looks at."""
    all: bool = False
    """Also train every try to its end, and compare tune's order with the judge's."""
    options: dict[str, str] = field(default_factory=dict)
    """Options of `icom tune` to try, as pairs."""
    output_dir: Path = Path("world-tuned")
    """Folder for the runs and results.jsonl."""


def measure(config: TuneWorldConfig) -> None:
    """A line of results.jsonl for each concept and seed."""
    for concept in config.concepts:
        for seed in config.seeds:
            row = _measure(config, concept, seed)
            print(json.dumps(row), flush=True)
            with (config.output_dir / "results.jsonl").open("a") as file:
                file.write(json.dumps(row) + "\n")


def _measure(config: TuneWorldConfig, concept: str, seed: int) -> dict[str, Any]:
    folder = config.output_dir / f"{concept}-{seed}"
    words = {"train_data_dir": f"bundled:{concept}", "placeholder_token": TOKEN, "initializer_token": INITIALIZER}
    flags: dict[str, Any] = {**words, "mixed_precision": "no", "seed": seed, **config.options}
    began = time.monotonic()
    tune(load_tune_config(flags | {"output_dir": str(folder)}))
    seconds = time.monotonic() - began
    tries = json.loads((folder / "tune.json").read_text())
    _, rows = load_embedding(folder / EMBEDDING)
    after, elsewhere = (drawn.score.share for drawn in judge_rows(concept, rows, num_images=config.num_images))
    winner, steps = tries[0], sum(one["steps"] for one in tries)
    row: dict[str, Any] = {"concept": concept, "seed": seed, "after": after, "elsewhere": elsewhere}
    row |= {"learning_rate": winner["learning_rate"], "vectors": winner["vectors"], "best_step": winner["best_step"]}
    row |= {"steps_in_all": steps, "runs": steps / ONE_RUN, "seconds": seconds}
    if config.all:
        row |= _compare(config, folder, concept, flags, tries)
    return row


def _compare(
    config: TuneWorldConfig, folder: Path, concept: str, flags: dict[str, Any], tries: list[dict[str, Any]]
) -> dict[str, Any]:
    """What the judge says of every try, trained until it has learned."""
    losses, scores = [], []
    for one in tries:
        name = f"lr-{one['learning_rate']:g}-vectors-{one['vectors']}"
        given = {name: value for name, value in flags.items() if name not in ("learning_rates", "vectors")}
        given |= {"learning_rate": one["learning_rate"], "num_vectors": one["vectors"], "stop": "auto"}
        output = folder / TRIES / f"{name}-whole"
        train(load_train_config(given | {"output_dir": str(output), "num_comparison_images": 0, "report_to": "none"}))
        _, rows = load_embedding(output / EMBEDDING)
        drawn = judge_rows(concept, rows, num_images=config.num_images)
        scores.append(statistics.mean(part.score.share for part in drawn))
        curve = [json.loads(line) for line in (output / "validation.jsonl").read_text().splitlines()]
        losses.append(best([(point["step"], point["loss"]) for point in curve])[1])
    return {
        "tries": [
            {name: one[name] for name in ("learning_rate", "vectors", "rounds")} | {"loss": loss, "score": score}
            for one, loss, score in zip(tries, losses, scores, strict=True)
        ],
        # Of the order that tune ends with, and of the lowest loss of each try that went to its end.
        "rank_correlation": rank_correlation([-place for place in range(len(tries))], scores),
        "rank_correlation_of_losses": rank_correlation([-loss for loss in losses], scores),
        "mean_of_tries": statistics.mean(scores),
        "regret": max(scores) - scores[0],
    }


def rank_correlation(one: Sequence[float], other: Sequence[float]) -> float:
    """Spearman's, with mean ranks where values are equal; nan where all of one are."""
    ranked = [
        [statistics.mean(sorted(values).index(v) + k for k in range(values.count(v))) for v in values]
        for values in (list(one), list(other))
    ]
    try:
        return statistics.correlation(*ranked)
    except statistics.StatisticsError:
        return float("nan")


if __name__ == "__main__":
    import tyro

    measure(tyro.cli(TuneWorldConfig, prog="python -m tools.world.tune", use_underscores=True))
