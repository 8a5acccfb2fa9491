"""report.html, opened in a real browser: what it shows is what the run's files say, and it needs nothing else.

Guards icom.report.
"""

from __future__ import annotations

import io
import json
import math
import random
import re
import shutil
import statistics
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from PIL import Image

from icom.data.images import BUNDLED_CONCEPTS
from icom.report.advice import Advice, advise, change
from icom.report.curves import chart, ticks
from icom.report.facts import Facts
from icom.training.outcome import DONE, STOPPED, Outcome
from tests.support.browser import Browser, browsing, find_browser
from tests.support.command import Run

HOSTILE = "<script>alert(1)</script>"
TOKEN = "hf_thisIsASecretOfTheHubAndMustNotBeSeen"
NARROW = 360


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if find_browser() is None:
        pytest.skip("no browser here")
    with browsing(tmp_path_factory.mktemp("browser")) as opened:
        yield opened


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def points(browser: Browser) -> dict[str, list[tuple[str, list[list[float]]]]]:
    """Of each chart by its name: the lines' classes and points, as the browser reads them."""
    told = browser.ask(
        """JSON.stringify([...document.querySelectorAll("svg")].map(svg => [svg.getAttribute("aria-label"),
        [...svg.querySelectorAll("polyline")].map(line => [line.getAttribute("class"),
        [...line.points].map(point => [point.x, point.y])])]))"""
    )
    return dict(json.loads(told))


def pictures(browser: Browser) -> list[tuple[str, int, int]]:
    """(alternative text, width, height in pixels) of all that the browser could decode."""
    told = browser.ask(
        """JSON.stringify([...document.images].map(image => [image.alt, image.naturalWidth, image.naturalHeight]))"""
    )
    return [tuple(one) for one in json.loads(told)]


def test_page_of_a_run_in_a_browser(tmp_path: Path, train: Run, icom: Run, browser: Browser) -> None:
    """Everything that a stranger could bring in is hostile: the word, captions, a picture's name, a prompt."""
    photos = tmp_path / "photos"
    photos.mkdir()
    names = ["0.png", f"{HOSTILE.replace('/', '')}.png", "2&lt;b&gt;.png", "3.png"]
    for number, name in enumerate(names):
        shutil.copy(BUNDLED_CONCEPTS / "red-moon" / f"{number}.png", photos / name)
        (photos / name).with_suffix(".txt").write_text(f"{HOSTILE} <b>bold</b>" + " very" * (200 if number == 3 else 0))
    out = tmp_path / "out"
    options: dict[str, object] = {
        **{"train_data_dir": photos, "placeholder_token": HOSTILE, "output_dir": out, "max_train_steps": 12},
        **{"save_steps": 4, "validation_share": 0.5, "num_comparison_images": 1, "hub_token": TOKEN},
        **{"sample_prompts": "[name] <img src=x onerror=alert(2)> --s 2", "sample_every_n_steps": 6},
    }
    result = train(**options)
    assert result.code == 0, result.err
    page = out / "report.html"
    assert "report.html  all about this run" in result.out
    content = page.read_text()
    assert TOKEN not in content
    assert not re.search(r"<script|<img src=x|<b>|https?://", content.replace("https://huggingface.co", ""))
    assert len(content) < 400_000

    browser.show(1200)
    browser.open(page)
    assert browser.complaints() == []
    assert browser.requests() == [page.as_uri()]
    assert browser.ask("document.title") == f"{HOSTILE}: train"
    assert browser.ask("document.querySelector('h1').textContent") == HOSTILE
    assert browser.ask("document.scripts.length") == 0

    metrics, validation = rows_of(out / "metrics.jsonl"), rows_of(out / "validation.jsonl")
    drawn = points(browser)
    assert len(metrics) == 12
    raw, mean = drawn["Loss"]
    assert (raw[0], mean[0]) == ("raw", "mean")
    assert len(raw[1]) == len(mean[1]) == len(drawn["Learning rate"][0][1]) == 12
    (title,) = [title for title in drawn if title.startswith("Validation loss")]
    for found, rows in ((raw[1], metrics), (drawn[title][0][1], validation)):
        assert len(found) == len(rows)
        # Every point lies where its number says: on one straight line of pixels over losses.
        ups, losses = [-y for _, y in found], [row["loss"] for row in rows]
        assert np.corrcoef(ups, losses)[0, 1] > 0.9999
        assert np.corrcoef([x for x, _ in found], [row["step"] for row in rows])[0, 1] > 0.9999
    assert len(drawn["Norm of the learned rows"][0][1]) == 3
    shown = pictures(browser)
    assert len(shown) == 2 + 4 and all(width and height for _, width, height in shown)
    with Image.open(out / "samples.png") as sheet:
        assert shown[0][1:] == sheet.size
    assert [name for name in names if name in browser.ask("document.body.innerText")] == names
    said = browser.ask("document.querySelector('pre').textContent")
    assert yaml.safe_load(said) == yaml.safe_load((out / "config.yaml").read_text())
    text = browser.ask("document.body.innerText")
    assert f"torch {torch.__version__.partition('+')[0]}" in text and "12 of 12" in text
    assert "does not read the ends of 1 of them: 3.txt" in text

    # In the dark the letters are light; on a phone nothing is wider than the screen.
    for width, scheme in ((1200, "dark"), (NARROW, "light"), (NARROW, "dark")):
        browser.show(width, scheme)
        back, letters = (
            statistics.mean(map(int, re.findall(r"\d+", browser.ask(f"getComputedStyle(document.body).{name}"))))
            for name in ("backgroundColor", "color")
        )
        assert (back < letters) == (scheme == "dark")
        assert browser.ask("document.documentElement.scrollWidth") <= width
        with Image.open(io.BytesIO(browser.picture())) as picture:
            assert 0.9 * width < picture.width <= width
            assert len(np.unique(np.asarray(picture.convert("L")))) > 20
    letters = browser.ask("document.querySelector('svg text').getBoundingClientRect().height")
    assert letters > 8  # pixels, on the phone

    before = content
    page.unlink()
    assert icom("report", str(out)).code == 0
    assert not page.exists()
    assert icom("report", str(out), "--html").code == 0
    assert page.read_text() == before
    (photos / "0.png").unlink()
    (out / "run.json").write_text("{}")
    (out / "samples.png").write_bytes(b"damaged")
    assert icom("report", str(out), "--html").code == 0
    browser.open(page)
    assert browser.complaints() == [] and len(pictures(browser)) == 1


def test_page_of_a_run_that_was_stopped(tmp_path: Path) -> None:
    """Ctrl-C leaves a page of what is there."""
    import signal

    from tests.support.command import start_process, train_arguments
    from tests.support.waiting import wait_until

    out = tmp_path / "out"
    process = start_process(*train_arguments(output_dir=out, max_train_steps=10_000))
    wait_until(lambda: process.poll() is not None or (out / "metrics.jsonl").exists())
    wait_until(lambda: process.poll() is not None or len((out / "metrics.jsonl").read_text()) > 200)
    process.send_signal(signal.SIGINT)
    told = process.communicate()
    assert process.returncode == 130, told
    content = (out / "report.html").read_text()
    steps = len(rows_of(out / "metrics.jsonl"))
    assert f"<dd>{steps:,} of 10,000</dd>" in content and "<dd>stopped</dd>" in content
    assert "--resume_from_checkpoint latest" in content


def test_page_of_a_finetuning(tmp_path: Path, icom: Run, browser: Browser) -> None:
    from tests.support.command import finetune_arguments

    out = tmp_path / "out"
    words = finetune_arguments(output_dir=out, max_train_steps=3, num_validation_samples=2, validation_steps=1)
    result = icom(*words, "--validation_prompts", "a red star")
    assert result.code == 0, result.err
    browser.open(out / "report.html")
    assert browser.complaints() == []
    drawn = points(browser)
    assert {title: len(lines[0][1]) for title, lines in drawn.items()} == {
        **{"Loss": 3, "Validation loss: on fixed pictures, noises and timesteps": 3, "Learning rate": 3},
        **{"Norm of the gradient": 3, "Pictures per second": 3, "Share of the time spent waiting for data": 3},
        **{"Damaged samples": 3, "Seconds per step": 3},
    }
    assert [one[0] for one in pictures(browser)] == ["Validation pictures of step 3"]


def test_curves() -> None:
    assert ticks(0, 1) == [0, 0.2, 0.4, 0.6, 0.8, 1]
    assert ticks(0.1312, 0.1604) == [0.14, 0.15, 0.16]
    assert ticks(-3, 5000) == [0, 1000, 2000, 3000, 4000, 5000]
    many = [(float(x), float(x % 2)) for x in range(10_001)]
    made = chart("many", [("mean", "zigzag", many)])
    assert made and made.shown == 6
    drawn = [tuple(map(float, point.split(","))) for point in made.lines[0].points.split()]
    assert len(drawn) == math.ceil(10_001 / 6)
    # Means of six are all a half, but for the last one's.
    assert len({round(y, 1) for _, y in drawn[:-1]}) == 1
    assert chart("nothing", [("mean", "", [(1.0, math.nan)])]) is None
    flat = chart("flat", [("mean", "", [(5.0, 0.0)])])
    assert flat and all(math.isfinite(float(part)) for part in flat.lines[0].points.split(","))


def facts(losses: list[float], **changed: Any) -> Facts:
    settings = {"learning_rate": 1e-3, "sample_prompts": ["a"], "placeholder_token": "<x>"}
    outcome = Outcome(Path("out"), DONE, len(losses), len(losses), 0.1, 1.0, None, settings, "train")
    rows = [{"step": step, "loss": loss, "lr": 1e-3, "seconds": 1.0} for step, loss in enumerate(losses, 1)]
    return replace(Facts(outcome, rows, [], [], {"pictures": 5}, ""), **changed)


def said(advice: list[Advice], *parts: str) -> bool:
    return any(all(part in f"{one.what} {one.why}" for part in parts) for one in advice)


def test_advice_follows_what_was_measured() -> None:
    random.seed(3)
    noise = [0.15 + random.gauss(0, 0.05) for _ in range(400)]
    falling = [loss - 0.0003 * step for step, loss in enumerate(noise)]
    rising = [loss + 0.0003 * step for step, loss in enumerate(noise)]
    assert said(advise(facts(noise)), "icom tune", "no more than its noise")
    assert said(advise(facts(falling)), "--stop auto", "it fell")
    assert said(advise(facts(rising)), "lower --learning_rate than 0.001", "rose by more than its noise")
    assert said(advise(facts(noise[:10])), "10 steps are too few")
    # An independent count of the noise: how far apart two quarters of the same loss lie, again and again.
    gaps = []
    for seed in range(300):
        random.seed(seed)
        (early, late), _ = change([random.gauss(0.15, 0.05) for _ in range(400)])
        gaps.append(early - late)
    assert change(noise)[1] == pytest.approx(statistics.pstdev(gaps), rel=0.15)

    flat = [(step, 0.15 - 1e-6 * step) for step in range(0, 100, 10)]
    assert said(advise(facts(noise, validation=flat)), "icom tune", "no fall")
    up = [(step, 0.15 + 1e-4 * step) for step in range(0, 100, 10)]
    assert said(advise(facts(noise, validation=up)), "lower --learning_rate", "rose from 0.1500")
    down = [(step, 0.15 - 1e-4 * step) for step in range(0, 100, 10)]
    assert said(advise(facts(noise, validation=down)), "more --max_train_steps", "still falling")
    learned = [(0, 0.16), *((step, 0.14) for step in range(10, 100, 10))]
    assert said(advise(facts(noise, validation=learned)), "--stop auto", "hardly since step 45")

    few = {"pictures": 2, "captions_cut": ["a.txt", "b.txt"]}
    assert said(advise(facts(falling, noted=few)), "There are 2", "background")
    assert said(advise(facts(falling, noted=few)), "Shorten", "2 of them: a.txt, b.txt")
    assert said(advise(facts(falling, norms=[(10, 0.4), (20, 2.5)])), "--preserve_embedding_norm", "0.40", "2.50")
    assert not said(advise(facts(falling)), "preserve_embedding_norm")
    stopped = facts(falling)
    stopped = replace(stopped, outcome=replace(stopped.outcome, state=STOPPED, steps=900))
    assert said(advise(stopped), "--resume_from_checkpoint latest", "400 of 900")
