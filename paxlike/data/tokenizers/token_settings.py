# SPDX-License-Identifier: Apache-2.0
"""Special and added tokens, from the Hugging Face files beside a tokenizer."""

import os
import pathlib
from collections.abc import Mapping
from typing import Any, NamedTuple

from paxlike import untrusted_files
from paxlike.errors import UserError

_TOKENIZER = "tokenizer_config.json"
_SPECIAL = "special_tokens_map.json"
_GENERATION = "generation_config.json"
_ADDED = "added_tokens.json"
# The files that are copied with a tokenizer, besides its own file and its chat template.
FILES = (_TOKENIZER, _SPECIAL, _GENERATION, _ADDED)

_DECODER = "added_tokens_decoder"
_EXTRA = ("extra_special_tokens", "additional_special_tokens")  # The first non-empty one is used.
_ROLES = (
  "bos_token",
  "eos_token",
  "unk_token",
  "sep_token",
  "pad_token",
  "cls_token",
  "mask_token",
)
TOKENIZER_BYTES = 256_000_000  # The largest file of a tokenizer that is read.
_NO_ID = -1  # Some configurations have this instead of null.


class AddedToken(NamedTuple):
  """A token besides those of the tokenizer's own file.

  Attributes:
    text: Its text; it is matched before the text is split any further.
    id: The declared id; None: its id in the vocabulary, else the next free one.
    special: Whether decoding skips it.
    lstrip: Whether it absorbs white space before it.
    rstrip: Whether it absorbs white space after it.
    single_word: Whether it does not match within a word.
    normalized: Whether it is matched in the normalized text.
  """

  text: str
  id: int | None = None
  special: bool = True
  lstrip: bool = False
  rstrip: bool = False
  single_word: bool = False
  normalized: bool = False


class TokenSettings:
  """The settings beside a tokenizer's file; each file is optional and read when first needed.

  Attributes:
    file: The tokenizer's file.
  """

  def __init__(self, tokenizer: str | os.PathLike[str]):
    """`tokenizer` is the path of its file; settings are in the same folder."""
    self.file = pathlib.Path(tokenizer)
    self._folder = os.path.dirname(os.fspath(tokenizer))
    self._contents: dict[str, dict[str, Any]] = {}

  @property
  def adds_bos(self) -> bool | None:
    """Whether texts begin with BOS; None if unspecified."""
    found = self._content(_TOKENIZER).get("add_bos_token")
    return found if isinstance(found, bool) else None

  @property
  def adds_eos(self) -> bool:
    """Whether texts end with EOS."""
    return self._content(_TOKENIZER).get("add_eos_token") is True

  @property
  def adds_prefix_space(self) -> bool:
    """Whether each text gets a leading space, in classes of transformers that have this option."""
    return bool(self._content(_TOKENIZER).get("add_prefix_space"))

  @property
  def is_legacy(self) -> bool:
    """Whether text after an added token gets a leading space, as in transformers' legacy mode."""
    return bool(self._content(_TOKENIZER).get("legacy"))

  @property
  def splits_special(self) -> bool:
    """Whether special tokens in texts are split like other text."""
    return bool(self._content(_TOKENIZER).get("split_special_tokens"))

  @property
  def tokenizer_class(self) -> str:
    """The class of transformers; "" if unspecified."""
    found = self._content(_TOKENIZER).get("tokenizer_class")
    return found.removesuffix("Fast") if isinstance(found, str) else ""

  @property
  def has_tokenizer_config(self) -> bool:
    """Whether there is a `tokenizer_config.json`."""
    return bool(self._content(_TOKENIZER))

  def path(self, file: str) -> str:
    """Returns the path of a file in the tokenizer's folder, such as one of FILES."""
    return os.path.join(self._folder, file)

  def token(self, role: str) -> str | None:
    """Returns the text of the token of a role, such as `bos_token`; None if unspecified.

    Raises:
      UserError: Its text is not a string.
    """
    return self.roles().get(role)

  def roles(self, defaults: Mapping[str, str] | None = None) -> dict[str, str]:
    """Returns the special tokens: role, such as `bos_token` -> text.

    Args:
      defaults: Role -> text for roles that no file specifies.

    Raises:
      UserError: A text is not a string.
    """
    return {role: token.text for role, token in self._roles(defaults or {}).items()}

  def added(self, defaults: Mapping[str, str] | None = None) -> list[AddedToken]:
    """Returns the added tokens of all files, each once, in the order of transformers.

    Args:
      defaults: Role -> text for roles that no file specifies.

    Raises:
      UserError: A file declares an invalid token.
    """
    roles, extra = self._roles(defaults or {}), self._extra()
    found = {token.text: token for token in sorted(self._declared(), key=lambda one: one.id or 0)}
    for token in (*roles.values(), *extra):
      found.setdefault(token.text, token)
    for token in roles.values():
      found[token.text] = found[token.text]._replace(special=True)
    return [token for token in found.values() if token.text]

  def ids(self, name: str) -> tuple[int, ...]:
    """Returns the ids of `bos_token_id` or `eos_token_id` in `generation_config.json`.

    Raises:
      UserError: One is not an id.
    """
    return ids_of(self._content(_GENERATION), name, place=self.path(_GENERATION))

  def check_ids(self, vocab_size: int):
    """Raises UserError if `generation_config.json` has an id that is not below `vocab_size`."""
    check_ids(self._content(_GENERATION), vocab_size, place=self.path(_GENERATION))

  def _content(self, name: str) -> dict[str, Any]:
    if name not in self._contents:
      self._contents[name] = _settings(self.path(name))
    return self._contents[name]

  def _merged(self) -> dict[str, Any]:
    """Returns `tokenizer_config.json`; an old one is merged with `special_tokens_map.json`."""
    config = self._content(_TOKENIZER)
    return config if _DECODER in config else config | self._content(_SPECIAL)

  def _roles(self, defaults: Mapping[str, str]) -> dict[str, AddedToken]:
    merged = {**defaults, **self._merged()}
    named = merged.get(_EXTRA[0])
    own: dict[str, Any] = {role: merged.get(role) for role in _ROLES}
    # Also roles such as `image_token`, but not switches such as `add_bos_token`.
    own |= {
      name: token
      for name, token in merged.items()
      if name.endswith("_token") and not name.startswith("add_") and isinstance(token, str | dict)
    }
    own |= named if isinstance(named, dict) else {}
    return {name: self._token(token, name) for name, token in own.items() if token is not None}

  def _extra(self) -> list[AddedToken]:
    merged = self._merged()
    found = next((merged[name] for name in _EXTRA if merged.get(name)), [])
    if not isinstance(found, list | dict):
      raise UserError(f"{self.path(_TOKENIZER)}: {_EXTRA[0]} is not a list.")
    return [] if isinstance(found, dict) else [self._token(one, _EXTRA[0]) for one in found]

  def _declared(self) -> list[AddedToken]:
    """Returns the tokens declared with an id."""
    config = self._content(_TOKENIZER)
    if _DECODER in config:
      found = config[_DECODER]
      place = f"{self.path(_TOKENIZER)}: {_DECODER}"
      if not isinstance(found, dict):
        raise UserError(f"{place} is not a mapping.")
      return [
        self._token(token, _DECODER)._replace(id=_number(number, place))
        for number, token in found.items()
      ]
    special = {token.text for token in (*self._roles({}).values(), *self._extra())}
    return [
      AddedToken(
        text,
        _number(number, self.path(_ADDED)),
        special=text in special,
        normalized=text not in special,
      )
      for text, number in self._content(_ADDED).items()
    ]

  def _token(self, token: Any, name: str) -> AddedToken:
    if isinstance(token, str):
      return AddedToken(token)
    if isinstance(token, dict) and isinstance(token.get("content"), str):
      flags = {key: token[key] for key in AddedToken._fields[2:] if key in token}
      if all(isinstance(flag, bool) for flag in flags.values()):
        special = flags.get("special", name != _DECODER)
        return AddedToken(
          token["content"], **({"special": special, "normalized": not special} | flags)
        )
    raise UserError(f"{self.path(_TOKENIZER)}: {name} is not a string.")


def check_file(tokenizer: str | os.PathLike[str]):
  """Raises UserError if VOCAB_PATH is a folder; it may be missing."""
  if os.path.isdir(tokenizer):
    raise UserError(f"VOCAB_PATH={os.fspath(tokenizer)} is a folder: give the tokenizer's file.")


def ids_of(config: Mapping[str, Any], name: str, *, place: str) -> tuple[int, ...]:
  """Returns the ids under a key of a configuration: none, one or several.

  Args:
    config: The configuration.
    name: The key, such as `eos_token_id`; null and -1 are no id.
    place: The configuration's file, for errors.

  Raises:
    UserError: One is not an id.
  """
  found = config.get(name)
  found = found if isinstance(found, list) else [found]
  return tuple(_number(one, f"{place}: {name}") for one in found if one not in (None, _NO_ID))


def check_ids(config: Mapping[str, Any], vocab_size: int, *, place: str):
  """Raises UserError if a configuration has an id of a token that is not below `vocab_size`."""
  for role in _ROLES:
    for number in ids_of(config, f"{role}_id", place=place):
      if number >= vocab_size:
        raise UserError(
          f"{place}: {role}_id is {number}, but the model's ids are 0 to {vocab_size - 1}:"
          " correct or remove it."
        )


def _number(value: Any, place: str) -> int:
  """Returns an id as an int."""
  if isinstance(value, str) and value.isdecimal() and place.endswith(_DECODER):
    value = int(value)
  if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
    return value
  raise UserError(f"{place} is {value!r}, which is not a token id.")


def _settings(path: str) -> dict[str, Any]:
  if not untrusted_files.is_there(pathlib.Path(path)):
    return {}
  return untrusted_files.read_json(pathlib.Path(path))
