"""The options of `icom evaluate`."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from icom.config.common import Repeatable, check_at_least_one, flat
from icom.config.generate import GUIDANCE, DrawingOptions
from icom.config.words import place_and_word
from icom.errors import UsageError

WORLD = "bundled"
"""The value of --prompts_file that stands for captions of the bundled model's world."""

MetricName = Literal["fid", "kid", "clip_fid", "clip_score", "judge"]


@dataclass(kw_only=True)
class EvaluateConfig(DrawingOptions):
    """Draw pictures from many prompts, and score them: FID, KID, CLIP-FID, CLIP score; or those of a learned word, by
    the pictures that it was learned from (docs/evaluate.md).

    What is drawn already is not drawn again. Start it with mpirun or torchrun, and the processes share the drawing.

    Example: icom evaluate --pretrained_model_name_or_path out/current_pipeline --prompts_file prompts.txt
    --real_data_dir photos --inception_weights weights-inception-2015-12-05-6726825d.pth --guidance_scales 1 2 4 8

    Example: icom evaluate --embedding mine --image_encoder dinov2
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
    train_data_dir: str | None = None
    """Pictures that the word of --embedding was learned from: its drawn ones are compared with them, and nothing else
    is. Default: those of the run, where --embedding names its folder."""
    image_encoder: str | None = None
    """What compares them: a folder with CLIP or DINOv2 of transformers, or with a safety checker of diffusers. Default:
    --clip_model, else the CLIP tower of the safety checker in the model's folder."""
    steps: Repeatable[int] = field(default_factory=list)
    """Steps of the run to score, of those that --save_steps left. Default: six of them, evenly, the last among them."""
    initializer_token: str | None = None
    """What the word started from: step 0, and what stands in its place where prompts are compared with pictures.
    Default: the run's."""
    output_dir: str | None = None
    """Folder for the pictures, results.json and curve.png. Default: evaluation; of a run's word, that in its folder,
    and of words that were learned together one for each in there."""

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
        if self.of_a_word:
            self._check_word()
        else:
            for name in ("train_data_dir", "image_encoder", "steps", "initializer_token"):
                if getattr(self, name):
                    raise UsageError(
                        f"--{name} is about the word of one --embedding: name the folder of its run, or its file."
                    )

    def _check_word(self) -> None:
        for name in ("metrics", "inception_weights"):
            if getattr(self, name):
                raise UsageError(f"--{name} compares with --real_data_dir or prompts, and a word is scored: drop it.")
        if len(self.scales) > 1:
            raise UsageError("A word is scored over its steps, at one of --guidance_scales.")
        if self.prompts_file == WORLD:
            raise UsageError(f"--prompts_file {WORLD} has captions that do not say the word: name others, or none.")

    @property
    def of_a_word(self) -> bool:
        """Whether a learned word is scored by its training pictures: one that is named by its run, with the pictures,
        or without anything that its pictures could be scored by otherwise."""
        embeddings = flat(self.embedding)
        if len(embeddings) != 1 or self.real_data_dir:
            return False
        named = Path(place_and_word(embeddings[0])[0]).expanduser().is_dir() or self.train_data_dir is not None
        return named or not (self.prompt or self.prompts_file)

    @property
    def scales(self) -> list[float]:
        """--guidance_scales, or its default."""
        return flat(self.guidance_scales) or [GUIDANCE]


def scale_name(scale: float) -> str:
    """Of the folder with a scale's pictures: guidance-7.5."""
    return f"guidance-{scale:g}"
