"""`icom evaluate`: which pictures it draws, that it goes on where it was, its scores, and what cannot be scored.

Guards icom.evaluate.command, pictures, real, scores, world and curve.
"""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from icom.config.evaluate import EvaluateConfig
from icom.evaluate.distances import Normal, clip_score, frechet
from icom.evaluate.networks import Clip
from icom.evaluate.world import BOTH, Asked, ask, shares
from icom.parallel.secret import new_secret
from icom.world.judge import Verdict, load_judge
from icom.world.scene import Scene, Thing
from tests.support.command import Result, Run, assert_message, cut, start_process
from tests.support.ranks import Ranks
from tests.support.tiny_clip import make_clip
from tests.support.waiting import wait_until

FAST = ("--num_inference_steps", "2", "--engine", "off")


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_clip(tmp_path_factory.mktemp("clip")))


@pytest.fixture
def evaluate(icom: Run, tmp_path: Path) -> Callable[..., Result]:
    """Run it, in few steps, into `out`."""
    return lambda *words: icom("evaluate", "--output_dir", str(tmp_path / "out"), *FAST, *words)


def drawn(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.glob("guidance-*/*.png"))}


def times(folder: Path) -> dict[str, int]:
    return {str(path.relative_to(folder)): path.stat().st_mtime_ns for path in folder.glob("guidance-*/*.png")}


def results(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "results.json").read_text())
    return found


def photos(folder: Path, count: int) -> Path:
    """A folder of captioned pictures that are wider than high."""
    folder.mkdir()
    noise = np.random.Generator(np.random.PCG64(0)).integers(0, 256, (count, 6, 8, 3), dtype=np.uint8)
    for number, one in enumerate(noise):
        Image.fromarray(one).resize((96, 72), Image.Resampling.NEAREST).save(folder / f"{number}.png")
        (folder / f"{number}.txt").write_text(f"a photo of a red star, number {number}")
    return folder


# Which pictures.


def test_pictures_are_those_of_generate(evaluate: Callable[..., Result], icom: Run, tmp_path: Path) -> None:
    """Number i is drawn from prompt i and the seed after the last one's, byte for byte."""
    prompts = ("--prompt", "a red star", "a photo of a ring at night")
    assert evaluate(*prompts, "--num_images", "3", "--seed", "5", "--guidance_scales", "3").code == 0
    pictures = drawn(tmp_path / "out")
    assert list(pictures) == [f"guidance-3/00000{number}.png" for number in range(3)]
    again = ("--guidance_scale", "3", "--seed", "5", "6", "7", "--output_dir", str(tmp_path / "generated"))
    assert icom("generate", *prompts, *FAST, *again).code == 0
    same = ("000-a-red-star-seed5", "001-a-photo-of-a-ring-at-night-seed6", "000-a-red-star-seed7")
    assert [*pictures.values()] == [(tmp_path / "generated" / f"{name}.png").read_bytes() for name in same]


def test_only_what_is_missing_or_damaged_is_drawn(evaluate: Callable[..., Result], tmp_path: Path) -> None:
    out, words = tmp_path / "out", ("--prompt", "a star", "a ring", "--guidance_scales", "1", "3", "--batch_size", "2")
    assert "drew 10 pictures, 0 of 10 were there" in evaluate(*words, "--num_images", "5").out
    before = drawn(out)
    (out / "guidance-1/000003.png").unlink()
    cut(out / "guidance-3/000000.png")
    written = times(out)
    assert "drew 2 pictures, 8 of 10 were there" in evaluate(*words, "--num_images", "5").out
    assert drawn(out) == before, "also beside one that was left of the same batch"
    kept = {name for name, when in times(out).items() if written.get(name) == when}
    assert kept == before.keys() - {"guidance-1/000003.png", "guidance-3/000000.png"}

    more = evaluate(*words[:-2], "--guidance_scales", "2", "--batch_size", "2", "--num_images", "7")
    assert more.code == 0 and "drew 11 pictures, 10 of 21 were there" in more.out
    assert {name: content for name, content in drawn(out).items() if name in before} == before


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        (("--seed", "1"), "seed"),
        (("--prompt", "a ring"), "prompts"),
        (("--negative_prompt", "grey"), "negative_prompt"),
        (("--num_inference_steps", "3", "--scheduler", "ddim"), "num_inference_steps, scheduler"),
    ],
)
def test_other_pictures_are_not_mixed_in(
    changed: tuple[str, ...], named: str, evaluate: Callable[..., Result], tmp_path: Path
) -> None:
    words = ("--prompt", "a star", "--num_images", "2")
    assert evaluate(*words).code == 0
    before = times(tmp_path / "out")
    assert_message(
        evaluate(*words, *changed), 2, f"pictures of another evaluation ({named}: see", "another --output_dir"
    )
    assert times(tmp_path / "out") == before
    (tmp_path / "out/settings.json").unlink()
    assert_message(evaluate(*words), 2, "pictures of another evaluation (nobody knows of which")


@pytest.mark.long
def test_several_processes_draw_the_same_pictures(evaluate: Callable[..., Result], tmp_path: Path) -> None:
    """One that is killed on the way costs the pictures it was at."""
    words = ("--prompts_file", "bundled", "--num_images", "5", "--guidance_scales", "1", "3", "--batch_size", "2")
    assert evaluate(*words).code == 0
    alone = drawn(tmp_path / "out")

    together = tmp_path / "together"
    single = start_process("evaluate", *FAST, *words, "--output_dir", str(together))
    wait_until(lambda: len(drawn(together)) > 1 or single.poll() is not None)
    single.kill()
    single.communicate()
    assert single.returncode == -signal.SIGKILL
    left = times(together)
    command = ("-m", "icom", "evaluate", *FAST, *words, "--output_dir", str(together))
    group = Ranks(tmp_path / "ranks", 2, *command, secret=new_secret())
    try:
        ended = group.results()
    finally:
        group.end()
    assert [result.code for result in ended] == [0, 0], ended
    assert drawn(together) == alone
    share = re.search(r"pictures: (\d+)/\1 ", ended[0].err)
    assert share and int(share[1]) < 10 - len(left), "rank 0 drew all of the rest"
    assert {name: when for name, when in times(together).items() if name in left} == left
    assert results(together)["scores"] == results(tmp_path / "out")["scores"]
    assert "Scores in" not in ended[1].out


@pytest.mark.long
def test_processes_that_write_to_different_folders(tmp_path: Path) -> None:
    command = ("-m", "icom", "evaluate", *FAST, "--prompt", "a star", "--num_images", "4", "--output_dir", "own")
    group = Ranks(tmp_path, 2, *command, secret=new_secret())
    try:
        ended = group.results()
    finally:
        group.end()
    assert [result.code for result in ended] == [1, 1], ended
    told = "".join(result.err for result in ended)
    assert "own is not the folder of rank 0: --output_dir has to be a folder that all machines share" in told
    assert not drawn(tmp_path / "rank0/own"), "hours of drawing would have been for nothing"


@pytest.mark.long
def test_ctrl_c_leaves_what_is_drawn(tmp_path: Path) -> None:
    words = ("--prompt", "a star", "--num_images", "1000", "--output_dir", str(tmp_path / "out"))
    process = start_process("evaluate", *FAST, *words)
    wait_until(lambda: len(drawn(tmp_path / "out")) > 1 or process.poll() is not None)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate()
    assert process.returncode == 130 and "Traceback" not in err, err
    for path in (tmp_path / "out").rglob("*.png"):
        Image.open(path).load()


# Scores.


def test_scores_of_the_bundled_world(evaluate: Callable[..., Result], clip: str, tmp_path: Path) -> None:
    """CLIP's and the judge's, from the files alone."""
    out = tmp_path / "out"
    words = (
        "--num_images",
        "6",
        "--seed",
        "2",
        "--batch_size",
        "6",
        "--guidance_scales",
        "1",
        "5",
        "--clip_model",
        clip,
    )
    result = evaluate(*words, "--num_inference_steps", "8")
    assert result.code == 0, result.err
    asked, network, judge = ask(6, 2), Clip(clip), load_judge()
    found = results(out)
    assert [row["guidance_scale"] for row in found["scores"]] == [1, 5]
    for row in found["scores"]:
        folder = out / f"guidance-{row['guidance_scale']:g}"
        pictures = [Image.open(folder / f"{number:06d}.png") for number in range(6)]
        seen = network.see(pictures)
        score = clip_score(seen, network.read([one.caption for one in asked]))
        assert row["clip_score"] == pytest.approx(score) and score > 1
        right = [
            (verdict.colour, verdict.shape) == (one.scene.thing.colour, one.scene.thing.shape)
            for verdict, one in zip(judge.look_at(pictures), asked, strict=True)
        ]
        assert row["judge"][BOTH] == pytest.approx(sum(right) / 6)
        assert f"{sum(right) / 6:.1%}" in result.out and f"{row['clip_score']:.2f}" in result.out
    assert "icom: no fid, kid: --inception_weights is missing" in result.err
    assert found["not_computed"].keys() == {"fid", "kid"}
    with Image.open(out / "curve.png") as curve:
        assert curve.size == (3 * 480, 420)


def test_clip_fid_against_a_folder_whose_captions_are_the_prompts(
    evaluate: Callable[..., Result], clip: str, tmp_path: Path
) -> None:
    real = photos(tmp_path / "real", 5)
    (real / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\nand no more")
    (real / "broken.txt").write_text("broken")
    words = ("--real_data_dir", str(real), "--clip_model", clip, "--metrics", "clip_fid", "clip_score")
    assert_message(evaluate(*words), 1, "1 of 6 samples", "are damaged")
    (real / "broken.png").unlink()
    result = evaluate(*words)
    assert result.code == 0, result.err
    out, found = tmp_path / "out", results(tmp_path / "out")
    settings = json.loads((out / "settings.json").read_text())
    assert settings["prompts"] == [f"a photo of a red star, number {number}" for number in range(5)]
    network = Clip(clip)
    squares = []
    for path in sorted(real.glob("*.png")):
        with Image.open(path) as picture:
            squares.append(picture.resize((85, 64), Image.Resampling.LANCZOS).crop((10, 0, 74, 64)))
    more = evaluate("--real_data_dir", str(real), "--num_images", "7")
    assert "drew 2 pictures, 5 of 7 were there" in more.out, "the captions come again"
    ours = [Image.open(path) for path in sorted(out.glob("guidance-7.5/*.png"))[:5]]
    expected = frechet(Normal.of(network.see(squares)), Normal.of(network.see(ours)))
    (row,) = found["scores"]
    assert row["clip_fid"] == pytest.approx(expected) and expected > 0
    assert "judge" not in row and "5 of 5 captioned pictures" in found["compared_with"]

    fewer = evaluate(*words, "--num_real_images", "2", "--prompts_file", str(tmp_path / "list.txt"))
    assert_message(fewer, 2, "Cannot read --prompts_file")


def test_metric_that_cannot_be_had_is_told_before_anything_is_drawn(
    evaluate: Callable[..., Result], clip: str, tmp_path: Path
) -> None:
    words = ("--prompt", "a star", "--num_images", "2", "--metrics", "fid", "clip_score", "judge")
    assert_message(
        evaluate(*words, "--clip_model", clip),
        1,
        "Not all of --metrics can be computed",
        "fid: --real_data_dir is missing",
        "judge: the judge understands captions of the bundled model's world only (--prompts_file bundled)",
    )
    assert not (tmp_path / "out").exists()
    nothing = evaluate("--prompt", "a star", "--num_images", "2")
    assert nothing.code == 0 and "nothing was scored" in nothing.out
    assert "icom: no clip_score: --clip_model is missing" in nothing.err
    assert not (tmp_path / "out/curve.png").exists() and len(drawn(tmp_path / "out")) == 2


@pytest.mark.parametrize(
    ("words", "code", "parts"),
    [
        (("--pretrained_model_name_or_path", "random:tiny"), 2, ("No prompts", "--prompts_file", "--real_data_dir")),
        (("--guidance_scales", "0.5"), 2, ("--guidance_scales have to be between 1",)),
        (("--guidance_scales", "nan"), 2, ("--guidance_scales have to be between 1",)),
        (("--guidance_scales", "2", "2.0"), 2, ("a scale twice",)),
        (("--num_images", "0"), 2, ("--num_images has to be at least 1",)),
        (("--batch_size", "0"), 2, ("--batch_size has to be at least 1",)),
        (("--num_real_images", "0"), 2, ("--num_real_images has to be at least 1",)),
        (("--seed", "-1"), 2, ("--seed has to be between 0",)),
        (("--real_data_dir", "nowhere"), 2, ("--real_data_dir nowhere: no such folder",)),
        (("--metrics", "judge", "--resolution", "32"), 1, ("the judge sees pictures of 64 px only",)),
        (("--metrics", "clip_fid", "--num_images", "1", "--clip_model", "x"), 1, ("each of two or more",)),
        (("--metrics", "clip_score", "--clip_model", "nowhere"), 1, ("no CLIP model of transformers in nowhere",)),
        (("--inception_weights", "nowhere.pth"), 1, ("nowhere.pth is not weights-inception", "No such file")),
    ],
)
def test_what_cannot_work(
    words: tuple[str, ...],
    code: int,
    parts: tuple[str, ...],
    evaluate: Callable[..., Result],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert_message(evaluate(*words), code, *parts)
    assert not (tmp_path / "out").exists()


# The world.


def test_captions_do_not_depend_on_how_many_there_are() -> None:
    assert ask(20, 1)[:5] == ask(5, 1) != ask(5, 2)
    for one in ask(20, 1):
        assert one.scene.thing.colour in one.caption and one.scene.thing.shape in one.caption


def test_only_what_a_caption_names_counts() -> None:
    scene = Scene(Thing("red", "plain", "star"), "small", "at the top", "in a forest", 0)
    seen = Verdict("red", "dotted", "star", "big", "on the left", "at night")
    other = Verdict("blue", "plain", "star", "small", "at the top", "in a forest")
    asked = [Asked("a red star", scene), Asked("a red plain star in a forest", scene)]
    assert shares([seen, other], asked) == {
        **{"colour": 0.5, "shape": 1.0, "pattern": 1.0, "background": 1.0},
        BOTH: 0.5,
    }


def test_default_guidance_is_generates() -> None:
    assert EvaluateConfig().scales == [7.5]
