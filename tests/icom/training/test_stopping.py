"""The validation loss without noise, and `--stop auto`.

Guards icom.training.stopping, icom.training.train_validation and icom.training.validation.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from icom.data.captions import TEMPLATES
from icom.data.images import list_pictures
from icom.data.sampling import SampleStream
from icom.training import train_validation
from icom.training.outcome import read_outcome
from icom.training.stopping import GAINED, best, chosen, is_learned, verdict
from icom.training.train_validation import FORWARD, SAMPLES, held_out_last, steps_between
from tests.support.checkpoints import assert_same_tensors, validation_curve
from tests.support.command import Result, assert_refused
from tests.support.plain_loss import plain_loss
from tests.support.ranks import Ranks

Train = Callable[..., Result]


def falling(time: float, every: int, last: int, start: float = 0.25, fall: float = 0.05) -> list[tuple[int, float]]:
    """Losses that fall exponentially: by 63 % of `fall` in `time` steps."""
    return [(step, start - fall * (1 - math.exp(-step / time))) for step in range(0, last + 1, every)]


def first_stop(curve: list[tuple[int, float]]) -> int | None:
    return next((curve[count - 1][0] for count in range(1, len(curve) + 1) if is_learned(curve[:count])), None)


@pytest.mark.parametrize("time", [20, 100, 731])
def test_an_exponential_stops_where_the_formula_says(time: int) -> None:
    """With x = exp(-t/2T), the later half brings x - x^2 of a fall of 1 - x^2: a share of x / (1 + x)."""
    x = GAINED / (1 - GAINED)
    expected = -2 * time * math.log(x)
    stopped = first_stop(falling(time, every=2, last=10 * time))
    assert stopped is not None
    assert stopped == pytest.approx(expected, abs=4)


def test_what_stops_it_has_no_units_and_no_window() -> None:
    curve = falling(50, every=5, last=1000)
    stopped = first_stop(curve)
    assert first_stop([(step, 7 + 1000 * loss) for step, loss in curve]) == stopped
    assert first_stop([(8 * step, loss) for step, loss in curve]) == 8 * (stopped or 0)


@pytest.mark.parametrize(
    "losses",
    [
        [0.3 - 0.001 * step for step in range(200)],  # falls on and on
        [0.3] * 200,  # learns nothing
        [0.3 + 0.001 * step for step in range(200)],  # goes astray
        [0.3, *[0.31 - 1e-5 * step for step in range(200)]],  # above its start
        [0.3, 0.299, *[0.31] * 200],  # fell once, by next to nothing
        [0.3, 0.29, 0.28, 0.28],  # four losses say nothing
    ],
)
def test_what_has_not_learned_goes_on(losses: list[float]) -> None:
    assert first_stop(list(enumerate(losses))) is None


def test_the_verdict_says_why_and_what_to_do() -> None:
    learned = falling(10, every=2, last=60)
    assert "0.2500 to 0.2001" in verdict(learned, stopped=True)
    assert "more --max_train_steps" in verdict(learned[:4], stopped=False)
    assert "next to nothing was learned" in verdict([(0, 0.25), (5, 0.26)], stopped=False)


def test_the_latest_of_the_good_rows_are_kept() -> None:
    """A tenth of the fall of 2 is 0.2."""
    assert best([(0, 3.0), (4, 1.0), (8, 1.0)]) == (4, 1.0)
    assert chosen([(0, 3.0), (4, 1.0), (8, 1.15), (12, 1.25)]) == (8, 1.15)
    assert chosen([(0, 3.0), (4, 3.5), (8, 4.0)]) == (0, 3.0)


def test_fixed_samples_are_stratified_and_a_function_of_the_seed() -> None:
    stream = SampleStream(seed=7, pictures=5, repeats=40, templates=27, timesteps=1000)
    samples = stream.fixed(range(5), 20)
    assert [sample.timestep // 50 for sample in samples] == list(range(20))
    assert [sample.picture for sample in samples] == [0, 1, 2, 3, 4] * 4
    assert samples == SampleStream(seed=7, pictures=3, repeats=1, templates=27, timesteps=1000).fixed(range(5), 20)
    other = SampleStream(seed=8, pictures=5, repeats=40, templates=27, timesteps=1000).fixed(range(5), 20)
    assert not {sample.noise_seed for sample in samples} & {sample.noise_seed for sample in other}
    trained = {stream[index].noise_seed for index in range(400)}
    assert not trained & {sample.noise_seed for sample in samples}
    # The mean timestep of independent draws varies by 1000 / sqrt(12 x 20) = 65, of one draw per stratum by 65 / 20.
    means = [sum(s.timestep for s in SampleStream(i, 5, 40, 27, 1000).fixed(range(5), 20)) / 20 for i in range(50)]
    assert max(abs(mean - 499.5) for mean in means) < 5 * 65 / 20


def test_validation_takes_its_share() -> None:
    for share in (0.01, 0.1, 0.3):
        for samples_per_step in (1, 4, 64):
            every, cost = steps_between(share, samples_per_step), SAMPLES * FORWARD
            assert cost / (cost + every * samples_per_step) <= share
            if every > 1:
                assert cost / (cost + (every - 1) * samples_per_step) > share


def test_pictures_are_held_out_where_there_are_enough() -> None:
    assert held_out_last(range(19)) == (list(range(19)), 19)
    pictures, trained = held_out_last(range(25))
    assert (trained, pictures[trained:]) == (23, [9, 19])
    assert sorted(pictures) == list(range(25))


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> int:
    """Four samples make a validation; what there is to test does not depend on their number."""
    monkeypatch.setattr(train_validation, "SAMPLES", 4)
    return 4


def rows(folder: Path) -> torch.Tensor:
    return load_file(folder / "learned_embeds.safetensors")["<robot>"]


def test_the_loss_is_that_of_a_plain_loop_and_changes_nothing(tmp_path: Path, train: Train, few: int) -> None:
    options: dict[str, object] = {"max_train_steps": 5, "learning_rate": 1e-2, "validation_share": 0.5, "save_steps": 2}
    seen, plain, later = tmp_path / "seen", tmp_path / "plain", tmp_path / "later"
    assert train(output_dir=seen, **options).code == 0
    assert train(output_dir=plain, **options | {"validation_share": None}).code == 0
    assert torch.equal(rows(seen), rows(plain))
    assert not (plain / "validation.jsonl").exists()
    found = validation_curve(seen)
    assert [step for step, _ in found] == [0, 2, 4]

    # Before the first step the word is its initializer.
    pictures = list_pictures("bundled")
    samples = SampleStream(7, 5, 100, 27, 1000).fixed(range(5), few)
    captions = [TEMPLATES["object"][sample.template].format("toy") for sample in samples]
    losses = [plain_loss(pictures[s.picture].path, caption, s) for s, caption in zip(samples, captions, strict=True)]
    assert found[0][1] == pytest.approx(sum(losses) / few, rel=1e-5)
    # Later it is as if a run began with the rows of then.
    saved = seen / "learned_embeds-steps-4.safetensors"
    assert train(output_dir=later, initial_embedding=saved, **options | {"max_train_steps": 1}).code == 0
    assert validation_curve(later) == [(0, found[-1][1])]


STOPPING = {
    "learning_rate": 1e-1,
    "stop": "auto",
    "validation_share": 0.5,
    "max_train_steps": 60,
    "save_steps": 2,
    "checkpointing_steps": 5,
}
"""Such a rate has learned after a few steps."""


@pytest.mark.usefixtures("few")
def test_a_run_stops_by_itself_keeps_the_best_and_resumes_equal(tmp_path: Path, train: Train) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    result = train(output_dir=whole, **STOPPING)
    assert result.code == 0
    found = validation_curve(whole)
    last, (step, loss) = found[-1][0], chosen(found)
    assert first_stop(found) == last < 60
    assert f"(step {step}), and by at most 2% of that since step {last // 2}: learned" in result.out
    saved = load_file(whole / f"learned_embeds-steps-{step}.safetensors")["<robot>"]
    assert torch.equal(rows(whole), saved)
    assert f"learned in {step} steps" in (whole / "README.md").read_text()
    assert read_outcome(whole).state == "done"

    # Interrupted between two losses, and once more after its end.
    shutil.copytree(whole / "checkpoint-5", parts / "checkpoint-5")
    again = train(output_dir=parts, resume_from_checkpoint="latest", **STOPPING)
    assert "resumed after step 5" in again.out
    for _ in range(2):
        assert torch.equal(rows(parts), rows(whole))
        assert validation_curve(parts) == found
        assert_same_tensors(parts / f"checkpoint-{last}", whole / f"checkpoint-{last}")
        again = train(output_dir=parts, resume_from_checkpoint="latest", **STOPPING)
        assert f"Step {last} was done already" in again.out

    # Nothing is asked of the loss: it goes on from the same rows.
    on = STOPPING | {"stop": None, "max_train_steps": last + 2}
    assert train(output_dir=parts, resume_from_checkpoint="latest", **on).code == 0
    assert validation_curve(parts)[:-1] == found
    config = yaml.safe_load((whole / "config.yaml").read_text())
    assert (config["stop"], config["max_train_steps"]) == ("auto", 60)
    other = train(output_dir=parts, resume_from_checkpoint="latest", **STOPPING | {"validation_share": 0.2})
    assert_refused(other, 1, "validation_share (checkpoint 0.5, now 0.2)")
    assert loss < found[0][1]


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"validation_share": 0.7}, ("--validation_share", "between 0 and 0.5")),
        ({"validation_share": -0.1}, ("--validation_share", "between 0 and 0.5")),
        ({"validation_share": "nan"}, ("--validation_share", "between 0 and 0.5")),
        ({"validation_share": 0, "stop": "auto"}, ("--stop auto", "--validation_share 0")),
        ({"stop": "never"}, ("--stop",)),
    ],
)
def test_bad_options(options: dict[str, object], parts: tuple[str, ...], tmp_path: Path, train: Train) -> None:
    assert_refused(train(output_dir=tmp_path, **options), 2, *parts)


@pytest.mark.long
@pytest.mark.usefixtures("few")
@pytest.mark.parametrize(
    "options",
    [{"enable_bucket": True}, {"use_ema": True}, {"optimizer": "schedule_free_adamw"}, {"random_crop": True}],
    ids=lambda options: next(iter(options)),
)
def test_watched_runs_end_and_go_on_as_unwatched_ones(options: dict[str, object], tmp_path: Path, train: Train) -> None:
    """Whatever is learned with: the losses are of the rows that people get, and looking at them changes no row."""
    watched = {"validation_share": 0.5, "checkpointing_steps": 2, **options}
    assert train(output_dir=tmp_path / "plain", max_train_steps=4, **options).code == 0
    assert train(output_dir=tmp_path / "whole", max_train_steps=4, **watched).code == 0
    assert train(output_dir=tmp_path / "parts", max_train_steps=2, **watched).code == 0
    again = train(output_dir=tmp_path / "parts", max_train_steps=4, resume_from_checkpoint="latest", **watched)
    assert again.code == 0, again
    assert validation_curve(tmp_path / "parts") == validation_curve(tmp_path / "whole")
    assert len(validation_curve(tmp_path / "whole")) > 2
    learned = [rows(tmp_path / name) for name in ("plain", "whole", "parts")]
    assert all(torch.equal(one, learned[0]) for one in learned)


@pytest.mark.long
@pytest.mark.parametrize("count", [2, 3])
def test_the_same_on_any_number_of_ranks(count: int, tmp_path: Path, train: Train, ranks: Callable[..., Ranks]) -> None:
    """The same total batch; the losses differ by what the rows differ by: the rounding of sums of gradients."""
    options: dict[str, object] = {"max_train_steps": 3, "learning_rate": 1e-2, "validation_share": 0.5, "seed": 7}
    alone = options | {"gradient_accumulation_steps": count, "train_batch_size": 2}
    assert train(output_dir=tmp_path / "alone", **alone).code == 0
    group = ranks(count, train_batch_size=2, **options)
    assert [result.code for result in group.results()] == [0] * count
    found, expected = validation_curve(group.folders[0] / "out"), validation_curve(tmp_path / "alone")
    assert len(found) > 1
    assert found[0] == expected[0]  # of the same rows: the same bits, whoever computed which part
    assert found == [(step, pytest.approx(loss, rel=1e-6)) for step, loss in expected]
