"""The options of `icom generate`, and those that all who draw have."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from icom.config.common import (
    BackendName,
    EngineName,
    PrecisionName,
    Repeatable,
    check_at_least_one,
    check_resolution,
    flat,
)
from icom.errors import UsageError

STEPS, GUIDANCE = 25, 7.5
"""How pictures are drawn where nobody says otherwise: denoising steps, scale of guidance (Ho & Salimans 2022)."""
Sampler = Literal["model", "ddim", "ddpm", "dpm++", "euler", "euler_a", "pndm", "unipc"]
SAMPLER: Sampler = "dpm++"


@dataclass(kw_only=True)
class DrawingOptions:
    """With which model, words and sampler pictures are drawn."""

    embedding: Repeatable[str] = field(default_factory=list)
    """Learned words: files (learned_embeds.safetensors, .bin, .pt) or Hub ids; FILE=<word> names the word anew."""
    prompt: Repeatable[str] = field(default_factory=list)
    """One or several prompts."""
    prompts_file: str | None = None
    """Text file with one prompt per line; empty lines and lines that start with # are skipped."""
    negative_prompt: str | None = None
    """What the pictures should not show."""
    pretrained_model_name_or_path: str | None = None
    """The model to draw with. Default: the one in the config.yaml beside the first embedding, else `bundled`."""
    tokenizer_name: str | None = None
    """Tokenizer to use instead of the model's own."""
    revision: str | None = None
    """Git revision of a model on the Hub."""
    variant: str | None = None
    """Variant of the model files, for instance fp16."""
    scheduler: Sampler = SAMPLER
    """Sampler; `model` takes the one that the model ships."""
    num_inference_steps: int = STEPS
    """Denoising steps."""
    resolution: int | None = None
    """Width and height in pixels, a multiple of 8. Default: the model's own."""
    mixed_precision: PrecisionName = "no"
    """Precision of the model; `auto` as in `icom train`."""
    backend: BackendName = "auto"
    """What computes, as in `icom train`."""
    engine: EngineName = "auto"
    """As in `icom train`."""

    def __post_init__(self) -> None:
        """Raises: UsageError for what cannot be drawn, whatever the model."""
        if self.resolution is not None:
            check_resolution(self.resolution)
        check_at_least_one(num_inference_steps=self.num_inference_steps)


@dataclass(kw_only=True)
class GenerateConfig(DrawingOptions):
    """Draw pictures with a learned word.

    Example: icom generate --embedding out/learned_embeds.safetensors --prompt "a photo of <dicoo>"
    """

    seed: Repeatable[int] = field(default_factory=list)
    """One or several seeds (default: 0); each prompt is drawn once per seed. A picture depends on those two alone."""
    num_images_per_prompt: int = 1
    """Pictures per prompt and seed (further ones use the seeds that follow)."""
    guidance_scale: float = GUIDANCE
    """Classifier-free guidance; 1 turns it off and halves the time."""
    output_dir: str = "generated"
    """Folder for the pictures."""
    grid: bool = False
    """Also write grid.png: a row per prompt, a column per seed."""

    def __post_init__(self) -> None:
        """Raises: UsageError for what cannot be drawn, whatever the model."""
        super().__post_init__()
        check_at_least_one(num_images_per_prompt=self.num_images_per_prompt)
        for seed in flat(self.seed):
            if not 0 <= seed < 2**63 - self.num_images_per_prompt:
                raise UsageError(f"--seed has to be between 0 and 2^63 - 1, not {seed}.")
