"""How the results of `icom bench --method unet` are shown: on the terminal, as CSV, Markdown and PNG."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Mapping
from typing import Any, Literal

Row = Mapping[str, Any]

_OPTIONS = {
    "processes": "processes",
    "parallel": "parallel",
    "micro_batch": "micro-batch",
    "gradient_checkpointing": "checkpointing",
    "ema": "EMA",
    "workers": "workers",
}
"""Key of a row -> its heading, of what tells rows apart."""


def print_table(result: dict[str, Any]) -> None:
    """The table, with a column for every option that differs between rows, and how attention was computed."""
    _print(result, _title(result), _columns(result["rows"]), result["rows"])


def print_comparison(result: dict[str, Any]) -> None:
    """icom's step and diffusers'."""
    rows = [{"name": name, **row} for name, row in result["contenders"].items()]
    title = f"{_title(result)}, batch {result['options']['batch_size']}"
    _print(result, title, _columns_of_comparison(), rows)


def files(result: dict[str, Any]) -> dict[str, bytes]:
    """Suffix -> content, of what --sweep writes."""
    rows = result["rows"]
    text = io.StringIO()
    writer = csv.DictWriter(text, rows[0].keys())
    writer.writeheader()
    writer.writerows(rows)
    return {"csv": text.getvalue().encode(), "md": markdown(result).encode(), "png": _plot(result)}


def markdown(result: dict[str, Any]) -> str:
    """The table, what all its rows have in common, and how attention was computed."""
    lines = [f"{_title(result)}. {_caption(result)}.", "", *_in_markdown(_columns(result["rows"]), result["rows"])]
    if result["attention"]:
        lines += ["", *_in_markdown(_columns_of_attention(), _attention(result))]
    return "\n".join([*lines, "", _about(result)]) + "\n"


Columns = dict[str, Callable[[Row], str]]
"""Heading -> what a row has there."""


def _columns(rows: list[Row]) -> Columns:
    columns: Columns = {
        heading: lambda row, key=key: str(row[key])  # type: ignore[misc]
        for key, heading in _OPTIONS.items()
        if key == "micro_batch" or len({row[key] for row in rows}) > 1
    }
    columns |= _TIMES | {
        "images/s": lambda row: _number(row["images_per_second"]),
        "per device": lambda row: _number(row["images_per_second_per_device"]),
        "waiting": lambda row: "" if row["waiting"] is None else f"{row['waiting']:.1%}",
        "peak GB": lambda row: _number(row["peak_gb"]),
    }
    if any(row["processes"] > 1 for row in rows):
        columns |= {
            "efficiency": lambda row: "" if row["efficiency"] is None else f"{row['efficiency']:.1%}",
            "MB sent": lambda row: _number(row["bytes_sent"], 1e6),
            "by formula": lambda row: _number(row["bytes_by_formula"], 1e6),
        }
    return columns


def _columns_of_comparison() -> Columns:
    def faster(row: Row) -> str:
        return (
            "{:.2f} x ({:.2f}–{:.2f})".format(row["faster_by"], *row["faster_by_range"]) if "faster_by" in row else ""
        )

    return {
        "": lambda row: row["name"],
        **_TIMES,
        "images/s": lambda row: _number(row["images_per_second"]),
        "peak GB": lambda row: _number(row["peak_gb"]),
        "faster by": faster,
    }


_TIMES: Columns = {
    "s/step": lambda row: _number(row["seconds_per_step"]) or row["status"],
    "range": lambda row: f"{row['fastest']:.3g}–{row['slowest']:.3g}" if row["fastest"] else "",
}


def _columns_of_attention() -> Columns:
    def measured(row: Row) -> str:
        return ", ".join(f"{way} {ms:.4g}" for way, ms in row["milliseconds"].items())

    return {
        "attention: batch x heads x queries x keys x width": lambda row: row["shape"],
        "chosen": lambda row: row["chosen"],
        "measured, ms": measured,
    }


def _in_markdown(columns: Columns, rows: list[Any]) -> list[str]:
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    return [*lines, *(f"| {' | '.join(cell(row) for cell in columns.values())} |" for row in rows)]


def _print(result: dict[str, Any], title: str, columns: Columns, rows: list[Any]) -> None:
    from rich.console import Console

    _print_one(title, _caption(result), columns, rows, justify="right")
    if result["attention"]:
        _print_one("", "", _columns_of_attention(), _attention(result), justify="left")
    Console().print(_about(result), highlight=False, markup=False)


def _print_one(title: str, caption: str, columns: Columns, rows: list[Any], justify: Literal["left", "right"]) -> None:
    from rich.console import Console
    from rich.measure import Measurement
    from rich.table import Table

    table = Table(title=title, caption=caption)
    for heading in columns:
        table.add_column(heading, justify=justify if heading else "left")
    for row in rows:
        table.add_row(*(cell(row) for cell in columns.values()))
    console = Console()
    if justify == "right":  # a number that is cut is none: a terminal wraps what is too wide for it
        wanted = Measurement.get(console, console.options.update(max_width=1000), table).maximum
        console = Console(width=max(console.width, wanted))
    console.print(table)


def _attention(result: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"shape": shape, **found} for shape, found in result["attention"].items()]


def _title(result: dict[str, Any]) -> str:
    options = result["options"]
    precision = "bf16" if options["mixed_precision"] == "bf16" else "fp32"
    kind = " from latents" if options["precomputed"] else ""
    source = options["train_data_dir"] or "made-up pictures"
    return f"Training the whole UNet, {options['arch']} at {options['resolution']} px, {precision}, {source}{kind}"


def _caption(result: dict[str, Any]) -> str:
    options, here = result["options"], result["machine"]
    rows = result.get("rows", [])
    same = [
        f"{heading} {rows[0][key]}"
        for key, heading in _OPTIONS.items()
        if rows and len({row[key] for row in rows}) == 1 and rows[0][key] != "one"
    ]
    cores = f"{here['cores_per_process']} core(s) per process"
    measured = f"medians of {options['rounds']} round(s) of {options['steps']} step(s)"
    return ", ".join([here["cpu"], cores, f"PyTorch {here['torch']}", measured, *same])


def _about(result: dict[str, Any]) -> str:
    """One sentence on what computed."""
    attention = "" if result["attention"] else "; attention: PyTorch's own, nothing was measured"
    return f"{result['backend']}{attention}"


def _number(value: float | None, unit: float = 1.0) -> str:
    return "" if value is None else f"{value / unit:.4g}"


def _plot(result: dict[str, Any]) -> bytes:
    """PNG: images per second over the micro-batch, a line for each combination of the other options."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    rows = result["rows"]
    differing = [key for key in _OPTIONS if key != "micro_batch" and len({row[key] for row in rows}) > 1]
    for values in dict.fromkeys(tuple(row[key] for key in differing) for row in rows):
        line = [row for row in rows if tuple(row[key] for key in differing) == values and row["images_per_second"]]
        label = ", ".join(f"{_OPTIONS[key]} {value}" for key, value in zip(differing, values, strict=True))
        axes.plot(
            [row["micro_batch"] for row in line], [row["images_per_second"] for row in line], marker="o", label=label
        )
    options = result["options"]
    axes.set(xlabel="micro-batch", ylabel="images/s", title=f"{options['arch']} at {options['resolution']} px")
    axes.set_xticks(sorted({row["micro_batch"] for row in rows}))
    axes.set_ylim(0, 1.1 * axes.get_ylim()[1])
    if differing:
        axes.legend(fontsize="small")
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=120)
    return file.getvalue()
