"""The options of `icom evaluate`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from icom.config.common import Repeatable, check_at_least_one, flat
from icom.config.generate import DrawingOptions
from icom.errors import UsageError

MetricName = Literal["fid", "kid", "clip_fid", "clip_score", "judge"]


@dataclass(kw_only=True)
class EvaluateConfig(DrawingOptions):
    """Draw pictures from many prompts, and score them: FID, KID, CLIP-FID, CLIP score (docs/evaluate.md).

    What is drawn already is not drawn again. Start it with mpirun or torchrun, and the processes share the drawing.

    Example: icom evaluate --pretrained_model_name_or_path out/current_pipeline --prompts_file prompts.txt
    --real_data_dir photos --inception_weights weights-inception-2015-12-05-6726825d.pth --guidance_scales 1 2 4 8
    """

    prompts_file: str | None = None
    """Text file with one prompt per line, as in `icom generate`; or `bundled`: captions of the bundled model's world,
    which its judge understands. Without any prompt: captions of --real_data_dir, else those, for the bundled model."""
    num_images: int | None = None
    """Pictures per guidance scale: picture number i has prompt i (after the last one the first again). Default: one for
    each prompt; 200 where the prompts are captions."""
    seed: int = 0
    """Picture number i is drawn from the seed --seed + i."""
    guidance_scales: Repeatable[float] = field(default_factory=list)
    """One or several scales of classifier-free guidance (default: 7.5); 1 turns it off. Each gets all pictures."""
    batch_size: int = 1
    """Pictures drawn at a time; it changes them by rounding. For small models on CPUs, and for GPUs."""
    real_data_dir: str | None = None
    """Pictures to compare with, as --train_data_dir of `icom finetune` names them. Where there are no prompts, their
    captions are."""
    num_real_images: int = 10_000
    """At most so many of them, evenly spread. All that is compared should have the same number."""
    image_column: str = "image"
    """As in `icom finetune`, for --real_data_dir."""
    caption_column: str = "text"
    """As in `icom finetune`, for --real_data_dir."""
    metrics: Repeatable[MetricName] = field(default_factory=list)
    """What to compute; then all of it has to be there. Default: what can be computed, and why the rest cannot."""
    inception_weights: str | None = None
    """torch-fidelity's weights-inception-2015-12-05-6726825d.pth, for FID and KID."""
    clip_model: str | None = None
    """Folder with a CLIP model of transformers (openai/clip-vit-base-patch32), for CLIP-FID and the CLIP score."""
    output_dir: str = "evaluation"
    """Folder for the pictures, results.json and curve.png."""

    def __post_init__(self) -> None:
        """Raises: UsageError for what cannot be drawn or compared."""
        super().__post_init__()
        check_at_least_one(num_images=self.num_images, batch_size=self.batch_size, num_real_images=self.num_real_images)
        if not 0 <= self.seed < 2**62:
            raise UsageError(f"--seed has to be between 0 and 2^62 - 1, not {self.seed}.")
        scales = self.scales
        if not all(1 <= scale < 1000 for scale in scales):  # nor nan
            raise UsageError("--guidance_scales have to be between 1 (no guidance) and 1000.")
        if len(set(map(scale_name, scales))) < len(scales):
            raise UsageError("--guidance_scales has a scale twice.")

    @property
    def scales(self) -> list[float]:
        """--guidance_scales, or its default."""
        return flat(self.guidance_scales) or [7.5]


def scale_name(scale: float) -> str:
    """Of the folder with a scale's pictures: guidance-7.5."""
    return f"guidance-{scale:g}"
