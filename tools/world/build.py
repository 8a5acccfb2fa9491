"""Make what ships with icom from a seed: `python -m tools.world.build` (see `--help`).

Writes the bundled model, the judge and the concept sets; takes about an hour and a half on two cores.
"""

from __future__ import annotations

import copy
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from transformers import CLIPTokenizer

from icom.bench.command import this_machine
from icom.data.captions import TEMPLATES
from icom.data.images import BUNDLED_CONCEPTS
from icom.engine.memory import keep_freed_memory
from icom.models import loading
from icom.models.architectures import ARCHITECTURES
from icom.models.parts import TEXT_ENCODER, UNET, VAE
from icom.training.report import save_png
from icom.world.concepts import CONCEPTS, concept_scenes
from icom.world.judge import WEIGHTS, Judge
from icom.world.scene import BACKGROUNDS, COLOURS, GENERIC, NAMES, PATTERNS, PLACES, SHAPES, SIZES, draw
from tools.world.judge import train_judge
from tools.world.training import Log, encode_world, train_decoder, train_denoiser, train_vae

if TYPE_CHECKING:
    from diffusers import AutoencoderKL

ARCHITECTURE = "tiny"

Part = Literal["tokenizer", "judge", "vae", "decoder", "unet", "concepts"]


@dataclass(kw_only=True)
class BuildConfig:
    """Make the bundled model, the judge and the concept sets from a seed."""

    parts: tuple[Part, ...] = ("judge", "vae", "decoder", "unet", "concepts")
    """What to make anew, in this order; the rest stays as it is in --output_dir. `unet` is the text encoder too."""
    output_dir: Path = loading.BUNDLE.parent
    """Folder for model/, judge.safetensors and concepts/."""
    log: Path = Path("docs/bundled-model.jsonl")
    """File for losses and durations; lines of parts that are made anew are appended."""
    seed: int = 0
    """Of initial weights, pictures, captions and noise."""
    judge_steps: int = 2500
    """Optimizer steps of the judge, 64 pictures each."""
    vae_steps: int = 4800
    """Optimizer steps of the VAE, 16 pictures each."""
    decoder_steps: int = 4000
    """Further steps of the VAE's decoder alone, 16 pictures each."""
    unet_steps: int = 6000
    """Optimizer steps of UNet and text encoder, 64 pictures each."""
    unet_pictures: int = 48_000
    """Pictures that UNet and text encoder see, with ever new captions."""


def build(config: BuildConfig) -> None:
    """Make the parts that `config` names."""
    keep_freed_memory()
    loading.quiet_libraries()
    folder = config.output_dir / "model"
    makers = {
        "tokenizer": lambda: build_tokenizer(folder / "tokenizer"),
        "judge": lambda: make_judge(config),
        "vae": lambda: make_vae(config, folder),
        "decoder": lambda: make_decoder(config, folder),
        "unet": lambda: make_unet(config, folder),
        "concepts": lambda: make_concepts(config.output_dir / BUNDLED_CONCEPTS.name),
    }
    config.log.parent.mkdir(parents=True, exist_ok=True)
    for part in config.parts:
        began = time.monotonic()
        torch.manual_seed(config.seed)
        makers[part]()
        seconds = round(time.monotonic() - began)
        row = {"part": part, "done": True, "seconds": seconds, "seed": config.seed, "machine": this_machine()}
        with config.log.open("a", encoding="utf-8") as log:
            log.write(json.dumps(row) + "\n")


def words() -> list[str]:
    """All words of the world's captions."""
    phrases = [template.replace("{}", "") for templates in TEMPLATES.values() for template in templates]
    phrases += [*COLOURS, *PATTERNS, *SHAPES, *SIZES, *PLACES, *BACKGROUNDS, *NAMES, *GENERIC]
    return sorted(set(" ".join(phrases).replace("-", " ").split()))


def build_tokenizer(folder: Path) -> None:
    """Write CLIP's byte-pair tokenizer with a vocabulary in which every word of the world is one token.

    Its trainer numbers equally frequent pieces of words in no fixed order: that is why this part is not made anew
    unless asked for. A model belongs to the tokenizer that it was trained with.
    """
    from tokenizers import Tokenizer
    from tokenizers.models import BPE
    from tokenizers.pre_tokenizers import ByteLevel, Whitespace
    from tokenizers.trainers import BpeTrainer

    trainer = BpeTrainer(vocab_size=10_000, min_frequency=0, end_of_word_suffix="</w>", show_progress=False)
    tokenizer = Tokenizer(BPE(end_of_word_suffix="</w>"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.train_from_iterator(words(), trainer)
    merges = [tuple(pair) for pair in json.loads(tokenizer.to_str())["model"]["merges"]]
    alphabet = sorted(ByteLevel.alphabet())
    pieces = [*alphabet, *(f"{c}</w>" for c in alphabet), *("".join(pair) for pair in merges)]
    pieces = [*dict.fromkeys(pieces), "<|startoftext|>", "<|endoftext|>"]
    CLIPTokenizer(
        vocab={piece: index for index, piece in enumerate(pieces)},
        merges=merges,  # type: ignore[arg-type]  # pairs are what it takes
        model_max_length=ARCHITECTURES[ARCHITECTURE].text_encoder["max_position_embeddings"],
    ).save_pretrained(folder)


def make_judge(config: BuildConfig) -> None:
    """Train the judge and write it, float16."""
    from safetensors.torch import save_file

    judge = Judge()
    train_judge(
        judge, config.seed, steps=config.judge_steps, batch=64, log=Log(config.log, "judge", config.judge_steps)
    )
    tensors = {name: tensor.half() for name, tensor in judge.state_dict().items()}
    save_file(tensors, config.output_dir / WEIGHTS.name)


def make_vae(config: BuildConfig, folder: Path) -> None:
    """Train the VAE and write it, float16."""
    vae = VAE.build(ARCHITECTURES[ARCHITECTURE]).to(memory_format=torch.channels_last)
    train_vae(vae, config.seed, steps=config.vae_steps, batch=16, log=Log(config.log, "vae", config.vae_steps))
    _float16(vae).save_pretrained(folder / "vae")


def make_decoder(config: BuildConfig, folder: Path) -> None:
    """Train the decoder of the VAE that is there."""
    vae = load_vae(folder)
    log = Log(config.log, "decoder", config.decoder_steps)
    train_decoder(vae, config.seed, steps=config.decoder_steps, batch=16, log=log)
    _float16(vae).save_pretrained(folder / "vae")


def load_vae(folder: Path) -> AutoencoderKL:
    """The VAE that is there, in float32."""
    from diffusers import AutoencoderKL

    vae: AutoencoderKL = AutoencoderKL.from_pretrained(folder / "vae").float().to(memory_format=torch.channels_last)
    vae.register_to_config(_name_or_path="")  # a folder of this machine, which would be saved with it
    return vae


def make_unet(config: BuildConfig, folder: Path) -> None:
    """Train UNet and text encoder with the VAE that is there, and write the whole pipeline, float16."""
    from diffusers import DDPMScheduler, StableDiffusionPipeline

    tokenizer = CLIPTokenizer.from_pretrained(folder / "tokenizer")
    vae = load_vae(folder)
    text_encoder = TEXT_ENCODER.build(ARCHITECTURES[ARCHITECTURE].with_vocabulary(len(tokenizer)))
    unet = UNET.build(ARCHITECTURES[ARCHITECTURE]).to(memory_format=torch.channels_last)
    noise_scheduler = DDPMScheduler(**ARCHITECTURES[ARCHITECTURE].scheduler)
    latents = encode_world(vae, config.seed, config.unet_pictures)

    def save() -> None:
        tokenizer.backend_tokenizer.no_padding()  # of its last use: it would go into its file
        StableDiffusionPipeline(
            vae=_float16(vae),
            text_encoder=_float16(text_encoder),
            tokenizer=tokenizer,
            unet=_float16(unet),
            scheduler=noise_scheduler,
            safety_checker=None,
            feature_extractor=None,
            requires_safety_checker=False,
        ).save_pretrained(folder)
        _load_in_float32(folder / "text_encoder" / "config.json")

    log = Log(config.log, "unet", config.unet_steps)
    train_denoiser(
        unet,
        text_encoder,
        tokenizer,
        noise_scheduler,
        latents,
        config.seed,
        steps=config.unet_steps,
        batch=64,
        log=log,
        save=save,
    )
    save()


def _float16(module: Any) -> Any:
    """A copy for the file."""
    return copy.deepcopy(module).to(torch.float16)


def _load_in_float32(config: Path) -> None:
    """Let transformers load float16 weights as diffusers does: it takes the file's precision where nothing is said."""
    values = json.loads(config.read_text())
    config.write_text(json.dumps(values | {"dtype": "float32"}, indent=2) + "\n")


def make_concepts(folder: Path) -> None:
    """Write the concept sets' pictures."""
    for name in CONCEPTS:
        (folder / name).mkdir(parents=True, exist_ok=True)
        for index, scene in enumerate(concept_scenes(name)):
            save_png(draw(scene), folder / name / f"{index}.png")


if __name__ == "__main__":
    import tyro

    build(tyro.cli(BuildConfig, prog="python -m tools.world.build", use_underscores=True))
