"""Captions and templates of `icom train`, from files to what is checked."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from icom.config.captions import BUILT_IN
from icom.config.train import TrainConfig
from icom.data.caption_files import METADATA, TEXTS, Metadata, speaks_of_pictures, texts_beside
from icom.data.captions import FILEWORDS, Captions, Text, built_in, mark, marks_in
from icom.data.images import Picture, names_of
from icom.data.masks import ENDING as MASK_ENDING
from icom.data.members import CaptionReader, caption_of
from icom.data.records import DamagedRecord
from icom.errors import IcomError, UsageError

NAME = "[name]"
"""A1111's mark of the word in templates."""
_HOW = f'a template such as "a photo of {NAME}, {FILEWORDS}" (--caption_templates FILE)'


def read_captions(config: TrainConfig, pictures: Sequence[Picture]) -> Captions:
    """What is said of the pictures: by --caption_templates, by what lies beside them, or by --learnable_property.

    Args:
        config: checked.
        pictures: of --train_data_dir.

    Raises:
        UsageError: templates that cannot be read, or nothing that --shuffle_caption and the like could act on.
        IcomError: captions that are missing, empty or of no picture, or that do not say the word; names the files.
    """
    root, words = pictures[0].path.parent, tuple(word.placeholder_token for word in config.words)
    count, label = len(words), " or ".join(words)
    templates = _templates(config, words)
    own: tuple[Text, ...] = ()
    if templates is None or any(FILEWORDS in template.text for template in templates):
        own = _read_own(root, [picture.path.name for picture in pictures], config)
        for template in templates or ():
            if FILEWORDS in template.text and not own:
                raise IcomError(
                    f"{template.place} asks for captions ({FILEWORDS}), and there are none beside the pictures in "
                    f"{root}: neither {' or '.join(TEXTS)} files nor metadata.jsonl."
                )
        if templates is None:
            templates = (Text(FILEWORDS, ""),) if own else built_in(config.learnable_property).templates
    if not own and (config.shuffle_caption or config.caption_dropout_rate):
        option = "--shuffle_caption" if config.shuffle_caption else "--caption_dropout_rate"
        raise UsageError(f"{option} acts on captions of pictures, and none are used here: drop it.")
    if any(not marks_in(template.text, count) for template in templates) and (
        without := [text.place for text in own if not marks_in(text.text, count)]
    ):
        raise IcomError(
            f"Captions without {label}: {names_of(without)}. Write it into them, give {_HOW}, or do without captions "
            f"(--caption_templates {BUILT_IN})."
        )
    files = "--instance_prompt" if config.instance_prompt is not None else config.caption_templates
    files = None if files == BUILT_IN else files
    if own:
        source = f"those of the {len(own)} pictures" + (f", in {len(templates)} templates of {files}" if files else "")
    else:
        source = f"{len(templates)} templates of {files}" if files else ""
    how = (config.shuffle_caption, config.keep_tokens, config.caption_dropout_rate)
    captions = Captions(templates, own, *how, source, count)
    said = {found for text in captions.all() for found in marks_in(text.text, count)}
    if unsaid := [word for number, word in enumerate(words) if mark(number) not in said]:
        raise IcomError(
            f"Nothing that is said of the pictures in {root} names {' or '.join(unsaid)}: it would learn nothing. "
            "Several words need captions that say which of them are in a picture."
        )
    return captions


def _templates(config: TrainConfig, words: tuple[str, ...]) -> tuple[Text, ...] | None:
    """Those that the options name; None where the pictures decide.

    Raises:
        UsageError: they cannot be read, or do not say the word.
    """
    prompt = config.instance_prompt
    if config.caption_templates == BUILT_IN:
        return built_in(config.learnable_property).templates
    if prompt is None:
        return None if config.caption_templates is None else read_templates(config.caption_templates, words)
    place = "--instance_prompt"
    text = marked(prompt, words, place)
    if not marks_in(text, len(words)):
        raise UsageError(f"{place} {prompt!r} does not say {' or '.join(words)}: it would teach nothing.")
    return (Text(text, place),)


def unused(pictures: Sequence[Picture], captions: Captions) -> list[str]:
    """A sentence about captions beside the pictures that no template asks for, where there are any."""
    folder = pictures[0].path.parent
    there = sorted(path.name for path in folder.iterdir() if path.is_file() and speaks_of_pictures(path.name))
    if captions.own or not there:
        return []
    return [f"the captions in {folder} are not used ({names_of(there)}): no template has {FILEWORDS}."]


def read_templates(file: str, words: Sequence[str]) -> tuple[Text, ...]:
    """The templates of a file: a line each; empty ones and comments (#) are passed over.

    Raises:
        UsageError: it cannot be read, is empty, or a line has an unknown mark or none at all.
    """
    try:
        lines = Path(file).expanduser().read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"Cannot read --caption_templates {file}: {error}") from error
    templates = []
    for number, line in enumerate(lines, start=1):
        if not line.strip() or line.strip().startswith("#"):
            continue
        place = f"--caption_templates {file}, line {number}"
        if unknown := [mark for mark in re.findall(r"\[[^\[\]]*\]", line) if mark not in (NAME, FILEWORDS)]:
            raise UsageError(f"{place}: there is no {unknown[0]}. Marks are {NAME}, the new word, and {FILEWORDS}.")
        template = marked(line.strip(), words, place)
        if not marks_in(template, len(words)) and FILEWORDS not in template:
            raise UsageError(f"{place} has neither {NAME} nor {FILEWORDS}: it would teach nothing.")
        templates.append(Text(template, place))
    if not templates:
        raise UsageError(f"--caption_templates {file} is empty. Write {_HOW.partition(' (')[0]} into it, one per line.")
    return tuple(templates)


def _read_own(root: Path, pictures: list[str], config: TrainConfig) -> tuple[Text, ...]:
    """The pictures' captions; empty where nothing beside them holds any.

    Raises:
        IcomError: names everything that is wrong with them.
    """
    there = [path.name for path in root.iterdir() if path.is_file() and not path.name.startswith(".")]
    texts = {name for name in there if speaks_of_pictures(name)}
    files = [name for name in METADATA if name in texts]
    texts.difference_update(files)
    metadata = Metadata(root, files)
    column = config.caption_column
    if column not in metadata.columns and (column != "text" or (files and not texts)):
        said = f"{root / files[0]} has {', '.join(metadata.columns) or 'none'}" if files else "there is none"
        raise IcomError(
            f"No column {column!r} of metadata beside the pictures: {said}. Name another (--caption_column)"
            + (f", or do without captions (--caption_templates {BUILT_IN})." if files else ".")
        )
    words = [word.placeholder_token for word in config.words]
    own, problems, without = [], [], []
    alone = set(texts)
    for name in pictures:
        beside = texts_beside(name, texts)
        alone.difference_update(beside)
        if len(beside) > 1:
            problems.append(f"{name} has {' and '.join(beside)}: keep one of them")
            continue
        try:
            if caption := metadata.caption(name, column, CaptionReader(None)):
                place = f"{files[0]}, {name}"
            elif beside:
                place = beside[0]
                caption = caption_of(place, (root / place).read_bytes())
            else:
                without.append(name)
                continue
            own.append(Text(marked(caption, words, place), place))
        except OSError as error:
            problems.append(f"{beside[0]}: {error.strerror}")
        except (DamagedRecord, IcomError) as error:
            problems.append(str(error))
    if alone:
        problems.append(f"{names_of(sorted(alone))}: captions without their pictures")
    if rows := sorted(metadata.rows.keys() - set(there)):
        problems.append(f"{names_of(rows)}: in {files[0]}, but not in the folder")
    if without and (own or problems or files):
        problems += _of_silent(without)
    if problems:
        listed = "\n  ".join(problems)
        raise IcomError(
            f"The captions in {root} cannot be used; mend them, or do without (--caption_templates {BUILT_IN}):"
            f"\n  {listed}"
        )
    return tuple(own)


def _of_silent(pictures: list[str]) -> list[str]:
    """What is wrong with pictures of which nothing is said."""
    problems = [f"{names_of(pictures)}: pictures without a caption"]
    if masks := [name for name in pictures if name.lower().endswith(MASK_ENDING)]:
        problems.append(f"{names_of(masks)}: if these are masks, add --masked_loss")
    return problems


def marked(text: str, words: Sequence[str], place: str) -> str:
    """A text with marks for the words, however their letters are: the tokenizer makes no difference.

    Args:
        text: of a template or caption; [name] is the first word.
        words: placeholder tokens; `mark` gives their marks.
        place: where it stands.

    Raises:
        IcomError: one stands inside another word, where the tokenizer would find it, too.
    """
    text = text.replace(NAME, words[0])
    # One may be the beginning of another.
    numbers = sorted(range(len(words)), key=lambda number: -len(words[number]))
    pattern = re.compile("|".join(f"({re.escape(words[number])})" for number in numbers), re.IGNORECASE)
    for match in pattern.finditer(text):
        word = words[numbers[(match.lastindex or 1) - 1]]
        before, after = text[: match.start()][-1:], text[match.end() :][:1]
        if (before.isalnum() and word[0].isalnum()) or (after.isalnum() and word[-1].isalnum()):
            raise IcomError(f"{place}: {word} stands inside another word ({before}{match.group()}{after}); part them.")
    return pattern.sub(lambda match: mark(numbers[(match.lastindex or 1) - 1]), text)
