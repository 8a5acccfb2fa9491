"""Which rule ends a run best? `python -m tools.world.stopping` trains the bundled concepts and asks the judge.

Each run goes to its last step, and leaves its rows at every validation. The rules then read the curves as if they had
seen them grow, and the judge looks at the rows that each would have left: those of its last step, and those that are
kept.
"""

from __future__ import annotations

import itertools
import json
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, get_args

from icom.commands.demo import INITIALIZER, TOKEN, judge_rows
from icom.config.demo import ConceptName
from icom.config.train import load_train_config
from icom.methods.embedding_file import load_embedding
from icom.training.stopping import Curve, chosen, is_learned
from icom.training.train import train
from icom.training.train_validation import steps_between
from icom.training.validation import FILE

Rule = Callable[[Curve], bool]


def dvar(curve: Curve, window: int, share: float = 0.15) -> bool:
    """Voronov et al. 2023 (arXiv:2302.04841): the variance of the last `window` losses, over that of all, is small."""
    losses = [loss for _, loss in curve]
    return len(losses) > window and statistics.pvariance(losses[-window:]) < share * statistics.pvariance(losses)


RULES: dict[str, Rule] = {
    "--max_train_steps": lambda curve: False,
    "--stop auto": is_learned,
    **{f"DVAR, last {window} losses": partial(dvar, window=window) for window in (5, 10, 20)},
}


@dataclass(kw_only=True)
class StoppingConfig:
    """Compare rules that end a run."""

    concepts: tuple[ConceptName, ...] = get_args(ConceptName)
    """Concept sets."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Seeds."""
    num_images: int = 16
    """Pictures of each kind that the judge looks at."""
    train: dict[str, str] = field(default_factory=dict)
    """Training options to try, as pairs."""
    output_dir: Path = Path("world-stopping")
    """Folder for the runs, scores.jsonl, and the table."""


def compare(config: StoppingConfig) -> None:
    """Train what is not trained yet, judge, and print a table."""
    found: dict[str, list[dict[str, float]]] = {}
    for concept, seed in itertools.product(config.concepts, config.seeds):
        folder = config.output_dir / f"{concept}-{seed}"
        curve = _curve(config, folder, concept, seed)
        for name, rule in RULES.items():
            last = next((curve[count - 1][0] for count in range(1, len(curve) + 1) if rule(curve[:count])), None)
            end = curve[-1][0] if last is None else last
            kept = chosen([point for point in curve if point[0] <= end])[0]
            row: dict[str, float] = {"steps": end, "kept": kept, "ended": last is not None}
            for what, step in (("last", end), ("kept", kept)):
                scores = _scores(config, folder, concept, step)
                row |= {f"{what} {kind}": share for kind, share in scores.items()}
            found.setdefault(name, []).append(row)
    keys = ("steps", "ended", "last after", "last elsewhere", "kept after", "kept elsewhere")
    print(f"| rule | {' | '.join(keys)} |\n{'|---' * (len(keys) + 1)}|")
    for name, rows in found.items():
        means = [statistics.mean(float(row[key]) for row in rows) for key in keys]
        print(f"| {name} | {means[0]:.0f} | {' | '.join(f'{mean:.1%}' for mean in means[1:])} |")


def _curve(config: StoppingConfig, folder: Path, concept: str, seed: int) -> list[tuple[int, float]]:
    if not (folder / "learned_embeds.safetensors").exists():
        words = {"train_data_dir": f"bundled:{concept}", "placeholder_token": TOKEN, "initializer_token": INITIALIZER}
        flags: dict[str, Any] = {**words, "mixed_precision": "no", "seed": seed, "output_dir": str(folder)}
        flags |= {"validation_share": 0.1, "num_comparison_images": 0, "report_to": "none", **config.train}
        settled = load_train_config(flags)
        every = steps_between(settled.share_for_validation, settled.samples_per_step(1))
        train(load_train_config(flags | {"save_steps": every}))
    return [(row["step"], row["loss"]) for row in map(json.loads, (folder / FILE).read_text().splitlines())]


def _scores(config: StoppingConfig, folder: Path, concept: str, step: int) -> dict[str, float]:
    """The judge's, of the rows of a step; what it has said once is kept."""
    file = config.output_dir / "scores.jsonl"
    key = [folder.name, step, config.num_images]
    for line in file.read_text().splitlines() if file.exists() else []:
        if (told := json.loads(line))["key"] == key:
            scores: dict[str, float] = told["scores"]
            return scores
    _, rows = load_embedding(folder / f"learned_embeds-steps-{step}.safetensors")
    after, elsewhere = judge_rows(concept, rows, num_images=config.num_images)
    scores = {"after": after.score.share, "elsewhere": elsewhere.score.share}
    with file.open("a") as out:
        out.write(json.dumps({"key": key, "scores": scores}) + "\n")
    return scores


if __name__ == "__main__":
    import tyro

    compare(tyro.cli(StoppingConfig, prog="python -m tools.world.stopping", use_underscores=True))
