"""`icom evaluate --embedding RUN`: how like the pictures of a learned word are to those that it was learned from."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from icom import __version__
from icom.commands.generate import Studio, all_prompts, prepare
from icom.config.common import flat
from icom.config.evaluate import EvaluateConfig
from icom.config.rows import RANDOM
from icom.config.words import placeholder_tokens
from icom.data.caption_reading import marked
from icom.data.captions import WORD
from icom.data.images import list_pictures, read_picture
from icom.errors import UsageError
from icom.evaluate.encoders import Encoder, open_encoder
from icom.evaluate.learned import Learned, add_start, check_steps, open_learned, steps_to_score
from icom.evaluate.likeness import alignment, among_themselves, likeness
from icom.evaluate.networks import Clip
from icom.evaluate.pictures import Plan, draw_missing, drawn_by, keep_settings, settings_of
from icom.evaluate.scores import see
from icom.evaluate.word_report import IMAGES, TEXT, best_step, show, write_card, write_curve
from icom.files import write_atomically
from icom.methods.embedding import filled
from icom.models import loading
from icom.parallel.group import Group
from icom.training.lock import only_run_in
from icom.world.concepts import CONCEPTS, new_backgrounds
from icom.world.judge import load_judge
from icom.world.scene import SIZE

if TYPE_CHECKING:
    from PIL import Image

    from icom.data.images import Picture

PROMPTS = {
    "object": ("a photo of {}", "a photo of {} on a beach", "a photo of {} in a forest", "a painting of {}"),
    "style": tuple(f"{what} in the style of {{}}" for what in ("a house", "a harbour", "a portrait", "a forest")),
}
"""The word alone, and in contexts that its pictures do not show; nothing else of it is asked."""
PICTURES = 8
"""Of each step, where nobody says how many."""
RESULTS, CURVE = "results.json", "curve.png"


@dataclasses.dataclass(frozen=True)
class Networks:
    """What rank 0 scores with.

    Attributes:
        encoder: compares pictures.
        name: of it.
        clip: compares pictures with words; None where there is none.
        real: the training pictures.
        plain: the prompts with the initializer in the word's place; empty where nobody knows it.
    """

    encoder: Encoder
    name: str
    clip: Clip | None
    real: Sequence[Picture]
    plain: Sequence[str]


def draw_word(config: EvaluateConfig, group: Group, until_all_is_written: ExitStack) -> Callable[[], None] | None:
    """Draw what is missing, in all processes.

    Returns:
        What is left to rank 0: to score all.

    Raises:
        IcomError: embedding, model, training pictures, encoder or output folder are no good.
        UsageError: steps or prompts that cannot be, or the output folder holds other pictures.
    """
    learned = open_learned(config)
    check_steps(learned, flat(config.steps))
    concept = _concept(config, learned)
    prompts = _prompts(config, learned, concept)
    place = config.pretrained_model_name_or_path or learned.settings.get("pretrained_model_name_or_path") or "bundled"
    source = loading.find(str(place), tokenizer_name=None, revision=config.revision, variant=config.variant)
    # What is missing is told before the hours of drawing.
    networks = _networks(config, learned, prompts, source.folder) if group.leads else None
    output = Path(config.output_dir or (learned.folder or Path()) / "evaluation" / learned.name)
    count = config.num_images or max(PICTURES, len(prompts))
    said = [filled(prompt, [learned.token]) for prompt in prompts]
    (guidance,) = config.scales
    named = dataclasses.replace(config, pretrained_model_name_or_path=str(place))
    studio = prepare(named, said, output, guided=guidance > 1, place=group.place, digest=True, words=[learned.word()])
    add_start(learned, studio.pipeline, config.initializer_token)
    steps = steps_to_score(learned, flat(config.steps))
    settings = settings_of(config, studio, count) | {"guidance_scale": guidance}
    group.agree("The settings", settings | {"steps": [learned.group(step) for step in steps]})
    if group.leads:
        print(f"icom: {studio.backend.describe()} ({studio.reason})", flush=True)
        until_all_is_written.enter_context(only_run_in(output))
    keep_settings(output, settings, group)
    plan = Plan(output, [learned.group(step) for step in steps], count, config.batch_size)

    def draw(number: int, numbers: Sequence[int]) -> list[tuple[Image.Image, str]]:
        put_rows(studio, learned.token, learned.rows[steps[number]])
        return drawn_by(config, studio, numbers, guidance)

    drawn = draw_missing(plan, draw, group)
    if networks is None:
        return None
    total = plan.count * len(steps)
    print(f"icom: drew {drawn:,} pictures, {total - drawn:,} of {total:,} were there.", flush=True)
    groups = dict(zip(steps, plan.groups, strict=True))
    return partial(_score, config, learned, networks, studio.model, groups, plan, said, concept)


def put_rows(studio: Studio, token: str, rows: torch.Tensor) -> None:
    """Let the word mean these rows, (vectors, width)."""
    ids = studio.pipeline.tokenizer.convert_tokens_to_ids(placeholder_tokens(token, len(rows)))
    table = studio.pipeline.text_encoder.get_input_embeddings().weight
    with torch.no_grad():
        table[ids] = rows.to(table)


def _pictures_in(config: EvaluateConfig, learned: Learned) -> str:
    place = config.train_data_dir or learned.settings.get("train_data_dir")
    if place:
        return str(place)
    raise UsageError(
        f"Nobody knows which pictures {learned.token} was learned from: no config.yaml lies beside it. Name their "
        "folder with --train_data_dir."
    )


def _concept(config: EvaluateConfig, learned: Learned) -> str | None:
    """The concept of the bundled world that the word was learned from, which the judge knows."""
    kind, _, name = _pictures_in(config, learned).partition(":")
    model = config.pretrained_model_name_or_path or learned.settings.get("pretrained_model_name_or_path", "bundled")
    if kind != "bundled" or model != "bundled":
        return None
    return name or min(CONCEPTS)


def _prompts(config: EvaluateConfig, learned: Learned, concept: str | None) -> list[str]:
    """With WORD for the word."""
    if config.prompt or config.prompts_file:
        prompts = [marked(prompt, [learned.token], f"The prompt {prompt!r}") for prompt in all_prompts(config)]
        if not any(WORD in prompt for prompt in prompts):
            raise UsageError(
                f'No prompt says {learned.token}. Write it, or [name], as in --prompt "a photo of [name]".'
            )
        return prompts
    if concept:
        return [f"a photo of {WORD}", *(f"a photo of {WORD} {where}" for where in new_backgrounds(concept)[:3])]
    return list(PROMPTS["style" if learned.settings.get("learnable_property") == "style" else "object"])


def _networks(config: EvaluateConfig, learned: Learned, prompts: Sequence[str], model: Path | None) -> Networks:
    place = _pictures_in(config, learned)
    real = list_pictures(place)
    encoder, name = open_encoder(config.image_encoder or config.clip_model, model)
    clip = encoder if isinstance(encoder, Clip) else Clip(config.clip_model) if config.clip_model else None
    word = config.initializer_token or learned.settings.get("initializer_token")
    plain = [filled(prompt, [word]) for prompt in prompts] if word and word != RANDOM else []
    if clip and not plain:
        print("icom: no text alignment: --initializer_token is missing, which prompts say in the word's place.")
    return Networks(encoder, name, clip if plain else None, real, plain)


def _score(
    config: EvaluateConfig,
    learned: Learned,
    networks: Networks,
    model: str,
    groups: dict[int, str],
    plan: Plan,
    prompts: Sequence[str],
    concept: str | None,
) -> None:
    seeing: dict[str, Any] = {"encoder": networks.encoder}
    pictures = [read_picture(picture.path) for picture in networks.real]
    real = see(seeing, pictures, len(pictures), "training pictures")["encoder"]
    if networks.clip and networks.clip is not networks.encoder:
        seeing["clip"] = networks.clip
    texts = networks.clip.read(networks.plain) if networks.clip else None
    rows: list[dict[str, Any]] = []
    for step, group in groups.items():
        seen = see(seeing, plan.pictures(group), plan.count, f"scores of step {step}")
        like = likeness(seen["encoder"], real)
        row: dict[str, Any] = {"step": step, IMAGES: like.mean, "error": like.error, "nearest": like.nearest}
        if texts is not None:
            row[TEXT] = alignment(seen.get("clip", seen["encoder"]), texts[np.arange(plan.count) % len(texts)])
        if concept and config.resolution in (None, SIZE):
            row["judge"] = _judged(concept, plan, group, prompts)
        rows.append(row)
    best = best_step(rows)
    result: dict[str, Any] = {
        "icom": __version__,
        "word": learned.token,
        "model": model,
        "image_encoder": networks.name,
        "training_pictures": len(pictures),
        "pictures": plan.count,
        "prompts": list(prompts),
        "seed": config.seed,
        "guidance_scale": config.scales[0],
        "scheduler": config.scheduler,
        "num_inference_steps": config.num_inference_steps,
        "among_training_pictures": among_themselves(real),
        "best_step": best,
        "scores": rows,
    }
    content = json.dumps(result, indent=1, ensure_ascii=False) + "\n"
    write_atomically(plan.folder / RESULTS, content.encode())
    write_curve(result, plan.folder / CURVE)
    show(result)
    card = write_card(learned.folder, learned.name, result) if learned.folder else None
    where = f", and in the model card {card}" if card else ""
    print(f"Scores in {plan.folder / RESULTS}, their curve in {plan.folder / CURVE}{where}.")


def _judged(concept: str, plan: Plan, group: str, prompts: Sequence[str]) -> float:
    """The share of pictures that show the concept, in the context that the prompt names."""
    thing, backgrounds = CONCEPTS[concept], new_backgrounds(concept)
    verdicts = load_judge().look_at(list(plan.pictures(group)))
    right = []
    for number, verdict in enumerate(verdicts):
        asked = [where for where in backgrounds if where in prompts[number % len(prompts)]]
        right.append(verdict.thing == thing and (not asked or verdict.background in asked))
    return sum(right) / len(right)
