"""The parts of a record from their bytes, wherever those were kept: picture and caption."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from icom.data.images import BadPicture, decode_picture
from icom.data.records import DamagedRecord
from icom.errors import UsageError

if TYPE_CHECKING:
    from PIL import Image


def picture_of(key: str, content: bytes) -> Image.Image:
    """A record's picture, upright and RGB.

    Args:
        key: the record's, for messages.
        content: of the picture's file.

    Raises:
        DamagedRecord: it does not decode.
    """
    try:
        return decode_picture(io.BytesIO(content), key)
    except BadPicture as error:
        raise DamagedRecord(key, str(error)) from error


def caption_of(key: str, content: bytes | str) -> str:
    """A record's caption, without white space around it.

    Args:
        key: the record's, for messages.
        content: text, or UTF-8 with or without a mark of its byte order.

    Raises:
        DamagedRecord: it is empty, or not UTF-8.
    """
    try:
        text = content if isinstance(content, str) else content.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise DamagedRecord(key, "the caption is not UTF-8") from None
    if not (text := text.strip()):
        raise DamagedRecord(key, "the caption is empty")
    return text


class CaptionReader:
    """Makes a caption of what stands where captions do: a text, or with --idx_to_prompt the number of a class."""

    def __init__(self, idx_to_prompt: str | None) -> None:
        """Read the prompts.

        Raises:
            UsageError: the file is missing, or neither a list of prompts nor a mapping of numbers to them.
        """
        self.prompts = None if idx_to_prompt is None else _read_prompts(Path(idx_to_prompt).expanduser())

    def __call__(self, key: str, content: bytes | str | int) -> str:
        """A record's caption.

        Raises:
            DamagedRecord: it is empty, not UTF-8, or no class with a prompt.
        """
        if self.prompts is None:
            return caption_of(key, content if isinstance(content, bytes) else str(content))
        try:
            return self.prompts[int(content)]
        except ValueError:
            raise DamagedRecord(key, f"{content!r:.40} is no number of a class") from None
        except KeyError:
            raise DamagedRecord(key, f"class {int(content)} has no prompt") from None


class TarCaptions:
    """Where the captions of tars stand, and what they are. `member` is the suffix of the member that has them."""

    def __init__(self, caption_column: str, idx_to_prompt: str | None) -> None:
        """Understand the options of these names.

        Raises:
            UsageError: captions cannot stand there.
        """
        place, _, self.field = caption_column.partition(":")
        self.member = "txt" if place == "text" else place  # the default is the name of a column
        self.reader = CaptionReader(idx_to_prompt)
        if self.member not in ("txt", "json", "cls") or (self.member == "json") != bool(self.field):
            raise UsageError(
                f"--caption_column {caption_column}: in tars captions stand in txt, json:FIELD, or cls with "
                "--idx_to_prompt."
            )
        if self.member == "cls" and self.reader.prompts is None:
            raise UsageError(
                "--caption_column cls: classes are numbers; name the file with a prompt for each (--idx_to_prompt)."
            )

    def read(self, key: str, content: bytes) -> str:
        """A sample's caption.

        Raises:
            DamagedRecord: there is none.
        """
        if not self.field:
            return self.reader(key, content)
        try:
            said: Any = json.loads(content)
        except (ValueError, RecursionError) as error:
            raise DamagedRecord(key, f"its .json is damaged ({error})") from None
        value = said.get(self.field) if isinstance(said, dict) else None
        if not isinstance(value, str | int):
            raise DamagedRecord(key, f"its .json has no text {self.field!r}")
        return self.reader(key, value)


def _read_prompts(path: Path) -> dict[int, str]:
    try:
        read = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"--idx_to_prompt {path}: {error}.") from error
    pairs = enumerate(read) if isinstance(read, list) else read.items() if isinstance(read, dict) else [(0, None)]
    prompts = {}
    for number, prompt in pairs:
        if not str(number).isdecimal() or not isinstance(prompt, str) or not prompt.strip():
            raise UsageError(
                f'--idx_to_prompt {path} has to be a list of prompts, or a mapping such as {{"0": "a photo of a cat"}}.'
            )
        prompts[int(number)] = prompt.strip()
    return prompts
