"""What a run leaves for people: metrics, loss curve, picture grids, model card."""

from __future__ import annotations

import contextlib
import io
import json
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from PIL import Image
from PIL.PngImagePlugin import PngInfo

from icom import __version__
from icom.files import write_atomically, write_error
from icom.models.loading import is_hub_id

A1111_SAMPLERS = {
    "ddim": "DDIM",
    "ddpm": "DDPM",
    "dpm++": "DPM++ 2M",
    "euler": "Euler",
    "euler_a": "Euler a",
    "pndm": "PLMS",
    "unipc": "UniPC",
}
"""Our names of samplers (icom.models.pipelines.SAMPLERS) -> A1111's."""
LOSS_CURVE = "loss.png"
"""What each training writes to --output_dir at its end, after what it was for."""


class Metrics:
    """`metrics.jsonl`: one JSON object per optimizer step. A resumed run continues the file where it left off."""

    def __init__(self, path: Path, *, after_step: int) -> None:
        """Keep the lines up to `after_step`; later ones (of the part that is done again) go."""
        self.path = path
        self.rows = [row for row in read_metrics(path) if row["step"] <= after_step] if after_step else []
        write_atomically(path, "".join(json.dumps(row) + "\n" for row in self.rows).encode())
        self._file = path.open("a", encoding="utf-8")

    def add(self, **row: Any) -> None:
        """Append one step.

        Raises:
            IcomError: disk full.
        """
        self.rows.append(row)
        try:
            self._file.write(json.dumps(row) + "\n")
            self._file.flush()
        except OSError as error:
            raise write_error(self.path, error) from error

    def close(self) -> None:
        """Close the file."""
        with contextlib.suppress(OSError):  # a full disk was reported by `add` already
            self._file.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All complete lines of a metrics.jsonl; a line that a crash cut off is left out."""
    if not path.exists():
        return []
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return rows


def loss_curve(rows: Sequence[dict[str, Any]], path: Path, validation: Sequence[tuple[int, float]] = ()) -> None:
    """Draw loss over steps, single steps pale and their running mean bold, as PNG.

    Args:
        rows: of the metrics.
        path: the file.
        validation: (step, validation loss), drawn below on an axis of its own: it falls by a hundredth of what the loss
            of single steps varies by.
    """
    from matplotlib.figure import Figure  # without pyplot, which takes a second to import and keeps figures alive

    steps = [row["step"] for row in rows]
    losses = [row["loss"] for row in rows]
    below = 1 if validation else 0
    figure = Figure(figsize=(8, 4 + 3 * below), layout="constrained")
    panels = figure.subplots(1 + below, sharex=True, squeeze=False)
    axes = panels[0, 0]
    axes.plot(steps, losses, color="tab:blue", alpha=0.3, linewidth=1, label="step")
    axes.plot(steps, running_mean(losses), color="tab:blue", linewidth=2, label="running mean")
    axes.set(ylabel="loss", title="Diffusion loss")
    axes.legend(frameon=False)
    if validation:
        found, values = zip(*validation, strict=True)
        panels[1, 0].plot(found, values, color="tab:orange", marker=".", linewidth=2)
        panels[1, 0].set(ylabel="loss", title="On fixed pictures, noises and timesteps")
    panels[-1, 0].set_xlabel("optimizer step")
    for axes in panels[:, 0]:
        axes.spines[["top", "right"]].set_visible(False)
    buffer = io.BytesIO()
    figure.savefig(buffer, dpi=120)
    write_atomically(path, buffer.getvalue())


def running_mean(values: Sequence[float], weight: float = 0.05) -> list[float]:
    """Exponential mean with the bias correction of Adam (Kingma & Ba 2015), so that it starts at the first value."""
    means, total = [], 0.0
    for count, value in enumerate(values, 1):
        total = (1 - weight) * total + weight * value
        means.append(total / (1 - (1 - weight) ** count))
    return means


def grid(images: Sequence[Image.Image], columns: int, gap: int = 4) -> Image.Image:
    """Lay pictures of one size out in rows of `columns`."""
    width, height = images[0].size
    rows = -(-len(images) // columns)
    sheet = Image.new("RGB", (columns * (width + gap) - gap, rows * (height + gap) - gap), (255, 255, 255))
    for index, image in enumerate(images):
        row, column = divmod(index, columns)
        sheet.paste(image, (column * (width + gap), row * (height + gap)))
    return sheet


def save_png(image: Image.Image, path: Path, parameters: str | None = None) -> None:
    """Write a PNG, whole or not at all.

    Args:
        image: the picture.
        path: the file.
        parameters: what it was made with (see `drawn_with`), for the text chunk of that name.
    """
    write_atomically(path, png(image, parameters))


def png(image: Image.Image, parameters: str | None = None) -> bytes:
    """The content of a PNG; see `save_png`."""
    buffer = io.BytesIO()
    text = PngInfo()
    if parameters is not None:
        text.add_text("parameters", parameters)
    image.save(buffer, "PNG", pnginfo=text)
    return buffer.getvalue()


def drawn_with(
    prompt: str,
    negative_prompt: str | None,
    *,
    steps: int,
    sampler: str,
    guidance: float,
    seed: int,
    size: tuple[int, int],
    model: str,
) -> str:
    """What a picture was made with, as A1111 writes it into its PNGs and other tools read it.

    The prompt; the negative one after its heading; last a line of `Name: value` with commas between, where a value
    that holds commas or colons is a JSON string.
    """
    values = {
        "Steps": steps,
        "Sampler": sampler,
        "CFG scale": f"{guidance:g}",
        "Seed": seed,
        "Size": f"{size[0]}x{size[1]}",
        "Model": model,
        "Version": f"icom {__version__}",
    }
    last = ", ".join(f"{name}: {_quoted(str(value))}" for name, value in values.items())
    negative = [f"Negative prompt: {negative_prompt}"] if negative_prompt else []
    return "\n".join([prompt, *negative, last])


def _quoted(value: str) -> str:
    return json.dumps(value, ensure_ascii=False) if re.search(r"[,:\n]", value) else value


def model_card(*, token: str, base_model: str, learnable_property: str, steps: int, pictures: Sequence[str]) -> str:
    """Text of the README.md that goes to the Hub.

    Args:
        token: the placeholder.
        base_model: Hub id (a Hub id is linked) or another name.
        learnable_property: object or style.
        steps: optimizer steps.
        pictures: file names beside the card.
    """
    header = ["---", "library_name: diffusers"]
    if is_hub_id(base_model):
        header.append(f"base_model: {base_model}")
    header += ["tags:", "- stable-diffusion", "- text-to-image", "- diffusers", "- textual_inversion", "---"]
    kind = "a style" if learnable_property == "style" else "an object"
    body = [
        f"# `{token}`",  # bare, <…> would be an HTML tag and vanish
        "",
        f"Textual inversion embedding for {base_model}: `{token}` stands for {kind} learned in {steps} steps.",
        "",
        *_how_to_draw(token, base_model),
        "",
        *(f"![{name}](./{name})" for name in pictures),
    ]
    return "\n".join([*header, "", *body]) + "\n"


def finetuned_card(
    *, base_model: str, resolution: int, steps: int, batch: int, mean: bool, pictures: Sequence[str]
) -> str:
    """Text of the README.md of a UNet's training.

    Args:
        base_model: that it started from.
        resolution: in pixels.
        steps: optimizer steps.
        batch: samples of each.
        mean: the weights are their mean over the training.
        pictures: file names beside the card.
    """
    header = ["---", "library_name: diffusers"]
    if is_hub_id(base_model):
        header.append(f"base_model: {base_model}")
    header += ["tags:", "- stable-diffusion", "- stable-diffusion-diffusers", "- text-to-image", "- diffusers", "---"]
    of_mean = " The weights are their exponential mean over the training." if mean else ""
    body = [
        "# Fine-tuned Stable Diffusion",
        "",
        f"The UNet of {base_model}, trained on captioned pictures at {resolution} px in {steps} steps of {batch} "
        f"samples.{of_mean}",
        "",
        "```python",
        "from diffusers import StableDiffusionPipeline",
        "",
        'StableDiffusionPipeline.from_pretrained("this repository")("…").images[0]',
        "```",
        "",
        *(f"![{name}](./{name})" for name in pictures),
    ]
    return "\n".join([*header, "", *body]) + "\n"


def _how_to_draw(token: str, base_model: str) -> list[str]:
    if base_model == "bundled" or base_model.startswith("random:"):  # names that only icom knows
        options = ["--embedding", "learned_embeds.safetensors", "--pretrained_model_name_or_path", base_model]
        return ["```sh", shlex.join(["icom", "generate", *options, "--prompt", f"a photo of {token}"]), "```"]
    return [
        "```python",
        "from diffusers import StableDiffusionPipeline",
        "",
        f'pipeline = StableDiffusionPipeline.from_pretrained("{base_model}")',
        'pipeline.load_textual_inversion("learned_embeds.safetensors")',
        f'pipeline("a photo of {token}").images[0]',
        "```",
    ]
