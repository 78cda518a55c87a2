# SPDX-License-Identifier: Apache-2.0
"""The style of the repository, as laws: sizes, names, headers, and who may import whom."""

import ast
import pathlib
import re

import pytest

REPOSITORY = pathlib.Path(__file__).resolve().parent.parent
PACKAGE = REPOSITORY / "paxlike"
SOURCES = sorted(
  path
  for folder in ("paxlike", "benchmarks", "tests")
  for path in (REPOSITORY / folder).rglob("*.py")
)
MODULES = [path for path in SOURCES if path.is_relative_to(PACKAGE)]
MAX_LINES, MAX_FUNCTION_LINES = 450, 80

# Low to high: a file imports from lower rows, and, within its folder, from its own row. What shares
# a row with a file of another name is no business of that file.
RANKS: tuple[tuple[str, ...], ...] = (
  ("__init__", "errors", "configurable", "chips", "networks", "ranges"),
  ("gpu_targets", "tpu_targets", "usage", "program_text", "tables", "knob_text"),
  ("topology", "cluster", "run_folder", "input_files"),
  ("progress", "stacks", "watchdog", "rendezvous", "ending"),
  ("members",),
  ("watch",),
  (
    "hugging_face_keys",
    "mesh",
    "kernels",
    "collectives",
    "distributed",
    "saved_step",
    "knob_types",
    "signals",
    "growing",
    "checksums",
    "console",
    "memory",
  ),
  ("layers", "data", "feed", "hugging_face_rope"),
  (
    "committing",
    "ownership",
    "optimizers",
    "flops",
    "requirements",
    "relayout",
    "weight_rules",
    "sampling",
    "prompts",
  ),
  ("objectives", "train_state", "metrics", "checkpoint", "profiling", "meter", "evaluation"),
  ("journal", "best", "configuration", "model_sizes", "memory_check"),
  ("memory_model",),
  ("cost_model",),
  ("pipelined",),
  ("train_step", "preflight", "generate", "hugging_face", "restoring"),
  ("decoding", "origin"),
  ("trainer",),
  ("following",),
  ("aot",),
  ("planner",),
  ("knobs", "symbols", "fiddlers"),
  ("graph_data",),
  ("graph_text", "graph_types"),
  ("building",),
  ("graph_edits",),
  ("config_file", "experiment"),
  ("registry",),
  ("saved_experiment",),
  ("experiments",),
  ("scripts_gpu", "checks"),
  ("harness",),
  ("flags", "show", "check_page", "compile_page", "plan_page", "plot", "verify", "convert"),
  ("unexpected", "decode_options", "starting"),
  ("main",),
)
FIDDLE = {
  "building", "config_file", "convert", "experiment", "experiments", "fiddlers", "flags",
  "graph_data", "graph_edits", "graph_text", "graph_types", "knobs", "main",
  "scripts_gpu", "show", "symbols",
}  # fmt: skip
# Slow to import, so only functions that build a source from them may.
LAZY = {"clu", "seqio", "tensorflow", "tensorflow_datasets", "tensorflow_text"}

RANK = {name: rank for rank, row in enumerate(RANKS) for name in row}

every_source = pytest.mark.parametrize(
  "path", SOURCES, ids=lambda path: str(path.relative_to(REPOSITORY))
)
every_module = pytest.mark.parametrize(
  "path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE))
)


def tree(path: pathlib.Path) -> ast.Module:
  return ast.parse(path.read_text(), filename=str(path))


def unit(dotted: str) -> str:
  """The row entry of what is imported: paxlike.layers.norm -> layers, paxlike.x -> __init__."""
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


def imports_on_loading(root: ast.AST) -> list[str]:
  """Like `imports`, without the bodies of functions and what only type checkers read."""
  names, stack = [], [root]
  while stack:
    node = stack.pop()
    names += imported(node)
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
      continue
    if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
      stack += node.orelse
    else:
      stack += ast.iter_child_nodes(node)
  return names


def own_imports(path: pathlib.Path) -> set[str]:
  """The rows' entries of the package's modules that a file imports, other than its own."""
  names = {unit(name) for name in imports(tree(path)) if name.split(".")[0] == "paxlike"}
  return names - {unit_of(path)}


def test_there_is_something_to_check():
  assert len(MODULES) > 20
  assert any(own_imports(path) for path in MODULES)


@every_source
def test_header_size_and_name(path):
  text = path.read_text()
  if text:
    assert text.startswith("# SPDX-License-Identifier: Apache-2.0\n")
  assert len(text.splitlines()) <= MAX_LINES
  assert path.name not in ("utils.py", "common.py") and not path.name.endswith("_lib.py")


@every_source
def test_functions_are_short(path):
  for node in ast.walk(tree(path)):
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
      lines = (node.end_lineno or node.lineno) - node.lineno + 1
      assert lines <= MAX_FUNCTION_LINES, f"{node.name} has {lines} lines"


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


@every_source
def test_nothing_is_swallowed(path):
  for node in ast.walk(tree(path)):
    assert not (isinstance(node, ast.ExceptHandler) and swallows(node)), f"line {node.lineno}"


@every_source
def test_nothing_is_left_for_later(path):
  # Spelt so that this line does not find itself.
  found = re.findall(r"\b(?:TO" r"DO|FIX" r"ME|X" r"XX)\b", path.read_text())
  assert not found


@every_module
def test_imports_go_down_the_ranks(path):
  name = unit_of(path)
  assert name in RANK, f"give {name} a row in RANKS"
  for other in own_imports(path):
    assert other in RANK, f"give {other} a row in RANKS"
    assert RANK[other] < RANK[name], f"{name} imports {other}"


def test_data_and_layers_are_strangers():
  for path in MODULES:
    strangers = {"data": "layers", "layers": "data"}
    assert strangers.get(unit_of(path)) not in own_imports(path), path


@every_module
def test_fiddle_stops_at_the_door(path):
  names = {name.split(".")[0] for name in imports(tree(path))}
  assert "fiddle" not in names or unit_of(path) in FIDDLE


@every_module
def test_graphs_are_built_in_one_place(path):
  assert "fdl.build(" not in path.read_text() or unit_of(path) == "building"


@every_module
def test_tensorflow_is_imported_by_who_needs_it(path):
  assert not LAZY & {name.split(".")[0] for name in imports_on_loading(tree(path))}


def test_the_laws_have_teeth():
  """Each of the helpers finds an offence that is there."""
  offender = ast.parse(
    "import fiddle as fdl\n"
    "from paxlike.layers import norm\n"
    "from paxlike import trainer, __version__\n"
    "try:\n  import seqio\nexcept ImportError:\n  pass\n"
    "if TYPE_CHECKING:\n  import clu\n"
    "def f():\n  import tensorflow\n"
  )
  units = {unit(name) for name in imports(offender) if name.startswith("paxlike")}
  assert units == {"layers", "trainer", "__init__"}
  on_loading = {name.split(".")[0] for name in imports_on_loading(offender)}
  assert {"fiddle", "seqio"} <= on_loading and not {"clu", "tensorflow"} & on_loading
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
