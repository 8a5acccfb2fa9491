"""The placeholder token: its rows inside a frozen text encoder, and its place in the captions."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from icom.errors import UsageError

if TYPE_CHECKING:
    from transformers import CLIPTextModel, CLIPTokenizer


class PlaceholderEmbedding(torch.nn.Module):
    """A frozen token table with a few trainable rows spliced into its lookup.

    Looking a placeholder id up gives a trained row, any other id the frozen table's row. Only `rows` has a gradient,
    so gradient, optimizer state, all-reduce and checkpoint are a few KB, where training the whole table and restoring
    all other rows (the field's usual way) moves 152 MB and gives the same rows.

    Attributes:
        rows: nn.Parameter, float32 of shape (vectors, width).
    """

    def __init__(self, table: torch.nn.Embedding, first_id: int, rows: torch.Tensor) -> None:
        """Args: the frozen table; the id of the first placeholder token, the others follow; initial rows."""
        super().__init__()
        self.table = table
        self.first_id = first_id
        self.rows = torch.nn.Parameter(rows.detach().clone().float())

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Ids (batch, tokens) to embeddings (batch, tokens, width) in the table's dtype."""
        offset = ids - self.first_id
        is_placeholder = (offset >= 0) & (offset < len(self.rows))
        # The placeholder's ids may lie outside the frozen table: look up row 0 there and overwrite it.
        frozen = self.table(ids.masked_fill(is_placeholder, 0))
        trained = F.embedding(offset.clamp(0, len(self.rows) - 1), self.rows).to(frozen.dtype)
        return torch.where(is_placeholder.unsqueeze(-1), trained, frozen)


def placeholder_tokens(token: str, vectors: int) -> list[str]:
    """The tokens of a concept as diffusers names them: <x>, <x>_1, <x>_2 …"""
    return [token, *(f"{token}_{index}" for index in range(1, vectors))]


def add_placeholder(
    tokenizer: CLIPTokenizer, text_encoder: CLIPTextModel, token: str, initializer: str, vectors: int
) -> PlaceholderEmbedding:
    """Teach the tokenizer the placeholder and splice its rows into the text encoder.

    Args:
        tokenizer: gets `vectors` new tokens.
        text_encoder: frozen; its token table is wrapped.
        token: the placeholder, not yet in the vocabulary.
        initializer: a word or phrase; rows start from its tokens in turn.
        vectors: how many rows.

    Raises:
        UsageError: placeholder known already, initializer empty or longer than `vectors` tokens.
    """
    first_id = len(tokenizer)
    initial_ids = add_words(tokenizer, token, initializer, vectors)
    table = text_encoder.get_input_embeddings()
    assert isinstance(table, torch.nn.Embedding)
    repeated = [initial_ids[index % len(initial_ids)] for index in range(vectors)]
    concept = PlaceholderEmbedding(table, first_id, table.weight[repeated])
    text_encoder.set_input_embeddings(concept)
    return concept


def add_words(tokenizer: CLIPTokenizer, token: str, initializer: str, vectors: int) -> list[int]:
    """Teach the tokenizer the placeholder's tokens; they get the ids that follow. Needs no weights.

    Returns:
        Token ids of the initializer.

    Raises:
        UsageError: placeholder known already, initializer empty or longer than `vectors` tokens.
    """
    ids = initializer_ids(tokenizer, initializer, vectors)
    tokens = placeholder_tokens(token, vectors)
    if known := known_tokens(tokenizer, tokens):
        raise UsageError(
            f"The vocabulary has {known[0]!r} already: it would change a word that the model knows. Choose another "
            f"--placeholder_token, for instance {suggestion(token)}."
        )
    tokenizer.add_tokens(tokens)
    return ids


def known_tokens(tokenizer: CLIPTokenizer, tokens: Sequence[str]) -> list[str]:
    """Which of the tokens the tokenizer knows: as a word, or as a piece of its vocabulary (such as `toy</w>`)."""
    vocabulary = tokenizer.get_vocab()

    def is_word(name: str) -> bool:
        ids = tokenizer.encode(name, add_special_tokens=False)
        return len(ids) == 1 and ids[0] != tokenizer.unk_token_id

    return [name for name in tokens if name in vocabulary or is_word(name)]


def suggestion(token: str) -> str:
    """A placeholder like `token` that stands on its own in any text."""
    return f"<my-{re.sub(r'[^a-z0-9]+', '-', token.lower().replace('</w>', '')).strip('-') or 'word'}>"


def initializer_ids(tokenizer: CLIPTokenizer, initializer: str, vectors: int) -> list[int]:
    """Token ids of the initializer phrase.

    Raises:
        UsageError: no tokens, or more than `vectors`.
    """
    ids = [int(i) for i in tokenizer.encode(initializer, add_special_tokens=False)]
    if not ids:
        raise UsageError("--initializer_token is empty. Give a word that the model knows, for instance toy.")
    if len(ids) > vectors:
        pieces = ", ".join(str(piece) for piece in tokenizer.convert_ids_to_tokens(ids))
        raise UsageError(
            f"--initializer_token {initializer!r} is {len(ids)} tokens ({pieces}) but --num_vectors is {vectors}. "
            f"Set --num_vectors {len(ids)} or choose a shorter word."
        )
    return ids


def captions_to_ids(
    tokenizer: CLIPTokenizer, templates: tuple[str, ...], tokens: list[str], length: int
) -> torch.Tensor:
    """Token ids of all captions with the concept filled in.

    Args:
        tokenizer: knows the placeholder tokens.
        templates: captions with `{}`.
        tokens: the concept's placeholder tokens.
        length: context length of the text encoder (77).

    Returns:
        int64 of shape (templates, length), padded and cut as CLIP does.

    Raises:
        UsageError: the concept's tokens do not fit into the context beside the longest caption, or change how the
            rest of a caption is read.
    """
    check_captions(tokenizer, templates, tokens)
    captions = [template.format(" ".join(tokens)) for template in templates]
    longest = max(len(ids) for ids in tokenizer(captions).input_ids)
    if longest > length:
        raise UsageError(
            f"--num_vectors {len(tokens)} makes captions of {longest} tokens; the text encoder reads {length}. "
            f"At most {len(tokens) - (longest - length)} fit."
        )
    encoded = tokenizer(captions, padding="max_length", truncation=True, max_length=length, return_tensors="pt")
    ids = encoded.input_ids
    assert isinstance(ids, torch.Tensor)
    return ids


def check_captions(tokenizer: CLIPTokenizer, templates: tuple[str, ...], tokens: list[str]) -> None:
    """Prove that each caption has each of the concept's tokens once, in order, and all else as without them.

    A new token is found anywhere in a text: `hoto` would split every "photo".

    Raises:
        UsageError: names the caption.
    """
    new = [tokenizer.convert_tokens_to_ids(token) for token in tokens]
    for template in templates:
        caption = template.format(" ".join(tokens))
        without, ids = tokenizer([template.format(""), caption]).input_ids
        rest = [i for i in ids if i not in new]
        if [i for i in ids if i in new] != new or rest != without:
            pieces = " ".join(str(piece) for piece in tokenizer.convert_ids_to_tokens(ids[1:-1]))
            raise UsageError(
                f"--placeholder_token {tokens[0]} changes how the captions are read: {caption!r} becomes {pieces!r}. "
                f"Choose a word that is no part of others, for instance {suggestion(tokens[0])}."
            )
