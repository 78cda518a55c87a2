# SPDX-License-Identifier: Apache-2.0
"""A model family in Hugging Face's terms: its `config.json` and the names of its weights.

Each configuration key is either read, known to have no effect on logits, or required to have the
value that paxlike implements; any other key or value is refused.
"""

import dataclasses
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

from paxlike.checkpoints import hf_keys as keys
from paxlike.checkpoints.hf_layers import HfLayers
from paxlike.checkpoints.hf_rope import HfRope
from paxlike.checkpoints.hf_rules import Rules
from paxlike.errors import UserError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Wrapper:
  """A multimodal model, of which only the text model is converted.

  Attributes:
    model_type: `model_type` of the configuration, whose `text_config` is that of the text model.
    neutral: Keys without effect on text.
    fixed: Keys of `text_config` that must have this value, because the wrapper ignores them.
    renamed: Prefix of tensor names -> prefix in the standalone text model.
    dropped: Pattern (`re`) of tensors outside the text model.
    tied: Default of `tie_word_embeddings` in both configurations. None: an absent key takes the
      other's value, because the tensors decide in transformers.
  """

  model_type: str
  neutral: frozenset[str]
  fixed: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  renamed: Mapping[str, str]
  dropped: str
  tied: bool | None = True

  def text(self, config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the configuration of the text model.

    Raises:
      UserError: It is missing, or a key is unknown.
    """
    text = config.get("text_config")
    if not isinstance(text, Mapping):
      raise UserError(f"a {self.model_type} model lacks text_config.")
    key = "tie_word_embeddings"
    tied = {part.get(key, self.tied) for part in (config, text) if key in part or self.tied}
    if len(tied) > 1:
      raise UserError("tie_word_embeddings differs in text_config: which one is right is unclear.")
    for key, value in config.items():
      known = key in keys.NEUTRAL | self.neutral | {"text_config", "tie_word_embeddings"}
      fits = key in keys.FIXED and keys.is_one_of(value, keys.FIXED[key])
      if not known and not fits and keys.is_set(value):
        raise UserError(_unknown(key, value))
    for key, wanted in self.fixed.items():
      if not keys.is_one_of(text.get(key), wanted):
        raise UserError(f"text_config.{key} is {text[key]!r}, not {keys.spell(wanted)}.")
    dtype = config.get("dtype") or config.get("torch_dtype")
    return {
      **({"torch_dtype": dtype} if dtype else {}),
      **text,
      **({"tie_word_embeddings": tied.pop()} if tied else {}),
    }

  def name(self, tensor: str) -> str | None:
    """Returns a tensor's name in the standalone text model; None if it is not part of that."""
    if re.fullmatch(self.dropped, tensor):
      return None
    for theirs, ours in self.renamed.items():
      if tensor.startswith(theirs):
        return ours + tensor.removeprefix(theirs)
    return tensor


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
  """A family's `config.json` and safetensors files, for both directions.

  A family needs a few of these attributes only; see `variant` for one that resembles another.

  Attributes:
    model_type: `model_type` of the configuration.
    architecture: The class in transformers.
    knobs: Configuration key -> knob; the constructor also takes a pair of the knob and the default.
    rules: Weight -> its tensors.
    rope: Rotary position embedding, if any.
    layers: The configuration keys with a value for each layer, if any.
    wrapper: The multimodal model that contains a model of this family.
    other_types: Further values of `model_type` for the same model, which exports do not write.

    defaults: Values of absent keys in transformers. A key in `knobs` without a default is required.
    nullable: Keys that may be null; their knobs are None then.
    fixed: Keys that must have this value, or one of a tuple; an absent key means this value unless
      `defaults` has another. The first is written.
    neutral: Keys without effect on logits, besides those of every family.
    choices: Key in `knobs` -> each of its values and that of the knob; others are refused. If some
      mean the same, the first is written.
    derived: Key -> its value, given the others, defaults included; it is written.
    equal: Key -> another key whose value it must have, if present.
    aliases: Key -> its name in `knobs`.
    rewritten: Replaces keys of a configuration by others that mean the same, before any is read.

    without: Name of a weight -> rules for models that lack it.
    mtp: Rules for each layer of multi-token prediction, such as of "projection.w", besides those of
      its block. These layers follow the last one of the model. Empty: no place for them.
    mtp_copies: Weight of the model -> its copy in each of these layers, which exports write.
    copies: Tensor that may be present and is not read -> the tensor that it must equal.
    ignored: Patterns (`re`) of tensors that may be present and are not needed; `{KNOB}` stands for
      the knob's value.
    prefix: Prefix of tensor names that some files lack.
    stacked_experts: Suffix of a tensor's name, if one tensor may stack the matrices of all experts
      -> for each matrix of an expert, what takes the place of the name's last component.
  """

  model_type: str
  architecture: str
  knobs: Mapping[str, Any]
  rules: Rules
  rope: HfRope | None = None
  layers: HfLayers | None = None
  wrapper: Wrapper | None = None
  other_types: tuple[str, ...] = ()

  defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  nullable: frozenset[str] = frozenset()
  fixed: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  neutral: frozenset[str] = frozenset()
  choices: Mapping[str, Mapping[Any, Any]] = dataclasses.field(default_factory=dict)
  derived: Mapping[str, Callable[[Mapping[str, Any]], Any]] = dataclasses.field(
    default_factory=dict
  )
  equal: Mapping[str, str] = dataclasses.field(default_factory=dict)
  aliases: Mapping[str, str] = dataclasses.field(default_factory=dict)
  rewritten: Callable[[dict[str, Any]], dict[str, Any]] = dict

  without: Mapping[str, Rules] = dataclasses.field(default_factory=dict)
  mtp: Rules = dataclasses.field(default_factory=dict)
  mtp_copies: Rules = dataclasses.field(default_factory=dict)
  copies: Mapping[str, str] = dataclasses.field(default_factory=dict)
  ignored: frozenset[str] = frozenset()
  prefix: str = ""
  stacked_experts: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)

  def __post_init__(self):
    pairs = {key: knob for key, knob in self.knobs.items() if isinstance(knob, tuple)}
    knobs, defaults = ({key: pair[i] for key, pair in pairs.items()} for i in (0, 1))
    object.__setattr__(self, "knobs", {**self.knobs, **knobs})
    object.__setattr__(self, "defaults", {**self.defaults, **defaults})

  def variant(self, *, lacking: Collection[str] = (), **changes: Any) -> "Family":
    """Returns a family that differs from this one.

    Args:
      lacking: Patterns (`fnmatch`) of configuration keys and of weights that the new family lacks.
      **changes: Attributes. Mappings and sets are added to those of this family, after what it
        lacks was removed; other values replace them.
    """

    def left(names: Iterable[str]) -> list[str]:
      return [name for name in names if not any(fnmatchcase(name, one) for one in lacking)]

    values: dict[str, Any] = {}
    for field in dataclasses.fields(self):
      value = getattr(self, field.name)
      if isinstance(value, Mapping):
        values[field.name] = {name: value[name] for name in left(value)}
      elif isinstance(value, frozenset):
        values[field.name] = frozenset(left(value))
      if field.name in values and field.name in changes:
        values[field.name] |= changes.pop(field.name)
    return dataclasses.replace(self, **values, **changes)

  @property
  def title(self) -> str:
    """The family's name in messages."""
    return f"{self.architecture} of Hugging Face"

  def read(self, config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the knobs that `config` sets.

    Raises:
      UserError: A key is missing or unknown, or has a value that paxlike does not implement.
    """
    config = self._renamed(config)
    self._check(config)
    values = {}
    for key, knob in self.knobs.items():
      if key not in config and key not in self.defaults:
        raise UserError(f"a {self.model_type} model lacks {key}.")
      values[knob] = config.get(key, self.defaults.get(key))
      if key in self.choices:
        values[knob] = self._chosen(key, values[knob])
      elif values[knob] is None and key in config and key not in self.nullable:
        raise UserError(f"{key} is null.")
      elif type(self.defaults.get(key)) in (int, float) and isinstance(values[knob], str):
        raise UserError(f"{key} is {values[knob]!r}, not a number.")
      elif isinstance(values[knob], list):
        values[knob] = tuple(values[knob])
    for key, function in self.derived.items():
      if config.get(key) not in (None, wanted := function({**self.defaults, **config})):
        raise UserError(f"{key} is {config[key]!r}; by other keys it is {wanted!r}.")
    if self.layers is not None:
      values |= self.layers.read({**self.defaults, **config})
    return values | ({} if self.rope is None else self.rope.read(config))

  def write(self, values: Mapping[str, Any], *, dtype: str) -> dict[str, Any]:
    """Returns the `config.json` of a model with these knobs, its weights in `dtype`."""
    config: dict[str, Any] = {"architectures": [self.architecture], "model_type": self.model_type}
    for key, knob in self.knobs.items():
      value = values[knob]
      config[key] = list(value) if isinstance(value, tuple) else value
    for key, choices in self.choices.items():
      config[key] = next(theirs for theirs, ours in choices.items() if ours == config[key])
    config |= {key: function(config) for key, function in self.derived.items()}
    for key, wanted in self.fixed.items():
      config[key] = wanted[0] if isinstance(wanted, tuple) else wanted
    if self.rope is not None:
      config |= self.rope.write(values)
    if self.layers is not None:
      config |= self.layers.write(values)
    # The defaults of some families are beyond a small vocabulary, which transformers refuses.
    return {**config, "pad_token_id": None, "torch_dtype": dtype}

  def rules_of(self, weights: Iterable[str]) -> Rules:
    """Returns the rules for a model that has weights of these names, `{}` for the layer."""
    there = set(weights)
    rules = self.rules | {f"mtp.{{}}.{name}": rule for name, rule in self.mtp.items()}
    for name, others in self.without.items():
      rules |= {} if name in there else others
    return rules

  def num_mtp_layers(self, tensors: Collection[str], num_layers: int) -> int:
    """Returns how many layers of multi-token prediction have a tensor among these."""
    if not self.mtp:
      return 0
    (first, *_), count = self.mtp.values(), 0
    while first.names(num_layers + count, ())[0] in tensors:
      count += 1
    return count

  def is_ignored(self, name: str, values: Mapping[str, Any]) -> bool:
    """Returns whether a tensor of a model with these knobs is ignored."""
    if name in self.copies:
      return True
    return any(re.fullmatch(_with_knobs(pattern, values), name) for pattern in self.ignored)

  def _chosen(self, key: str, value: Any) -> Any:
    for theirs, ours in self.choices[key].items():
      if keys.is_one_of(value, theirs):
        return ours
    raise UserError(f"{key} is {value!r}, not {keys.spell(tuple(self.choices[key]))}.")

  def _renamed(self, config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a configuration with aliases resolved, and `rewritten`."""
    config = dict(config)
    for alias, key in self.aliases.items():
      if alias in config:
        value = config.pop(alias)
        if config.setdefault(key, value) != value:
          raise UserError(f"{alias}={value!r} and {key}={config[key]!r} contradict each other.")
    return self.rewritten(config)

  def _check(self, config: Mapping[str, Any]):
    """Raises a UserError for unknown keys and unsupported values."""
    for _, problem in self._problems(config):
      raise UserError(problem)

  def differing(self, config: Mapping[str, Any]) -> list[str]:
    """Returns the keys of a configuration that the family lacks, or has with other values."""
    config = self._renamed(config)
    lacking = (key for key in self.knobs if key not in config and key not in self.defaults)
    return [*dict.fromkeys(key for key, _ in self._problems(config)), *lacking]

  def _problems(self, config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yields a key and what is wrong with it, for unknown keys and unsupported values."""
    fixed = keys.FIXED | dict(self.fixed)
    for key in {*self.knobs, *(() if self.rope is None else self.rope.keys)}:
      fixed.pop(key, None)
    for key, wanted in fixed.items():
      if key not in config and key not in self.defaults:
        continue
      found = config.get(key, self.defaults.get(key))
      if not keys.is_one_of(found, wanted):
        absent = "" if key in config else " (its default)"
        yield key, f"{key} is {found!r}{absent}, not {keys.spell(wanted)}."
    for key, other in self.equal.items():
      if config.get(key) is not None and config[key] != config.get(other):
        yield key, f"{key}={config[key]!r} is not {other}={config.get(other)!r}."
    known = keys.NEUTRAL | self.neutral | fixed.keys() | self.knobs.keys() | self.equal.keys()
    known |= self.derived.keys()
    if self.rope is not None:
      known |= self.rope.keys
    if self.layers is not None:
      known |= self.layers.keys
    for key, value in config.items():
      if key not in known and keys.is_set(value):
        yield key, _unknown(key, value)


def _unknown(key: str, value: Any) -> str:
  shown = repr(value)
  shown = shown if len(shown) < 80 else f"{shown[:77]}..."
  return (
    f"{key}={shown} is unknown to paxlike, so the model may differ. If it has no effect, remove it"
    f" from config.json."
  )


def _with_knobs(pattern: str, values: Mapping[str, Any]) -> str:
  return re.sub(r"\{([A-Z_]+)\}", lambda match: str(values[match[1]]), pattern)
