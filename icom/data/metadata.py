"""Metadata of samples as columns with types, for filters."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from icom.errors import IcomError

if TYPE_CHECKING:
    import pyarrow as pa


EXTRA = "make setup-master EXTRAS=data, or python -m pip install -e '.[data]'"
"""How to get it."""


def need_data_extra(what: str) -> None:
    """Say how to get what reads shards where it is missing.

    Args:
        what: needs it: "Reading tars".

    Raises:
        IcomError: it is missing.
    """
    try:
        import braceexpand  # noqa: F401
        import pyarrow  # noqa: F401
    except ImportError as error:
        raise IcomError(f"{what} needs {error.name}, which comes with the extra `data`: {EXTRA}.") from None


def columns(rows: Sequence[Mapping[str, Any]]) -> pa.Table:
    """What samples say of themselves: a row each, a column for each field that somebody has.

    A column holds true and false, whole numbers, numbers, or texts: the first of these that all its values are. What is
    no scalar (a list, say) is left out.
    """
    import pyarrow as pa

    names = list(
        dict.fromkeys(name for row in rows for name, value in row.items() if not isinstance(value, list | dict))
    )
    made = {name: _array([_scalar(row.get(name)) for row in rows]) for name in names}
    # A table without columns has no rows either, so there is one that says how many there are.
    return pa.table(made) if made else pa.table({"": pa.nulls(len(rows))}).select([])


def together(tables: Sequence[pa.Table]) -> pa.Table:
    """Tables of `columns`, one below the other; a column is what all of them are, and null where a table lacks it."""
    import pyarrow as pa

    kinds: dict[str, pa.DataType] = {}
    for table in tables:
        for name, kind in zip(table.schema.names, table.schema.types, strict=True):
            kinds[name] = _wider(kinds.get(name, pa.null()), kind)
    return pa.concat_tables(
        pa.table(
            {
                name: table[name].cast(kind, safe=False) if name in table.schema.names else pa.nulls(len(table), kind)
                for name, kind in kinds.items()
            }
        )
        for table in tables
    )


def numbers_where_possible(rows: Iterable[Mapping[str, str]]) -> list[dict[str, Any]]:
    """Rows of a CSV file, whose values are all texts: as numbers in the columns that hold nothing else."""
    read = [{name: value for name, value in row.items() if value != ""} for row in rows]
    texts = {name for row in read for name, value in row.items() if _number(value) is None}
    return [{name: value if name in texts else _number(value) for name, value in row.items()} for row in read]


def utf8(text: str) -> str:
    """The text, with a question mark for what is no character: JSON and names of files can have such."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


def _number(text: str) -> float | int | None:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return None


def _scalar(value: Any) -> bool | int | float | str | None:
    return value if isinstance(value, bool | int | float | str) else None


def _array(values: list[Any]) -> pa.Array:
    import pyarrow as pa

    kinds = {type(value) for value in values} - {type(None)}
    if not kinds:
        return pa.nulls(len(values))
    if kinds == {bool}:
        return pa.array(values, pa.bool_())
    if kinds == {int} and all(value is None or -(2**63) <= value < 2**63 for value in values):
        return pa.array(values, pa.int64())
    if kinds <= {int, float}:
        return pa.array([value if value is None else float(value) for value in values], pa.float64())
    texts = [value if isinstance(value, str | None) else json.dumps(value) for value in values]
    return pa.array([text if text is None else utf8(text) for text in texts], pa.string())


def _wider(one: pa.DataType, other: pa.DataType) -> pa.DataType:
    """The type that holds both."""
    import pyarrow as pa

    if one == other or pa.types.is_null(other):
        return one
    if pa.types.is_null(one):
        return other
    numbers = (pa.int64(), pa.float64())
    return pa.float64() if one in numbers and other in numbers else pa.string()
