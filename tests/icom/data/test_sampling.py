"""The sample stream: a pure function of (seed, index) with the distribution of a shuffled dataset.

Guards icom.data.sampling.
"""

from __future__ import annotations

from collections import Counter

import torch

from icom.data.sampling import SampleStream, gaussian_noise

STREAM = SampleStream(seed=7, pictures=5, repeats=40, templates=27, timesteps=1000)
FROZEN = [(0, False, 10, 745), (2, False, 8, 329), (3, False, 11, 639), (3, False, 0, 668)]


def test_random_access_in_any_order_and_process() -> None:
    forward = [STREAM[i] for i in range(500)]
    again = SampleStream(seed=7, pictures=5, repeats=40, templates=27, timesteps=1000)
    assert [again[i] for i in reversed(range(500))] == forward[::-1]
    assert torch.equal(gaussian_noise(forward[3], (4, 8, 8))[1], gaussian_noise(again[3], (4, 8, 8))[1])


def test_stream_is_frozen() -> None:
    """Checkpoints and published runs rely on these very samples: a change here breaks resume between versions."""
    samples = [(s.picture, s.flip, s.template, s.timestep) for s in (STREAM[0], STREAM[1], STREAM[199], STREAM[1000])]
    assert samples == FROZEN


def test_every_epoch_shows_each_picture_repeats_times_in_its_own_order() -> None:
    epochs = [[STREAM[e * 200 + i].picture for i in range(200)] for e in range(3)]
    for epoch in epochs:
        assert Counter(epoch) == dict.fromkeys(range(5), 40)
    assert epochs[0] != epochs[1] != epochs[2]


def test_choices_are_uniform_and_independent_of_the_picture() -> None:
    """Chi-square bounds at about five standard deviations."""
    samples = [STREAM[i] for i in range(20_000)]
    for values, kinds in (
        ([s.flip for s in samples], 2),
        ([s.template for s in samples], 27),
        ([s.timestep // 50 for s in samples], 20),
        ([(s.picture, s.flip) for s in samples], 10),
    ):
        expected = len(samples) / kinds
        counts = Counter(values)
        assert len(counts) == kinds
        chi_square = sum((count - expected) ** 2 / expected for count in counts.values())
        assert chi_square < (kinds - 1) + 5 * (2 * (kinds - 1)) ** 0.5
    assert {0, 999} <= {s.timestep for s in samples}


def test_noise_is_standard_normal_and_its_two_draws_differ() -> None:
    noises = torch.stack([torch.stack(gaussian_noise(STREAM[i], (4, 8, 8))) for i in range(400)])
    assert abs(noises.mean()) < 0.01
    assert abs(noises.std() - 1) < 0.01
    flat = noises.flatten(2)
    correlation = (flat[:, 0] * flat[:, 1]).mean()
    assert abs(correlation) < 0.015


def test_seeds_give_other_streams() -> None:
    other = SampleStream(seed=8, pictures=5, repeats=40, templates=27, timesteps=1000)
    assert [STREAM[i] for i in range(20)] != [other[i] for i in range(20)]
