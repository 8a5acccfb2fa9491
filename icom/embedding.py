"""The placeholder token: its rows inside a frozen text encoder, and the file that holds them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file, save

from icom.errors import IcomError, UsageError
from icom.files import write_atomically

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
    initial_ids = check_words(tokenizer, token, initializer, vectors)
    first_id = len(tokenizer)
    table = text_encoder.get_input_embeddings()
    assert isinstance(table, torch.nn.Embedding)
    if first_id > table.num_embeddings:
        raise UsageError(
            f"The tokenizer has {first_id} tokens and the text encoder only {table.num_embeddings}: they do not "
            "belong together. Drop --tokenizer_name or name the tokenizer of this model."
        )
    tokenizer.add_tokens(placeholder_tokens(token, vectors))
    repeated = [initial_ids[index % len(initial_ids)] for index in range(vectors)]
    concept = PlaceholderEmbedding(table, first_id, table.weight[repeated])
    text_encoder.set_input_embeddings(concept)
    return concept


def check_words(tokenizer: CLIPTokenizer, token: str, initializer: str, vectors: int) -> list[int]:
    """Whether the new word is new and its initializer known; needs no weights.

    Returns:
        Token ids of the initializer.

    Raises:
        UsageError: placeholder known already, initializer empty or longer than `vectors` tokens.
    """
    ids = initializer_ids(tokenizer, initializer, vectors)
    for name in placeholder_tokens(token, vectors):
        known = tokenizer.encode(name, add_special_tokens=False)
        if len(known) == 1 and known[0] != tokenizer.unk_token_id:
            raise UsageError(
                f"The vocabulary has {name!r} already: it would change a word that the model knows. Choose another "
                f"--placeholder_token, for instance <my-{token.strip('<>')}>."
            )
    return ids


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
        UsageError: the concept's tokens do not fit into the context beside the longest caption.
    """
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


def load_initial_rows(path: Path, vectors: int) -> torch.Tensor:
    """The rows of --initial_embedding: float32 (vectors, width). What word they were learned for does not matter.

    Raises:
        UsageError: no such file, or another number of rows.
        IcomError: it is damaged, or no embedding.
    """
    if not path.is_file():
        raise UsageError(f"--initial_embedding {path} is no file. Name the learned_embeds.safetensors of a run.")
    _, rows = load_embedding(path)
    if len(rows) != vectors:
        raise UsageError(f"--initial_embedding {path} holds {len(rows)} vectors: give --num_vectors {len(rows)}.")
    return rows.float()


def save_embedding(path: Path, token: str, rows: torch.Tensor) -> None:
    """Write rows in the one form that diffusers, A1111 and ComfyUI all open: a single key, the token; 2-D; float32.

    Args:
        path: *.safetensors.
        token: the placeholder.
        rows: (vectors, width).
    """
    tensor = rows.detach().float().cpu().contiguous()
    write_atomically(path, save({token: tensor}, metadata={"format": "pt"}))


def load_embedding(path: Path) -> tuple[str, torch.Tensor]:
    """Read a file written by `save_embedding` (or by diffusers).

    Returns:
        (token, rows of shape (vectors, width)).

    Raises:
        IcomError: missing, damaged, or not one 2-D tensor.
    """
    if not path.is_file():
        kind = "is a folder" if path.is_dir() else "does not exist"
        raise IcomError(f"--embedding {path} {kind}. Name the learned_embeds.safetensors of a run.")
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise IcomError(
            f"{path} is not a safetensors file, or damaged ({error}). Take the learned_embeds.safetensors of a run."
        ) from error
    if len(tensors) != 1:
        raise IcomError(f"{path} holds {len(tensors)} tensors; an embedding file has one, named by its token.")
    ((token, rows),) = tensors.items()
    if rows.dim() == 1:
        rows = rows[None]
    if rows.dim() != 2 or not rows.numel() or not rows.is_floating_point():
        raise IcomError(f"{path} holds {rows.dtype} of shape {tuple(rows.shape)}; expected (vectors, width).")
    if not bool(torch.isfinite(rows.float()).all()):
        raise IcomError(f"{path} holds numbers that are not finite: nothing can be drawn with it. Train it again.")
    return token, rows
