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
from icom.config.finetune import load_finetune_config
from icom.data.captions import TEMPLATES
from icom.data.images import BUNDLED_CONCEPTS
from icom.engine.memory import keep_freed_memory
from icom.models import loading
from icom.models.architectures import ARCHITECTURES
from icom.models.parts import TEXT_ENCODER, UNET, VAE
from icom.training.checkpoint_folders import PIPELINE
from icom.training.finetune import finetune
from icom.training.report import read_metrics, save_png
from icom.world.concepts import CONCEPTS, concept_scenes
from icom.world.judge import WEIGHTS, Judge
from icom.world.scene import BACKGROUNDS, COLOURS, GENERIC, NAMES, PATTERNS, PLACES, SHAPES, SIZE, SIZES, draw
from tools.world.judge import train_judge
from tools.world.shards import ShardsConfig, write_shards
from tools.world.training import Log, latent_scale, train_decoder, train_vae

if TYPE_CHECKING:
    from diffusers import AutoencoderKL, StableDiffusionPipeline

ARCHITECTURE = "tiny"

RECIPE: dict[str, Any] = {
    "train_text_encoder": True,
    "resolution": SIZE,
    "train_batch_size": 64,
    "learning_rate": 1e-3,
    "lr_scheduler": "cosine",
    "adam_beta2": 0.99,
    "adam_weight_decay": 1e-3,
    "mixed_precision": "auto",
    "checkpointing_steps": 1000,
    "save_only_most_recent": True,
    "report_to": "none",
}
"""Options of `icom finetune` for UNet and text encoder, beside its defaults: one caption in ten is empty, gradients
are clipped to 1. It is Stable Diffusion's recipe (Rombach et al. 2022, arXiv:2112.10752) in small; but here the text
encoder starts from nothing, too.
"""

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
    """Pictures that UNet and text encoder see, each with a caption."""
    work_dir: Path = Path("bundled-model-training")
    """Folder for the tars and for the training of UNet and text encoder; started again, that goes on from there."""


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
    """Train UNet and text encoder with the VAE that is there, by `icom finetune`, and write the pipeline, float16."""
    from diffusers import DDPMScheduler

    start, out = config.work_dir / "start", config.work_dir / "unet"
    shards = config.work_dir / f"shards-{config.seed}-{config.unet_pictures}"
    if not shards.exists():
        write_shards(ShardsConfig(output_dir=shards, pictures=config.unet_pictures, seed=config.seed))
    tokenizer = CLIPTokenizer.from_pretrained(folder / "tokenizer")
    vae = load_vae(folder)
    vae.register_to_config(scaling_factor=latent_scale(vae, config.seed, min(config.unet_pictures, 4_800)))
    architecture = ARCHITECTURES[ARCHITECTURE].with_vocabulary(len(tokenizer))
    parts = {"tokenizer": tokenizer, "vae": vae, "scheduler": DDPMScheduler(**architecture.scheduler)}
    text_encoder, unet = TEXT_ENCODER.build(architecture), UNET.build(architecture)
    _pipeline(text_encoder=text_encoder, unet=unet, **parts).save_pretrained(start)
    flags = RECIPE | {
        "pretrained_model_name_or_path": str(start),
        "from_scratch": "model",
        "train_data_dir": str(shards),
        "max_train_steps": config.unet_steps,
        "lr_warmup_steps": max(1, min(200, config.unet_steps // 10)),
        "seed": config.seed,
        "output_dir": str(out),
        "resume_from_checkpoint": "latest",
    }
    finetune(load_finetune_config(flags))
    log_losses(out / "metrics.jsonl", config.log)
    trained = (part.load_class().from_pretrained(out / PIPELINE / part.name) for part in (TEXT_ENCODER, UNET))
    text_encoder, unet = trained
    unet.register_to_config(_name_or_path="")  # a folder of this machine, which would be saved with it
    _pipeline(text_encoder=text_encoder, unet=unet, **parts).to(dtype=torch.float16).save_pretrained(folder)
    _load_in_float32(folder / "text_encoder" / "config.json")


def _pipeline(**parts: Any) -> StableDiffusionPipeline:
    """Parts as a pipeline, without safety checker."""
    from diffusers import StableDiffusionPipeline

    nothing = {"safety_checker": None, "feature_extractor": None, "requires_safety_checker": False}
    return StableDiffusionPipeline(**parts, **nothing)


def log_losses(metrics: Path, log: Path, every: int = 100) -> None:
    """Add the running mean of a training's loss to the log, as `fit` does it.

    Args:
        metrics: `metrics.jsonl` of `icom finetune`.
        log: of the build.
        every: so many steps.
    """
    mean, rows = 0.0, read_metrics(metrics)
    with log.open("a", encoding="utf-8") as file:
        for row in rows:
            mean += (row["loss"] - mean) * max(0.01, 1 / row["step"])
            if row["step"] % every == 0 or row is rows[-1]:
                file.write(json.dumps({"part": "unet", "step": row["step"], "loss": round(mean, 5)}) + "\n")


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
