"""Prior preservation: the word is also learned from pictures of its class, which the model draws itself.

Where diffusers' scripts train the network, the class's prompt keeps the class from changing. Here the network is frozen
and only the word's rows can change: what is kept is what the word meant at the beginning, when its rows were those of
--initializer_token.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from icom.commands.generate import draw
from icom.config.generate import GUIDANCE, SAMPLER, STEPS
from icom.config.train import TrainConfig
from icom.data.caption_reading import marked
from icom.data.captions import Captions, Text
from icom.data.class_pictures import DRAWN, pictures_there
from icom.data.images import Picture
from icom.data.sampling import Stream, raw_words
from icom.errors import IcomError
from icom.files import make_writable_folder, write_atomically
from icom.methods.embedding import filled
from icom.models import pipelines
from icom.parallel.group import Group
from icom.progress import progress
from icom.training.pictures import bucket_order
from icom.training.report import A1111_SAMPLERS, drawn_with, png

if TYPE_CHECKING:
    from icom.backends import Backend
    from icom.data.latents import Moments
    from icom.models.loading import Model
    from icom.training.run import Run


def class_captions(config: TrainConfig) -> Captions:
    """What is said of pictures of the class."""
    assert config.class_prompt
    place = "--class_prompt"
    return Captions((Text(marked(config.class_prompt, [config.placeholder_token], place), place),))


def class_pictures(config: TrainConfig, model: Model, backend: Backend, group: Group) -> list[Picture]:
    """--num_class_images pictures of the class. All processes draw those that rank 0 lacks; each machine gets them.

    Which picture has which number decides its noise, so that a run that was interrupted goes on, to the same pictures.

    Args:
        config: with `seed` settled.
        model: prepared by the backend.
        backend: that computes.
        group: the processes.

    Raises:
        IcomError: they cannot be drawn or written, were drawn for something else, or differ between machines.
    """
    assert config.class_data_dir
    folder, size = Path(config.class_data_dir).expanduser(), (config.resolution, config.resolution)
    prompt = filled(class_captions(config).templates[0].text, [config.initializer_token])
    shown = Path(model.source.name).name if Path(model.source.name).is_dir() else model.source.name

    def drawn(number: int) -> str:
        sampler = A1111_SAMPLERS[SAMPLER]
        return drawn_with(
            *(prompt, None), steps=STEPS, sampler=sampler, guidance=GUIDANCE, seed=number, size=size, model=shown
        )

    wanted = json.loads(group.broadcast(json.dumps(_wanted(config, drawn)).encode() if group.leads else None))
    missing: list[int] = wanted["missing"]
    if missing and group.leads:
        print(f"icom: drawing {len(missing)} pictures of {prompt!r} into {folder} (--num_class_images)", flush=True)
    if missing and group.place.local_rank == 0:
        make_writable_folder(folder, "--class_data_dir")
    pipeline = pipelines.pipeline_of(model, SAMPLER)
    quiet = not (group.leads and missing)
    with progress(None, "class pictures", "picture", total=len(missing), disable=quiet) as bar:
        for first in range(0, len(missing), group.size):
            numbers = missing[first : first + group.size]
            content = b""
            if group.rank < len(numbers):
                number = numbers[group.rank]
                with backend.autocast():
                    image = draw(pipeline, prompt, number, resolution=config.resolution)
                content = png(image, drawn(number))
            for number, made in zip(numbers, group.gather(content), strict=False):
                if group.place.local_rank == 0:
                    write_atomically(folder / _name(number), made, "--class_data_dir")
            bar.update(len(numbers))
    group.wait_for_everyone()
    pictures = {picture.path.name: picture for picture in pictures_there(config)}
    chosen = [pictures[name] for name in wanted["names"] if name in pictures]
    group.agree("The pictures of the class", {picture.path.name: picture.digest for picture in chosen})
    return chosen


def _wanted(config: TrainConfig, drawn: Callable[[int], str]) -> dict[str, list[Any]]:
    """Names of the pictures that are learned, and the numbers of those that have to be drawn for it.

    Raises:
        IcomError: one was drawn for something else.
    """
    there = {picture.path.name: picture.path for picture in pictures_there(config)}
    own = [name for name in there if not DRAWN.fullmatch(name)][: config.num_class_images]
    numbers = range(config.num_class_images - len(own))
    for number in numbers:
        path = there.get(_name(number))
        if path and (found := _of_any_version(_parameters(path))) != (now := _of_any_version(drawn(number))):
            raise IcomError(
                f"{path} was drawn for something else: {found!r}, and now it would be {now!r}. Choose another "
                "--class_data_dir, or delete the pictures in it."
            )
    return {
        "names": [*own, *map(_name, numbers)],
        "missing": [number for number in numbers if _name(number) not in there],
    }


def _name(number: int) -> str:
    return f"class-{number:05}.png"


def _parameters(path: Path) -> str:
    from PIL import Image

    with Image.open(path) as image:
        return str(image.info.get("parameters", "nothing that icom knows of"))


def _of_any_version(parameters: str) -> str:
    return parameters.rpartition(", Version: ")[0] or parameters


def with_prior(run: Run, pictures: list[Picture], moments: Moments) -> Run:
    """The run, which learns these pictures beside its own.

    Sample i of the class belongs to sample i of the run, and is a function of (seed, i), too.

    Args:
        run: without prior preservation.
        pictures: of the class.
        moments: theirs.
    """
    config = run.config
    assert config.seed is not None
    seed = int(raw_words(config.seed, Stream.PRIOR, count=1)[0] >> np.uint64(1))
    prior = replace(
        run,
        method=run.method.saying(run.model, class_captions(config)),
        moments=moments,
        stream=replace(
            run.stream,
            seed=seed,
            pictures=len(pictures),
            repeats=1,
            templates=1,
            buckets=bucket_order(pictures, config, seed, repeats=1),
        ),
    )
    digests = json.dumps([picture.digest for picture in pictures])
    options = {
        "class_prompt": config.class_prompt,
        "class_pictures": hashlib.sha256(digests.encode()).hexdigest()[:12],
        "prior_loss_weight": config.prior_loss_weight,
    }
    return replace(run, prior=prior, identity=replace(run.identity, options=run.identity.options | options))
