"""Files with learned rows: icom's own, those that other tools left over the years, and `icom convert` between them."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from icom.config.convert import ConvertConfig
from icom.config.words import file_name, place_and_word
from icom.errors import IcomError, UsageError
from icom.files import write_atomically
from icom.models import hub, loading

PUBLISHED = ("learned_embeds.safetensors", "learned_embeds.bin")
"""What a repository of an embedding on the Hub holds; the first one that is there is taken."""

OPENS_IN = "opens in diffusers, A1111 and ComfyUI"

_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt")
_ENCODERS = ("clip_l", "clip_g", "t5xxl")
_NAMELESS = ("*", "emb_params")
"""Keys that are no words: the original script's and A1111's, kohya's."""
_LARGEST = 64 * 2**20


@dataclass(frozen=True)
class Word:
    """A learned word."""

    token: str
    rows: torch.Tensor  # float32 (vectors, width)
    path: Path  # where it was read
    stem: Path  # where a file made of it goes, without its ending


def save_embedding(path: Path, token: str, rows: torch.Tensor, option: str = "--output_dir") -> None:
    """Write rows in the one form that diffusers, A1111 and ComfyUI all open: a single key, the token; 2-D; float32.

    Args:
        path: *.safetensors.
        token: the placeholder.
        rows: (vectors, width).
        option: what the user chose the folder with.
    """
    save_embeddings(path, {token: rows}, option)


def save_embeddings(path: Path, words: Mapping[str, torch.Tensor], option: str = "--output_dir") -> None:
    """Write the rows of several words: a key for each. icom reads such files; diffusers' loader takes a word at a time.

    Args:
        path: *.safetensors.
        words: token -> (vectors, width).
        option: what the user chose the folder with.
    """
    tensors = {token: rows.detach().float().cpu().contiguous() for token, rows in words.items()}
    write_atomically(path, save(tensors, metadata={"format": "pt"}), option)


def named_by_file(token: str, title: str | None = None) -> str:
    """How to say the word in the tools that call it by its file.

    Args:
        token: the word.
        title: of the file, where it has its final name already.
    """
    called = title or file_name(token)
    copied = "this one" if title else f"copied as {called}.safetensors it"
    return (
        f"A1111 and ComfyUI call a word by its file's name: {copied} is `{called}` in A1111 and "
        f"`embedding:{called}` in ComfyUI."
    )


def find_word(name: str) -> Word:
    """Read the one word that the user named, as `find_words` does.

    Raises:
        IcomError, UsageError: as there, or there are several.
    """
    word, *others = find_words(name)
    if others:
        tokens = ", ".join(one.token for one in (word, *others))
        raise UsageError(f"{name} holds several words ({tokens}). Name one of them, as in {name}={word.token}.")
    return word


def find_words(name: str) -> list[Word]:
    """Read what the user named: a file, a Hub id, or one of them with `=word`.

    That names the word anew, or of a file with several words one of them.

    Raises:
        IcomError: missing, damaged, or no embedding for Stable Diffusion.
        UsageError: the word given is none.
    """
    place, token = place_and_word(name)
    if token is not None and token.split() != [token]:
        raise UsageError(f"{name}: after the last = comes the word, one without spaces, for instance <mine>.")
    path = _find_file(place)
    words = load_embeddings(path)
    from_hub = path != Path(place).expanduser()
    stem = Path(place.rpartition("/")[2]) if from_hub else path.with_suffix("")
    if len(words) == 1:
        ((own, rows),) = words.items()
        return [Word(token or own, rows, path, stem)]
    if token is not None and token not in words:
        raise UsageError(f"{place} holds {', '.join(words)}, and not {token}.")
    return [
        Word(own, rows, path, stem.with_name(file_name(own))) for own, rows in words.items() if token in (None, own)
    ]


def load_embedding(path: Path) -> tuple[str, torch.Tensor]:
    """Read an embedding file of one word, as `load_embeddings` does.

    Raises:
        IcomError: as there, or it holds several words.
    """
    words = load_embeddings(path)
    if len(words) > 1:
        raise IcomError(f"{path} holds several words ({', '.join(words)}): take the file of one of them.")
    ((token, rows),) = words.items()
    return token, rows


def load_embeddings(path: Path) -> dict[str, torch.Tensor]:
    """Read an embedding file in any of the known layouts.

    Safetensors or pickled (of which only tensors and plain containers are read): {token: rows}, as diffusers writes,
    or several of them, as `save_embeddings` does; A1111's `string_to_param`; kohya's `emb_params`; a list of such; bare
    rows. Rows may be 1-D and of any float type.

    Returns:
        Token -> float32 rows of shape (vectors, width). Where the file names no word, the file's name is it.

    Raises:
        IcomError: missing, damaged, or no embedding for Stable Diffusion 1 or 2.
    """
    if not path.is_file():
        kind = "is a folder" if path.is_dir() else "does not exist"
        raise IcomError(f"The embedding {path} {kind}. Name the learned_embeds.safetensors of a run.")
    if path.stat().st_size > _LARGEST:
        raise IcomError(f"{path} is too large for an embedding ({path.stat().st_size / 2**20:.0f} MB): a whole model?")
    content = _read(path)
    if _is_of_several_words(content):
        return {token: _checked([content[token]], path) for token in sorted(content)}
    token, tensors = _words_in(content, path)
    return {token or re.sub(r"\s+", "-", path.stem): _checked(tensors, path)}


def _checked(tensors: list[torch.Tensor], path: Path) -> torch.Tensor:
    """The rows of a word: float32 (vectors, width).

    Raises:
        IcomError: they are none.
    """
    parts = [_rows(tensor, path) for tensor in tensors]
    if len(widths := {part.shape[1] for part in parts}) > 1:
        raise IcomError(f"{path} holds rows of several widths ({', '.join(map(str, sorted(widths)))}); expected one.")
    rows = torch.cat(parts)
    if not bool(torch.isfinite(rows).all()):
        raise IcomError(f"{path} holds numbers that are not finite: nothing can be drawn with it. Train it again.")
    return rows


def _is_of_several_words(content: Any) -> bool:
    """Whether it maps words to rows of one width, and not the names of a network's parameters, which have dots."""
    if not isinstance(content, dict) or len(content) < 2:
        return False
    tokens = all(
        isinstance(name, str) and name.split() == [name] and ("." not in name or name.startswith("<"))
        for name in content
    )
    if not tokens or not {*_ENCODERS, *_NAMELESS}.isdisjoint(content):
        return False
    rows = [tensor for tensor in content.values() if isinstance(tensor, torch.Tensor) and tensor.dim() in (1, 2)]
    return len(rows) == len(content) and len({tensor.shape[-1] for tensor in rows}) == 1


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


def convert(config: ConvertConfig) -> None:
    """`icom convert`: write an embedding as safetensors, under its word.

    Raises:
        IcomError: the embedding cannot be read, the output not written, or it exists.
    """
    word = find_word(config.embedding)
    output = Path(config.output or f"{word.stem}.safetensors")
    if output.exists():
        raise IcomError(f"{output} exists already. Name another file with --output.")
    save_embedding(output, word.token, word.rows, "--output")
    vectors, width = word.rows.shape
    print(f"{output}: {word.token}, {vectors} x {width}, float32; {OPENS_IN}")
    print(named_by_file(word.token, output.stem))


def _find_file(place: str) -> Path:
    path = Path(place).expanduser()
    if path.exists() or path.suffix in _SUFFIXES or not loading.is_hub_id(place):
        return path
    folder = hub.snapshot(place, None, [*PUBLISHED, "config.yaml"], "embedding")
    for name in PUBLISHED:
        if (folder / name).is_file():
            return folder / name
    raise IcomError(
        f"{place} on the Hub has no {' or '.join(PUBLISHED)}. Download the file you want (`hf download {place}`) and "
        "name it."
    )


def _read(path: Path) -> Any:
    """What the file holds, as tensors and plain containers."""
    content = path.read_bytes()
    # A safetensors file starts with 8 bytes of length and the brace of its header.
    pickled = content[8:9] != b"{" and content[:1] in (b"\x80", b"P")
    try:
        if not pickled:
            return load(content)
        return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except SafetensorError as error:
        raise IcomError(
            f"{path} is not a safetensors file, or damaged ({error}). Take the learned_embeds.safetensors of a run."
        ) from error
    except Exception as error:
        # A damaged pickle raises nearly anything.
        if forbidden := re.search(r"GLOBAL (\S+)", str(error)):
            raise IcomError(
                f"{path} holds {forbidden[1]} beside tensors. Reading that could run code of whoever made the file, "
                "and icom does not. Ask for a safetensors file of it."
            ) from error
        raise IcomError(f"{path} is damaged ({type(error).__name__}). Fetch it again.") from error


def _words_in(content: Any, path: Path) -> tuple[str | None, list[torch.Tensor]]:
    """(the word, where the file tells; its tensors)."""
    if isinstance(content, list) and content:
        parts = [_words_in(part, path) for part in content]
        return parts[0][0], [tensor for _, tensors in parts for tensor in tensors]
    if isinstance(content, torch.Tensor):
        return None, [content]
    if isinstance(content, dict):
        if encoders := [name for name in _ENCODERS if name in content]:
            raise IcomError(
                f"{path} is an embedding for a model with several text encoders ({', '.join(encoders)}): SDXL or "
                "newer. icom draws with Stable Diffusion 1 and 2."
            )
        if isinstance(parameters := content.get("string_to_param"), dict):
            _, tensors = _words_in(parameters, path)
            name = content.get("name")
            return name if isinstance(name, str) and name.split() == [name] and name not in _NAMELESS else None, tensors
        if len(content) == 1:
            ((name, tensor),) = content.items()
            if isinstance(name, str) and isinstance(tensor, torch.Tensor):
                return None if name in _NAMELESS or not name.strip() else name, [tensor]
        raise IcomError(f"{path} holds {len(content)} entries; an embedding file has one, named by its token.")
    raise IcomError(f"{path} holds a {type(content).__name__} and no tensors: it is no embedding.")


def _rows(tensor: torch.Tensor, path: Path) -> torch.Tensor:
    rows = tensor.detach()
    if rows.dim() == 1:
        rows = rows[None]
    if rows.dim() != 2 or not rows.numel() or not rows.is_floating_point():
        raise IcomError(f"{path} holds {rows.dtype} of shape {tuple(rows.shape)}; expected (vectors, width).")
    return rows.float()
