"""FID, KID and CLIP score against closed forms, other forms and plain loops.

Guards icom.evaluate.distances.
"""

from __future__ import annotations

import numpy as np
import pytest

from icom.evaluate.distances import Features, Normal, clip_score, frechet, kernel_distance

RANDOM = np.random.Generator(np.random.PCG64(1))


def covariance(width: int) -> Features:
    factor = RANDOM.standard_normal((width, width))
    return factor @ factor.T


def test_distance_of_normal_distributions_along_the_axes() -> None:
    """There the covariances' roots are those of the variances, one by one."""
    one = Normal(np.array([1.0, 2.0]), np.diag([4.0, 9.0]))
    other = Normal(np.array([4.0, 6.0]), np.diag([1.0, 16.0]))
    assert frechet(one, other) == pytest.approx(25 + (2 - 1) ** 2 + (3 - 4) ** 2)
    assert frechet(one, one) == pytest.approx(0, abs=1e-12)


def test_distance_as_the_paper_writes_it() -> None:
    """With the root of the product of the covariances, which is not symmetric: Newton's iteration finds it."""
    one, other = (Normal(RANDOM.standard_normal(6), covariance(6)) for _ in range(2))
    product = one.covariance @ other.covariance
    root, inverse = product, np.eye(6)
    for _ in range(60):  # Denman & Beavers 1976
        root, inverse = (root + np.linalg.inv(inverse)) / 2, (inverse + np.linalg.inv(root)) / 2
    assert np.allclose(root @ root, product)
    difference = one.mean - other.mean
    expected = difference @ difference + np.trace(one.covariance + other.covariance - 2 * root)
    assert frechet(one, other) == pytest.approx(expected) == frechet(other, one)


def test_distance_of_samples_nears_that_of_their_distributions() -> None:
    turn, _ = np.linalg.qr(RANDOM.standard_normal((3, 3)))
    spread = np.array([1.0, 2.0, 0.5])
    one = RANDOM.standard_normal((40_000, 3)) * spread @ turn
    other = (RANDOM.standard_normal((40_000, 3)) * 2 * spread + [3.0, 0, 0]) @ turn
    assert frechet(Normal.of(one), Normal.of(other)) == pytest.approx(9 + (spread**2).sum(), rel=0.02)


def test_fewer_pictures_than_features() -> None:
    """The covariances have no inverse."""
    one, other = RANDOM.standard_normal((5, 20)), RANDOM.standard_normal((7, 20))
    product = Normal.of(one).covariance @ Normal.of(other).covariance
    mixed = np.sqrt(np.linalg.eigvals(product).astype(complex)).real.sum()  # torch-fidelity's form
    difference = one.mean(0) - other.mean(0)
    traces = one.var(0, ddof=1).sum() + other.var(0, ddof=1).sum()
    assert frechet(Normal.of(one), Normal.of(other)) == pytest.approx(difference @ difference + traces - 2 * mixed)


def test_kernel_distance_is_the_papers_sum() -> None:
    """All pictures are in each subset here, in another order."""
    one, other = RANDOM.standard_normal((6, 4)), RANDOM.standard_normal((6, 4)) + 1

    def kernel(x: Features, y: Features) -> float:
        return float((sum(a * b for a, b in zip(x, y, strict=True)) / 4 + 1) ** 3)

    within = sum(kernel(x[i], x[j]) for x in (one, other) for i in range(6) for j in range(6) if i != j) / (6 * 5)
    between = sum(kernel(x, y) for x in one for y in other) / 36
    mean, spread = kernel_distance(one, other)
    assert mean == pytest.approx(within - 2 * between)
    assert spread == pytest.approx(0, abs=1e-12)


def test_kernel_distance_of_equal_distributions_is_near_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    """By subsets that are smaller than the sets."""
    monkeypatch.setattr("icom.evaluate.distances.KID_SUBSET", 200)
    one, other, shifted = (RANDOM.standard_normal((1500, 8)) + shift for shift in (0, 0, 0.5))
    near, spread = kernel_distance(one, other)
    far, _ = kernel_distance(one, shifted)
    assert spread > 0 and abs(near) < 0.1 * far
    assert kernel_distance(one, other) == (near, spread), "the subsets are the same every time"


def test_clip_score_is_the_mean_cosine() -> None:
    pictures = np.array([[3.0, 4.0], [0.0, 2.0], [1.0, 0.0]])
    prompts = np.array([[6.0, 8.0], [5.0, 5.0], [-1.0, 0.0]])
    assert clip_score(pictures, prompts) == pytest.approx(100 * (1 + 0.5**0.5 + 0) / 3)
