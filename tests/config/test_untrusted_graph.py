# SPDX-License-Identifier: Apache-2.0
"""A graph in a file from elsewhere runs no code, and is refused in one line if it is damaged."""

import json
import sys
from typing import Any

import fiddle as fdl
import pytest
from helpers.graphs import transformer

from paxlike.config import building, graph_data, graph_file
from paxlike.errors import UserError


class Mine:
  """A class of the user."""


def saved(graph: Any) -> str:
  return json.dumps({"paxlike_graph": 1, "graph": graph})


@pytest.fixture
def trap(tmp_path, monkeypatch):
  """A module that leaves a trace when it is imported."""
  trace = tmp_path / "trace"
  source = f"import pathlib\npathlib.Path({str(trace)!r}).touch()\ndef run(): pass\n"
  (tmp_path / "trap_module.py").write_text(source)
  (tmp_path / "paxlike_trap.py").write_text(source)
  monkeypatch.syspath_prepend(tmp_path)
  yield trace
  for name in ("trap_module", "paxlike_trap"):
    sys.modules.pop(name, None)


@pytest.mark.parametrize("module", ["trap_module", "paxlike_trap", "trap_module.sub"])
@pytest.mark.parametrize(
  "node",
  [
    {"symbol": "MODULE:run"},
    {"config": "MODULE:run"},
    {"partial": "MODULE:run", "arguments": {}},
    {"config": "builtins:dict", "arguments": {"x": {"list": [{"symbol": "MODULE:run"}]}}},
    {"unknown": {"symbol": "MODULE:run"}},
    {"dict": [[{"symbol": "MODULE:run"}, 1]]},
    {"config": "optax:adamw", "positional": [{"arg_factory": "MODULE:run"}]},
  ],
  ids=str,
)
def test_nothing_of_a_refused_module_is_imported(trap, module, node):
  text = saved(node).replace("MODULE", module)
  with pytest.raises(UserError) as error:
    graph_file.load(text, allow_modules=["elsewhere", "", "trap", "trap_modul"])
  assert f"{module}.run" in str(error.value)
  assert f"--fdl_allow_modules={module}" in str(error.value)
  assert not trap.exists()
  assert not {"trap_module", "paxlike_trap"} & {*sys.modules}


def test_an_allowed_module_is_imported(trap):
  loaded = graph_file.load(saved({"config": "trap_module:run"}), allow_modules=["trap_module"])
  assert fdl.get_callable(loaded) is sys.modules["trap_module"].run
  assert trap.exists()


@pytest.mark.parametrize(
  "name",
  [
    "builtins:eval",
    "builtins:exec",
    "builtins:__import__",
    "builtins:open",
    "builtins:getattr",
    "builtins:type",
    "os:system",
    "posix:system",
    "subprocess:Popen",
    "functools:reduce",
    "functools:partial",
    "operator:methodcaller",
    "importlib:import_module",
    "jax.numpy:load",
    "jax.numpy:save",
    "numpy:load",
    "jax.nn:jnp.load",
    "jax.nn:initializers",
    "jax.nn.initializers:__builtins__",
    "jax.nn.initializers:__loader__",
    "optax:losses",
    "fiddle:build",
    "paxlike:layers",
    "paxlike.layers:Linear.__init__.__globals__",
    "paxlike.layers.module:jax.numpy.load",
    "paxlike.layers.module:math.sqrt",
    "paxlike.layers.module:nnx.Module",
    "paxlike.layers.module:Any",
    "paxlike.layers.stack:enum.Enum",
    "paxlike.layers.stack:Module",
    "paxlike.layers.stack:Remat.mro",
    "paxlike.layers.stack:Stack.__subclasses__",
    "paxlike.layers.stack:_stacked",
    "paxlike.layers.stack:BlockFactory",
    "paxlike.config.graph_file:load",
    "paxlike.data.seqio.corpus:main",
    "paxlike.data.seqio.corpus:_read_elsewhere",
    "paxlike.data.seqio.corpus:SeqIOTask.register",
    "paxlike.cli.tfds_download:main",
    "paxlike.data.seqio.fetch:fetch",
    "paxlike.data.prepared:write",
    "paxlike.data.seqio.tfds_writer:write",
    "paxlike.data.token_index:write",
    "paxlike.checkpoints.run_checkpoints:Checkpoints.save",
    "paxlike.convert.importing:copy_tokenizer",
    "paxlike.convert.main:run",
    "paxlike.cli.harness:PaxlikeLM",
    "paxlike.file_io:write",
    "paxlike.devices.xla_flags:options",
    "paxlike.training.trainer:Trainer.train",
    "jax.nn:dot_product_attention",
    "paxlike.config.graph_edits:call_fiddler",
    "paxlike.main:main",
    "paxlike.__main__:main",
    "paxlike.nowhere:thing",
    "paxlike.layers.linear:Nothing",
    "os.system",
    ":",
    "os:",
    "",
    "..os:system",
    "paxlike..os:system",
    "paxlike.layers.linear:Linear\n",
  ],
)
def test_nothing_else_resolves(name):
  for node in ({"symbol": name}, {"config": name}):
    with pytest.raises(UserError) as error:
      graph_file.load(saved(node))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
  "arguments", [{"compiler_options": {"dict": [["xla_dump_to", "/tmp"]]}}, {"compiled_step": "x"}]
)
def test_a_file_gives_a_trainer_no_program_and_no_options_of_its_compiler(arguments):
  with pytest.raises(UserError, match="does not match this version"):
    graph_file.load(saved({"config": "paxlike.training:Trainer", "arguments": arguments}))


OPTIONS = {"dict": [["compiler_options", {"dict": [["xla_dump_to", "/tmp"]]}]]}


def test_a_file_names_no_execution_and_a_graph_has_none():
  of_trainer = {"config": "paxlike.training:Trainer"}
  for name in ("paxlike.training:Execution", "paxlike.training.execution:Execution"):
    node = {"config": name, "arguments": {}}
    with pytest.raises(UserError, match=r"cannot use .*Execution"):
      graph_file.load(saved(of_trainer | {"arguments": {"execution": node}}))
  graph = graph_file.load(saved(of_trainer | {"arguments": {"execution": OPTIONS}}))
  with pytest.raises(UserError, match=r"execution=.*: expected a \(subclass of\) .*Execution"):
    building.build(graph)


@pytest.mark.parametrize(
  "name", ["copy:sys.exit", "copy:dispatch_table", "copy:types.FunctionType", "copy:Error.mro"]
)
def test_an_allowed_module_lends_only_what_it_defines(name):
  with pytest.raises(UserError, match="not defined there"):
    graph_file.load(saved({"symbol": name}), allow_modules=["copy"])
  assert graph_file.load(saved({"symbol": "copy:deepcopy"}), allow_modules=["copy"])


@pytest.mark.parametrize(
  "text",
  [
    "",
    "{",
    "[]",
    "null",
    "{}",
    '{"root": {"type": "ref"}}',
    '{"paxlike_graph": 2, "graph": null}',
    "[" * 100_000,
    saved([]),
    saved({}),
    saved({"x": 1}),
    saved({"same_as": 1}),
    saved({"same_as": "x"}),
    saved({"float": "1"}),
    saved({"dtype": "str"}),
    saved({"symbol": 3}),
    saved({"symbol": {"symbol": "optax:adamw"}}),
    saved({"symbol": "optax:adamw", "more": 1}),
    saved({"list": 3}),
    saved({"list": [], "more": 1}),
    saved({"dict": [1]}),
    saved({"dict": [[1, 2, 3]]}),
    saved({"dict": [[{"list": []}, 1]]}),
    saved({"set": [{"list": []}]}),
    saved({"config": 3}),
    saved({"config": "optax:adamw", "partial": "optax:adamw"}),
    saved({"config": "optax:adamw", "arguments": []}),
    saved({"config": "optax:adamw", "positional": {}}),
    saved({"config": "optax:adamw", "arguments": {"learning_rat": 1}}),
    saved({"config": "optax:adamw", "positional": [1] * 20}),
    saved({"partial": "paxlike.layers:Linear", "arguments": {"dtyp": 1}}),
    '{"paxlike_graph": 1, "graph": ' + '{"list": [' * 400 + "]}" * 400 + "}",
  ],
  ids=lambda text: text[-60:],
)
def test_damaged_and_foreign_files_are_refused_in_one_line(text):
  try:
    loaded = graph_file.load(text)
  except UserError as error:
    assert "config file" in str(error)
    assert "\n" not in str(error)
  else:
    # Deep, but sound.
    assert text.count("[") > 300
    assert isinstance(loaded, list)


def test_a_file_of_100_GB_is_refused_unread(tmp_path):
  path = tmp_path / "config.json"
  with path.open("wb") as file:
    file.truncate(10**11)
  with pytest.raises(UserError, match=r"config\.json.*100,000,000,000 bytes; the limit"):
    graph_file.read(path)


def doubled(kind: str, last: Any, *, levels: int = 44) -> Any:
  """Returns a collection that holds another twice, which holds ..."""
  value = {kind: [last], "id": 1}
  for number in range(1, levels):
    value = {kind: [value, {"same_as": number}], "id": number + 1}
  return value


@pytest.mark.parametrize(
  "value",
  [
    doubled("list", 1),
    doubled("list", {"config": "builtins:dict"}),
    {"set": [doubled("tuple", 1)]},
    {"dict": [[doubled("tuple", 1), 1]]},
    doubled("list", "x" * 64_000, levels=9),
  ],
  ids=["list", "graph", "set", "key", "text"],
)
def test_a_few_lines_that_stand_for_a_million_values_are_refused(value, tmp_path):
  text = saved({"config": "builtins:dict", "arguments": {"x": value}})
  (tmp_path / "config.json").write_text(text)
  for read, source in ((graph_file.load, text), (graph_file.read_data, tmp_path / "config.json")):
    with pytest.raises(UserError, match="has more than 100,000 values"):
      read(source)


@pytest.mark.parametrize(
  ("root", "found"),
  [
    ({"config": "builtins:dict"}, "dict"),
    ({"config": "optax:adam"}, "optax.adam"),
    ({"symbol": "paxlike.training:Trainer"}, "type"),
    ({"partial": "paxlike.training:Trainer"}, "Partial"),
    ({"list": []}, "list"),
    (None, "NoneType"),
    (3, "int"),
  ],
  ids=str,
)
def test_the_root_of_a_run_is_a_trainer(tmp_path, root, found):
  path = tmp_path / "config.json"
  path.write_text(saved(root))
  with pytest.raises(UserError, match=f"config.json: the root is a {found}, not a Trainer"):
    graph_file.read(path)
  path.write_text(saved({"config": f"{__name__}:Mine"}))
  assert graph_file.read(path, allow_modules=iter([__name__])) == fdl.Config(Mine)


def walk(data: Any):
  """Yields all that a graph as data holds."""
  yield data
  if isinstance(data, graph_data.Part):
    data = {"target": data.target, **data.arguments}
  for item in data.values() if isinstance(data, dict) else data:
    yield from walk(item) if isinstance(item, graph_data.Part | dict | list | tuple) else [item]


def test_a_graph_to_look_at_is_data_that_nothing_builds(trap, tmp_path):
  path = tmp_path / "config.json"
  hostile = {"config": "trap_module:run", "arguments": {"x": {"list": [{"symbol": "os:system"}]}}}
  path.write_text(saved(hostile))
  data = graph_file.read_data(path)
  assert graph_file.difference(data, data) == ""
  assert "was Config(run)" in graph_file.difference(data, fdl.Config(dict))
  assert not isinstance(data, fdl.Buildable) and fdl.build(data) is data
  path.write_text(graph_file.dump(transformer()))
  for item in walk(graph_file.read_data(path)):
    assert not isinstance(item, fdl.Buildable) and not callable(item), item
  assert not trap.exists()
