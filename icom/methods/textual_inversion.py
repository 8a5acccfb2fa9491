"""Textual inversion (Gal et al. 2022, arXiv:2208.01618): a new word's rows in a frozen text encoder's token table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from icom.config.words import file_name, placeholder_tokens
from icom.errors import UsageError
from icom.methods.embedding import (
    PlaceholderEmbedding,
    add_placeholders,
    add_words,
    captions_to_ids,
    check_captions,
    check_lengths,
)
from icom.methods.embedding_file import save_embedding, save_embeddings

if TYPE_CHECKING:
    from transformers import CLIPTokenizer

    from icom.config.train import TrainConfig
    from icom.data.captions import Captions
    from icom.data.sampling import Sample
    from icom.models.loading import Model
    from icom.models.parts import Conditioning


@dataclass(frozen=True)
class TextualInversion:
    """New words in a frozen model, and all that the rest of icom knows of them: mostly one.

    Attributes:
        words: the placeholders; several are learned together, of the same pictures.
        concept: their rows, spliced into the text encoder.
        captions: what is said of samples.
        known: token ids of what can be said, int64 (context length,); of shuffled captions one order alone.
        cut: where captions stand whose end the text encoder does not read.
    """

    words: tuple[str, ...]
    concept: PlaceholderEmbedding
    captions: Captions
    known: dict[str, torch.Tensor]
    cut: list[str]

    @property
    def parameters(self) -> dict[str, torch.nn.Parameter]:
        """What is trained, float32 (vectors, width) each. The names are those in checkpoints: of several the words."""
        rows = list(self.concept.words)
        return {"rows": rows[0]} if len(rows) == 1 else dict(zip(self.words, rows, strict=True))

    @property
    def learned(self) -> dict[str, torch.Tensor]:
        """Word -> its rows."""
        return dict(zip(self.words, self.concept.words, strict=True))

    def activate(self, model: Model) -> None:
        """Splice these rows in, where those of another word were."""
        model.text_encoder.set_input_embeddings(self.concept)

    def condition(self, model: Model, samples: Sequence[Sample]) -> Conditioning:
        """The text encoder's states of the samples' captions."""
        return self.encode(model, self.ids(model.tokenizer, samples).to(self.concept.words[0].device))

    def encode(self, model: Model, ids: torch.Tensor) -> Conditioning:
        """The text encoder's states of captions' token ids, which are on its device."""
        self.activate(model)
        return model.encode(ids)

    def ids(self, tokenizer: CLIPTokenizer, samples: Sequence[Sample]) -> torch.Tensor:
        """Token ids of the samples' captions, int64 (samples, context length)."""
        return torch.stack([self._read(tokenizer, self.captions.of(sample)) for sample in samples])

    def _read(self, tokenizer: CLIPTokenizer, caption: str) -> torch.Tensor:
        if caption in self.known:
            return self.known[caption]
        length, (tokens, *further) = len(next(iter(self.known.values()))), self._tokens
        return captions_to_ids(tokenizer, [caption], tokens, length, *further)[0]

    def saying(self, model: Model, captions: Captions) -> TextualInversion:
        """The same rows, with other captions.

        Args:
            model: that knows the words.
            captions: of other pictures.

        Raises:
            UsageError: a caption would be read otherwise because of a word, or has no room for it.
            IcomError: captions that are too long for the word in them.
        """
        length, (tokens, *further) = model.text_encoder.config.max_position_embeddings, self._tokens
        texts = list(dict.fromkeys(one.text for one in captions.all()))
        check_captions(model.tokenizer, texts, tokens, *further)
        cut = check_lengths(model.tokenizer, captions, tokens, length, *further)
        ids = captions_to_ids(model.tokenizer, texts, tokens, length, *further)
        return replace(self, captions=captions, known=dict(zip(texts, ids, strict=True)), cut=cut)

    @property
    def _tokens(self) -> list[list[str]]:
        return [placeholder_tokens(word, len(rows)) for word, rows in self.learned.items()]

    def describe(self) -> str:
        """For instance: 768 trainable numbers (1 x 768)."""
        shapes = [rows.shape for rows in self.learned.values()]
        count = sum(shape.numel() for shape in shapes)
        return f"{count} trainable numbers ({' + '.join(f'{shape[0]} x {shape[1]}' for shape in shapes)})"

    def save(self, path: Path) -> None:
        """The embedding; that of one word in the form that diffusers, A1111 and ComfyUI all open."""
        save_embeddings(path, self.learned)

    @property
    def own_files(self) -> dict[str, str]:
        """Word -> the name of a file of its own, where there are several."""
        return {word: f"{file_name(word)}.safetensors" for word in self.words if len(self.words) > 1}

    def save_one_by_one(self, folder: Path) -> None:
        """Where there are several words: a file for each, in the form that all open."""
        for word, name in self.own_files.items():
            save_embedding(folder / name, word, self.learned[word])

    def add_to(self, pipeline: Any) -> None:
        """The words with their rows."""
        for word, rows in self.learned.items():
            pipeline.load_textual_inversion({word: rows.detach().cpu()}, token=word)


def check(tokenizer: CLIPTokenizer, config: TrainConfig, captions: Captions) -> None:
    """Refuse words that cannot be learned, before weights are read; the tokenizer is used up.

    Raises:
        UsageError: a word is not new, its initializer unknown, or a caption would be read otherwise because of it.
    """
    for word in config.words:
        add_words(tokenizer, word.placeholder_token, word.initializer_token, word.num_vectors)
    check_captions(tokenizer, [one.text for one in captions.all()], *(word.tokens for word in config.words))


def attach(
    model: Model, config: TrainConfig, captions: Captions, initial_rows: Mapping[str, torch.Tensor] | None = None
) -> TextualInversion:
    """Splice new words into a model that no backend has prepared yet.

    Args:
        model: freshly loaded; tokenizer and text encoder are changed.
        config: tokens, initializers, vectors.
        captions: of the pictures.
        initial_rows: word -> its rows of --initial_embedding, (vectors, width).

    Raises:
        UsageError: initial rows, placeholder or initializer do not fit the model, or too many vectors for captions.
        IcomError: captions that are too long for the word in them.
    """
    words = config.words
    concept = add_placeholders(model.tokenizer, model.text_encoder, words, config.seed or 0)
    for word, rows in zip(words, concept.words, strict=True):
        initial = (initial_rows or {}).get(word.placeholder_token)
        if initial is None:
            continue
        if initial.shape != rows.shape:
            raise UsageError(
                f"--initial_embedding {word.initial_embedding} holds rows of width {initial.shape[1]} and "
                f"{model.source.name} has {rows.shape[1]}: it was trained for another kind of model."
            )
        with torch.no_grad():
            rows.copy_(initial)
    tokens = tuple(word.placeholder_token for word in words)
    return TextualInversion(tokens, concept, captions, {}, []).saying(model, captions)
