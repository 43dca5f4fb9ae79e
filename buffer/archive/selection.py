"""A condition over trajectories, as text: `success and staleness <= 4 and reward.task > 0`.

The words of Python's expressions, and nothing else of Python: comparisons, `and`, `or`, `not`, `in`, arithmetic,
constants and names of columns. `a.b` is a field of `sampling`, `engine` or `vision`, a metric (`metrics.steps`) or a
reward component (`reward.format`). What a trajectory does not have compares as false.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from vagen.buffer.archive.reader import Archive
from vagen.buffer.archive.schema import LIGHT, TRAJECTORIES
from vagen.common.errors import ConfigError

__all__ = ["Selection"]

_Row = Mapping[str, Any]
_Value = Callable[[_Row], Any]

_COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda value, among: value in among,
    ast.NotIn: lambda value, among: value not in among,
}
_ARITHMETIC: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Mod: operator.mod,
}
_MAPS = {"metrics": "metrics", "reward": "reward_by_component"}
_SCALARS = tuple(name for name in LIGHT if not pa.types.is_nested(TRAJECTORIES.field(name).type))
_STRUCTS = tuple(name for name in LIGHT if pa.types.is_struct(TRAJECTORIES.field(name).type))


class Selection:
    """A condition, parsed."""

    def __init__(self, text: str) -> None:
        """Raises `ConfigError` that quotes what is not understood."""
        self.text = text
        self._columns: set[str] = set()
        try:
            tree = ast.parse(text.strip(), mode="eval")
        except SyntaxError as error:
            raise ConfigError(f'--where "{text}": not an expression: {error.msg} (equality is ==)') from None
        self._holds = self._compile(tree.body)

    def mask(self, archive: Archive) -> np.ndarray:
        """bool `[num_trajectories]`: those for which it holds. Reads no tokens.

        Raises `ConfigError` when values of different kinds are compared.
        """
        # A condition without names still needs to know how many rows there are.
        columns = sorted(self._columns) or ["step"]
        found: list[bool] = []
        for table in archive.iterate_tables(columns):
            for row in table.to_pylist():
                try:
                    found.append(bool(self._holds(row)))
                except (TypeError, ZeroDivisionError) as error:
                    raise ConfigError(f'--where "{self.text}": {error}') from None
        return np.array(found, dtype=bool)

    def _compile(self, node: ast.expr) -> _Value:
        match node:
            case ast.BoolOp(op, values):
                parts = [self._compile(value) for value in values]
                whole = all if isinstance(op, ast.And) else any
                return lambda row: whole(part(row) for part in parts)
            case ast.UnaryOp(ast.Not(), operand):
                negated = self._compile(operand)
                return lambda row: not negated(row)
            case ast.UnaryOp(ast.USub(), operand):
                return _with_values(operator.neg, self._compile(operand))
            case ast.BinOp(left, op, right) if type(op) in _ARITHMETIC:
                return _with_values(_ARITHMETIC[type(op)], self._compile(left), self._compile(right))
            case ast.Compare(left, ops, comparators) if all(type(op) in _COMPARISONS for op in ops):
                sides = [self._compile(side) for side in (left, *comparators)]
                pairs = zip(sides, ops, sides[1:], strict=False)
                tests = [_with_values(_COMPARISONS[type(op)], a, b) for a, op, b in pairs]
                return lambda row: all(test(row) for test in tests)
            case ast.Constant(value) if isinstance(value, (bool, int, float, str)):
                return lambda row: value
            case ast.Tuple(elts) | ast.List(elts):
                members = [self._compile(element) for element in elts]
                return lambda row: [member(row) for member in members]
            case ast.Name(name) | ast.Attribute(ast.Name(name), _):
                return self._column(name, node.attr if isinstance(node, ast.Attribute) else None)
        raise ConfigError(f'--where "{self.text}": {ast.unparse(node)!r} is not understood')

    def _column(self, name: str, inner: str | None) -> _Value:
        if inner is None and name in _SCALARS:
            self._columns.add(name)
            return lambda row: row[name]
        if inner is not None and name in _MAPS:
            column = _MAPS[name]
            self._columns.add(column)
            return lambda row: next((item["value"] for item in row[column] if item["name"] == inner), None)
        if inner is not None and name in _STRUCTS and TRAJECTORIES.field(name).type.get_field_index(inner) >= 0:
            self._columns.add(name)
            return lambda row: None if row[name] is None else row[name][inner]
        known = [*_SCALARS, *(f"{struct}.<field>" for struct in _STRUCTS), *(f"{name}.<name>" for name in _MAPS)]
        asked = name if inner is None else f"{name}.{inner}"
        raise ConfigError(f'--where "{self.text}": no column {asked!r}; known are {", ".join(known)}')


def _with_values(function: Callable[..., Any], *operands: _Value) -> _Value:
    """The function of the operands; None where one of them is missing, which counts as false."""

    def call(row: _Row) -> Any:
        values = [operand(row) for operand in operands]
        return None if any(value is None for value in values) else function(*values)

    return call
