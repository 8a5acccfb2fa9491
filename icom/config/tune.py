"""The options of `icom tune`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from icom.config.common import check_at_least_one
from icom.config.loading import layers
from icom.config.train import TrainConfig, made_of
from icom.errors import UsageError

RATES = (3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1)
"""In steps of about the square root of 10; with two numbers of vectors all fits into three runs."""
FOUND = {"learning_rate": "learning_rates", "num_vectors": "vectors", "stop": None}
"""Options of `icom train` that this command finds by itself -> what says which values it tries."""


@dataclass(kw_only=True)
class TuneConfig(TrainConfig):
    """Find the learning rate, the number of vectors and the steps for your pictures, by trying them.

    Every pair of --learning_rates and --vectors is tried for a few steps, on the same samples; the half with the lower
    validation loss goes on for as many steps again, and so on until one is left, which trains until it has learned (as
    with --stop auto) or to --max_train_steps. The model is loaded once. --output_dir then has the rows of the best
    (learned_embeds.safetensors, ready to use), best.yaml, which makes them again (icom train --config tune/best.yaml),
    and what was tried (tune.json, tune.png). Ctrl-C leaves the same for the best so far; --resume_from_checkpoint
    latest goes on.

    Example: icom tune --train_data_dir photos --placeholder_token "<dicoo>" --initializer_token toy
    --pretrained_model_name_or_path stable-diffusion-v1-5/stable-diffusion-v1-5 --train_batch_size 1
    --max_train_steps 1000 --mixed_precision auto
    """

    learning_rates: list[float] = field(default_factory=lambda: list(RATES))
    """Learning rates to try."""
    vectors: list[int] = field(default_factory=lambda: [1, 2])
    """Numbers of vectors to try with each of them."""
    stop: Literal["auto"] | None = "auto"
    """Not an option of this command: its runs end when they have learned."""
    output_dir: str = "tune"
    """Folder for what was found, and a folder in it for each try."""

    def __post_init__(self) -> None:
        """Refuse what cannot work, before anything is loaded.

        Raises:
            UsageError: names the option and how to fix it.
        """
        super().__post_init__()
        for name in ("learning_rates", "vectors"):
            values = getattr(self, name)
            if not values:
                raise UsageError(f"--{name} is empty. Give at least one value, or drop it.")
            if len(set(values)) < len(values):
                raise UsageError(f"--{name} has a value twice.")
        if not all(math.isfinite(rate) and rate > 0 for rate in self.learning_rates):
            raise UsageError("--learning_rates have to be positive numbers.")
        check_at_least_one(vectors=min(self.vectors))
        if self.share_for_validation == 0:
            raise UsageError("`icom tune` compares validation losses: --validation_share must not be 0.")
        for chosen, advice in (
            (
                self.lr_scheduler != "constant",
                f"--lr_scheduler {self.lr_scheduler} depends on the number of steps, and `icom tune` compares rates "
                "before it knows that: use constant.",
            ),
            (self.optimizer == "prodigy", "--optimizer prodigy finds the rate by itself: use `icom train` for that."),
            (self.push_to_hub, "--push_to_hub is for `icom train --config tune/best.yaml --push_to_hub`. Drop it."),
            (self.save_as_full_pipeline, "--save_as_full_pipeline is for `icom train`. Drop it."),
            (self.validation_prompt, "--validation_prompt is for `icom train`. Drop it."),
            (self.sample_prompts, "--sample_prompts is for `icom train`. Drop it."),
            (self.further_words, "`icom tune` finds what suits one word: tune one of them, then train them together."),
            (self.concepts_list, "--concepts_list is for `icom train`: tune one word at a time."),
            (self.on, "--on is for `icom train`. Log in (`icom ssh`) and start `icom tune` there."),
            (
                self.resume_from_checkpoint not in (None, "latest"),
                "`icom tune` goes on from where it was: --resume_from_checkpoint takes `latest` here.",
            ),
        ):
            if chosen:
                raise UsageError(advice)

    def candidate(self, rate: float, vectors: int, output_dir: str) -> TrainConfig:
        """The run of `icom train` that tries a rate and a number of vectors."""
        own = {option.name: getattr(self, option.name) for option in fields(TrainConfig)}
        found = {"learning_rate": rate, "num_vectors": vectors, "stop": "auto", "output_dir": output_dir}
        return TrainConfig(**own | found)


def load_tune_config(flags: Mapping[str, Any]) -> TuneConfig:
    """Lay the flags that were given over --config, and over both the defaults of the model that they name.

    Raises:
        UsageError: unreadable file, unknown key, wrong type, missing or impossible value.
    """
    chosen = layers(flags)
    for name, instead in FOUND.items():
        if any(options.get(name) is not None for options in chosen):
            what = f"give --{instead}" if instead else "drop it"
            raise UsageError(f"--{name} is what `icom tune` finds: {what}.")
    return made_of(TuneConfig, chosen, flags.get("config"))
