"""Which metrics can be had here, and their values for the pictures of an evaluation."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, get_args

import numpy as np
from PIL import Image

from icom.config.common import flat
from icom.config.evaluate import EvaluateConfig, MetricName
from icom.errors import IcomError
from icom.evaluate.distances import Features, Normal, clip_score, frechet, kernel_distance
from icom.evaluate.networks import Clip, Inception, Unavailable
from icom.evaluate.pictures import Plan
from icom.evaluate.real import Reference
from icom.evaluate.world import Asked, shares
from icom.progress import progress
from icom.world.judge import load_judge
from icom.world.scene import SIZE

METRICS: tuple[MetricName, ...] = get_args(MetricName)
SEEN_BY = {"fid": "inception", "kid": "inception", "clip_fid": "clip", "clip_score": "clip"}
"""Metric -> the network whose features it is computed from."""
COMPARING = ("fid", "kid", "clip_fid")
"""Those that need pictures to compare with."""
_BATCH = 16
"""Pictures that a network looks at together."""


class Network(Protocol):
    """What looks at pictures."""

    def see(self, pictures: Sequence[Image.Image]) -> Features:
        """Features of RGB pictures of one size."""


class Scorer:
    """What can be computed, with the networks for it.

    Attributes:
        metrics: what is computed, in the order of METRICS.
        lacking: metric -> why it cannot be, and what to do.
        reference: pictures to compare with.
    """

    def __init__(self, config: EvaluateConfig, reference: Reference | None, asked: Sequence[Asked]) -> None:
        """Load the networks.

        Args:
            config: of the evaluation.
            reference: pictures to compare with, if there are any.
            asked: the scenes behind the prompts, one for each, where those are the world's.

        Raises:
            IcomError: a metric that was asked for by name cannot be had, or a file of weights is none.
        """
        self.reference, self._asked = reference, asked
        self._networks: dict[str, Network] = {}
        named = flat(config.metrics)
        wanted = [metric for metric in METRICS if metric in (named or METRICS)]
        reasons = {metric: self._why_not(metric, config) for metric in wanted}
        self.lacking = {metric: reason for metric, reason in reasons.items() if reason}
        self.metrics = [metric for metric in wanted if metric not in self.lacking]
        if named and self.lacking:
            listed = "\n  ".join(f"{metric}: {reason}." for metric, reason in self.lacking.items())
            raise IcomError(f"Not all of --metrics can be computed:\n  {listed}")

    def _why_not(self, metric: str, config: EvaluateConfig) -> str | None:
        """What is missing for a metric, if anything is. Loads its network, so that this is known before the drawing."""
        if metric == "judge":
            if not self._asked:
                return "the judge understands captions of the bundled model's world only (--prompts_file bundled)"
            return None if config.resolution in (None, SIZE) else f"the judge sees pictures of {SIZE} px only"
        if metric in COMPARING and self.reference is None:
            return "--real_data_dir is missing: the pictures to compare with"
        if metric in COMPARING and (config.num_images == 1 or len(self.reference or ()) < 2):
            return "it compares two sets of pictures, each of two or more"
        name = SEEN_BY[metric]
        if name not in self._networks:
            try:
                self._networks[name] = (
                    Clip(config.clip_model) if name == "clip" else Inception(config.inception_weights)
                )
            except Unavailable as error:
                return str(error)
        return None

    def scores(self, plan: Plan, scales: Sequence[float], prompts: Sequence[str]) -> list[dict[str, Any]]:
        """A row for each scale of guidance: its metrics by name.

        Args:
            plan: pictures, all of which are there; a group for each scale.
            scales: of guidance.
            prompts: those of the first pictures; then they come again.
        """
        side = next(plan.pictures(plan.groups[0])).width
        real: Mapping[str, Features] = {}
        if self.reference and (names := {SEEN_BY[metric] for metric in self.metrics if metric in COMPARING}):
            networks = {name: self._networks[name] for name in names}
            what = "pictures to compare with"
            real = see(networks, self.reference.pictures(side), len(self.reference), what)
        normal = {name: Normal.of(features) for name, features in real.items()}
        texts = self._texts(prompts, plan.count)
        rows: list[dict[str, Any]] = []
        for scale, group in zip(scales, plan.groups, strict=True):
            seen = see(self._networks, plan.pictures(group), plan.count, f"scores at guidance {scale:g}")
            row: dict[str, Any] = {"guidance_scale": scale}
            for metric in self.metrics:
                if metric == "judge":
                    row[metric] = self._judged(plan.pictures(group))
                elif metric == "clip_score":
                    row[metric] = clip_score(seen["clip"], texts)
                elif metric == "kid":
                    row["kid"], row["kid_std"] = kernel_distance(real["inception"], seen["inception"])
                else:
                    row[metric] = frechet(normal[SEEN_BY[metric]], Normal.of(seen[SEEN_BY[metric]]))
            rows.append(row)
        return rows

    def _texts(self, prompts: Sequence[str], count: int) -> Features:
        """CLIP's features of the prompts of `count` pictures; none where there is no CLIP."""
        clip = self._networks.get("clip")
        if not isinstance(clip, Clip):
            return np.empty((count, 0))
        read = np.concatenate([clip.read(batch) for batch in _batches(prompts[:count])])
        return read[np.arange(count) % len(read)]

    def _judged(self, pictures: Iterable[Image.Image]) -> dict[str, float]:
        judge = load_judge()
        verdicts = [verdict for batch in _batches(pictures) for verdict in judge.look_at(batch)]
        asked = list(itertools.islice(itertools.cycle(self._asked), len(verdicts)))
        return shares(verdicts, asked)


def see(networks: Mapping[str, Network], pictures: Iterable[Image.Image], total: int, what: str) -> dict[str, Features]:
    """What each network sees in each picture.

    Args:
        networks: by name.
        pictures: RGB.
        total: how many.
        what: is going on, for people.
    """
    seen: dict[str, list[Features]] = {name: [] for name in networks}
    with progress(None, what, "picture", total=total, leave=False, disable=not networks) as bar:
        for batch in _batches(pictures) if networks else ():
            for name, network in networks.items():
                seen[name].append(network.see(batch))
            bar.update(len(batch))
    return {name: np.concatenate(parts) for name, parts in seen.items()}


def _batches(items: Iterable[Any]) -> Iterator[list[Any]]:
    iterator = iter(items)
    while batch := list(itertools.islice(iterator, _BATCH)):
        yield batch
