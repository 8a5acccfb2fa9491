"""Measure the bundled model: `make evaluate-bundled` writes benchmarks/bundled-model.md and .json.

Three questions: does the judge know the world's pictures, does the model draw what a prompt says, and are concepts
that it has never seen learned from five pictures?
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import random
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from icom.bench.command import this_machine
from icom.commands.demo import GUIDANCE, Learned, draw_prompts, learn
from icom.config.demo import ConceptName
from icom.config.train import BUNDLED_DEFAULTS
from icom.evaluate.world import BOTH, NAMED, ask, shares
from icom.files import make_writable_folder, write_atomically
from icom.training.outcome import read_outcome
from icom.training.report import grid, save_png
from icom.world.concepts import EVERYTHING
from icom.world.judge import HEADS, load_judge
from icom.world.scene import draw, random_scene

Question = Literal["judge", "prompts", "concepts"]

ALIKE = {"mixed_precision": "no"}
"""Instead of the default, so that machines with and without bf16 measure the same thing."""


@dataclass(kw_only=True)
class EvaluateConfig:
    """Measure the judge, the bundled model and the learning of concepts."""

    questions: tuple[Question, ...] = ("judge", "prompts", "concepts")
    """What to measure."""
    concepts: tuple[ConceptName, ...] = get_args(ConceptName)
    """Concept sets to learn."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Seeds of the trainings."""
    num_images: int = 16
    """Pictures of each kind per training."""
    train: dict[str, str] = field(default_factory=dict)
    """Training options to try instead of the defaults, as pairs: --train learning_rate 5e-3 num_vectors 2."""
    output_dir: Path = Path("benchmarks")
    """Folder for bundled-model.json, bundled-model.md and bundled-model.png."""


def evaluate(config: EvaluateConfig) -> None:
    """Measure what `config` names, print it, and write it."""
    make_writable_folder(config.output_dir)
    training = BUNDLED_DEFAULTS | ALIKE | config.train
    result: dict[str, Any] = {"machine": this_machine(), "guidance": GUIDANCE, "training": training}
    if "judge" in config.questions:
        result["judge"] = judge_accuracy(2000, seed=1)
    if "prompts" in config.questions:
        result["prompts"] = prompt_accuracy(200, seed=2, sheet=config.output_dir / "bundled-model.png")
    if "concepts" in config.questions:
        result["concepts"] = concept_scores(config)
    text = to_markdown(result)
    print(text)
    write_atomically(config.output_dir / "bundled-model.json", (json.dumps(result, indent=1) + "\n").encode())
    write_atomically(config.output_dir / "bundled-model.md", text.encode())


def judge_accuracy(count: int, seed: int) -> dict[str, float]:
    """Share of right answers per question, and of pictures with all right, on fresh pictures of the whole world."""
    rng = random.Random(f"judge test {seed}")
    scenes = [random_scene(rng, EVERYTHING) for _ in range(count)]
    verdicts = load_judge().look_at([draw(scene) for scene in scenes])
    wanted = [dataclasses.asdict(scene.thing) | dataclasses.asdict(scene) for scene in scenes]
    pairs = list(zip(verdicts, wanted, strict=True))
    shares = {head: sum(getattr(v, head) == w[head] for v, w in pairs) / count for head in HEADS}
    return {
        "pictures": count,
        **shares,
        "all": sum(all(getattr(v, h) == w[h] for h in HEADS) for v, w in pairs) / count,
    }


def prompt_accuracy(count: int, seed: int, sheet: Path) -> dict[str, float]:
    """Draw captions of the world and ask the judge for every attribute that a caption names.

    Args:
        count: captions; each names a colour and a shape.
        seed: of the captions.
        sheet: PNG for the first 32 pictures.
    """
    asked = ask(count, seed)
    pictures = draw_prompts([one.caption for one in asked])
    save_png(grid(pictures[:32], columns=8), sheet)
    found = shares(load_judge().look_at(pictures), asked)
    return {"prompts": count, **{name: found[name] for name in (*NAMED, BOTH)}}


def concept_scores(config: EvaluateConfig) -> list[dict[str, Any]]:
    """Scores of every concept and seed."""
    rows = []
    for concept, seed in itertools.product(config.concepts, config.seeds):
        with tempfile.TemporaryDirectory() as folder:
            flags: dict[str, Any] = {**ALIKE, **config.train, "seed": seed, "output_dir": folder}
            learned = learn(concept, flags, num_images=config.num_images)
            steps = read_outcome(Path(folder)).step
        row = {"concept": concept, "seed": seed, **_shares(learned), "steps": steps}
        rows.append({**row, "seconds": round(learned.seconds, 1)})
        print(json.dumps(rows[-1]), flush=True)
    return rows


def _shares(learned: Learned) -> dict[str, float]:
    return {when: getattr(learned, when).score.share for when in ("before", "after", "elsewhere")}


def to_markdown(result: dict[str, Any]) -> str:
    """The result as tables for people."""
    lines = ["# The bundled model, measured", "", "Made by `make evaluate-bundled`.", ""]
    for question, title in (("judge", "The judge on pictures of the world"), ("prompts", "Prompted pictures")):
        if question in result:
            values = result[question]
            lines += [f"## {title}", "", "| " + " | ".join(values) + " |", "|---" * len(values) + "|"]
            cells = (f"{value:.1%}" if isinstance(value, float) else str(value) for value in values.values())
            lines += ["| " + " | ".join(cells) + " |", ""]
    if "concepts" in result:
        rows = result["concepts"]
        lines += ["## Concepts", "", "Share of pictures that are right.", ""]
        lines += ["| concept | seed | before | after | new context | steps | training |", "|---" * 7 + "|"]
        for row in rows:
            shares = (f"{row[when]:.0%}" for when in ("before", "after", "elsewhere"))
            about = [row["concept"], str(row["seed"]), *shares, str(row["steps"]), f"{row['seconds']:.0f} s"]
            lines.append(f"| {' | '.join(about)} |")
        means = (f"{sum(row[when] for row in rows) / len(rows):.1%}" for when in ("before", "after", "elsewhere"))
        steps, seconds = (sum(row[name] for row in rows) / len(rows) for name in ("steps", "seconds"))
        lines += [f"| **mean** | | {' | '.join(means)} | {steps:.0f} | {seconds:.0f} s |", ""]
    return "\n".join(lines)


if __name__ == "__main__":
    import tyro

    evaluate(tyro.cli(EvaluateConfig, prog="python -m tools.world.evaluate", use_underscores=True))
