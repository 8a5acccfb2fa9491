"""What is said of a sample's picture: a template, a caption of the picture's own, or both.

The paper's templates (Gal et al. 2022, arXiv:2208.01618) are those of diffusers' script; `[filewords]` is A1111's mark.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from icom.data.sampling import Stream, raw_words

if TYPE_CHECKING:
    from icom.data.sampling import Sample

_OBJECT = {
    "a photo of": "a|my|the|one|a clean|a dirty|a nice|a cool|a small|the cool|the clean|the nice|the small"
    "|the weird|the large",
    "a cropped photo of": "a|the",
    "a close-up photo of": "a|the",
    "a good photo of": "a|the",
    "a rendition of": "a|the",
    "a rendering of": "a",
    "a dark photo of": "the",
    "a bright photo of": "the",
    "the photo of": "a",
}
# Two stand twice, as in the original: each template is drawn with equal probability.
_STYLE = (
    "a painting|a rendering|a cropped painting|the painting|a clean painting|a dirty painting|a dark painting"
    "|a picture|a cool painting|a close-up painting|a bright painting|a cropped painting|a good painting"
    "|a close-up painting|a rendition|a nice painting|a small painting|a weird painting|a large painting"
)

TEMPLATES: dict[str, tuple[str, ...]] = {
    "object": tuple(f"{lead} {article} {{}}" for lead, ends in _OBJECT.items() for article in ends.split("|")),
    "style": tuple(f"{picture} in the style of {{}}" for picture in _STYLE.split("|")),
}
"""learnable_property -> captions; `{}` stands for the placeholder token."""

WORD, FILEWORDS = "{}", "[filewords]"
"""Marks in templates: of the placeholder token, and of the picture's own caption."""


def mark(number: int) -> str:
    """Of one of several words that are learned together: WORD of the first, {1} of the next."""
    return f"{{{number}}}" if number else WORD


def marks_in(text: str, words: int = 1) -> list[str]:
    """The marks of words in a text, in their order.

    Args:
        text: of a template or caption.
        words: how many are learned; what would be another one's mark is text.
    """
    return re.findall("|".join(re.escape(mark(number)) for number in range(words)), text)


@dataclass(frozen=True)
class Text:
    """A template or a picture's caption, with WORD for the placeholder token. `place` says where it stands."""

    text: str
    place: str


@dataclass(frozen=True)
class Captions:
    """What can be said of the pictures.

    Attributes:
        templates: each sample takes one.
        own: the pictures' captions, in the order of the pictures; empty where no template has FILEWORDS.
        shuffle: put a caption's tags into another order in each sample.
        keep: so many tags stay in front.
        dropout: share of the samples whose caption is left out, but for the word.
        source: where all this comes from, for people; empty for the built-in templates.
        words: how many are learned.
    """

    templates: tuple[Text, ...]
    own: tuple[Text, ...] = ()
    shuffle: bool = False
    keep: int = 0
    dropout: float = 0.0
    source: str = ""
    words: int = 1

    def of(self, sample: Sample) -> str:
        """What is said of a sample, with WORD for the placeholder token: a function of the sample alone.

        The tags are shuffled as kohya's sd-scripts do. Its dropout leaves nothing of a caption; the word stays here.
        """
        template = self.templates[sample.template].text
        if FILEWORDS not in template:
            return template
        own = self.own[sample.picture].text
        if not (self.shuffle or self.dropout):
            return template.replace(FILEWORDS, own)
        tags = _tags(own)
        words = raw_words(sample.noise_seed, Stream.CAPTION, count=1 + len(tags))
        if float(words[0]) < self.dropout * 2.0**64:
            return self._without(template, own)
        if self.shuffle:
            order = np.argsort(words[1 + self.keep :], kind="stable") + self.keep
            own = ", ".join([*tags[: self.keep], *(tags[place] for place in order)])
        return template.replace(FILEWORDS, own)

    def all(self) -> Iterator[Text]:
        """Everything that can be said; of the orders of tags the one that has the word as far back as it comes."""
        for template in self.templates:
            if FILEWORDS not in template.text:
                yield template
                continue
            if self.dropout:
                for text in dict.fromkeys(self._without(template.text, own.text) for own in self.own):
                    yield Text(text, template.place)
            for own in self.own:
                text = own.text
                if self.shuffle:
                    tags = _tags(text)
                    text = ", ".join([*tags[: self.keep], *sorted(tags[self.keep :], key=self._says_a_word)])
                yield Text(template.text.replace(FILEWORDS, text), own.place)

    def _says_a_word(self, text: str) -> bool:
        return bool(marks_in(text, self.words))

    def _without(self, template: str, own: str) -> str:
        """A template without the picture's caption; words stay where only the caption had them."""
        kept = "" if self._says_a_word(template) else " ".join(dict.fromkeys(marks_in(own, self.words)))
        return " ".join(", ".join(_tags(template.replace(FILEWORDS, kept))).split())

    def facts(self) -> dict[str, str]:
        """What processes have to have alike: name -> digest. Empty for the built-in templates."""
        templates = {f"template {i}": one for i, one in enumerate(self.templates, start=1) if one.place}
        return {name: _digest(one.text) for name, one in (templates | {one.place: one for one in self.own}).items()}

    def identity(self) -> dict[str, Any]:
        """What decides a run's bits, in the names of the options; empty for the built-in templates."""
        return {
            name: value
            for name, value in {
                "captions": self.own and _digest([one.text for one in self.own]),
                "caption_templates": self.templates[0].place and _digest([one.text for one in self.templates]),
                "shuffle_caption": self.shuffle,
                "keep_tokens": self.keep,
                "caption_dropout_rate": self.dropout,
            }.items()
            if value
        }


def built_in(learnable_property: str) -> Captions:
    """The paper's templates."""
    return Captions(tuple(Text(template, "") for template in TEMPLATES[learnable_property]))


def _tags(text: str) -> list[str]:
    return [tag for tag in (part.strip() for part in text.split(",")) if tag]


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:12]
