# SPDX-License-Identifier: Apache-2.0
"""The definition of all command-line flags for absl, with their types and parsers."""

from typing import Annotated, Any

from absl import flags

from paxlike.config import knob_types, ranges
from paxlike.devices import gpu_targets, tpu_targets
from paxlike.errors import did_you_mean

STRINGS = (
  "fdl_config",
  "fdl_config_file",
  "job_log_dir",
  "against",
  "topology",
  "calibrate",
  "save",
  "compiled_step",
  "pgle_profile",
  "server_addr",
  "tfds_data_dir",
)
# Flag -> its default.
BOOLEANS = {
  "fdl_help": False,
  "list": False,
  "changed": False,
  "continuous": False,
  "chat": False,
  "kernels": False,
  "json": False,
  "full": False,
  "traceback": False,
  "enable_checkpoint_saving": True,
  "enable_summary_writer": True,
  "multiprocess_gpu": False,
}
_COUNT = Annotated[int, ranges.Range(least=1, most=2**16)]
NUMBERS = {
  "slices": _COUNT,
  "global_batch": ranges.Size,
  "confirm": Annotated[int, ranges.Range(least=0, most=1000)],
  "draws": Annotated[int, ranges.Range(least=1, most=1000)],
  "tokens": Annotated[float, ranges.Range(least=1, most=1e18)],
  "dcn_bandwidth": Annotated[float, ranges.Range(least=1e6, most=1e15)],
  "num_hosts": _COUNT,
  "host_idx": Annotated[int, ranges.Range(least=0, most=2**16)],
  "heartbeat_timeout": Annotated[int, ranges.Range(least=1, most=10**6)],
  "join_timeout": Annotated[int, ranges.Range(least=1, most=10**6)],
  "num_cpu_devices": Annotated[int, ranges.Range(least=1, most=1024)],
  "max_new_tokens": ranges.Size,
  "top_k": ranges.Size,
  "num_samples": _COUNT,
  "decode_rows": _COUNT,
  "decode_seed": ranges.NonNegative,
  "temperature": ranges.Temperature,
  "top_p": ranges.Share,
  "min_p": ranges.Share,
}
# Flags with several numbers: the type and the least count.
_SEVERAL = {
  "widths": (ranges.Size, 2),
  "depths": (ranges.Depth, 1),
  "rates": (ranges.Rate, 1),
}
_KINDS = (*gpu_targets.KINDS, *tpu_targets.KINDS)
# Flags with one value; `Options` has a field of the same name for each.
SCALARS = ("mode", "step", "price", "target", *STRINGS, *BOOLEANS, *NUMBERS, *_SEVERAL)


def define() -> flags.FlagValues:
  """Returns the flags in a `FlagValues` of their own: absl's global one has those of libraries."""
  values = flags.FlagValues()
  # Flags after a stray argument are parsed too, so that the error names that argument.
  values.set_gnu_getopt(True)
  flags.DEFINE_string("mode", "train", "", flag_values=values)
  for name in (*STRINGS, "exp"):
    flags.DEFINE(Text(), name, None, "", flag_values=values)
  for name, default in {**BOOLEANS, "help": False, "h": False}.items():
    flag = flags.BooleanFlag(name, default, "")
    flag.parser = Bool()
    flags.DEFINE_flag(flag, flag_values=values)
  flags.DEFINE(Step(ranges.NonNegative), "step", None, "", flag_values=values)
  flags.DEFINE(Prices(), "price", None, "", flag_values=values)
  flags.DEFINE(Target(), "target", "time", "", flag_values=values)
  for name, kind in NUMBERS.items():
    flags.DEFINE(Number(kind), name, None, "", flag_values=values)
  for name, (kind, least) in _SEVERAL.items():
    flags.DEFINE(Ascending(kind, least=least), name, None, "", flag_values=values)
  for name in ("fdl_set", "prompt"):
    flags.DEFINE_multi_string(name, [], "", flag_values=values)
  texts = dict.fromkeys(("fiddler", "fdl_allow_modules", "prompt_file", "stop"), Text())
  for name, parser in {**texts, "stop_token": Number(ranges.NonNegative)}.items():
    flags.DEFINE_multi(parser, flags.ArgumentSerializer(), name, [], "", flag_values=values)
  return values


class Bool(flags.BooleanParser):
  """absl's parser with a one-line error message."""

  def parse(self, argument: str | int) -> bool:
    try:
      return super().parse(argument)
    except ValueError:
      raise ValueError(f"expected true or false, got {argument!r}.") from None


class Number(flags.ArgumentParser):
  """A parser of numbers that checks their type and range by `knob_types`."""

  syntactic_help = "a number"

  def __init__(self, kind: Any):
    super().__init__()
    self._kind = kind

  def parse(self, argument: str | int) -> Any:
    return knob_types.convert(self._kind, argument, text=isinstance(argument, str))


class Ascending(Number):
  """A parser of numbers that are separated by commas; sorts them."""

  syntactic_help = "numbers, separated by commas"

  def __init__(self, kind: Any, *, least: int):
    super().__init__(kind)
    self._least = least

  def parse(self, argument: str | int) -> tuple[Any, ...]:
    found = sorted({super(Ascending, self).parse(part) for part in str(argument).split(",")})
    if len(found) < self._least:
      raise ValueError(f"expected at least {self._least} different numbers, such as 128,256.")
    return tuple(found)


class Text(flags.ArgumentParser):
  """A parser of non-empty text."""

  syntactic_help = "a text"

  def parse(self, argument: str) -> str:
    if not argument:
      raise ValueError("expected a non-empty text.")
    return argument


class Step(Number):
  """A parser of the step of a checkpoint, or "best"."""

  def parse(self, argument: str | int) -> int | str:
    return argument if argument == "best" else super().parse(argument)


class Prices(flags.ArgumentParser):
  """A parser of the price of a device-hour: 2.50, or h100:2.50,v5e:1.20 for kinds of devices."""

  syntactic_help = "a price, or several such as h100:2.50,v5e:1.20"

  def parse(self, argument: str) -> dict[str, float]:
    kind: Any = Annotated[float, ranges.Range(least=0, most=1e6)]
    prices = {}
    for part in argument.split(","):
      name, _, price = part.strip().lower().rpartition(":")
      if name and name not in _KINDS:
        raise ValueError(f"there is no kind of device {name}.{did_you_mean(name, _KINDS)}")
      if name in prices:
        raise ValueError(f"it gives the price of {name or 'a device-hour'} twice.")
      prices[name] = knob_types.convert(kind, price, text=True)
    return prices


class Target(flags.ArgumentParser):
  """A parser of what plans are sorted by."""

  syntactic_help = "time or cost"

  def parse(self, argument: str) -> str:
    if argument not in ("time", "cost"):
      raise ValueError(f"expected time or cost, got {argument!r}.")
    return argument
