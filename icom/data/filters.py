"""Which samples are taken, by their metadata: conditions in YAML, parsed by the grammar below and never evaluated.

    filters    = mapping of columns to conditions, all of which have to hold; and, in place of a column,
                 and: [filters, …]  or: [filters, …]
    condition  = a number, true or false: equal to it
               | a list of values: equal to one of them
               | a text: alternatives
    alternatives = conjunction { "or" conjunction }
    conjunction  = test { "and" test }
    test         = [ ">=" | "<=" | ">" | "<" | "==" | "=" | "!=" ] value  |  number ".." number (both included)
    value        = a number | true | false | "text" | 'text' | text without quotes, signs, and the words and, or

A sample that lacks a field is neither in nor out by it (SQL's null, Kleene's logic): it is left out unless an `or` has
another reason to take it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from icom.errors import UsageError

if TYPE_CHECKING:
    import numpy as np

_NUMBER = r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?"
_RANGE = re.compile(rf"({_NUMBER})\s*\.\.\s*({_NUMBER})")
# A quote opens a text only where a value begins: the one in "don't" does not.
_VALUE = r"""(?P<double>"[^"]*")|(?P<single>'[^']*')|(?P<bare>(?:(?!\s+(?:and|or)\s).)+)"""
_TEST = re.compile(rf"\s*(?P<sign>>=|<=|==|!=|>|<|=)?\s*(?:{_VALUE})\s*(?:\s(?P<word>and|or)\s|$)", re.DOTALL)
_NO_VALUE = re.compile(r"""^$|^(?:and|or)\b|\b(?:and|or)$|^['!]|[<>="]""")
_ORDERS = {">=": "greater_equal", "<=": "less_equal", ">": "greater", "<": "less"}
_BOTH = ("and", "or")


@dataclass(frozen=True)
class _Test:
    """One comparison.

    Attributes:
        column: of the metadata.
        written: the whole condition, for messages.
        sign: ==, !=, or a key of _ORDERS.
        value: to compare with.
        text: the value as it was written, for columns of text.
    """

    column: str
    written: object
    sign: str
    value: float | int | bool | str
    text: str

    def fault(self, what: str) -> UsageError:
        return _fault(self.column, self.written, what)


@dataclass(frozen=True)
class _Both:
    """Several conditions: `and` takes what passes all, `or` what passes one."""

    word: str
    parts: tuple[Condition, ...]


Condition = _Test | _Both


@dataclass(frozen=True)
class Selection:
    """What filters take.

    Attributes:
        taken: bool of shape (samples,).
        failed: samples that have the fields and do not pass.
        lacking: samples that were left out for want of a field.
    """

    taken: np.ndarray
    failed: int
    lacking: int

    def __str__(self) -> str:
        """For a start line; empty where nothing was left out."""
        lacking = f", {self.lacking:,} of them for want of a field" if self.lacking else ""
        left_out = self.failed + self.lacking
        return f" ({left_out:,} left out by filters{lacking})" if left_out else ""


def parse_filters(filters: Mapping[str, Any]) -> Condition:
    """Understand what stands in the configuration.

    Raises:
        UsageError: it cannot be understood; names filter and column.
    """
    parts: list[Condition] = []
    for column, condition in filters.items():
        if column in _BOTH:
            if not isinstance(condition, list) or not all(isinstance(part, dict) and part for part in condition):
                raise _fault(column, condition, f"`{column}` takes a list of filters, each of them `column: condition`")
            parts.append(_Both(column, tuple(parse_filters(part) for part in condition)))
        elif isinstance(condition, list):
            if not condition:
                raise _fault(column, condition, "an empty list takes nothing")
            parts.append(_Both("or", tuple(_equal(column, condition, value) for value in condition)))
        elif isinstance(condition, str):
            parts.append(_parse(column, condition))
        else:
            parts.append(_equal(column, condition, condition))
    return parts[0] if len(parts) == 1 else _Both("and", tuple(parts))


def fields(condition: Condition) -> list[str]:
    """The columns that a condition asks for."""
    if isinstance(condition, _Test):
        return [condition.column]
    return sorted({column for part in condition.parts for column in fields(part)})


def select(condition: Condition, table: Any, known: Sequence[str] = ()) -> Selection:
    """Apply filters to metadata.

    Args:
        condition: of `parse_filters`.
        table: pyarrow.Table with a row for each sample.
        known: columns that there are, for messages, where the table has only some of them.

    Raises:
        UsageError: no such column, it holds something else than what it is compared with, or nothing is left.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    for column in fields(condition):
        if column not in table.column_names:
            raise UsageError(
                f"The filter on {column!r} has no such column (--filters). Samples have: "
                f"{', '.join(sorted(known or table.column_names)) or 'no metadata'}."
            )
    passed = _evaluate(condition, table)
    lacking = int(passed.null_count)
    taken = pc.fill_null(passed, False)
    taken = (taken.combine_chunks() if isinstance(taken, pa.ChunkedArray) else taken).to_numpy(zero_copy_only=False)
    if not taken.any():
        alone = condition.parts if isinstance(condition, _Both) and condition.word == "and" else (condition,)
        found = "; ".join(_alone(part, _evaluate(part, table)) for part in alone)
        raise UsageError(f"The filters leave nothing of {len(table):,} samples (--filters). {found}.")
    return Selection(taken, len(table) - int(taken.sum()) - lacking, lacking)


def _alone(part: Condition, passed: Any) -> str:
    import pyarrow.compute as pc

    lack = f", {passed.null_count:,} lack it" if passed.null_count else ""
    return f"{' or '.join(fields(part))}: {pc.sum(passed).as_py() or 0:,} pass{lack}"


def _fault(column: str, written: object, what: str) -> UsageError:
    return UsageError(f"Cannot understand the filter {column}: {written!r}: {what} (--filters; docs/data.md).")


def _parse(column: str, written: str) -> Condition:
    """A condition that is a text."""
    alternatives: list[list[Condition]] = [[]]
    place, word = 0, ""
    while True:
        found = _TEST.match(written, place)
        if found is None:
            raise _fault(column, written, f"a value is missing, or something follows it, at {written[place:]!r}")
        alternatives[-1].append(_one(column, written, found))
        word, place = found["word"], found.end()
        if word is None:
            break
        if word == "or":
            alternatives.append([])
    either = tuple(tests[0] if len(tests) == 1 else _Both("and", tuple(tests)) for tests in alternatives)
    return either[0] if len(either) == 1 else _Both("or", either)


def _one(column: str, written: str, found: re.Match[str]) -> Condition:
    """A comparison or a range."""
    sign = "==" if found["sign"] in (None, "=") else found["sign"]
    quoted = found["double"] or found["single"]
    text = quoted[1:-1] if quoted else found["bare"].strip()
    value: float | int | bool | str = text if quoted else _typed(text)
    if not quoted and _NO_VALUE.search(text):
        raise _fault(column, written, f"{text!r} is no value; put it in quotes if it is a text")
    if ends := None if quoted else _RANGE.fullmatch(text):
        if found["sign"]:
            raise _fault(column, written, f"a range takes no {sign}")
        low, high = (_typed(end) for end in ends.groups())
        if low > high:  # type: ignore[operator]
            raise _fault(column, written, f"nothing is between {low} and {high}")
        ranged = (_Test(column, written, ">=", low, ends[1]), _Test(column, written, "<=", high, ends[2]))
        return _Both("and", ranged)
    if not quoted and ".." in text and re.search(r"\d\s*\.\.|\.\.\s*\d", text):
        raise _fault(column, written, "a range has a number at both ends, as in 512..1024; for one end write >= or <=")
    if sign in _ORDERS and (isinstance(value, bool | str)):
        raise _fault(column, written, f"{sign} compares with a number, and {text!r} is none")
    return _Test(column, written, sign, value, text)


def _typed(text: str) -> float | int | bool | str:
    """A value that stands without quotes."""
    if text in ("true", "false"):
        return text == "true"
    if re.fullmatch(_NUMBER, text):
        return int(text) if re.fullmatch(r"[+-]?\d+", text) else float(text)
    return text


def _equal(column: str, written: object, value: object) -> _Test:
    """What stands in YAML as a value."""
    if isinstance(value, str) and (re.match(r"\s*[<>=!]", value) or _RANGE.fullmatch(value.strip())):
        raise _fault(
            column, written, "a list takes values; write comparisons into one text, with and / or between them"
        )
    if not isinstance(value, bool | int | float | str) or (isinstance(value, float) and not math.isfinite(value)):
        raise _fault(column, written, f"{value!r} is neither a number, nor true or false, nor a text")
    text = ("true" if value else "false") if isinstance(value, bool) else str(value)
    return _Test(column, written, "==", value, text)


def _evaluate(condition: Condition, table: Any) -> Any:
    """Arrow booleans, null where a field is missing."""
    import functools

    import pyarrow.compute as pc

    if isinstance(condition, _Both):
        both: Callable[[Any, Any], Any] = pc.and_kleene if condition.word == "and" else pc.or_kleene
        return functools.reduce(both, (_evaluate(part, table) for part in condition.parts))
    column, value = _comparable(condition, table[condition.column])
    compare = _ORDERS.get(condition.sign) or ("equal" if condition.sign == "==" else "not_equal")
    return getattr(pc, compare)(column, value)


def _comparable(test: _Test, column: Any) -> tuple[Any, Any]:
    """Column and value in a type that both have.

    Raises:
        UsageError: they have none.
    """
    import pyarrow as pa

    kind = column.type
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
        column = column.cast(kind)
    if pa.types.is_null(kind):  # every sample lacks the field
        return column.cast(pa.bool_()), pa.scalar(True)
    if pa.types.is_boolean(kind):
        if isinstance(test.value, bool):
            return column, pa.scalar(test.value)
        raise test.fault(f"the column holds true and false, and {test.text!r} is neither")
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        if test.sign in _ORDERS:
            raise test.fault(f"the column holds texts, and {test.sign} compares numbers")
        return column, pa.scalar(test.text, kind)
    if pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind):
        if isinstance(test.value, bool | str):
            raise test.fault(f"the column holds numbers, and {test.text!r} is none")
        whole = pa.types.is_integer(kind) and isinstance(test.value, int) and -(2**63) <= test.value < 2**63
        if whole and not pa.types.is_uint64(kind):
            return column.cast(pa.int64()), pa.scalar(test.value, pa.int64())
        return column.cast(pa.float64(), safe=False), pa.scalar(float(test.value), pa.float64())
    raise test.fault(f"the column holds {kind}; numbers, texts, true and false can be compared")
