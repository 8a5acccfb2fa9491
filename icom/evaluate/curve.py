"""How the scores change with the guidance, as a picture."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from icom.evaluate.world import BOTH
from icom.files import write_atomically

TITLES = {
    "fid": "FID\nlower is better",
    "kid": "KID\nlower is better",
    "clip_fid": "CLIP-FID\nlower is better",
    "clip_score": "CLIP score\nhigher is better",
    "judge": f"judge: {BOTH} right\nhigher is better",
}


def curve(rows: Sequence[dict[str, Any]], metrics: Sequence[str], path: Path) -> None:
    """Draw each metric over the scale of guidance, side by side, as PNG.

    Args:
        rows: of `Scorer.scores`.
        metrics: one or more that all rows have.
        path: the file.
    """
    from matplotlib.figure import Figure

    rows = sorted(rows, key=lambda row: float(row["guidance_scale"]))
    scales = [row["guidance_scale"] for row in rows]
    figure = Figure(figsize=(4 * len(metrics), 3.5), layout="constrained")
    panels = figure.subplots(1, len(metrics), squeeze=False)
    for axes, metric in zip(panels[0], metrics, strict=True):
        values = [row[metric][BOTH] if metric == "judge" else row[metric] for row in rows]
        spread = [row["kid_std"] for row in rows] if metric == "kid" else None
        axes.errorbar(scales, values, yerr=spread, color="tab:blue", marker="o", linewidth=2, capsize=3)
        axes.set(xlabel="guidance scale", title=TITLES[metric])
        axes.set_xticks(scales, [f"{scale:g}" for scale in scales])
        axes.spines[["top", "right"]].set_visible(False)
    buffer = io.BytesIO()
    figure.savefig(buffer, dpi=120)
    write_atomically(path, buffer.getvalue())
