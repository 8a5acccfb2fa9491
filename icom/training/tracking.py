"""Trackers (TensorBoard, Weights & Biases, Comet) through Accelerate; all of them work without a network."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from icom.config.training import SECRETS, RunOptions, settings
from icom.errors import UsageError

if TYPE_CHECKING:
    from accelerate import Accelerator
    from PIL import Image

KNOWN = ("tensorboard", "wandb", "comet_ml")


def choose(report_to: str) -> list[str]:
    """The trackers to use.

    Args:
        report_to: as in --report_to.

    Raises:
        UsageError: one was asked for that is not installed.
    """
    if report_to == "none":
        return []
    installed = [name for name in KNOWN if _is_installed(name)]
    if report_to == "all":
        return installed
    if report_to == "auto":
        return [name for name in installed if name == "tensorboard"]
    if report_to not in installed:
        raise UsageError(
            f"--report_to {report_to}: the package is not installed. `pip install {report_to}` "
            "(or the extra: `pip install -e .[trackers]`), or --report_to none."
        )
    return [report_to]


def start(accelerator: Accelerator, config: RunOptions, project: str = "textual_inversion") -> None:
    """Open the chosen trackers; W&B and Comet write to disk where they have no key to go online with."""
    options: dict[str, dict[str, Any]] = {
        "wandb": {"dir": config.output_dir},
        "comet_ml": {},
    }
    if not os.environ.get("WANDB_API_KEY") and not _netrc_knows_wandb() and "WANDB_MODE" not in os.environ:
        options["wandb"]["mode"] = "offline"
    if not os.environ.get("COMET_API_KEY"):
        options["comet_ml"]["online"] = False
        os.environ.setdefault("COMET_OFFLINE_DIRECTORY", str(Path(config.output_dir) / config.logging_dir))
    for secret in filter(None, (getattr(config, name) for name in SECRETS)):
        # W&B and Comet keep the command line with the run.
        sys.argv = [word.replace(secret, "***") for word in sys.argv]
    values = {name: value for name, value in settings(config).items() if isinstance(value, int | float | str | bool)}
    accelerator.init_trackers(project, config=values, init_kwargs=options)


def log_pictures(accelerator: Accelerator, name: str, images: Sequence[Image.Image], step: int) -> None:
    """Show pictures in every tracker that can."""
    stack = np.stack([np.asarray(image) for image in images])
    for tracker in accelerator.trackers:
        if tracker.name == "tensorboard":
            tracker.log_images({name: stack}, step=step, dataformats="NHWC")
        elif tracker.name == "wandb":
            tracker.log_images({name: list(stack)}, step=step)
        elif tracker.name == "comet_ml":
            for index, image in enumerate(images):
                tracker.tracker.log_image(image, name=f"{name}-{index}", step=step)


def _is_installed(name: str) -> bool:
    spec = find_spec(name)
    # A folder wandb/ that a tracker left in the current one passes for a package, but has no file to start from.
    return spec is not None and spec.origin is not None


def _netrc_knows_wandb() -> bool:
    path = Path(os.environ.get("NETRC", "~/.netrc")).expanduser()
    return path.is_file() and "api.wandb.ai" in path.read_text(errors="replace")
