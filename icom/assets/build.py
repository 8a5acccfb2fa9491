"""Make the bundled model and pictures: `python -m icom.assets.build` writes icom/assets/model and icom/assets/pictures.

The model has the classes and the layout of Stable Diffusion 1.5 at a tiny width, CLIP's tokenizer class with a small
vocabulary of its own, and random weights: it shows that everything works, not pretty pictures.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import torch
from PIL import Image, ImageDraw

from icom.architectures import ARCHITECTURES, build_text_encoder, build_unet, build_vae, fill_random
from icom.captions import TEMPLATES
from icom.images import BUNDLED_PICTURES
from icom.models import BUNDLE, quiet_libraries

ARCHITECTURE = "tiny"
WORDS = (
    "a an and at ball bear beach bed big bird black blue board book bottle bowl box boy bright brown building bus cake "
    "car cartoon cat chair child circle city clock cloud coat coffee colour cup cute dark day dog doll door drawing "
    "elephant field figure fish floor flower food forest fruit garden girl glass grass gray green ground hat holding "
    "horse house in is kitchen lake lamp large light little looking machine man metal moon mountain mug near night "
    "object of on orange painting park person picture pink plane plant plastic plate play purple rabbit red river road "
    "robot room round running sand sea shape shirt shoe sitting sky small snow square standing star stone street "
    "striped style sun sword table teddy that the toy train tree triangle two umbrella under vase wall water wearing "
    "white window with woman wood wooden yellow"
).split()


def build_tokenizer(folder: Path) -> int:
    """Write vocab.json, merges.txt and the tokenizer's configuration; every word of WORDS and of the captions is one
    token.

    Returns:
        The size of the vocabulary.
    """
    from tokenizers import Tokenizer
    from tokenizers.models import BPE
    from tokenizers.pre_tokenizers import ByteLevel, Whitespace
    from tokenizers.trainers import BpeTrainer
    from transformers import CLIPTokenizer

    captions = [template.replace("{}", "") for templates in TEMPLATES.values() for template in templates]
    words = sorted({*WORDS, *" ".join(captions).replace("-", " ").split()})
    trainer = BpeTrainer(vocab_size=10_000, min_frequency=0, end_of_word_suffix="</w>", show_progress=False)
    tokenizer = Tokenizer(BPE(end_of_word_suffix="</w>"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.train_from_iterator(words, trainer)
    merges = [tuple(pair) for pair in json.loads(tokenizer.to_str())["model"]["merges"]]
    alphabet = sorted(ByteLevel.alphabet())
    pieces = [*alphabet, *(f"{c}</w>" for c in alphabet), *("".join(pair) for pair in merges)]
    pieces = [*dict.fromkeys(pieces), "<|startoftext|>", "<|endoftext|>"]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    length = ARCHITECTURES[ARCHITECTURE].text_encoder["max_position_embeddings"]
    CLIPTokenizer(
        vocab=vocabulary,
        merges=merges,  # type: ignore[arg-type]  # pairs are what it takes
        model_max_length=length,
    ).save_pretrained(folder)
    return len(vocabulary)


def build_model(folder: Path) -> None:
    """Write the pipeline: tokenizer, text encoder, VAE, UNet, scheduler."""
    quiet_libraries()
    from diffusers import DDPMScheduler, StableDiffusionPipeline
    from transformers import CLIPTokenizer

    vocabulary = build_tokenizer(folder / "tokenizer")
    text_encoder = build_text_encoder(ARCHITECTURE, vocabulary)
    vae, unet = build_vae(ARCHITECTURE), build_unet(ARCHITECTURE)
    for seed, part in enumerate((text_encoder, vae, unet)):
        fill_random(part, seed)
    with torch.no_grad():
        for name, parameter in unet.named_parameters():
            if "attn2.to_out" in name and parameter.dim() == 2:
                parameter.mul_(6)  # the text has to matter, or there is nothing to learn
    StableDiffusionPipeline(
        vae=vae,
        text_encoder=text_encoder,
        tokenizer=CLIPTokenizer.from_pretrained(folder / "tokenizer"),
        unet=unet,
        scheduler=DDPMScheduler(**ARCHITECTURES[ARCHITECTURE].scheduler),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    ).save_pretrained(folder)
    for path in folder.rglob("*.safetensors"):
        path.chmod(0o644)


def robot(background: str, body: str, lean: float, size: int, place: tuple[float, float]) -> Image.Image:
    """Draw a toy robot.

    Args:
        background: colour.
        body: colour.
        lean: degrees.
        size: pixels of the square picture.
        place: of the robot's middle, in parts of the size.
    """
    scale = 4  # drawn larger and reduced, for smooth edges
    side = size * scale
    sheet = Image.new("RGBA", (side, side), (0, 0, 0, 0))
    draw = ImageDraw.Draw(sheet)

    def box(left: float, top: float, right: float, bottom: float) -> tuple[float, ...]:
        return tuple(side * value for value in (left, top, right, bottom))

    for x in (0.4, 0.53):  # legs
        draw.rounded_rectangle(box(x, 0.66, x + 0.08, 0.84), side * 0.02, fill="dimgray")
    for x in (0.22, 0.71):  # arms
        draw.rounded_rectangle(box(x, 0.46, x + 0.07, 0.66), side * 0.03, fill="dimgray")
    draw.rounded_rectangle(box(0.31, 0.42, 0.69, 0.68), side * 0.04, fill=body, outline="black", width=side // 90)
    draw.rounded_rectangle(box(0.35, 0.18, 0.65, 0.4), side * 0.05, fill=body, outline="black", width=side // 90)
    draw.line(box(0.5, 0.18, 0.5, 0.1), fill="black", width=side // 60)
    draw.ellipse(box(0.47, 0.06, 0.53, 0.12), fill="gold")
    for x in (0.4, 0.53):  # eyes
        draw.ellipse(box(x, 0.24, x + 0.07, 0.31), fill="white", outline="black", width=side // 120)
        draw.ellipse(box(x + 0.02, 0.26, x + 0.05, 0.29), fill="black")
    draw.rectangle(box(0.42, 0.34, 0.58, 0.36), fill="black")
    draw.ellipse(box(0.45, 0.5, 0.55, 0.6), fill="gold", outline="black", width=side // 120)
    offset = tuple(round(side * (value - 0.5)) for value in place)
    sheet = sheet.rotate(lean, Image.Resampling.BICUBIC)
    picture = Image.new("RGB", (side, side), background)
    picture.paste(sheet, (offset[0], offset[1]), sheet)
    return picture.resize((size, size), Image.Resampling.LANCZOS)


def build_pictures(folder: Path) -> None:
    """Write five pictures of one toy robot in different places."""
    folder.mkdir(parents=True, exist_ok=True)
    backgrounds = ("lightblue", "beige", "palegreen", "lavender", "lightsalmon")
    for index, background in enumerate(backgrounds):
        angle = 2 * math.pi * index / len(backgrounds)
        place = (0.5 + 0.08 * math.cos(angle), 0.5 + 0.05 * math.sin(angle))
        picture = robot(background, "firebrick", lean=8 * math.sin(3 * angle), size=256, place=place)
        picture.save(folder / f"{index}.png", optimize=True)


if __name__ == "__main__":
    build_model(BUNDLE)
    build_pictures(BUNDLED_PICTURES)
