# SPDX-License-Identifier: Apache-2.0
"""Formats tables and byte counts as text."""

import datetime
from collections.abc import Iterable, Sequence
from typing import Any


def nbytes(count: float) -> str:
  """Returns an amount of memory, in powers of 1000."""
  for unit in ("B", "kB", "MB", "GB"):
    if count < 1000:
      return f"{count:.4g} {unit}"
    count /= 1000
  return f"{count:,.4g} TB"


def number(value: Any, *, digits: int = 4) -> str:
  """Returns a number with `digits` significant ones; anything else as `str`, but None as ""."""
  if isinstance(value, bool) or not isinstance(value, int | float):
    return "" if value is None else str(value)
  whole = isinstance(value, int) or value.is_integer() or abs(value) >= 10**digits
  return f"{value:,.0f}" if whole else f"{value:.{digits}g}"


def duration(seconds: float) -> str:
  """Returns a time as `h:mm:ss`, or from two days on in days."""
  if seconds >= 2 * 86400:
    return f"{seconds / 86400:,.2f} days"
  return str(datetime.timedelta(seconds=round(seconds)))


def listed(names: Iterable[str]) -> str:
  """Returns names as "a, b and c"."""
  *first, last = names
  return f"{', '.join(first)} and {last}" if first else last


def table(
  header: Sequence[str], rows: Iterable[Sequence[str]], *, right: Sequence[int] = ()
) -> str:
  """Returns rows in aligned columns, right-aligned if in `right`; an empty header is omitted.

  A row that is a str is a heading: it is printed as it is.
  """
  rows = [header, *rows] if any(header) else list(rows)
  cells_of = [row for row in rows if not isinstance(row, str)]
  widths = [max(len(row[column]) for row in cells_of) for column in range(len(header))]
  lines = []
  for row in rows:
    if isinstance(row, str):
      lines.append(row)
      continue
    cells = [
      cell.rjust(width) if column in right else cell.ljust(width)
      for column, (cell, width) in enumerate(zip(row, widths, strict=True))
    ]
    lines.append("  ".join(cells).rstrip())
  return "\n".join(lines)
