"""`--sample_prompts`: what is drawn on the way is what the rows of that step draw, and changes nothing else.

Guards icom.training.samples, icom.training.contact_sheet and icom.config.watching.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from icom.config.watching import SamplePrompt, read_lines
from icom.training.contact_sheet import GAP, SMALLEST, WIDEST, contact_sheet, evenly, steps_of
from tests.support.command import Run, assert_message, assert_refused, start_process, train_arguments
from tests.support.ranks import Ranks
from tests.support.waiting import wait_until

PROMPTS = [
    "a photo of [name] --s 2 --l 3 --d 11",
    "# a comment",
    "A photo of {} on green --w 40 --h 64 --s 2 --n <ROBOT>, red",
    "a toy --s 1 --l 1",
]
SEEN = {"max_train_steps": 6, "checkpointing_steps": 2, "save_steps": 2, "use_ema": True, "ema_decay": 0.5}


def rows(folder: Path) -> torch.Tensor:
    return load_file(folder / "learned_embeds.safetensors")["<robot>"]


def losses(folder: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def samples(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (folder / "samples").iterdir()}


def pixels(path: Path) -> np.ndarray[Any, Any]:
    with Image.open(path) as image:
        return np.asarray(image.convert("RGB"))


def assert_shows(sheet: np.ndarray[Any, Any], picture: Path, column: int) -> None:
    """The picture stands, enlarged pixel by pixel, somewhere in a column of the sheet."""
    small = Image.open(picture).convert("RGB")
    scale = 256 / max(small.size)
    large = np.asarray(small.resize([round(side * scale) for side in small.size], Image.Resampling.NEAREST))
    left = GAP + column * (256 + GAP) + (256 - large.shape[1]) // 2
    strip = sheet[:, left : left + large.shape[1]]
    tops = [top for top in range(len(strip) - len(large) + 1) if np.array_equal(strip[top], large[0])]
    assert any(np.array_equal(strip[top : top + len(large)], large) for top in tops), (picture, column)


def test_pictures_on_the_way(tmp_path: Path, train: Run, icom: Run) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("\n".join(PROMPTS), encoding="utf-8")
    watch = {"sample_prompts": file, "sample_every_n_steps": 2, "sample_animation": "webp"}
    plain, seen = tmp_path / "plain", tmp_path / "seen"
    assert train(output_dir=plain, **SEEN).code == 0
    result = train(output_dir=seen, **SEEN, **watch)
    assert result.code == 0, result.err
    assert "line 4 does not say <robot>" in result.err and "line 3 does not" not in result.err
    # Nothing that is learned knows of the drawing.
    assert torch.equal(rows(seen), rows(plain))
    assert losses(seen) == losses(plain)
    assert not (plain / "samples").exists()

    drawn = {f"prompt-{prompt}-step-{step}.png" for prompt in (1, 2, 3) for step in (0, 2, 4, 6)}
    assert set(samples(seen)) == drawn
    # Another way to the same picture: that of the file with the step's rows, which are the mean's.
    words = ["--prompt", "a photo of <robot>", "--seed", "11", "--num_inference_steps", "2", "--guidance_scale", "3"]
    words += ["--resolution", "64", "--output_dir", str(tmp_path / "drawn")]
    embedding = seen / "learned_embeds-steps-4.safetensors"
    assert icom("generate", "--embedding", str(embedding), *words).code == 0
    (expected,) = (tmp_path / "drawn").iterdir()
    assert np.array_equal(pixels(seen / "samples/prompt-1-step-4.png"), pixels(expected))
    with Image.open(seen / "samples/prompt-1-step-4.png") as ours, Image.open(expected) as theirs:
        assert ours.info["parameters"] == theirs.info["parameters"]
    with Image.open(seen / "samples/prompt-2-step-0.png") as image:
        assert image.size == (40, 64)
        said = image.info["parameters"].splitlines()
        assert said[:2] == ["A photo of <robot> on green", "Negative prompt: <robot>, red"]
        assert "Seed: 8," in said[2] and "CFG scale: 7.5," in said[2]  # the run's seed is 7, and this the second one
    # Rows differ by what was learned alone: what says nothing of it stays as it is.
    for prompt, kinds in ((1, 4), (3, 1)):
        assert (
            len({pixels(seen / f"samples/prompt-{prompt}-step-{step}.png").tobytes() for step in (0, 2, 4, 6)}) == kinds
        )

    sheet = pixels(seen / "samples.png")
    for prompt in (1, 2, 3):
        for column, step in enumerate((0, 2, 4, 6)):
            assert_shows(sheet, seen / f"samples/prompt-{prompt}-step-{step}.png", column)
    with Image.open(seen / "samples.webp") as film:
        assert getattr(film, "n_frames", 1) == 4
    assert "![samples.png](./samples.png)" in (seen / "README.md").read_text()

    # Killed when step 4 was saved, and one of its pictures drawn; then the last step was done by another run.
    before, old_sheet = samples(seen), (seen / "samples.png").read_bytes()
    (seen / "samples/prompt-2-step-4.png").unlink()
    (seen / "samples/prompt-1-step-6.png").write_bytes(before["prompt-1-step-0.png"])
    again = train(output_dir=seen, **SEEN, **watch, resume_from_checkpoint="checkpoint-4")
    assert again.code == 0, again.err
    assert "moved 1 embedding(s) and 3 sample(s) of steps after 4" in again.err
    assert samples(seen) == before
    assert (seen / "samples.png").read_bytes() == old_sheet
    # On with other prompts: the earlier ones' pictures are no row of theirs.
    words_now = {"sample_prompts": "a photo of [name] --s 2 --l 3", "sample_every_n_steps": 2}
    other = train(output_dir=seen, **SEEN, **words_now, resume_from_checkpoint="checkpoint-4")
    assert "moved 9 sample(s) of other prompts to" in other.err
    assert set(samples(seen)) == {"prompt-1-step-4.png", "prompt-1-step-6.png"}


def test_kept_step_and_default_interval(tmp_path: Path, train: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """With --stop auto the rows that people get are those of an earlier step: they have a column, too."""
    from icom.training import results, train_validation
    from icom.training import train as trained

    monkeypatch.setattr(train_validation, "SAMPLES", 4)
    monkeypatch.setattr(train_validation, "is_learned", lambda curve: curve[-1][0] >= 6)
    for module in (results, train_validation):
        monkeypatch.setattr(module, "chosen", lambda curve: next(one for one in reversed(curve) if one[0] <= 4))
    assert trained
    options: dict[str, object] = {"stop": "auto", "validation_share": 0.5, "max_train_steps": 9, "validation_steps": 5}
    result = train(output_dir=tmp_path, sample_prompts="[name] --s 1 --w 16 --h 16", **options)
    assert result.code == 0, result.err
    assert {path.name for path in (tmp_path / "samples").iterdir()} == {
        f"prompt-1-step-{step}.png" for step in (0, 4, 5, 6)
    }


def test_ctrl_c_while_drawing_saves(tmp_path: Path) -> None:
    """The signal comes while most of a step's pictures are left to draw."""
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("[name] --s 2\n" * 12)
    options = {
        "sample_prompts": prompts,
        "sample_every_n_steps": 5,
        "max_train_steps": 10,
        "output_dir": tmp_path / "out",
    }
    process = start_process(*train_arguments(**options))
    wait_until(lambda: process.poll() is not None or (tmp_path / "out/samples/prompt-2-step-5.png").exists())
    process.send_signal(signal.SIGINT)
    out, err = process.communicate()
    assert process.returncode == 130, (out, err)
    assert (tmp_path / "out/checkpoint-6/state.json").exists()
    assert not (tmp_path / "out/samples/prompt-12-step-5.png").exists()
    assert (tmp_path / "out/samples.png").exists()


@pytest.mark.long
def test_three_processes(tmp_path: Path, ranks: Callable[..., Ranks]) -> None:
    """Only rank 0 draws, and what they learn together is what they learn without."""
    options: dict[str, Any] = {"max_train_steps": 3, "mixed_precision": "no"}
    watch = {"sample_prompts": "[name] --s 2", "sample_every_n_steps": 1}
    found = []
    for name, more in (("plain", {}), ("seen", watch)):
        group = ranks(3, folder=tmp_path / name, **options, **more)
        assert [result.code for result in group.results()] == [0, 0, 0]
        found.append(group.folders)
    plain, seen = ([folder / "out" for folder in folders] for folders in found)
    assert torch.equal(rows(seen[0]), rows(plain[0]))
    assert losses(seen[0]) == losses(plain[0])
    assert len(samples(seen[0])) == 4
    assert not any((out / "samples").exists() for out in seen[1:])


def test_sheet_of_many(tmp_path: Path) -> None:
    """Hundreds of steps and prompts: bounded, readable, with the first and the last step."""
    picture = tmp_path / "one.png"
    Image.new("RGB", (80, 40), "red").save(picture)
    many = [(f"prompt {number} " + "word " * 300, dict.fromkeys(range(0, 3000, 10), picture)) for number in range(40)]
    sheet = contact_sheet(many)
    assert sheet.width <= WIDEST + GAP and sheet.height < 32 * (SMALLEST + 80) + 200
    shown = evenly(steps_of(many), 30)
    assert (shown[0], shown[-1], len(set(shown))) == (0, 2990, 30)
    one = contact_sheet([("short", {5: picture})])
    assert one.width < 900 and np.asarray(one)[:, :, 1].min() == 0


LINE = "--sample_prompts {}, line 2: "


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("a [name] --x 3", "there is no --x. Prompts may have --n, --w, --h, --d, --l, --s"),
        ("a [name] --ss euler", "there is no --ss"),
        ("a [name] --w", "--w has no value"),
        ("a [name] --w 60", "--w has to be a multiple of 8, not 60"),
        ("a [name] --h 9000", "--h has to be a whole number from 8 to 4096, not 9000"),
        ("a [name] --s 2.5", "--s has to be a whole number from 1 to 1000, not 2.5"),
        ("a [name] --l nan", "--l has to be a number from 1 to 1000, not nan"),
        ("a [name] --d -1", "--d has to be a seed between 0 and 2^63 - 1, not -1"),
        ("--n red", "no prompt before --n"),
    ],
)
def test_bad_lines(train: Run, tmp_path: Path, line: str, message: str) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text(f"a [name]\n{line}\n")
    assert_refused(train(output_dir=tmp_path / "out", sample_prompts=file), 2, LINE.format(file), message)


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"sample_prompts": "nowhere/prompts.txt"}, ("Cannot read --sample_prompts nowhere/prompts.txt",)),
        ({"sample_prompts": "EMPTY"}, ("is empty. Write prompts into it",)),
        ({"sample_prompts": "a [name] --q 1"}, ("--sample_prompts, prompt 1: there is no --q",)),
        ({"sample_prompts": "a [name]", "sample_every_n_steps": 0}, ("--sample_every_n_steps has to be at least 1",)),
        ({"sample_every_n_steps": 5}, ("--sample_every_n_steps is about --sample_prompts",)),
        ({"sample_animation": "gif"}, ("--sample_animation is about --sample_prompts",)),
        ({"sample_prompts": "a <other> thing"}, ("<other>, which nothing teaches",)),
        ({"sample_prompts": "very " * 80 + "[name]"}, ("is beyond that",)),
    ],
)
def test_bad_options(train: Run, tmp_path: Path, options: dict[str, object], parts: tuple[str, ...]) -> None:
    if options.get("sample_prompts") == "EMPTY":
        (tmp_path / "empty.txt").write_text("# nothing\n\n")
        options["sample_prompts"] = tmp_path / "empty.txt"
    assert_refused(train(output_dir=tmp_path / "out", **options), 2, *parts)


def test_lines_are_read_as_sd_scripts_read_them() -> None:
    line = "1girl, upper body --n low quality, worst quality --w 768 --h 512 --d 1 --l 7.5 --s 28"
    (read,) = read_lines(["", "# comment", line], "line")
    assert read == SamplePrompt(
        "1girl, upper body",
        "line 3",
        "low quality, worst quality",
        width=768,
        height=512,
        seed=1,
        guidance=7.5,
        steps=28,
    )


def test_tune_refuses_prompts(icom: Run, tmp_path: Path) -> None:
    words = train_arguments(output_dir=tmp_path, learning_rate=None, sample_prompts="a [name]")
    assert_message(icom("tune", *words[1:]), 2, "--sample_prompts is for `icom train`")
