"""Pictures of the same prompts over the steps of a run: as a sheet of labelled rows, and as an animation."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from icom.training.report import grid

WIDEST = 4096
"""Pixels of a sheet, which decide how large its pictures are, and how many of the steps it shows."""
LARGEST, SMALLEST = 256, 128
"""Pixels of a picture's longer side on a sheet. Smaller ones, as the bundled model draws, are enlarged."""
MOST_ROWS = 32
GAP, LINE = 6, 20
"""Pixels between pictures; of a line of text."""
LONGEST = 1000
"""Letters of a prompt that are looked at: two lines of the widest sheet."""
FRAME_MS, LAST_FRAME_MS = 500, 2000
WIDEST_FRAME = 4
"""Pictures side by side in an animation."""

Row = tuple[str, Mapping[int, Path]]
"""What is said of a prompt, and its pictures by step."""


def contact_sheet(rows: Sequence[Row]) -> Image.Image:
    """A row for each prompt below its text, a column for each step; what is missing stays empty.

    Of more steps than fit, the first, the last and others evenly between them are shown; of more prompts the first.

    Args:
        rows: one or more, with one picture or more.
    """
    shown, steps = rows[:MOST_ROWS], evenly(steps_of(rows), WIDEST // (SMALLEST + GAP))
    side = max(SMALLEST, min(LARGEST, WIDEST // len(steps) - GAP))
    width = max(len(steps) * (side + GAP), 3 * (LARGEST + GAP))  # or no text would have room
    left_out = [f"and {len(rows) - MOST_ROWS} prompts more, in the folder samples"] if len(rows) > MOST_ROWS else []
    texts = [_wrapped(text, width - 2 * GAP) for text, _ in shown]
    height = 2 * LINE + sum(LINE * len(lines) + side + 2 * GAP for lines in texts) + LINE * len(left_out)
    sheet = Image.new("RGB", (width + GAP, height), "white")
    draw = ImageDraw.Draw(sheet)
    for column, step in enumerate(steps):
        draw.text((GAP + column * (side + GAP), LINE // 2), _said(step, column == 0), "black", _font())
    top = 2 * LINE
    for lines, (_, pictures) in zip(texts, shown, strict=True):
        for line in lines:
            draw.text((GAP, top), line, "#444", _font())
            top += LINE
        for column, step in enumerate(steps):
            if step in pictures:
                sheet.paste(_fitted(pictures[step], side), (GAP + column * (side + GAP), top))
        top += side + 2 * GAP
    for line in left_out:
        draw.text((GAP, top), line, "#444", _font())
    return sheet


def animation(rows: Sequence[Row], kind: str) -> bytes:
    """All prompts side by side, step after step; it rests on the last one, and begins anew.

    Args:
        rows: as of `contact_sheet`.
        kind: webp or gif.
    """
    shown, steps = rows[:MOST_ROWS], steps_of(rows)
    empty = Image.new("RGB", (LARGEST, LARGEST), "white")
    frames = []
    for step in steps:
        pictures = [_fitted(one[step], LARGEST) if step in one else empty for _, one in shown]
        sheet = grid(pictures, min(WIDEST_FRAME, len(pictures)), GAP)
        frame = Image.new("RGB", (sheet.width, sheet.height + LINE + GAP), "white")
        frame.paste(sheet, (0, LINE + GAP))
        ImageDraw.Draw(frame).text((GAP, GAP // 2), _said(step, True), "black", _font())
        frames.append(frame)
    buffer = io.BytesIO()
    first, *others = frames
    durations = [FRAME_MS] * len(others) + [LAST_FRAME_MS]
    first.save(buffer, kind.upper(), save_all=True, append_images=others, duration=durations, loop=0)
    return buffer.getvalue()


def steps_of(rows: Sequence[Row]) -> list[int]:
    """All steps that there are pictures of."""
    return sorted({step for _, pictures in rows for step in pictures})


def evenly(items: Sequence[int], most: int) -> list[int]:
    """At most so many of them, the first and the last among them."""
    if len(items) <= most:
        return list(items)
    return [items[round(place * (len(items) - 1) / (most - 1))] for place in range(most)]


def _said(step: int, first: bool) -> str:
    return f"step {step}" if first else str(step)


def _fitted(path: Path, side: int) -> Image.Image:
    """A picture in the middle of a white square."""
    with Image.open(path) as image:
        picture = image.convert("RGB")
    scale = side / max(picture.size)
    size = (max(1, round(picture.width * scale)), max(1, round(picture.height * scale)))
    # Few pixels are shown as they are; blurred they would look like another picture.
    method = Image.Resampling.NEAREST if scale >= 2 else Image.Resampling.LANCZOS
    square = Image.new("RGB", (side, side), "white")
    square.paste(picture.resize(size, method), ((side - size[0]) // 2, (side - size[1]) // 2))
    return square


@lru_cache
def _font() -> ImageFont.FreeTypeFont:
    """DejaVu Sans, which matplotlib brings: it has letters of many scripts; Pillow's own has Latin ones only."""
    import matplotlib as mpl

    return ImageFont.truetype(Path(mpl.get_data_path(), "fonts/ttf/DejaVuSans.ttf"), 13)


def _wrapped(text: str, width: int, most: int = 2) -> list[str]:
    """A text in lines of so many pixels; what is beyond the last one is cut, with an ellipsis."""
    lines: list[str] = []
    rest = " ".join(text.split())[:LONGEST]
    while rest and len(lines) < most:
        end = len(rest)
        while end > 1 and _font().getlength(rest[:end]) > width:
            space = rest.rfind(" ", 0, end - 1)
            end = space if space > 0 else end - 1
        lines.append(rest[:end])
        rest = rest[end:].strip()
    if rest:
        line = lines[-1]
        while line and _font().getlength(f"{line} …") > width:
            line = line[:-1]
        lines[-1] = f"{line.rstrip()} …"
    return lines
