# SPDX-License-Identifier: Apache-2.0
"""Laws of what a config file may name: the list holds all that graphs need, and nothing that acts.

The walk is over everything that a name could reach, not over what somebody thought of.
"""

import ast
import enum
import functools
import importlib
import inspect
import os
import pkgutil
import typing
from collections.abc import Mapping
from typing import Any

import pytest
from helpers.sources import MODULES, PACKAGE

import paxlike
from paxlike import fiddlers, layers, registry
from paxlike.config import allowed_symbols, configurable, graph_file, old_names, type_words
from paxlike.errors import UserError
from paxlike.experiment import Experiment
from paxlike.experiments import datasets, gpt
from paxlike.training import optimizers

# What a string in a graph means, by the name of its parameter. Of a file that is only read ...
READ = {"path", "vocab_path", "folder", "prefix", "tfds_name"}
# ... and text that is looked up in a table, compared or printed.
TEXT = {
  "alphabet", "bos", "field", "implementation", "include", "ignore", "knob", "metric",
  "moment_dtype", "over", "role", "sample_prompt", "schedule", "split", "system", "task_split",
  "template", "time", "tracker_project", "trackers", "trained", "weight_dtype",
}  # fmt: skip
# What a graph may give a callable as, which what is marked calls: one of the list, as all there is.
CALLED = {
  "activation", "attention", "block", "choice", "decayed", "dispatch", "dot", "down", "dropout",
  "embedding", "embedding_norm", "evaluated", "experts", "gate", "head", "init", "kernel", "key",
  "key_value", "latent", "learning_rate", "lora", "metrics", "mlp", "mtp", "norm", "others",
  "advantages", "beta", "branch_norm", "conv", "decay", "epilogue", "expert_scale", "joint_qk_norm",
  "layer_inputs", "normalization", "observe", "per_layer_input", "router_norm",
  "output", "output_gate", "output_scale", "pattern", "positions", "post_norm", "projection",
  "prologue", "qk_clip", "qk_norm", "query", "query_down", "query_scale", "recurrent", "register",
  "relative_bias", "reward", "rope", "router", "rule", "scaling", "scheme", "shared", "shared_gate",
  "sinks", "stack", "step", "transform", "up", "value", "value_head", "value_norm",
  "weight_decay_schedule", "indexer", "weights",
}  # fmt: skip
# Who imports, runs or unpickles what a value names, and what that is where a file gives it.
BY_NAME = {
  "__init__.py": "constants",
  "config/allowed_symbols.py": "names that are on the list or allowed",
  "registry.py": "the package's own experiments",
  "data/seqio/corpus.py": "in a process of its own, the function that the graph named",
  "config/graph_edits.py": "a fiddler that the command line names",
  "convert/jax_checkpoint.py": "the family of a MaxText model, a constant",
  "convert/torch_files.py": "a pickle of tensors, of which no class but these is loaded",
  "compilation/saved_step.py": "a constant",
  "layers/attention/tokamax.py": "a constant",
  "rewards/pool.py": "a function that the command line or an experiment names; it writes a pickle",
  "rewards/worker.py": "the pickle of the process that started it",
  "layers/precision/transformer_engine.py": "a constant",
}


def modules() -> list[str]:
  """Every module of the package but those that are programs."""
  found = pkgutil.walk_packages(paxlike.__path__, "paxlike.")
  return [module.name for module in found if not module.name.endswith("__main__")]


@functools.cache
def listed() -> frozenset[str]:
  """What may be named, once all is imported that may be imported for it."""
  for package in allowed_symbols._PACKAGES:
    allowed_symbols._import_all(package)
  ours = {name for name in configurable.names() if name.startswith("paxlike.")}
  return frozenset(
    ours | {f"{m}:{s}" for m, names in allowed_symbols._LISTED.items() for s in names}
  )


def named(graph: Any) -> set[str]:
  return graph_file.names(graph_file.dump(graph))


def comes_back(graph: Any) -> bool:
  """Whether a graph is saved and loaded; faster than comparing graphs."""
  return graph_file.difference(graph_file.load(graph_file.dump(graph)), graph) == ""


def test_every_name_of_the_list_is_there_and_found_again():
  for name in listed():
    value = allowed_symbols.resolve(name)
    if name.startswith("paxlike."):
      assert allowed_symbols.name_of(value) == name
  assert 150 < len(listed()) < 500


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_nothing_else_resolves():
  """Of all modules of the package and of those that the list has, everything that they hold."""
  tried = 0
  for name in ["builtins", *allowed_symbols._LISTED, *modules()]:
    try:
      held = vars(importlib.import_module(name))
    except ImportError:  # The harness's extra is not installed.
      continue
    for key, value in list(held.items()):
      within = dir(value) if isinstance(value, type) else []
      for symbol in (key, *(f"{key}.{attribute}" for attribute in within)):
        tried += 1
        try:
          allowed_symbols.check(f"{name}:{symbol}")
        except UserError:
          continue
        assert old_names.current(f"{name}:{symbol}") in listed()
  assert tried > 10_000
  everywhere = {name for name in configurable.names() if name.startswith("paxlike.")}
  assert everywhere <= listed(), "marked in a module that allowed_symbols._PACKAGES lacks"


def strings_and_callables(annotation: Any) -> tuple[bool, bool]:
  """Whether an annotation takes a string, and whether it takes something that is called."""
  if annotation in (Any, inspect.Parameter.empty):
    return False, False
  if annotation is str or os.PathLike in (annotation, typing.get_origin(annotation)):
    return True, False
  if callable(annotation) and "Callable" in repr(annotation):
    return False, True
  if getattr(annotation, "_is_protocol", False) and "__call__" in vars(annotation):
    return False, True
  parts = [strings_and_callables(part) for part in typing.get_args(annotation) if part is not ...]
  origin = typing.get_origin(annotation)
  if origin is not None and issubclass_of_mapping(origin):
    parts = parts[1:]  # Keys are names of dims, and of data sets, which `preflight` checks.
  return any(one for one, _ in parts), any(two for _, two in parts)


def issubclass_of_mapping(origin: Any) -> bool:
  return isinstance(origin, type) and issubclass(origin, Mapping)


@pytest.mark.parametrize("name", sorted(n for n in listed() if n.startswith("paxlike.")))
def test_every_argument_is_of_a_kind_that_acts_on_nothing(name):
  """A new parameter that takes a string or a callable is to be put into one of the tables."""
  value = allowed_symbols.resolve(name)
  if isinstance(value, enum.Enum | enum.EnumType):
    return
  function = value.__init__ if isinstance(value, type) else value
  hints = typing.get_type_hints(function)
  for parameter in inspect.signature(value).parameters.values():
    text, called = strings_and_callables(hints.get(parameter.name, parameter.annotation))
    assert not text or parameter.name in READ | TEXT, parameter
    assert not called or parameter.name in CALLED, parameter


def test_who_imports_or_runs_by_name_is_known():
  functions = {"import_module", "__import__", "exec", "eval", "run_module", "run_path"}
  pickles = {"pickle", "cloudpickle", "dill", "marshal", "shelve"}
  found = set()
  for path in MODULES:
    for node in ast.walk(ast.parse(path.read_text())):
      called = ast.unparse(node.func).split(".")[-1] if isinstance(node, ast.Call) else ""
      imported = {alias.name for alias in node.names} if isinstance(node, ast.Import) else set()
      if called in functions or imported & pickles:
        found.add(path.relative_to(PACKAGE).as_posix())
  assert {"config/allowed_symbols.py", "registry.py"} <= found <= set(BY_NAME)


@functools.cache
def kinds() -> dict[str, Experiment]:
  """Of the registered experiments those whose graphs have new names; all have names of the list."""
  found, known = {}, set()
  for path, cls in registry.registered().items():
    names = named(cls().trainer())
    assert names <= listed()
    if not names <= known:
      found[path] = cls()
    known |= names
  return found


EDITS = [
  *fiddlers.FIDDLERS,
  *(f"attention({kernel})" for kernel in layers.KERNELS),
  *(f"quantize({kind})" for kind in fiddlers.DOTS),
  *(f"quantize_weights({scheme})" for scheme in fiddlers.SCHEMES),
  "lora(base=nf4, dropout=0.1)",
]


@pytest.mark.slow
def test_the_graphs_of_every_experiment_and_every_fiddler_are_saved_and_loaded():
  for place, experiment in enumerate(kinds().values()):
    graph = experiment.trainer()
    assert comes_back(graph)
    for edit in EDITS[place % 3 :: 3]:
      try:
        changed = graph_file.call_fiddler(experiment.trainer(), edit, fiddlers.FIDDLERS)
      except UserError:  # No linear map of such a role, say.
        continue
      assert named(changed) <= listed(), edit
  assert len(kinds()) > 5


def choices(cls: type[Experiment]) -> list[tuple[str, Any]]:
  """Each value of each knob that has a few, but those that an example registered."""
  registered = {**optimizers.SCHEDULES, **optimizers.OPTIMIZERS}  # None for what is built in.
  return [
    (name, choice)
    for name, knob in cls.knobs().items()
    for choice in type_words.choices(knob.type)
    if registered.get(choice) is None
  ]


NEEDED: dict[str, Any] = {
  "DATA_PATH": "x.txt",
  "DATA_PATHS": {"a": "x.txt"},
  "VOCAB_PATH": "x.model",
  "SAMPLE_PROMPT": "x",
  "BEST_CHECKPOINT_METRIC": "validation/log_pplx",
  "CHECKPOINT_RESTORE_PATH": "/x",
  "ICI_MESH_SHAPE": (2, 1, 1, 1),
  "LORA_DROPOUT": 0.1,
  "DROPOUT_PROB": 0.1,
  "TFDS_NAME": "x:1.0.0",
}


@pytest.mark.slow
def test_every_kind_of_data_and_every_choice_of_a_knob_is_saved_and_loaded():
  mixins = [getattr(datasets, name) for name in datasets.__all__]
  made = [
    type(f"{m.__name__}Gpt", (m, gpt.Gpt126M), {}) for m in mixins if not inspect.isabstract(m)
  ]
  tried, seen = set(), set()
  for cls in (*made, *(type(experiment) for experiment in kinds().values())):
    needed = {name: value for name, value in NEEDED.items() if name in cls.knobs()}
    for name, value in [("SEED", None), *choices(cls)]:
      if name in cls.knobs() and (name, value) in tried:
        continue
      tried.add((name, value))
      for more in ({}, needed):
        try:
          given = {**more, **({name: value} if name in cls.knobs() else {})}
          graph = cls(**given).trainer()
        except UserError:  # Other knobs would have to be set too.
          continue
        names = frozenset(named(graph))
        assert names <= listed(), (cls, given)
        if names not in seen:
          assert comes_back(graph)
        seen.add(names)
  assert len(tried) > 60
