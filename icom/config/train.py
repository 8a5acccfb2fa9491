"""The options of `icom train`.

Those that diffusers' `textual_inversion.py` has keep its names, meanings and defaults; the few deliberate differences
are in the docstring of the field.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, TypeVar

from icom.config.captions import CaptionOptions
from icom.config.common import check_at_least_one, check_not_negative, check_resolution
from icom.config.gpu import GpuOptions
from icom.config.loading import layers, merge, required
from icom.config.objective import ObjectiveOptions
from icom.config.pictures import BUNDLED_BUCKETS, PictureOptions
from icom.config.prior import PriorOptions
from icom.config.rows import RANDOM, RowOptions, default_rate
from icom.config.stopping import StoppingOptions
from icom.config.training import ModelOptions, RunOptions
from icom.config.watching import WatchingOptions
from icom.config.words import Word, file_name
from icom.errors import UsageError

Options = TypeVar("Options", bound="TrainConfig")

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
    """Required. A folder with the pictures, and captions where there are some (a .txt or .caption of the same name, or
    metadata.jsonl); or one that ships with icom, such as bundled:red-moon."""
    placeholder_token: str = required('"<dicoo>"')
    """Required. The new word, for instance "<dicoo>". It must not be in the vocabulary yet."""
    initializer_token: str = required("toy")
    """Required. What the new word starts from: a word the model knows, or a phrase of up to --num_vectors tokens; or
    "<rand>": random numbers with the mean and the spread of the model's own rows."""
    concepts_list: str | None = None
    """Learn several words, one after the other beside one model in memory: a YAML file with a list of options for each
    (or diffusers' JSON), which count more than those given here. Each word goes to a folder in --output_dir."""
    initial_embedding: str | None = None
    """Start the rows from this learned_embeds.safetensors, and not from --initializer_token."""
    learnable_property: Literal["object", "style"] = "object"
    """Chooses the sentences for pictures without captions: "a photo of a …" or "a painting in the style of …"."""
    num_vectors: int = 1
    """Rows to train. More hold more detail and take more of the prompt; they start from the initializer's tokens."""
    further_words: list[Word] = field(default_factory=list)
    """Words that the same pictures teach, together with the first one; captions say which are in a picture. In YAML
    files it is enough to give placeholder_token as a list, and the three options above as lists or one for all."""

    # Pictures.
    resolution: int = 512
    """Pictures are resized to resolution x resolution pixels; a multiple of 8 (bundled model: 64)."""
    center_crop: bool = False
    """Cut the middle square out before resizing, which keeps the shape of things. Without it (and without --random_crop
    and --enable_bucket) a picture that is not square is squeezed."""
    repeats: int = 100
    """How often each picture comes up in one epoch."""
    dataloader_num_workers: int = 0
    """Threads that decode pictures while the latent cache is filled; 0: the main one. Steps load nothing."""

    @property
    def words(self) -> list[Word]:
        """All that are learned."""
        first = Word(self.placeholder_token, self.initializer_token, self.num_vectors, self.initial_embedding)
        return [first, *self.further_words]

    @property
    def label(self) -> str:
        """The words, for people and in prompts: "<mug> and <toy>"."""
        return " and ".join(word.placeholder_token for word in self.words)

    def check_words(self) -> None:
        """Refuse words that cannot be.

        Raises:
            UsageError: names the option, and with several words the word.
        """
        seen: dict[str, str] = {}
        for word in self.words:
            token = word.placeholder_token
            check_at_least_one(num_vectors=word.num_vectors)
            if token.split() != [token]:  # a tokenizer would split or normalise it away
                raise UsageError(
                    f"--placeholder_token has to be one word without spaces, for instance <dicoo>; not {token!r}."
                )
            if not word.initializer_token.strip():
                raise UsageError("--initializer_token is empty. Give a word that the model knows, for instance toy.")
            for one in word.tokens:
                if one.lower() in seen:
                    raise UsageError(
                        f"The token {one} is that of {seen[one.lower()]} already. Every word needs one of its own; "
                        "those of several vectors also take <word>_1, <word>_2 and so on."
                    )
            seen |= dict.fromkeys((one.lower() for one in word.tokens), token)
        files = [file_name(word.placeholder_token).lower() for word in self.words]
        if len(set(files)) < len(files):
            raise UsageError(
                f"Files take letters, digits, dots and hyphens of words: {self.label} need different ones."
            )


@dataclass(kw_only=True)
class TrainConfig(
    RunOptions,
    WatchingOptions,
    StoppingOptions,
    RowOptions,
    ObjectiveOptions,
    PriorOptions,
    CaptionOptions,
    PictureOptions,
    GpuOptions,
    ConceptOptions,
):
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
        RunOptions.__post_init__(self)
        ObjectiveOptions.__post_init__(self)
        RowOptions.__post_init__(self)
        self.check_with(self)
        if self.initializer_token == RANDOM and self.with_prior_preservation:
            raise UsageError(
                f"--with_prior_preservation keeps what --initializer_token means; {RANDOM} means nothing. Give a word."
            )
        CaptionOptions.__post_init__(self)
        PriorOptions.__post_init__(self)
        StoppingOptions.__post_init__(self)
        self.check_words()
        self.check_gpu(gradient_checkpointing=self.gradient_checkpointing)
        check_at_least_one(
            repeats=self.repeats,
            save_steps=self.save_steps,
            validation_steps=self.validation_steps,
            num_validation_images=self.num_validation_images,
        )
        check_not_negative(
            dataloader_num_workers=self.dataloader_num_workers, num_comparison_images=self.num_comparison_images
        )
        self.check_watching()
        check_resolution(self.resolution)
        self.check_pictures(self.resolution, center_crop=self.center_crop)
        self.check_class_prompt(self.placeholder_token)
        if self.further_words and (self.with_prior_preservation or self.on):
            what = "--on" if self.on else "--with_prior_preservation"
            raise UsageError(f"{what} is for a word alone, and {self.label} are learned together: drop one of the two.")
        for word in self.words:
            if word.initial_embedding:
                place = Path(word.initial_embedding).expanduser().resolve().parent
                if place == Path(self.output_dir).expanduser().resolve():
                    raise UsageError(
                        f"--initial_embedding {word.initial_embedding} lies in --output_dir, where a run replaces such "
                        "files. Choose another --output_dir."
                    )


def load_train_config(flags: Mapping[str, Any]) -> TrainConfig:
    """Lay the flags that were given over --config, and over both the defaults of the model that they name.

    Raises:
        UsageError: unreadable file, unknown key, wrong type, missing or impossible value.
    """
    return made_of(TrainConfig, layers(flags), flags.get("config"))


def made_of(options: type[Options], chosen: Sequence[dict[str, Any]], path: str | None) -> Options:
    """Options of `icom train`, or of a command that has them and more.

    Args:
        options: the dataclass.
        chosen: options by name; the last counts most.
        path: the file among them, for messages.

    Raises:
        UsageError: unknown key, wrong type, missing or impossible value.
    """
    for given in chosen:
        # Who names epochs and no steps means them: neither a default nor a file below may bring steps in.
        if "num_train_epochs" in given:
            given.setdefault("max_train_steps", None)
    return merge(options, _one_by_one(chosen), path, of_the_model)


OF_A_WORD = tuple(option.name for option in fields(Word))


def _one_by_one(chosen: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """With words that are given as lists in the place where they belong: the first one, and further ones.

    Raises:
        UsageError: the lists are not as long as that of the words.
    """
    given = {name: options[name] for options in chosen for name in OF_A_WORD if options.get(name) is not None}
    tokens = given.get("placeholder_token")
    if not isinstance(tokens, list):
        return list(chosen)
    if not tokens:
        raise UsageError("placeholder_token is an empty list. Name a word, for instance <dicoo>.")
    words: list[dict[str, Any]] = [{} for _ in tokens]
    for name, value in given.items():
        values = value if isinstance(value, list) else [value] * len(tokens)
        if len(values) != len(tokens):
            raise UsageError(
                f"{name} has {len(values)} values for {len(tokens)} words: give one for each, or one for all."
            )
        for word, one in zip(words, values, strict=True):
            word[name] = one
    rest = [{name: value for name, value in options.items() if name not in OF_A_WORD} for options in chosen]
    missing = {"initializer_token": "???"}
    return [*rest, {**words[0], "further_words": [missing | word for word in words[1:]]}]


def of_the_model(merged: Any) -> Mapping[str, Any]:
    """Defaults of the model and the optimizer that the options name."""
    bundled = merged.pretrained_model_name_or_path == "bundled"
    defaults = {**BUNDLED_DEFAULTS, **BUNDLED_BUCKETS} if bundled else {}
    return defaults | default_rate(merged.optimizer)
