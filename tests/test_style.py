# SPDX-License-Identifier: Apache-2.0
"""The style of the repository, as laws: sizes, names, headers, and who may import whom."""

import ast
import functools
import graphlib
import pathlib
import re

import pytest
from helpers.sources import MODULES, PACKAGE, REPOSITORY, SOURCES

from paxlike import registry

MAX_LINES, MAX_FUNCTION_LINES = 490, 80

# The floors of the house, from the ground up: a folder (or a file at the top of the package)
# imports from the floors below its own, and what shares a floor does not know each other.
FLOORS: tuple[tuple[str, ...], ...] = (
  ("__init__", "errors"),
  ("file_io", "untrusted_files", "user_code"),
  ("run_folder",),
  ("config", "processes"),
  ("devices",),
  ("data", "layers", "rewards"),
  ("checkpoints", "telemetry"),
  ("inference",),
  ("training",),
  ("fiddlers", "compilation"),
  ("knob_groups", "planning", "profiling", "transfer"),
  ("experiment",),
  ("registry",),
  ("saved_experiment", "experiments"),
  ("scripts_gpu", "checks", "convert", "report"),
  ("cli",),
  ("root_graph",),
  ("data_command", "run_mode"),
  ("api", "launchers", "plan_mode", "transfer_mode"),
  ("sweep",),
  ("main",),
)
FIDDLE = {
  "cli", "config", "convert", "experiment", "experiments", "fiddlers", "knob_groups", "main",
  "scripts_gpu",
}  # fmt: skip
# Slow to import, so only functions that build a source from them may.
LAZY = {"clu", "seqio", "tensorflow", "tensorflow_datasets", "tensorflow_text"}

FLOOR = {name: floor for floor, row in enumerate(FLOORS) for name in row}

ROOMS = sorted(path.parent for path in PACKAGE.rglob("*/__init__.py") if path.parent != PACKAGE)


def tree(path: pathlib.Path) -> ast.Module:
  return ast.parse(path.read_text(), filename=str(path))


def unit(dotted: str) -> str:
  """The folder (or file) of what is imported: paxlike.layers.norm -> layers."""
  name = [*dotted.split("."), "__init__"][1]
  is_module = (PACKAGE / name).is_dir() or (PACKAGE / f"{name}.py").is_file()
  return name if is_module else "__init__"


def unit_of(path: pathlib.Path) -> str:
  """The same of a file of the package."""
  return path.relative_to(PACKAGE).with_suffix("").parts[0]


def imported(node: ast.AST) -> list[str]:
  """The full names of the modules (or of things in modules) that one statement imports."""
  if isinstance(node, ast.Import):
    return [alias.name for alias in node.names]
  if isinstance(node, ast.ImportFrom):
    assert node.level == 0, f"line {node.lineno}: a relative import"
    return [f"{node.module}.{alias.name}" for alias in node.names]
  return []


def imports(root: ast.AST) -> list[str]:
  return [name for node in ast.walk(root) for name in imported(node)]


def imports_at_run_time(root: ast.AST, *, in_functions: bool) -> list[str]:
  """Like `imports`, without what only type checkers read; `in_functions`: also in their bodies."""
  names, stack = [], [root]
  while stack:
    node = stack.pop()
    names += imported(node)
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not in_functions:
      continue
    if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
      stack += node.orelse
    else:
      stack += ast.iter_child_nodes(node)
  return names


def own_imports(path: pathlib.Path) -> set[str]:
  """The folders of the package that a file imports from, other than its own."""
  # `paxlike/__init__.py` names what it exports for type checkers, and imports it when it is used.
  root = tree(path)
  is_face = path == PACKAGE / "__init__.py"
  found = imports_at_run_time(root, in_functions=False) if is_face else imports(root)
  names = {unit(name) for name in found if name.split(".")[0] == "paxlike"}
  return names - {unit_of(path)}


def knobs_in(root: ast.AST) -> list[str]:
  """The knobs of any experiment that string literals name."""
  words = [
    word
    for node in ast.walk(root)
    if isinstance(node, ast.Constant) and isinstance(node.value, str)
    for word in re.findall(r"\b[A-Z][A-Z0-9_]+\b", node.value)
  ]
  return [word for word in words if word in all_knobs()]


@functools.cache
def all_knobs() -> frozenset[str]:
  return frozenset(name for cls in registry.registered().values() for name in cls.knobs())


def test_there_is_something_to_check():
  assert len(MODULES) > 20
  assert any(own_imports(path) for path in MODULES)


def test_headers_sizes_and_names():
  for path in SOURCES:
    text = path.read_text()
    assert not text or text.startswith("# SPDX-License-Identifier: Apache-2.0\n"), path
    assert len(text.splitlines()) <= MAX_LINES, path
    assert path.name not in ("utils.py", "common.py") and not path.name.endswith("_lib.py"), path


def swallows(handler: ast.ExceptHandler) -> bool:
  """Whether an except clause takes errors that nobody foresaw, other than to pass them on."""
  caught = "" if handler.type is None else ast.unparse(handler.type)
  names = set(re.findall(r"\w+", caught))
  if "BaseException" in names:  # As a thread does, for another to raise.
    used = {
      node.id for part in handler.body for node in ast.walk(part) if isinstance(node, ast.Name)
    }
    return handler.name not in used
  last = handler.body[-1]
  passed_on = isinstance(last, ast.Raise) and last.cause is not None
  return not names or ("Exception" in names and not passed_on)


def test_functions_are_short_and_swallow_nothing():
  for path in SOURCES:
    for node in ast.walk(tree(path)):
      if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        lines = (node.end_lineno or node.lineno) - node.lineno + 1
        assert lines <= MAX_FUNCTION_LINES, f"{path}: {node.name} has {lines} lines"
      swallowed = isinstance(node, ast.ExceptHandler) and swallows(node)
      assert not swallowed, f"{path}, line {getattr(node, 'lineno', 0)}"


def test_nothing_is_left_for_later():
  for path in SOURCES:
    # Spelt so that this line does not find itself.
    assert not re.findall(r"\b(?:TO" r"DO|FIX" r"ME|X" r"XX)\b", path.read_text()), path


def test_imports_go_down_the_floors():
  for path in MODULES:
    name = unit_of(path)
    assert name in FLOOR, f"{name} is new: give it a floor in FLOORS of {__file__}"
    for other in own_imports(path):
      assert FLOOR[other] < FLOOR[name], f"{path} imports {other}, which is not on a floor below"


def test_the_tree_in_the_design_is_that_of_the_package():
  """It lists all files and folders at the top of the package, each above what it imports."""
  page = (REPOSITORY / "docs" / "design.md").read_text()
  (listed,) = re.findall(r"^paxlike/\n((?:  .*\n)+)", page, re.MULTILINE)
  tree_of_page = re.findall(r"^  (\w+)(?:/|\.py) ", listed, re.MULTILINE)
  assert sorted(tree_of_page) == sorted(FLOOR.keys() - {"__init__"})
  place = {name: line for line, name in enumerate(tree_of_page)}
  for path in MODULES:
    above = {
      other for other in own_imports(path) if place.get(other, 99) < place.get(unit_of(path), -1)
    }
    assert not above, f"{path} imports {above}"


def test_files_and_folders_of_a_room_import_in_one_direction():
  """Each child of a folder, with all within it, imports its siblings without a circle."""
  for room in ROOMS:
    inside = ".".join(room.relative_to(PACKAGE.parent).parts) + "."
    graph: dict[str, set[str]] = {}
    for path in room.rglob("*.py"):
      child = path.relative_to(room).with_suffix("").parts[0]
      names = imports_at_run_time(tree(path), in_functions=True)
      siblings = {n.removeprefix(inside).split(".")[0] for n in names if n.startswith(inside)}
      graph.setdefault(child, set()).update(siblings - {child})
    del graph["__init__"]  # The door, which imports what the room exports.
    assert list(graphlib.TopologicalSorter(graph).static_order()), room


def test_tests_mirror_the_package():
  """A folder of tests is named for what it tests, and no test imports another."""
  tests = REPOSITORY / "tests"
  own = {tests / name for name in ("contracts", "fuzz", "golden", "helpers")}
  for path in sorted(tests.rglob("*.py")):
    assert own & set(path.parents) or (PACKAGE / path.relative_to(tests)).parent.is_dir(), path
    names = {part for name in imports(tree(path)) for part in name.split(".")}
    assert not [name for name in names if name.startswith("test_")], path


def test_fiddle_stops_at_the_door():
  for path in MODULES:
    names = {name.split(".")[0] for name in imports(tree(path))}
    assert "fiddle" not in names or unit_of(path) in FIDDLE, path


def test_layers_name_no_knobs():
  """Knobs belong to experiments: errors of layers name arguments; see `knob_arguments`."""
  for path in MODULES:
    assert unit_of(path) != "layers" or not knobs_in(tree(path)), path


def test_graphs_are_built_in_one_place():
  for path in MODULES:
    assert "fdl.build(" not in path.read_text() or path.name == "building.py", path


def test_tensorflow_is_imported_by_who_needs_it():
  for path in MODULES:
    on_loading = imports_at_run_time(tree(path), in_functions=False)
    assert not LAZY & {name.split(".")[0] for name in on_loading}, path


def test_the_laws_have_teeth():
  """Each of the helpers finds an offence that is there."""
  offender = ast.parse(
    "import fiddle as fdl\n"
    "from paxlike.layers import norm\n"
    "from paxlike import main, __version__\n"
    "try:\n  import seqio\nexcept ImportError:\n  pass\n"
    "if TYPE_CHECKING:\n  import clu\n"
    "def f():\n  import tensorflow\n"
  )
  units = {unit(name) for name in imports(offender) if name.startswith("paxlike")}
  assert units == {"layers", "main", "__init__"}
  on_loading = {name.split(".")[0] for name in imports_at_run_time(offender, in_functions=False)}
  assert {"fiddle", "seqio"} <= on_loading and not {"clu", "tensorflow"} & on_loading
  assert knobs_in(ast.parse('f"NUM_HEADS={heads} is {N} of NUM_X"')) == ["NUM_HEADS"]
  with pytest.raises(AssertionError, match="relative"):
    imports(ast.parse("from . import layers"))
  for clause, offends in {
    "except:\n  pass": True,
    "except Exception as e:\n  log(e)": True,
    "except Exception as e:\n  raise UserError(e)": True,
    "except Exception as e:\n  raise UserError(e) from e": False,
    "except:\n  raise UserError() from e": True,
    "except (OSError, Exception):\n  pass": True,
    "except BaseException as e:\n  pass": True,
    "except BaseException as e:\n  put(e)": False,
    "except OSError:\n  pass": False,
  }.items():
    (statement,) = ast.parse(f"try:\n  f()\n{clause}\n").body
    assert isinstance(statement, ast.Try) and swallows(statement.handlers[0]) is offends, clause
