"""The options of prior preservation in `icom train`; names and defaults are those of diffusers' scripts."""

from __future__ import annotations

import math
from dataclasses import dataclass

from icom.config.common import check_at_least_one
from icom.errors import UsageError


@dataclass(kw_only=True)
class PriorOptions:
    """Keep what the word meant at the beginning (Ruiz et al. 2023, arXiv:2208.12242, for a frozen model)."""

    with_prior_preservation: bool = False
    """Learn --class_prompt from pictures of the class, too, which pulls the word towards its kind. A step takes twice
    the time."""
    class_data_dir: str | None = None
    """Folder with pictures of the class. The model draws the missing ones into it, of --class_prompt with
    --initializer_token in the word's place; the next run finds them."""
    class_prompt: str | None = None
    """What pictures of the class show, for instance "a photo of a <dicoo>". It has to say the word: only its rows are
    trained, and a prompt without it, as diffusers' scripts take it, would teach them nothing."""
    num_class_images: int = 100
    """Pictures of the class that are learned."""
    prior_loss_weight: float = 1.0
    """The loss is that of the pictures plus so much of the class's."""

    def __post_init__(self) -> None:
        """Refuse what cannot work.

        Raises:
            UsageError: names the option.
        """
        check_at_least_one(num_class_images=self.num_class_images)
        if not (math.isfinite(self.prior_loss_weight) and self.prior_loss_weight > 0):
            raise UsageError(
                f"--prior_loss_weight has to be a positive number, not {self.prior_loss_weight}; without "
                "--with_prior_preservation there is no such loss."
            )
        for name in ("class_data_dir", "class_prompt"):
            value = getattr(self, name)
            if self.with_prior_preservation and not (value and value.strip()):
                example = "class" if name == "class_data_dir" else '"a photo of a <dicoo>"'
                raise UsageError(f"--with_prior_preservation needs --{name}, for instance --{name} {example}.")
            if value is not None and not self.with_prior_preservation:
                raise UsageError(f"--{name} is for --with_prior_preservation: give that too, or drop --{name}.")

    def check_class_prompt(self, word: str) -> None:
        """Refuse a class prompt from which the rows of the word would get no gradient.

        Raises:
            UsageError: says what to write.
        """
        if self.class_prompt is not None and word.lower() not in self.class_prompt.lower():
            raise UsageError(
                f"--class_prompt {self.class_prompt!r} does not say {word}. Only the word's rows are trained, and a "
                "prompt without it gives them no gradient: the run would take twice the time and learn the same bits. "
                f'Write the word in place of the class, for instance "a photo of a {word}".'
            )
