"""The options of `icom train`.

Those that diffusers' `textual_inversion.py` has keep its names, meanings and defaults; the few deliberate differences
are in the docstring of the field.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from icom.config.common import check_at_least_one, check_not_negative, check_resolution
from icom.config.loading import layers, merge, required
from icom.config.training import ModelOptions, RunOptions
from icom.errors import UsageError

BUNDLED_DEFAULTS = {
    "resolution": 64,
    "train_batch_size": 4,
    "max_train_steps": 500,
    "learning_rate": 1e-2,
    "num_vectors": 1,
    "mixed_precision": "auto",
}
"""Defaults for the bundled model, found by measuring (docs/bundled-model.md); all others have diffusers' own."""


@dataclass(kw_only=True)
class ConceptOptions(ModelOptions):
    """What is learned, from which pictures."""

    train_data_dir: str = required("photos")
    """Required. A folder with the pictures and nothing else, or one that ships with icom, such as bundled:red-moon."""
    placeholder_token: str = required('"<dicoo>"')
    """Required. The new word, for instance "<dicoo>". It must not be in the vocabulary yet."""
    initializer_token: str = required("toy")
    """Required. What the new word starts from: a word the model knows, or a phrase of up to --num_vectors tokens."""
    initial_embedding: str | None = None
    """Start the rows from this learned_embeds.safetensors, and not from --initializer_token."""
    learnable_property: Literal["object", "style"] = "object"
    """Chooses the captions: "a photo of a …" or "a painting in the style of …"."""
    num_vectors: int = 1
    """Rows to train. More hold more detail and take more of the prompt; they start from the initializer's tokens."""

    # Pictures.
    resolution: int = 512
    """Pictures are resized to resolution x resolution pixels; a multiple of 8 (bundled model: 64)."""
    center_crop: bool = False
    """Cut the middle square out before resizing. Without it a picture that is not square is squeezed."""
    repeats: int = 100
    """How often each picture comes up in one epoch."""
    dataloader_num_workers: int = 0
    """Threads that decode pictures while the latent cache is filled; 0: the main one. Steps load nothing."""


@dataclass(kw_only=True)
class TrainConfig(RunOptions, ConceptOptions):
    """Learn a new word for Stable Diffusion from a handful of pictures (textual inversion).

    Example: icom train --train_data_dir photos --placeholder_token "<dicoo>" --initializer_token toy
    --pretrained_model_name_or_path stable-diffusion-v1-5/stable-diffusion-v1-5 --mixed_precision auto
    """

    # Results.
    output_dir: str = "text-inversion-model"
    """Folder for embeddings, checkpoints, logs and pictures."""
    save_steps: int = 500
    """Write learned_embeds-steps-N.safetensors every so many steps."""
    save_as_full_pipeline: bool = False
    """Also write the whole pipeline, with the new word in it, to --output_dir."""
    no_safe_serialization: bool = False
    """Also write learned_embeds.bin (a pickle) for tools from before safetensors."""
    num_comparison_images: int | None = None
    """Pictures of the concept made before and after training with the same noise (comparison.png); 0: none. Default: 1,
    unless drawing would take more than a quarter of the training's time (and more than 10 s)."""

    # Watching it.
    validation_prompt: str | None = None
    """Prompt to draw during training, for instance "a photo of <dicoo> on the beach"."""
    num_validation_images: int = 4
    """Pictures per validation."""
    validation_steps: int = 100
    """Validate every so many steps."""
    validation_epochs: int | None = None
    """Deprecated: use --validation_steps."""

    def __post_init__(self) -> None:
        """Refuse what cannot work, before anything is loaded.

        Raises:
            UsageError: names the option and how to fix it.
        """
        super().__post_init__()
        check_at_least_one(
            num_vectors=self.num_vectors,
            repeats=self.repeats,
            save_steps=self.save_steps,
            validation_steps=self.validation_steps,
            num_validation_images=self.num_validation_images,
        )
        check_not_negative(
            dataloader_num_workers=self.dataloader_num_workers, num_comparison_images=self.num_comparison_images
        )
        check_resolution(self.resolution)
        if self.placeholder_token.split() != [self.placeholder_token]:  # a tokenizer would split or normalise it away
            raise UsageError(
                "--placeholder_token has to be one word without spaces, for instance <dicoo>; not "
                f"{self.placeholder_token!r}."
            )
        if not self.initializer_token.strip():
            raise UsageError("--initializer_token is empty. Give a word that the model knows, for instance toy.")
        if self.initial_embedding:
            place = Path(self.initial_embedding).expanduser().resolve().parent
            if place == Path(self.output_dir).expanduser().resolve():
                raise UsageError(
                    f"--initial_embedding {self.initial_embedding} lies in --output_dir, where a run replaces such "
                    "files. Choose another --output_dir."
                )


def load_train_config(flags: Mapping[str, Any]) -> TrainConfig:
    """Lay the flags that were given over --config, and over both the defaults of the model that they name.

    Raises:
        UsageError: unreadable file, unknown key, wrong type, missing or impossible value.
    """
    chosen = layers(flags)
    for options in chosen:
        # Who names epochs and no steps means them: neither a default nor a file below may bring steps in.
        if "num_train_epochs" in options:
            options.setdefault("max_train_steps", None)

    def of_the_model(merged: Any) -> Mapping[str, Any]:
        return BUNDLED_DEFAULTS if merged.pretrained_model_name_or_path == "bundled" else {}

    return merge(TrainConfig, chosen, flags.get("config"), of_the_model)
