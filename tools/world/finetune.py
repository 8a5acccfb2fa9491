"""Teach the bundled model a held-out thing by its whole UNet, and measure: `python -m tools.world.finetune`.

Writes the world's pictures as tars, trains as docs/finetune.md has it, and asks the judge what the new word draws, and
whether the old prompts still draw what they did.
"""

from __future__ import annotations

import itertools
import json
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, get_args

from omegaconf import OmegaConf

from icom.commands.demo import draw_prompts
from icom.config.demo import ConceptName
from icom.config.finetune import load_finetune_config
from icom.evaluate.world import BOTH, ask, shares
from icom.training.checkpoint_folders import PIPELINE
from icom.training.finetune import finetune
from icom.training.report import grid, save_png
from icom.world.concepts import CONCEPTS
from icom.world.judge import load_judge
from icom.world.scene import BACKGROUNDS
from tools.world.shards import ShardsConfig, write_shards

RECIPE: dict[str, Any] = {
    "train_batch_size": 16,
    "max_train_steps": 500,
    "learning_rate": 6e-4,
    "lr_scheduler": "cosine",
    "lr_warmup_steps": 20,
    "report_to": "none",
}
"""Options of `icom finetune`."""


@dataclass(kw_only=True)
class TeachConfig:
    """Fine-tune the bundled model on held-out things, and let the judge count."""

    concepts: tuple[ConceptName, ...] = get_args(ConceptName)
    """What to teach, one after the other, each from the bundled model."""
    seeds: tuple[int, ...] = (0, 1)
    """Seeds of pictures, captions and trainings."""
    word: str = "blicket"
    """The new noun."""
    new: int = 768
    """Pictures of the new thing."""
    old: int = 256
    """Pictures of what the model knows already, mixed with them; 0: none."""
    num_images: int = 48
    """Pictures of the new thing to judge for each way of naming it; every second one names a background."""
    num_old: int = 200
    """Pictures of old prompts to judge."""
    train: dict[str, str] = field(default_factory=dict)
    """Training options to try instead of the recipe's, as pairs: --train learning_rate 1e-4."""
    output_dir: Path = Path("world-finetuned")
    """Folder for tars, trainings, pictures and results.jsonl."""


@dataclass(frozen=True)
class Shares:
    """Of pictures that are right, from 0 to 1.

    Attributes:
        word: of prompts with the new word: colour, pattern, shape, and the background where the prompt names one.
        described: the same of prompts that name colour, pattern and shape.
        old: of prompts for what the model knew already: colour and shape.
    """

    word: float
    described: float
    old: float


def teach(config: TeachConfig) -> None:
    """Train and judge each concept with each seed; a row of results.jsonl for each."""
    pairs = [f"{name}={text}" for name, text in config.train.items()]
    tried: Any = OmegaConf.to_container(OmegaConf.from_dotlist(pairs))
    for concept, seed in itertools.product(config.concepts, config.seeds):
        folder = config.output_dir / f"{concept}-{seed}"
        data = write_data(folder / "data", concept, config.word, seed, new=config.new, old=config.old)
        flags = RECIPE | tried | {"seed": seed, "train_data_dir": str(data), "output_dir": str(folder / "out")}
        began = time.monotonic()
        finetune(load_finetune_config(flags))
        seconds = time.monotonic() - began
        model = str(folder / "out" / PIPELINE)
        scores = judged(folder, model, concept, config.word, num_images=config.num_images, num_old=config.num_old)
        row = {"concept": concept, "seed": seed, **asdict(scores), "seconds": round(seconds), "train": config.train}
        row |= {"new_pictures": config.new, "old_pictures": config.old}
        print(json.dumps(row), flush=True)
        with (config.output_dir / "results.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")


def write_data(folder: Path, concept: ConceptName, word: str, seed: int, *, new: int, old: int) -> Path:
    """Tars of the new thing and of the others, in folders beside each other; what is there stays.

    Args:
        folder: for them.
        concept: the new thing.
        word: its noun.
        seed: of scenes and captions.
        new: pictures of it.
        old: pictures of the others.

    Returns:
        The folder.
    """
    for part in (
        ShardsConfig(output_dir=folder / "new", things=concept, word=word, pictures=new, seed=seed),
        ShardsConfig(output_dir=folder / "old", pictures=old, seed=seed),
    ):
        if part.pictures and not part.output_dir.exists():
            write_shards(part)
    return folder


def judged(folder: Path, model: str, concept: ConceptName, word: str, *, num_images: int, num_old: int) -> Shares:
    """Draw with a model and let the judge count.

    Args:
        folder: for the pictures.
        model: folder of a pipeline, or `bundled`.
        concept: what was taught.
        word: its noun.
        num_images: pictures of it for each way of naming it; every second one names a background, too.
        num_old: pictures of captions of the world, as `icom.evaluate.world.ask` gives them.
    """
    thing, judge = CONCEPTS[concept], load_judge()
    places = ["", *BACKGROUNDS]
    found: dict[str, float] = {}
    for name, noun in (("word", word), ("described", f"{thing.colour} {thing.pattern} {thing.shape}")):
        named = [places[(index + 1) // 2 % len(places)] if index % 2 else "" for index in range(num_images)]
        pictures = draw_prompts(
            [f"a photo of a {noun} {place}".strip() for place in named], what=noun, model_name=model
        )
        save_png(grid(pictures, columns=8), folder / f"{name}.png")
        verdicts = judge.look_at(pictures)
        right = [v.thing == thing and place in ("", v.background) for v, place in zip(verdicts, named, strict=True)]
        found[name] = sum(right) / len(right)
    asked = ask(num_old, seed=2)
    pictures = draw_prompts([one.caption for one in asked], what="old prompts", model_name=model)
    save_png(grid(pictures[:32], columns=8), folder / "old.png")
    return Shares(**found, old=shares(judge.look_at(pictures), asked)[BOTH])


if __name__ == "__main__":
    import tyro

    teach(tyro.cli(TeachConfig, prog="python -m tools.world.finetune", use_underscores=True))
