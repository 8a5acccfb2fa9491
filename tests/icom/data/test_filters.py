"""Filters by metadata. Guards icom.data.filters.

The truth is written by hand, twice for each: as an expression of pyarrow's, and as Python about one sample.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds
import pytest
import yaml

from icom.config.data import DataOptions
from icom.config.loading import layers, merge, read_flags, read_yaml
from icom.data.filters import fields, parse_filters, select
from icom.data.metadata import columns
from icom.errors import UsageError
from tests.support.command import ROOT

Sample = dict[str, Any]


def samples(count: int = 400) -> list[Sample]:
    """Fields of every type; a tenth of each is missing."""
    rng = random.Random(0)
    made = []
    for number in range(count):
        sample = {
            "width": rng.choice([256, 511, 512, 513, 1024, 2048]),
            "pwatermark": rng.choice([0.0, 0.25, 0.5, 0.75, 1.0]),
            "licence": rng.choice(["cc-by", "cc0", "salt and pepper", "don't", "12", "true"]),
            "nsfw": rng.random() < 0.5,
            "number": number,
        }
        made.append({name: value if rng.random() < 0.9 else None for name, value in sample.items()})
    return made


SAMPLES = samples()
TABLE = pa.Table.from_pylist(SAMPLES)
W, P, L, N = (ds.field(name) for name in ("width", "pwatermark", "licence", "nsfw"))


def given(name: str, test: Callable[[Any], bool]) -> Callable[[Sample], bool]:
    return lambda sample: sample[name] is not None and test(sample[name])


wide = given("width", lambda w: w >= 512)
CASES: dict[str, tuple[Any, Callable[[Sample], bool]]] = {
    "width: '>=512'": (W >= 512, wide),
    "width: '> 512'": (W > 512, given("width", lambda w: w > 512)),
    "width: '<512'": (W < 512, given("width", lambda w: w < 512)),
    "width: '<= 511.5'": (W <= 511.5, given("width", lambda w: w <= 511.5)),
    "width: 512": (W == 512, given("width", lambda w: w == 512)),
    "width: '=512'": (W == 512, given("width", lambda w: w == 512)),
    "width: '!=512'": (W != 512, given("width", lambda w: w != 512)),
    "width: [512, 1024]": (W.isin([512, 1024]), given("width", lambda w: w in (512, 1024))),
    "width: 512..1024": ((W >= 512) & (W <= 1024), given("width", lambda w: 512 <= w <= 1024)),
    "width: '-1e1 .. 600'": ((W >= -10) & (W <= 600), given("width", lambda w: w <= 600)),
    "width: '>=512 and <1024'": ((W >= 512) & (W < 1024), given("width", lambda w: 512 <= w < 1024)),
    "width: '256 or 512..600 or >1024'": (
        (W == 256) | ((W >= 512) & (W <= 600)) | (W > 1024),
        given("width", lambda w: w == 256 or 512 <= w <= 600 or w > 1024),
    ),
    "width: '<300 or >500 and <1000'": (
        (W < 300) | ((W > 500) & (W < 1000)),
        given("width", lambda w: w < 300 or 500 < w < 1000),
    ),
    "pwatermark: '<=0.5'": (P <= 0.5, given("pwatermark", lambda p: p <= 0.5)),
    "pwatermark: 1": (P == 1, given("pwatermark", lambda p: p == 1)),
    "licence: cc0": (L == "cc0", given("licence", lambda x: x == "cc0")),
    "licence: '!=cc0 and != cc-by'": (
        (L != "cc0") & (L != "cc-by"),
        given("licence", lambda x: x not in ("cc0", "cc-by")),
    ),
    'licence: [cc0, "don\'t"]': (L.isin(["cc0", "don't"]), given("licence", lambda x: x in ("cc0", "don't"))),
    'licence: "don\'t or cc0"': (L.isin(["cc0", "don't"]), given("licence", lambda x: x in ("cc0", "don't"))),
    "licence: '\"salt and pepper\" or cc0'": (
        L.isin(["cc0", "salt and pepper"]),
        given("licence", lambda x: x in ("cc0", "salt and pepper")),
    ),
    "licence: 12": (L == "12", given("licence", lambda x: x == "12")),
    "licence: [true, 12]": (L.isin(["true", "12"]), given("licence", lambda x: x in ("true", "12"))),
    "nsfw: false": (~N, given("nsfw", lambda n: not n)),
    "nsfw: 'true'": (N, given("nsfw", bool)),
    "{width: '>=512', pwatermark: '<=0.5', nsfw: false}": (
        (W >= 512) & (P <= 0.5) & ~N,
        lambda s: wide(s) and given("pwatermark", lambda p: p <= 0.5)(s) and s["nsfw"] is False,
    ),
    # A sample without a field is in where the other reason holds.
    "{or: [{width: '>1000'}, {pwatermark: '<0.5', licence: cc0}], nsfw: false}": (
        ((W > 1000) | ((P < 0.5) & (L == "cc0"))) & ~N,
        lambda s: (
            s["nsfw"] is False
            and (
                given("width", lambda w: w > 1000)(s)
                or (given("pwatermark", lambda p: p < 0.5)(s) and s["licence"] == "cc0")
            )
        ),
    ),
    "{or: [{and: [{width: 256}, {width: '<300'}]}, {licence: '!=cc0'}]}": (
        ((W == 256) & (W < 300)) | (L != "cc0"),
        lambda s: s["width"] == 256 or (s["licence"] is not None and s["licence"] != "cc0"),
    ),
}


@pytest.mark.parametrize("written", CASES)
def test_filters_take_what_pyarrow_and_python_take(written: str) -> None:
    expression, python = CASES[written]
    condition = parse_filters(yaml.safe_load(written))
    selection = select(condition, TABLE)
    taken = [row for row, kept in enumerate(selection.taken) if kept]
    assert taken == [row for row, sample in enumerate(SAMPLES) if python(sample)]
    numbered = TABLE.append_column("row", pa.array(range(len(TABLE))))
    assert taken == ds.dataset(numbered).to_table(filter=expression)["row"].to_pylist()
    assert 0 < len(taken) < len(SAMPLES)
    assert len(taken) + selection.failed + selection.lacking == len(SAMPLES)


def test_samples_without_the_field_are_counted() -> None:
    selection = select(parse_filters({"width": ">=512"}), TABLE)
    missing = sum(sample["width"] is None for sample in SAMPLES)
    small = sum(sample["width"] is not None and sample["width"] < 512 for sample in SAMPLES)
    assert (selection.lacking, selection.failed) == (missing, small)
    assert str(selection) == f" ({missing + small} left out by filters, {missing} of them for want of a field)"


@pytest.mark.parametrize("kind", [pa.int8(), pa.uint64(), pa.float32(), pa.float16(), pa.decimal128(16, 2)])
def test_every_type_of_number(kind: Any) -> None:
    """As parquet files of others have them; large ones stay exact in whole numbers."""
    table = pa.table({"x": pa.array([1, 2, None, 3]).cast(pa.int32()).cast(kind)})
    assert select(parse_filters({"x": ">=2"}), table).taken.tolist() == [False, True, False, True]
    exact = pa.table({"x": pa.array([2**62, 2**62 + 1])})
    assert select(parse_filters({"x": 2**62 + 1}), exact).taken.tolist() == [False, True]
    assert select(parse_filters({"x": f"<{2**70}"}), exact).taken.all()


def test_texts_in_dictionaries() -> None:
    table = pa.table({"x": pa.array(["a", "b", None, "a"]).dictionary_encode()})
    assert select(parse_filters({"x": "a"}), table).taken.tolist() == [True, False, False, True]


@pytest.mark.parametrize(
    "filters",
    [
        {"width": ">="},
        {"width": ""},
        {"width": ">=512 and"},
        {"width": "and"},
        {"width": "or >= 512"},
        {"width": ">>512"},
        {"width": "=>512"},
        {"width": "> > 512"},
        {"width": ">=wide"},
        {"width": "<true"},
        {"width": "512.."},
        {"width": "..512"},
        {"width": "1024..512"},
        {"width": ">=1..2"},
        {"width": '"512" 513'},
        {"width": []},
        {"width": [">=512", "<1024"]},
        {"width": ["1..2"]},
        {"width": [[1]]},
        {"width": None},
        {"width": float("nan")},
        {"width": {"min": 512}},
        {"or": {"width": 1}},
        {"or": ["width"]},
        {"or": [{}]},
        {"or": [{"width": "<"}]},
    ],
)
def test_what_cannot_be_understood_is_refused(filters: dict[str, Any]) -> None:
    """The message names filter and column."""
    with pytest.raises(UsageError, match=r"Cannot understand the filter (width|or): .*--filters; docs/data\.md"):
        parse_filters(filters)


def test_nothing_is_evaluated(tmp_path: Path) -> None:
    """What another trainer's filters would have run is a text here."""
    mark = tmp_path / "mark"
    for text in (f"__import__('pathlib').Path('{mark}').touch()", f">=open('{mark}', 'w').fileno()"):
        with pytest.raises(UsageError):
            select(parse_filters({"width": text}), TABLE)
    assert not mark.exists()


@pytest.mark.parametrize(
    ("filters", "message"),
    [
        ({"widht": 1}, "'widht' has no such column .*licence, nsfw, number, pwatermark, width"),
        ({"licence": ">=512"}, "licence: '>=512': the column holds texts"),
        ({"width": "wide"}, "width: 'wide': the column holds numbers, and 'wide' is none"),
        ({"width": "true"}, "the column holds numbers, and 'true' is none"),
        ({"nsfw": 1}, "nsfw: 1: the column holds true and false"),
        ({"width": ">=5000"}, r"leave nothing of 400 samples .* width: 0 pass, \d+ lack it"),
        ({"width": "<300", "number": "<0"}, r"width: [1-9]\d* pass.*; number: 0 pass"),
        ({"list": 1}, "holds list<"),
        ({"empty": 1}, "leave nothing .* empty: 0 pass, 400 lack it"),
    ],
)
def test_filters_that_do_not_fit_the_samples(filters: dict[str, Any], message: str) -> None:
    table = TABLE
    if "list" in filters:
        table = table.append_column("list", pa.array([[1]] * 400))
    if "empty" in filters:
        table = table.append_column("empty", pa.nulls(400))
    with pytest.raises(UsageError, match=message):
        select(parse_filters(filters), table)


def test_fields_asked_for() -> None:
    assert fields(parse_filters({"or": [{"a": 1}, {"b": ">2 or <1", "a": 3}]})) == ["a", "b"]


def test_filters_come_from_files_and_flags(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("train_data_dir: x\nfilters: {width: '>=512', or: [{a: 1}, {b: [x, y]}]}\n")
    options = merge(DataOptions, [read_yaml(str(file))], str(file))
    assert options.filters == {"width": ">=512", "or": [{"a": 1}, {"b": ["x", "y"]}]}
    words = ["--train_data_dir", "x", "filters.width=>=512", "filters.b=[x, 1]", "filters.c=1..2 or don't"]
    flags = read_flags(DataOptions, words, "icom")
    assert merge(DataOptions, layers(flags), None).filters == {"width": ">=512", "b": ["x", 1], "c": "1..2 or don't"}
    with pytest.raises(UsageError, match="Cannot understand the filter width"):
        merge(DataOptions, [{"train_data_dir": "x", "filters": {"width": ">"}}], None)


def test_documentation_has_filters_that_work() -> None:
    (block,) = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs/data.md").read_text(), re.DOTALL)
    condition = parse_filters(yaml.safe_load(block)["filters"])
    one = {"original_width": 600, "pwatermark": 0.1, "aspect_ratio": 2.0, "licence": "cc0", "language": "en"}
    tried = [one | {"aesthetic": 7}, one | {"aesthetic": 5, "similarity": 0.4}, one | {"aesthetic": 5}]
    tried += [one | {"aesthetic": 7, "language": "fr"}, one | {"aesthetic": 7, "aspect_ratio": 2.1}]
    assert select(condition, columns(tried)).taken.tolist() == [True, True, False, False, False]
