"""What the options of training do to the score: `python -m tools.world.options` fills benchmarks/learning-options.md.

The same bundled concepts are learned with one option after the other, in so few steps that a better option can show.
What was measured once stays in learning-options.jsonl and is not measured again.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from icom.bench.command import this_machine
from icom.commands.demo import INITIALIZER, TOKEN, judge_rows
from icom.config.demo import ConceptName
from icom.config.train import load_train_config
from icom.data.masks import ENDING
from icom.files import make_writable_folder, write_atomically
from icom.methods.embedding_file import load_embedding
from icom.training.outcome import read_outcome
from icom.training.results import EMBEDDING
from icom.training.train import train
from icom.world.concepts import concept_scenes
from icom.world.scene import PLACES
from tools.world.masked import MaskedConfig, write_masked

SETTINGS: dict[str, dict[str, Any]] = {
    "icom's defaults": {},
    "--snr_gamma 5": {"snr_gamma": 5},
    "--noise_offset 0.1": {"noise_offset": 0.1},
    "--max_timestep 500": {"max_timestep": 500},
    "--min_timestep 500": {"min_timestep": 500},
    "--timestep_sampling logit_normal": {"timestep_sampling": "logit_normal"},
    '--initializer_token "<rand>"': {"initializer_token": "<rand>"},
    "--num_vectors 2": {"num_vectors": 2},
    "--optimizer prodigy": {"optimizer": "prodigy"},
    "--optimizer schedule_free_adamw": {"optimizer": "schedule_free_adamw"},
    "--max_grad_norm 1e-3": {"max_grad_norm": 1e-3},
    "--adam_weight_decay 1 --weight_decay_to_start": {"adam_weight_decay": 1.0, "weight_decay_to_start": True},
    "--preserve_embedding_norm 0.1": {"preserve_embedding_norm": 0.1},
    "--preserve_embedding_norm 1": {"preserve_embedding_norm": 1},
    "--use_ema --ema_half_life 20": {"use_ema": True, "ema_half_life": 20},
}
"""Named as on the command line -> options beside the bundled model's defaults."""
FIELD: dict[str, dict[str, Any]] = {
    "diffusers' script: rate 1e-4, 5000 steps": {"learning_rate": 1e-4, "max_train_steps": 5000},
    "diffusers' guide: rate 2e-3, 3000 steps": {"learning_rate": 2e-3, "max_train_steps": 3000},
    "sd-scripts: rate 1e-6, 1600 steps": {"learning_rate": 1e-6, "max_train_steps": 1600},
    "A1111: rate 5e-3, 1000 steps": {"learning_rate": 5e-3, "max_train_steps": 1000},
    "icom's --optimizer prodigy, 200 steps": {"optimizer": "prodigy", "max_train_steps": 200},
    "icom's defaults, 500 steps": {"max_train_steps": 500},
    "icom's defaults, --stop auto": {"max_train_steps": 500, "stop": "auto"},
}
"""Rates and steps that other trainers begin with, at the bundled model's batch; diffusers' guide multiplies its rate of
5e-4 by the batch of 4. A1111's are 100,000 steps: a hundredth of them are taken."""
ONE_BACKGROUND: dict[str, dict[str, Any]] = {
    "built-in sentences": {"caption_templates": "builtin"},
    "captions that name background and place": {},
    "--masked_loss": {"caption_templates": "builtin", "masked_loss": True},
    "--masked_loss --unmasked_weight 0": {"caption_templates": "builtin", "masked_loss": True, "unmasked_weight": 0},
    "captions and --masked_loss": {"masked_loss": True},
    "prior preservation, weight 0.1": {"caption_templates": "builtin", "prior_loss_weight": 0.1},
    "prior preservation, weight 1": {"caption_templates": "builtin", "prior_loss_weight": 1.0},
}
"""For six pictures that all have one background."""
TABLES = {"options": SETTINGS, "field": FIELD, "one background": ONE_BACKGROUND}
TITLES = {
    "options": "Each option alone, {steps} steps",
    "field": "What trainers begin with",
    "one background": "Six pictures on one background, {steps} steps",
}
MEASURED = ("after", "elsewhere", "norm", "steps", "cpu_seconds")


@dataclass(kw_only=True)
class OptionsConfig:
    """Measure the options of training."""

    tables: tuple[str, ...] = tuple(TABLES)
    """What to measure: options, field, one background."""
    concepts: tuple[ConceptName, ...] = ("green-star", "red-moon", "orange-ring")
    """Concept sets to learn."""
    seeds: tuple[int, ...] = (0,)
    """Seeds of the trainings."""
    num_images: int = 16
    """Pictures of each kind per training."""
    max_train_steps: int = 60
    """Steps, where a setting does not say otherwise."""
    train: dict[str, str] = field(default_factory=dict)
    """Training options for all, as pairs."""
    output_dir: Path = Path("benchmarks")
    """Folder for learning-options.jsonl and learning-options.md."""


def measure(config: OptionsConfig) -> None:
    """Learn, judge, and write what was not written yet; then the tables of all that is written."""
    make_writable_folder(config.output_dir)
    file = config.output_dir / "learning-options.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    done = {_key(row) for row in rows}
    for table in config.tables:
        for name, concept, seed in itertools.product(TABLES[table], config.concepts, config.seeds):
            row = {"table": table, "setting": name, "concept": concept, "seed": seed, "images": config.num_images}
            row |= {"asked_steps": TABLES[table][name].get("max_train_steps", config.max_train_steps)}
            if _key(row) in done:
                continue
            rows.append(
                row | _learn(config, concept, seed, TABLES[table][name], one_background=table == "one background")
            )
            print(json.dumps(rows[-1]), flush=True)
            with file.open("a") as out:
                out.write(json.dumps(rows[-1]) + "\n")
    text = to_markdown(rows)
    print(text)
    write_atomically(config.output_dir / "learning-options.md", text.encode())


def _key(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(row[name] for name in ("table", "setting", "concept", "seed", "images", "asked_steps"))


def _learn(
    config: OptionsConfig, concept: str, seed: int, options: dict[str, Any], *, one_background: bool
) -> dict[str, Any]:
    """Shares of pictures that are right, steps, CPU seconds of the whole training, and the mean norm of the rows."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        flags: dict[str, Any] = {"placeholder_token": TOKEN, "initializer_token": INITIALIZER, "mixed_precision": "no"}
        flags |= {"train_data_dir": f"bundled:{concept}", "num_comparison_images": 0, "report_to": "none", "seed": seed}
        flags |= {"max_train_steps": config.max_train_steps, "checkpointing_steps": 10**6, **config.train}
        if one_background:
            write_masked(MaskedConfig(folder=folder / "pictures", concept=concept))  # type: ignore[arg-type]
            where = concept_scenes(concept)[0].background
            for picture in sorted((folder / "pictures").glob("?.png")):
                place = list(PLACES)[int(picture.stem)]
                picture.with_suffix(".txt").write_text(f"a photo of a {TOKEN} {where} {place}")
            for mask in [] if "masked_loss" in options else (folder / "pictures").glob(f"*{ENDING}"):
                mask.unlink()  # it would be a picture
            flags["train_data_dir"] = str(folder / "pictures")
        if "prior_loss_weight" in options:
            flags |= {"with_prior_preservation": True, "class_data_dir": str(folder / "class"), "num_class_images": 32}
            flags |= {"class_prompt": f"a photo of a {TOKEN}"}
        began = time.process_time()
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            train(load_train_config(flags | options | {"output_dir": str(folder / "out")}))
            seconds = time.process_time() - began
            _, rows = load_embedding(folder / "out" / EMBEDDING)
            after, elsewhere = (one.score.share for one in judge_rows(concept, rows, num_images=config.num_images))
        return {
            **{"steps": read_outcome(folder / "out").step, "after": after, "elsewhere": elsewhere},
            **{"norm": round(float(rows.norm(dim=1).mean()), 2), "cpu_seconds": round(seconds, 1)},
        }


def to_markdown(rows: list[dict[str, Any]]) -> str:
    """A table for each kind: means over concepts and seeds."""
    machine = this_machine()
    lines = [
        "# What options of training do to the score",
        "",
        f"Written by `python -m tools.world.options` on {machine['cpu']}, PyTorch {machine['torch']}. A line's CPU "
        "time is that of the machine that measured it, busy or not: for the order of it.",
        "",
    ]
    for table, settings in TABLES.items():
        all_of_it = [row for row in rows if row["table"] == table]
        for steps in sorted({row["asked_steps"] for row in all_of_it}) if table != "field" else [None]:
            own = [row for row in all_of_it if steps in (None, row["asked_steps"])]
            if not own:
                continue
            lines += [f"## {TITLES[table].format(steps=steps)}", ""]
            lines += ["| setting | after | new context | norm | steps | CPU time | trainings |", "|---" * 7 + "|"]
            lines += [_line(name, found) for name in settings if (found := [r for r in own if r["setting"] == name])]
            lines.append("")
    return "\n".join(lines)


def _line(name: str, rows: list[dict[str, Any]]) -> str:
    mean = {key: statistics.mean(row[key] for row in rows) for key in MEASURED}
    shares = f"{mean['after']:.0%} | {mean['elsewhere']:.0%}"
    cost = f"{mean['steps']:.0f} | {mean['cpu_seconds']:.0f} s"
    return f"| {name} | {shares} | {mean['norm']:.2f} | {cost} | {len(rows)} |"


if __name__ == "__main__":
    import tyro

    measure(tyro.cli(OptionsConfig, prog="python -m tools.world.options", use_underscores=True))
