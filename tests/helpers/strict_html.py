# SPDX-License-Identifier: Apache-2.0
"""A strict parser of HTML: every element is closed, attributes are given once, ids are unique."""

import html.parser

VOID = {"br", "hr", "img", "input", "link", "meta"}


class Element:
  """An element with its attributes, the text directly in it, and its children."""

  def __init__(self, tag: str, attributes: dict[str, str | None]):
    self.tag, self.attributes = tag, attributes
    self.text = ""
    self.children: list[Element] = []

  def all(self, *tags: str) -> "list[Element]":
    """Returns it and what is in it, in order; only those with one of `tags`, if there are any."""
    found: list[Element] = [self] if not tags or self.tag in tags else []
    for child in self.children:
      found += child.all(*tags)
    return found

  @property
  def words(self) -> str:
    """The text of it and of what is in it."""
    return " ".join(" ".join(one.text for one in self.all()).split())


class _Parser(html.parser.HTMLParser):
  def __init__(self):
    super().__init__(convert_charrefs=True)
    self.root = Element("document", {})
    self.open = [self.root]

  def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]):
    names = [name for name, _ in attrs]
    assert len(set(names)) == len(names), f"<{tag}> has an attribute twice: {names}"
    assert tag.replace("-", "").isalnum(), f"<{tag}> is no name of an element"
    element = Element(tag, dict(attrs))
    self.open[-1].children.append(element)
    if tag not in VOID:
      self.open.append(element)

  def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]):
    raise AssertionError(f"<{tag}/> is not HTML")

  def handle_endtag(self, tag: str):
    assert self.open[-1].tag == tag, f"</{tag}> where <{self.open[-1].tag}> is open"
    self.open.pop()

  def handle_data(self, data: str):
    self.open[-1].text += data

  def handle_comment(self, data: str):
    raise AssertionError(f"a comment: {data}")


def parse(text: str) -> Element:
  """Returns the document; fails where it is not strict."""
  parser = _Parser()
  parser.feed(text)
  parser.close()
  assert parser.open == [parser.root], f"<{parser.open[-1].tag}> is not closed"
  assert text.startswith("<!DOCTYPE html>\n")
  every = parser.root.all()
  ids = [one.attributes["id"] for one in every if "id" in one.attributes]
  assert len(set(ids)) == len(ids), ids
  for one in every:
    for name in ("aria-labelledby", "for"):
      assert one.attributes.get(name) in {None, *ids}, one.attributes
  return parser.root
