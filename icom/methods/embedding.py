"""The placeholder token: its rows inside a frozen text encoder, and its place in the captions."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F

from icom.config.rows import RANDOM
from icom.config.words import placeholder_tokens
from icom.data.captions import WORD, mark, marks_in
from icom.data.images import names_of
from icom.data.sampling import Stream, raw_words
from icom.errors import IcomError, UsageError

if TYPE_CHECKING:
    from transformers import CLIPTextModel, CLIPTokenizer

    from icom.config.words import Word
    from icom.data.captions import Captions


class PlaceholderEmbedding(torch.nn.Module):
    """A frozen token table with a few trainable rows spliced into its lookup.

    Looking a placeholder id up gives a trained row, any other id the frozen table's row. Only `rows` has a gradient,
    so gradient, optimizer state, all-reduce and checkpoint are a few KB, where training the whole table and restoring
    all other rows (the field's usual way) moves 152 MB and gives the same rows.

    Attributes:
        words: for each word a parameter, float32 of shape (vectors, width).
    """

    def __init__(self, table: torch.nn.Embedding, first_id: int, *words: torch.Tensor) -> None:
        """Args: the frozen table; the id of the first placeholder token, the others follow; each word's first rows."""
        super().__init__()
        self.table = table
        self.first_id = first_id
        self.words = torch.nn.ParameterList(rows.detach().clone().float() for rows in words)

    @property
    def rows(self) -> torch.Tensor:
        """Of all words, (vectors, width); a word that no token of a batch is of gets a gradient of zeros."""
        return self.words[0] if len(self.words) == 1 else torch.cat(list(self.words))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Ids (batch, tokens) to embeddings (batch, tokens, width) in the table's dtype."""
        rows, offset = self.rows, ids - self.first_id
        is_placeholder = (offset >= 0) & (offset < len(rows))
        # The placeholder's ids may lie outside the frozen table: look up row 0 there and overwrite it.
        frozen = self.table(ids.masked_fill(is_placeholder, 0))
        trained = F.embedding(offset.clamp(0, len(rows) - 1), rows).to(frozen.dtype)
        return torch.where(is_placeholder.unsqueeze(-1), trained, frozen)


def add_placeholders(
    tokenizer: CLIPTokenizer, text_encoder: CLIPTextModel, words: Sequence[Word], seed: int = 0
) -> PlaceholderEmbedding:
    """Teach the tokenizer new words and splice their rows into the text encoder.

    Args:
        tokenizer: gets the words' tokens.
        text_encoder: frozen; its token table is wrapped.
        words: not yet in the vocabulary. The rows of each start from the tokens of its initializer in turn, or are
            RANDOM.
        seed: of random rows.

    Raises:
        UsageError: a word is known already, its initializer empty or longer than its vectors.
    """
    first_id = len(tokenizer)
    table = text_encoder.get_input_embeddings()
    if isinstance(table, PlaceholderEmbedding):  # somebody else's, who shares the text encoder
        table = table.table
    assert isinstance(table, torch.nn.Embedding)
    rows = []
    for number, word in enumerate(words):
        ids = add_words(tokenizer, word.placeholder_token, word.initializer_token, word.num_vectors)
        rows.append(start_rows(table.weight, ids, word.num_vectors, seed, number))
    concept = PlaceholderEmbedding(table, first_id, *rows)
    text_encoder.set_input_embeddings(concept)
    return concept


def start_rows(
    table: torch.Tensor, initial_ids: Sequence[int], vectors: int, seed: int, number: int = 0
) -> torch.Tensor:
    """What a word starts from.

    Args:
        table: (tokens, width).
        initial_ids: of the initializer's tokens, which the rows take in turn; none for random rows.
        vectors: how many rows.
        seed: of random ones.
        number: of the word among those that are learned together, from 0 on.
    """
    if not initial_ids:
        return random_rows(table, vectors, seed, number)
    return table[[initial_ids[index % len(initial_ids)] for index in range(vectors)]]


def random_rows(table: torch.Tensor, vectors: int, seed: int, number: int = 0) -> torch.Tensor:
    """Rows of normal numbers, each column with its mean and standard deviation in a token table.

    Args:
        table: (tokens, width).
        vectors: how many.
        seed: of the run.
        number: of the word, where several are learned together.

    Returns:
        float32 (vectors, width).
    """
    spread, middle = torch.std_mean(table.detach().float(), dim=0)
    (word,) = raw_words(seed, Stream.ROWS, *([number] if number else []), count=1)
    generator = torch.Generator().manual_seed(int(word >> np.uint64(1)))
    return middle + spread * torch.randn(vectors, table.shape[1], generator=generator)


def add_words(tokenizer: CLIPTokenizer, token: str, initializer: str, vectors: int) -> list[int]:
    """Teach the tokenizer the placeholder's tokens; they get the ids that follow. Needs no weights.

    Returns:
        Token ids of the initializer; none of RANDOM.

    Raises:
        UsageError: placeholder known already, initializer empty or longer than `vectors` tokens.
    """
    ids = [] if initializer == RANDOM else initializer_ids(tokenizer, initializer, vectors)
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
    tokenizer: CLIPTokenizer, templates: Sequence[str], tokens: Sequence[str], length: int, *further: Sequence[str]
) -> torch.Tensor:
    """Token ids of captions with the concept filled in.

    Args:
        tokenizer: knows the placeholder tokens.
        templates: captions with `{}`.
        tokens: the concept's placeholder tokens.
        length: context length of the text encoder (77).
        further: tokens of further words.

    Returns:
        int64 of shape (templates, length), padded and cut as CLIP does.
    """
    captions = [filled(template, tokens, *further) for template in templates]
    encoded = tokenizer(captions, padding="max_length", truncation=True, max_length=length, return_tensors="pt")
    ids = encoded.input_ids
    assert isinstance(ids, torch.Tensor)
    return ids


def filled(template: str, tokens: Sequence[str], *further: Sequence[str]) -> str:
    """A caption with the words' tokens wherever the template has their marks; captions may have other braces."""
    by_mark = {mark(number): " ".join(of_word) for number, of_word in enumerate((tokens, *further))}
    return re.sub("|".join(map(re.escape, by_mark)), lambda found: by_mark[found.group()], template)


def check_captions(
    tokenizer: CLIPTokenizer, templates: Sequence[str], tokens: Sequence[str], *further: Sequence[str]
) -> None:
    """Prove that each caption has all of a word's tokens in order for each of its marks, and all else as without them.

    A new token is found anywhere in a text: `hoto` would split every "photo".

    Raises:
        UsageError: names the caption.
    """
    words = (tokens, *further)
    by_mark = {mark(n): [tokenizer.convert_tokens_to_ids(token) for token in word] for n, word in enumerate(words)}
    new = {i for ids in by_mark.values() for i in ids}
    read = tokenizer([filled(template, *words) for template in templates]).input_ids
    read_without = tokenizer([filled(template, *([] for _ in words)) for template in templates]).input_ids
    for template, ids, without in zip(templates, read, read_without, strict=True):
        expected = [i for found in marks_in(template, len(words)) for i in by_mark[found]]
        if [i for i in ids if i in new] != expected or [i for i in ids if i not in new] != without:
            pieces = " ".join(str(piece) for piece in tokenizer.convert_ids_to_tokens(ids[1:-1]))
            named = " or ".join(word[0] for word in words)
            raise UsageError(
                f"--placeholder_token {named} changes how the captions are read: {filled(template, *words)!r} "
                f"becomes {pieces!r}. Choose a word that is no part of others, for instance {suggestion(tokens[0])}."
            )


def check_lengths(
    tokenizer: CLIPTokenizer, captions: Captions, tokens: Sequence[str], length: int, *further: Sequence[str]
) -> list[str]:
    """Prove that the concept's tokens stand where the text encoder still reads.

    Args:
        tokenizer: knows the placeholder tokens.
        captions: that samples can have.
        tokens: the concept's placeholder tokens.
        length: context length of the text encoder (77, of which two mark beginning and end).
        further: tokens of further words.

    Returns:
        Where the captions stand whose end is cut off, with their tokens.

    Raises:
        UsageError: the tokens do not fit into the context beside a built-in template.
        IcomError: they stand beyond it in a caption.
    """
    texts, words = list(captions.all()), (tokens, *further)
    new = {tokenizer.convert_tokens_to_ids(token) for word in words for token in word}
    cut: dict[str, int] = {}
    lost: list[str] = []
    most = len(tokens)
    for text, ids in zip(texts, tokenizer([filled(one.text, *words) for one in texts]).input_ids, strict=True):
        if len(ids) <= length:
            continue
        if any(i in new for i in ids[length - 1 :]):  # the last place is the mark of the end
            lost.append(text.place)
            if not further:
                most = min(most, len(tokens) + (length - len(ids)) // text.text.count(WORD))
        cut[text.place] = max(cut.get(text.place, 0), len(ids) - 2)
    if "" in lost:
        longest = cut[""] + 2
        raise UsageError(
            f"--num_vectors {len(tokens)} makes captions of {longest} tokens; the text encoder reads {length}. "
            f"At most {most} fit."
        )
    if lost:
        named = " or ".join(word[0] for word in words)
        raise IcomError(
            f"The text encoder reads {length - 2} tokens, and {named} can stand beyond them in "
            f"{names_of(sorted(set(lost)))}: put it nearer to the beginning, shorten the caption, or keep it in its "
            "place (--keep_tokens)."
        )
    return [f"{place} ({count} tokens)" for place, count in sorted(cut.items())]
