"""The parts of a record from their bytes, wherever those were kept: picture and caption."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

from icom.data.images import BadPicture, decode_picture
from icom.data.records import DamagedRecord

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
