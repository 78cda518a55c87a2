# SPDX-License-Identifier: Apache-2.0
"""Elements of HTML as text; every value is escaped unless it is an `Html`."""

import html
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

NUM_COLORS = 10  # Of the page's palette, `--c0` and so on.


class Html(str):
  """Text that is HTML already."""

  __slots__ = ()


def escaped(value: Any) -> Html:
  """Returns a value as HTML."""
  return value if isinstance(value, Html) else Html(html.escape(str(value)))


def joined(parts: Iterable[Any]) -> Html:
  """Returns the HTML of several values."""
  return Html("".join(escaped(part) for part in parts))


def element(tag: str, *content: Any, **attributes: Any) -> Html:
  """Returns an element. `class_` is `class`; `_` in other attributes is `-`; False leaves out."""
  given = "".join(
    f" {name.rstrip('_').replace('_', '-')}" + ("" if value is True else f'="{escaped(value)}"')
    for name, value in attributes.items()
    if value is not False and value is not None
  )
  return Html(f"<{tag}{given}>{joined(content)}</{tag}>")


def void(tag: str, **attributes: Any) -> Html:
  """Returns an element that has no content, such as `input`."""
  return Html(element(tag, **attributes).removesuffix(f"</{tag}>"))


def table(
  header: Sequence[Any], rows: Iterable[Sequence[Any]], *, label: str, numbers: bool = True
) -> Html:
  """Returns a table that scrolls by itself; `label` is its caption for screen readers.

  The first cell of a row is its header. With `numbers`, the others are aligned to the right.
  """
  head = element("tr", *(element("th", cell, scope="col") for cell in header))
  body = [
    element(
      "tr",
      element("th", row[0], scope="row"),
      *(element("td", cell) for cell in row[1:]),
    )
    for row in rows
  ]
  caption = element("caption", label)
  kind = "numbers" if numbers else "texts"
  inner = element("table", caption, element("thead", head), element("tbody", *body), class_=kind)
  return element("div", inner, class_="scroll", tabindex=0, role="region", aria_label=label)


def details(summary: str, *content: Any, opened: bool = False) -> Html:
  """Returns content that is folded under a summary."""
  return element("details", element("summary", summary), *content, open=opened)


def section(name: str, title: str, *content: Any) -> Html:
  """Returns a section of the page with a heading; "" without content."""
  if not any(content):
    return Html("")
  heading = element("h2", title, id=f"{name}-heading")
  return element("section", heading, *content, id=name, aria_labelledby=f"{name}-heading")


def bar(parts: Mapping[str, float], texts: Mapping[str, str], *, label: str) -> Html:
  """Returns a stacked bar of shares, with a legend that gives the `texts` of its parts."""
  whole = sum(parts.values()) or 1.0
  shares = {name: 100 * value / whole for name, value in parts.items() if value > 0}
  color = {name: number % NUM_COLORS for number, name in enumerate(parts)}
  pieces = [
    element(
      "span",
      class_=f"part k{color[name]}",
      style=f"width:{share:.3f}%",
      title=f"{name}: {texts[name]}",
    )
    for name, share in shares.items()
  ]
  legend = [
    element(
      "li", element("span", class_=f"key k{color[name]}"), f"{name} ", element("b", texts[name])
    )
    for name in parts
  ]
  spoken = f"{label}: {', '.join(f'{name} {texts[name]}' for name in shares)}"
  return joined(
    [
      element("div", *pieces, class_="bar", role="img", aria_label=spoken),
      element("ul", *legend, class_="legend"),
    ]
  )
