"""The options that say what is said of the pictures, in `icom train`."""

from __future__ import annotations

from dataclasses import dataclass

from icom.config.common import check_not_negative
from icom.errors import UsageError

BUILT_IN = "builtin"
"""What --caption_templates takes in place of a file."""


@dataclass(kw_only=True)
class CaptionOptions:
    """What is said of the pictures."""

    caption_column: str = "text"
    """Column with the captions in metadata.jsonl, metadata.csv or metadata.parquet, which lies beside the pictures."""
    caption_templates: str | None = None
    """Text file with a template per line: [name] is the new word, [filewords] the picture's caption. `builtin`: the
    sentences of --learnable_property. Default: captions (.txt, .caption, metadata) where there are any, else those."""
    instance_prompt: str | None = None
    """What is said of every picture, in place of templates and captions, for instance "photo of a <dicoo> cat"."""
    shuffle_caption: bool = False
    """Put a caption's tags (what commas separate) into another order in each sample."""
    keep_tokens: int = 0
    """With --shuffle_caption: so many tags stay in front."""
    caption_dropout_rate: float = 0.0
    """Share of samples whose caption is left out, but for the word: without it the rows would learn nothing."""

    def __post_init__(self) -> None:
        """Refuse what cannot work.

        Raises:
            UsageError: names the option.
        """
        check_not_negative(keep_tokens=self.keep_tokens)
        if not 0 <= self.caption_dropout_rate <= 1:
            raise UsageError(f"--caption_dropout_rate has to be between 0 and 1, not {self.caption_dropout_rate}.")
        if self.instance_prompt is not None and self.caption_templates is not None:
            raise UsageError("--instance_prompt takes the place of --caption_templates: drop one of them.")
        if self.keep_tokens and not self.shuffle_caption:
            raise UsageError("--keep_tokens says which tags --shuffle_caption leaves in place: give both, or neither.")
