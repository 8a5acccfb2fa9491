"""Textual inversion (Gal et al. 2022, arXiv:2208.01618): a new word's rows in a frozen text encoder's token table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from icom.data.captions import TEMPLATES
from icom.errors import UsageError
from icom.methods.embedding import (
    PlaceholderEmbedding,
    add_placeholder,
    add_words,
    captions_to_ids,
    check_captions,
    placeholder_tokens,
)
from icom.methods.embedding_file import save_embedding

if TYPE_CHECKING:
    from transformers import CLIPTokenizer

    from icom.config.train import TrainConfig
    from icom.data.sampling import Sample
    from icom.models.loading import Model
    from icom.models.parts import Conditioning


@dataclass(frozen=True)
class TextualInversion:
    """See `icom.methods.Method`.

    Attributes:
        token: the placeholder.
        concept: its rows, spliced into the text encoder.
        captions: token ids of all captions, int64 (templates, context length).
    """

    token: str
    concept: PlaceholderEmbedding
    captions: torch.Tensor

    @property
    def parameters(self) -> dict[str, torch.nn.Parameter]:
        """The rows, (vectors, width)."""
        return {"rows": self.concept.rows}

    def condition(self, model: Model, samples: Sequence[Sample]) -> Conditioning:
        """The text encoder's states of the samples' captions."""
        return model.encode(self.captions[[sample.template for sample in samples]].to(self.concept.rows.device))

    def describe(self) -> str:
        """For instance: 768 trainable numbers (1 x 768)."""
        rows = self.concept.rows
        return f"{rows.numel()} trainable numbers ({rows.shape[0]} x {rows.shape[1]})"

    def save(self, path: Path) -> None:
        """The embedding, in the form that diffusers, A1111 and ComfyUI all open."""
        save_embedding(path, self.token, self.concept.rows)

    def add_to(self, pipeline: Any) -> None:
        """The word with its rows."""
        pipeline.load_textual_inversion({self.token: self.concept.rows.detach().cpu()}, token=self.token)


def check(tokenizer: CLIPTokenizer, config: TrainConfig) -> None:
    """Refuse a word that cannot be learned, before weights are read; the tokenizer is used up.

    Raises:
        UsageError: the word is not new, its initializer unknown, or a caption would be read otherwise because of it.
    """
    add_words(tokenizer, config.placeholder_token, config.initializer_token, config.num_vectors)
    tokens = placeholder_tokens(config.placeholder_token, config.num_vectors)
    check_captions(tokenizer, TEMPLATES[config.learnable_property], tokens)


def attach(model: Model, config: TrainConfig, initial_rows: torch.Tensor | None = None) -> TextualInversion:
    """Splice a new word into a model that no backend has prepared yet.

    Args:
        model: freshly loaded; tokenizer and text encoder are changed.
        config: token, initializer, vectors, property.
        initial_rows: of --initial_embedding, (vectors, width).

    Raises:
        UsageError: initial rows, placeholder or initializer do not fit the model.
    """
    token, vectors = config.placeholder_token, config.num_vectors
    concept = add_placeholder(model.tokenizer, model.text_encoder, token, config.initializer_token, vectors)
    if initial_rows is not None:
        if initial_rows.shape != concept.rows.shape:
            raise UsageError(
                f"--initial_embedding {config.initial_embedding} holds rows of width {initial_rows.shape[1]} and "
                f"{model.source.name} has {concept.rows.shape[1]}: it was trained for another kind of model."
            )
        with torch.no_grad():
            concept.rows.copy_(initial_rows)
    length = model.text_encoder.config.max_position_embeddings
    tokens = placeholder_tokens(token, vectors)
    captions = captions_to_ids(model.tokenizer, TEMPLATES[config.learnable_property], tokens, length)
    return TextualInversion(token, concept, captions)
