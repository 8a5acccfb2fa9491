"""Do rows that were learned from bad pictures help in the negative prompt? `python -m tools.world.negative` counts.

Rows are trained on pictures that nobody wants (damaged ones, or the judge's "nothing known"). Prompts of the world are
then drawn with such a row as the negative prompt, without one, and with controls: a row that was never trained, and a
word that means nothing bad. A row that helps has to help more than its controls.
"""

from __future__ import annotations

import dataclasses
import json
import random
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from PIL import Image, ImageFilter

from icom.commands.generate import draw_together
from icom.config.train import load_train_config
from icom.evaluate.world import BOTH, Asked, ask, shares
from icom.methods.embedding import random_rows
from icom.methods.embedding_file import load_embedding
from icom.models import loading, pipelines
from icom.training.results import EMBEDDING
from icom.training.train import train
from icom.world.concepts import seen_things
from icom.world.judge import NOTHING, load_judge
from icom.world.scene import draw, random_scene
from tools.world.judge import junk_picture

TOKEN = "<bad>"
BATCH = 16


@dataclass(kw_only=True)
class NegativeConfig:
    """Measure rows of bad pictures in the negative prompt."""

    prompts: int = 128
    """Prompts of the world; each names a colour and a shape."""
    guidance: tuple[float, ...] = (2.0, 5.0)
    """Classifier-free guidance: at little of it more pictures are wrong."""
    num_inference_steps: int = 25
    """Steps of the sampler."""
    max_train_steps: int = 300
    """Steps of each training."""
    seeds: tuple[int, ...] = (0,)
    """Seeds of the trainings."""


def damaged(rng: random.Random) -> Image.Image:
    """A picture of the world, blurred or full of noise."""
    picture = draw(random_scene(rng, seen_things()))
    if rng.random() < 0.5:
        return picture.filter(ImageFilter.GaussianBlur(rng.uniform(1.5, 4)))
    noise = Image.frombytes("RGB", picture.size, rng.randbytes(3 * picture.width * picture.height))
    return Image.blend(picture, noise, rng.uniform(0.3, 0.6))


def nothing_known(rng: random.Random) -> Image.Image:
    """A picture without any object that the judge knows."""
    return junk_picture(random_scene(rng, seen_things()), rng)


BAD: dict[str, Callable[[random.Random], Image.Image]] = {"damaged": damaged, "nothing known": nothing_known}


def learn(kind: str, seed: int, steps: int) -> torch.Tensor:
    """The row of 40 pictures of a kind."""
    with tempfile.TemporaryDirectory() as folder:
        pictures, output = Path(folder, "pictures"), Path(folder, "out")
        pictures.mkdir()
        rng = random.Random(f"{kind} {seed}")
        for number in range(40):
            BAD[kind](rng).save(pictures / f"{number}.png")
        train(
            load_train_config(
                {
                    **{"train_data_dir": str(pictures), "output_dir": str(output), "seed": seed},
                    **{"placeholder_token": TOKEN, "initializer_token": "object", "max_train_steps": steps},
                    **{"num_comparison_images": 0, "report_to": "none", "mixed_precision": "no"},
                }
            )
        )
        return load_embedding(output / EMBEDDING)[1]


def measure(asked: list[Asked], negative: str | None, row: torch.Tensor | None, guidance: float, steps: int) -> str:
    """Draw all prompts and count, as JSON."""
    pipeline = pipelines.pipeline_of(loading.load(loading.find("bundled"), torch.float32))
    if row is not None:
        pipeline.load_textual_inversion({TOKEN: row}, token=TOKEN)
    pictures = []
    for start in range(0, len(asked), BATCH):
        prompts = [one.caption for one in asked[start : start + BATCH]]
        seeds = range(start, start + len(prompts))
        pictures += draw_together(pipeline, prompts, seeds, guidance, steps=steps, negative_prompt=negative)
    verdicts = load_judge().look_at(pictures)
    found = shares(verdicts, asked)
    found = {name: found[name] for name in ("colour", "shape", "pattern", "background", BOTH) if name in found}
    found[NOTHING] = sum(verdict.shape == NOTHING for verdict in verdicts) / len(verdicts)
    return json.dumps({name: round(share, 3) for name, share in found.items()})


def main(config: NegativeConfig) -> None:
    """Print a line of JSON for each negative prompt and guidance."""
    print(json.dumps(dataclasses.asdict(config)))
    asked = ask(config.prompts, seed=3)
    table = loading.load(loading.find("bundled"), torch.float32).text_encoder.get_input_embeddings()
    assert isinstance(table, torch.nn.Embedding)
    tried: list[tuple[str, str | None, torch.Tensor | None]] = [("none", None, None)]
    tried += [("control: the word object", "a photo of an object", None)]
    for seed in config.seeds:
        row = random_rows(table.weight, 1, seed)
        tried += [(f"control: a random row {seed}", f"a photo of {TOKEN}", row)]
        tried += [
            (f"row of {kind} pictures {seed}", f"a photo of {TOKEN}", learn(kind, seed, config.max_train_steps))
            for kind in BAD
        ]
    for guidance in config.guidance:
        for name, negative, row_ in tried:
            found = measure(asked, negative, row_, guidance, config.num_inference_steps)
            print(f"guidance {guidance:g}, {name}: {found}", flush=True)


if __name__ == "__main__":
    import tyro

    main(tyro.cli(NegativeConfig, prog="python -m tools.world.negative", use_underscores=True))
