"""How a new word is named: in the tokenizer, and in names of files."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path


def placeholder_tokens(token: str, vectors: int) -> list[str]:
    """The tokens of a concept as diffusers names them: <x>, <x>_1, <x>_2 …"""
    return [token, *(f"{token}_{index}" for index in range(1, vectors))]


def file_name(token: str) -> str:
    """What stands for a word in names of files and folders: letters, digits, dots and hyphens of it."""
    return re.sub(r"[^\w.-]+", "-", token).strip(".-") or "word"


def place_and_word(name: str) -> tuple[str, str | None]:
    """Take PLACE=WORD apart, which names one word of a file or a folder; None where there is no word."""
    if "=" in name and not Path(name).expanduser().exists():
        place, _, word = name.rpartition("=")
        return place, word
    return name, None


@dataclass
class Word:
    """A word that is learned, in the names of `icom train`'s options."""

    placeholder_token: str
    initializer_token: str
    num_vectors: int = 1
    initial_embedding: str | None = None

    @property
    def tokens(self) -> list[str]:
        """Of the tokenizer."""
        return placeholder_tokens(self.placeholder_token, self.num_vectors)
