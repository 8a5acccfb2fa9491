"""`icom evaluate`: draw pictures from many prompts, score them, and show how the scores change with the guidance."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from icom import __version__
from icom.commands.generate import Studio, all_prompts, prepare
from icom.config.evaluate import WORLD, EvaluateConfig, scale_name
from icom.engine.memory import keep_freed_memory
from icom.errors import UsageError
from icom.evaluate.curve import curve
from icom.evaluate.pictures import Plan, draw_missing, drawn_by, keep_settings, settings_of
from icom.evaluate.real import RealPictures, Reference, WorldPictures
from icom.evaluate.scores import Scorer
from icom.evaluate.word import draw_word
from icom.evaluate.world import BOTH, Asked, ask
from icom.files import write_atomically
from icom.parallel.group import Group, joined
from icom.parallel.place import find_place
from icom.training.lock import only_run_in

if TYPE_CHECKING:
    from PIL import Image

RESULTS, CURVE = "results.json", "curve.png"
DEFAULT_CAPTIONS = 200
"""So many pictures, where captions are the prompts and nobody says how many."""
ENOUGH = 2048
"""Below so many pictures, the width of Inception's features, their covariance is singular."""


def evaluate(config: EvaluateConfig) -> None:
    """Draw what is missing, score all, write results.json and curve.png.

    Raises:
        IcomError: model, real pictures, weights or output folder are no good, or a metric that was asked for by name
            cannot be had.
        UsageError: no prompts, or the output folder holds other pictures.
    """
    keep_freed_memory()
    with ExitStack() as until_all_is_written:
        with joined(find_place(os.environ)) as group:
            if config.of_a_word:
                score = draw_word(config, group, until_all_is_written)
            else:
                score = _draw(config, group, until_all_is_written)
        if score:  # the others need not wait for it
            score()


def _draw(config: EvaluateConfig, group: Group, until_all_is_written: ExitStack) -> Callable[[], None] | None:
    """What all processes do. Rank 0 makes the scorer first: what it lacks is told before the hours of drawing.

    Returns:
        What is left to rank 0: to score all.
    """
    scorer, prompts, count = None, b"", b""
    if group.leads:
        texts, asked, reference, number = _prompts(config)
        scorer = Scorer(config, reference, asked)
        for reason in dict.fromkeys(scorer.lacking.values()):
            metrics = ", ".join(metric for metric, why in scorer.lacking.items() if why == reason)
            print(f"icom: no {metrics}: {reason}.", file=sys.stderr)
        prompts, count = json.dumps(texts).encode(), str(number).encode()
    texts = json.loads(group.broadcast(prompts if group.leads else None))
    number = int(group.broadcast(count if group.leads else None))
    output = Path(config.output_dir or "evaluation")
    guided = any(scale > 1 for scale in config.scales)
    studio = prepare(config, texts, output, guided=guided, place=group.place, digest=True)
    settings = settings_of(config, studio, number)
    group.agree("The settings", settings)
    if group.leads:
        print(f"icom: {studio.backend.describe()} ({studio.reason})", flush=True)
        until_all_is_written.enter_context(only_run_in(output))
    keep_settings(output, settings, group)
    plan = Plan(output, [scale_name(scale) for scale in config.scales], number, config.batch_size)

    def draw(scale: int, numbers: Sequence[int]) -> list[tuple[Image.Image, str]]:
        return drawn_by(config, studio, numbers, config.scales[scale])

    drawn = draw_missing(plan, draw, group)
    if group.leads:
        total = plan.count * len(plan.groups)
        print(f"icom: drew {drawn:,} pictures, {total - drawn:,} of {total:,} were there.", flush=True)
    return partial(_score, config, plan, studio, scorer, texts) if scorer else None


def _prompts(config: EvaluateConfig) -> tuple[list[str], list[Asked], Reference | None, int]:
    """What is drawn, and what it is compared with.

    Returns:
        Prompts; the scenes behind them where they are the world's; pictures to compare with; pictures per scale.
    """
    real = RealPictures(config) if config.real_data_dir else None
    named = config.prompt or config.prompts_file not in (None, WORLD)
    bundled = config.pretrained_model_name_or_path in (None, "bundled") and not config.embedding
    if named:
        prompts = all_prompts(config)
        return prompts, [], real, config.num_images or len(prompts)
    count = config.num_images or DEFAULT_CAPTIONS
    if real and config.prompts_file is None:
        prompts = real.captions(count)
        return prompts, [], real, config.num_images or len(prompts)
    if config.prompts_file == WORLD or bundled:
        asked = ask(count, config.seed)
        # Other scenes than those that are asked for: they are as real pictures are to a prompt list.
        world = WorldPictures(ask(min(count, config.num_real_images), config.seed + 1))
        return [one.caption for one in asked], asked, real or world, count
    raise UsageError(
        "No prompts. Give them with --prompts_file FILE, or pictures with captions with --real_data_dir FOLDER."
    )


def _score(config: EvaluateConfig, plan: Plan, studio: Studio, scorer: Scorer, prompts: list[str]) -> None:
    rows = scorer.scores(plan, config.scales, prompts)
    result: dict[str, Any] = {
        "icom": __version__,
        "model": studio.model,
        "weights": studio.weights,
        "pictures": plan.count,
        "prompts": len(prompts),
        "seed": config.seed,
        "scheduler": config.scheduler,
        "num_inference_steps": config.num_inference_steps,
        "compared_with": scorer.reference.describe() if scorer.reference else None,
        "scores": rows,
        "not_computed": scorer.lacking,
    }
    content = json.dumps(result, indent=1, ensure_ascii=False) + "\n"
    write_atomically(plan.folder / RESULTS, content.encode())
    if not scorer.metrics:
        print(f"The pictures are in {plan.folder}; nothing was scored.")
        return
    curve(rows, scorer.metrics, plan.folder / CURVE)
    _show(rows, scorer, plan, studio)
    fewest = min(plan.count, len(scorer.reference or ()))
    if fewest < ENOUGH and ("fid" in scorer.metrics or "clip_fid" in scorer.metrics):
        print(
            f"FID and CLIP-FID of fewer than {ENOUGH:,} pictures come out too large, the more so the fewer: compare "
            "them with those of as many pictures alone. KID has no such bias."
        )
    print(f"Scores in {plan.folder / RESULTS}, their curve in {plan.folder / CURVE}.")


def _show(rows: list[dict[str, Any]], scorer: Scorer, plan: Plan, studio: Studio) -> None:
    from rich.console import Console
    from rich.table import Table

    against = f", against {scorer.reference.describe()}" if scorer.reference else ""
    table = Table(title=f"{studio.model}: {plan.count:,} pictures per scale{against}")
    headings = {
        "fid": "FID ↓",
        "kid": "KID ↓",
        "clip_fid": "CLIP-FID ↓",
        "clip_score": "CLIP score ↑",
        "judge": "judge ↑",
    }
    table.add_column("guidance", justify="right")
    for metric in scorer.metrics:
        table.add_column(headings[metric], justify="right", no_wrap=True)
    for row in rows:
        cells: dict[str, str] = {name: f"{row[name]:.2f}" for name in ("fid", "clip_fid", "clip_score") if name in row}
        if "kid" in row:
            cells["kid"] = f"{row['kid']:.4f} ± {row['kid_std']:.4f}"
        if "judge" in row:
            cells["judge"] = f"{row['judge'][BOTH]:.1%}"
        table.add_row(f"{row['guidance_scale']:g}", *(cells[metric] for metric in scorer.metrics))
    if "judge" in scorer.metrics:
        table.caption = f"judge: share of the pictures with the right {BOTH}"
    print()
    Console(soft_wrap=False).print(table)
