# SPDX-License-Identifier: Apache-2.0
"""Whatever is typed, the answer is a run that can work or one line, and then nothing is written."""

import functools
import json
import math
import typing
from typing import Any

import pytest
from helpers import campaign, command_lines
from helpers.command_lines import BASES, base
from hypothesis import strategies

from paxlike import fiddlers, registry, root_graph
from paxlike.cli import command_line, flag_types, flags, usage
from paxlike.config import dtypes, graph_file, ranges

# Of no type in particular: what people mistype, and what parsers trip over.
ODD = (
  *("", "0", "-1", "1", "2", "3", "7", "1e20", "nan", "inf", "-inf", "-0.0", "1e-50", "1.5", "0.5"),
  *("2147483648", "none", "None", "true", "false", "x", "x y", "[]", "[1,1]", "[1,1,1]", "{}"),
  *("[1,", "[", "]", "{", "{a: 1}", "'", '"', "'a", "\x00", "é\u202e", "=", "==", "-", "--", ","),
  *("9" * 5000, "1" * 400, "[" * 3000, "[" * 800 + "]" * 800, "{a:" * 500 + "1" + "}" * 500, " "),
  *("bfloat16", "float64", "int8", "complex64", "bool", "1_0", "0x10", "../..", "/", "~", "*"),
)  # fmt: skip
# They would reach out to other processes, or set up this one anew.
LEFT_OUT = {"server_addr", "num_cpu_devices", "multiprocess_gpu"}


def edges(kind: Any) -> list[str]:
  """Returns texts that are just of a type, or just not."""
  if typing.get_origin(kind) is typing.Annotated:
    plain, *marks = typing.get_args(kind)
    found = edges(plain)
    if "dtype" in marks:
      found += dtypes.NAMES
    for choice in (mark for mark in marks if isinstance(mark, ranges.OneOf)):
      found += choice.names
    for bounds in (mark for mark in marks if isinstance(mark, ranges.Range)):
      for end in filter(math.isfinite, (bounds.least, bounds.most)):
        steps = (-1, 0, 1) if plain is int else (-1e-9 * abs(end), 0, 1e-9 * abs(end))
        found += [str(plain(end + step)) for step in steps]
    return found
  args = [arg for arg in typing.get_args(kind) if arg is not ...]
  origin = typing.get_origin(kind)
  if origin is typing.Literal:
    return list(map(str, args))
  inner = [text for arg in args for text in edges(arg)]
  if origin in (tuple, list):
    return [f"[{','.join([text] * count)}]" for text in inner for count in (1, 3, 4)]
  if origin is dict:
    names = ("data", "fsdp", "tensor", "pipeline", "context", "expert", "a")
    return [f"{{{name}: {text}}}" for text in inner for name in names]
  return inner or {bool: ["true", "false"], type(None): ["none"]}.get(kind, [])


def texts(kind: Any) -> strategies.SearchStrategy[str]:
  """Returns texts for the value of a type."""
  near = edges(kind)
  odd = strategies.sampled_from(ODD) | strategies.text(max_size=12)
  numbers = strategies.integers(-(2**40), 2**40) | strategies.floats() | strategies.integers(1, 64)
  return (strategies.sampled_from(near) if near else odd) | odd | numbers.map(str)


bases = strategies.sampled_from(list(BASES))
everything = strategies.sampled_from(ODD) | strategies.integers(0, 40).map(str)


@strategies.composite
def knobs(draw: Any) -> list[str]:
  """A base with one to three of its knobs, or names near to them."""
  name = draw(bases)
  given = []
  for _ in range(draw(strategies.integers(1, 3))):
    knob = draw(strategies.sampled_from(list(registry.find(name).knobs().values())))
    given.append(f"--fdl.{knob.name}={draw(texts(knob.type))}")
  modes = strategies.sampled_from(["train", "train", "compile", "show"])
  return [*base(name), *given, f"--mode={draw(modes)}", "--job_log_dir={run}"]


@functools.cache
def paths(name: str) -> list[str]:
  """Returns the path of every value in the graph of a base."""
  options = command_line.parse(["paxlike", *base(name), "--mode=show"])
  graph = root_graph.of(options, root_graph.experiment_of(options))
  return [line.partition(" = ")[0] for line in graph_file.describe(graph).splitlines()]


@strategies.composite
def edits(draw: Any) -> list[str]:
  """A base with edits of its graph, and fiddlers."""
  name = draw(bases)
  given = []
  for _ in range(draw(strategies.integers(1, 3))):
    path = draw(strategies.sampled_from(paths(name)))
    path = draw(strategies.sampled_from([path, path, path, path.rpartition(".")[0] or path]))
    given.append(f"--fdl.{path}={draw(everything)}")
  if draw(strategies.booleans()):
    fiddler = draw(strategies.sampled_from(list(fiddlers.FIDDLERS)))
    arguments = draw(strategies.sampled_from(["", "()", "(1)", "(-1)", "(x=1)", "(None)", "("]))
    given.append(f"--fiddler={fiddler}{arguments}")
  return [*base(name), *given, "--job_log_dir={run}"]


@strategies.composite
def other_flags(draw: Any) -> list[str]:
  """Flags that are not about the experiment."""
  names = [name for name in flag_types.SCALARS if name not in LEFT_OUT]
  given = []
  chosen = draw(strategies.lists(strategies.sampled_from(names), max_size=3))
  for name in chosen:
    kind = flag_types.NUMBERS.get(name, str)
    given.append(f"--{name}={draw(texts(kind))}")
  more = [
    "--stop=",
    "--stop_token=-1",
    "--stop_token=99999",
    "--prompt=",
    "--prompt=a",
    "--nothing",
  ]
  more += [f"--prompt_file={command_lines.files()}/{name}" for name in ("pipe", "empty.txt", "")]
  more += ["--save=.", "--fdl_config=..", "--job_log_dir={run}[1]", "--fdl.=3", "--step=best"]
  more += ["--fdl.trained=nothing_like_this", "--fiddler=", "--continuous"]
  given += draw(strategies.lists(strategies.sampled_from(more), max_size=1))
  # Half of the flags in a mode that they are for: elsewhere their values do not matter.
  fitting = [mode for name in chosen for mode in flags.ONLY_IN.get(name, ())]
  mode = draw(strategies.sampled_from(fitting or ["show"]) | strategies.sampled_from(usage.MODES))
  folder = draw(strategies.sampled_from(["--job_log_dir={run}", "--job_log_dir=", "--traceback"]))
  return [*base("Synthetic126M"), f"--mode={mode}", folder, *given]


@functools.cache
def saved(name: str) -> str:
  """Returns the config.json of a base."""
  options = command_line.parse(["paxlike", *base(name), "--mode=show"])
  graph = root_graph.of(options, root_graph.experiment_of(options))
  return graph_file.dump(graph)


ODD_JSON = (
  *(None, True, 0, -1, 3, 1e20, 1e-50, "", "x", [], {}, {"list": []}, {"float": "nan"}, 2**70),
  *({"float": "inf"}, {"dtype": "int4"}, {"tuple": [1]}, {"same_as": 1}, {"config": "x"}),
  {"symbol": "paxlike.layers:swiglu"},
)


def places(node: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
  """Returns the place of every value in JSON."""
  items = list(node.items() if isinstance(node, dict) else enumerate(node))
  found = [(*path, key) for key, _ in items]
  for key, item in items:
    if isinstance(item, dict | list):
      found += places(item, (*path, key))
  return found


@strategies.composite
def config_files(draw: Any) -> str:
  """A config.json in which one or two values are others, or that is cut."""
  text = saved(draw(bases))
  if draw(strategies.integers(0, 9)) == 0:
    return text[: draw(strategies.integers(0, len(text)))]
  config = json.loads(text)
  for _ in range(draw(strategies.integers(1, 2))):
    *path, last = draw(strategies.sampled_from(places(config)))
    owner = functools.reduce(lambda node, key: node[key], path, config)
    if draw(strategies.integers(0, 4)):
      owner[last] = draw(strategies.sampled_from(ODD_JSON))
    else:
      del owner[last]
  return json.dumps(config)


def check(name: str, given: list[str], *, changed: list[str] | None = None):
  """Runs a command line and looks at its answer.

  Args:
    name: The campaign.
    given: The command line.
    changed: What of it is more than its base, which alone would run; None: not known.
  """
  answer = command_lines.run(given)
  fault = answer.fault
  if not fault and answer.status == 2:
    names = command_lines.given_names(given if changed is None else changed)
    named = any(word in answer.err for word in names)
    fault = "" if named or changed is None else "names nothing given"
    fault = fault or ("wrong blame" if command_lines.blamed_wrongly(given, answer) else "")
  empty = [flag for flag in given if flag[:6] != "--fdl." and flag.partition("=")[1:] == ("=", "")]
  if not fault and answer.status == 0 and set(empty) - {"--prompt="}:
    fault = "empty value without effect"
  what = {0: "ran", 1: "failed", 2: "refused", 3: "too large"}
  campaign.COUNTS[name][fault or what[answer.status or 0]] += 1
  assert not fault, f"{fault}: {given}\n{answer.err[-3000:]}"


def changes(given: list[str]) -> list[str]:
  """Returns what a command line has beside the flags of its base."""
  name = given[0].removeprefix("--fdl_config=")
  return [flag for flag in given[len(base(name)) :] if flag != "--job_log_dir={run}"]


@campaign.of(knobs(), examples=15)
def test_knobs(given):
  check("knobs", given, changed=changes(given))


@campaign.of(edits(), examples=20)
def test_edits_of_the_graph(given):
  check("edits", given, changed=changes(given))


@campaign.of(other_flags(), examples=30)
def test_flags(given):
  check("flags", given, changed=given)


@campaign.of(config_files(), examples=20)
def test_config_files(given):
  path = command_lines.files() / "config.json"
  path.write_text(given)
  check("config files", [f"--fdl_config_file={path}", "--job_log_dir={run}"])


@pytest.mark.slow
@pytest.mark.parametrize("name", BASES)
def test_bases_run(name):
  answer = command_lines.run([*base(name), "--job_log_dir={run}"])
  assert (answer.status, answer.fault) == (0, ""), answer.err
