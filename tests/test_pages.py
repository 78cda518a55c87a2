# SPDX-License-Identifier: Apache-2.0
"""The pages hold: what they name exists, and the commands that are marked for it run."""

import ast
import dataclasses
import os
import pathlib
import re
import subprocess

import pytest
from helpers import pages
from helpers.pages import DOCS, PAGES
from helpers.sources import MODULES, PACKAGE, REPOSITORY, SOURCES

from paxlike import registry
from paxlike.cli import flag_types
from paxlike.errors import UserError
from paxlike.experiments import datasets
from paxlike.experiments.distillation import OnPolicyDistillation
from paxlike.launchers.job import Job, with_defaults
from paxlike.launchers.main import TARGETS

every_page = pytest.mark.parametrize(
  "page", PAGES, ids=lambda page: page.relative_to(REPOSITORY).as_posix()
)
EXPERIMENTS = {cls.__name__: cls for cls in registry.registered().values()}
MIXINS = [getattr(datasets, name) for name in datasets.__all__] + [OnPolicyDistillation]
KNOBS = {name for cls in (*EXPERIMENTS.values(), *MIXINS) for name in cls.knobs()}
# Commands of shells and schedulers; what pages say of them is not ours to check.
SHELL = {"apt", "cd", "done", "echo", "export", "for", "git", "mpirun", "python3", "seq", "srun"}
SHELL |= {"bash", "cat", "docker", "grep", "pre-commit", "sbatch", "tb-gcp-uploader", "wait"}
# The knob that CONTRIBUTING.md adds, and nobody has.
IMAGINED = {"LOGITS_SCALE"}
LAUNCHERS = {"ntasks-per-node", "gpus-per-task", "npernode", "signal", "output"}
LAUNCH = {field.name for one in (Job, *TARGETS.values()) for field in dataclasses.fields(one)}
LAUNCH |= {"to", "submit"}
# What stands for a name that the reader has.
PLACEHOLDER = re.compile(r"NAME|EXPERIMENT\b.*|CONFIG|MODULE\.\w+|my_\w+\.\w+|\w*Class|FAMILY")
OURS = {
  name: f"{entry.partition(':')[0].replace('.', '/')}.py" for name, entry in pages.SCRIPTS.items()
}


def text_of(folders: tuple[str, ...]) -> str:
  files = [
    p for f in folders for kind in ("py", "sh", "sub") for p in (REPOSITORY / f).rglob(f"*.{kind}")
  ]
  return "\n".join(path.read_text() for path in files if path != pathlib.Path(__file__))


SOURCE = text_of(("paxlike", "scripts", "benchmarks", "tests"))
FLAGS = set(flag_types.define()) | set(re.findall(r'"--(\w+)"', SOURCE)) | LAUNCHERS
# Those that benchmarks make of names.
FLAGS |= {"experts", "hidden", "chosen", "alsologtostderr", "sweep"} | LAUNCH


def check_paxlike(args: list[str]):
  """Fails if a flag, a knob, its value or an experiment of a command is none."""
  given = dict(re.findall(r"--(fdl_config|exp|against)=(.+)", "\n".join(args)))
  for arg in args:
    if name := re.match(r"--(?!fdl\.)(\w+)", arg):
      assert name[1] in set(flag_types.define()), f"there is no flag --{name[1]}"
    if knob := re.match(r"--fdl\.([A-Z0-9_]+)=(.*)", arg):
      assert knob[1] in KNOBS, f"there is no knob {knob[1]}"
  for flag, name in given.items():
    if PLACEHOLDER.fullmatch(name):
      continue
    experiment = registry.find(name, flag=flag)()
    if flag != "against":
      for name, value in re.findall(r"--fdl\.([A-Z0-9_]+)=(.*)", "\n".join(args)):
        experiment.set(name, value, source="command line")


def check_own_flags(file: pathlib.Path, args: list[str]):
  """Fails if a program of the repository has not these flags, nor, if it takes knobs, paxlike."""
  assert file.is_file(), f"there is no {file}"
  source = file.read_text()
  if "paxlike.cli.tfds_download" in source:
    source = (PACKAGE / "cli" / "tfds_download.py").read_text()
  own = set(re.findall(r'"--(\w+)"', source))
  rest = [arg for arg in args if re.split("[= ]", arg.removeprefix("--"))[0] not in own]
  if "fdl" in source:
    check_paxlike([arg for arg in rest if arg.startswith("--") and "DIR" not in arg])
  else:
    assert [arg for arg in rest if arg.startswith("--")] == [], f"{file.name} has no such flag"


def check_module(module: str, args: list[str]):
  if module == "paxlike.main":
    return check_paxlike(args)
  roots = (REPOSITORY, REPOSITORY / "tests")
  files = [root / f"{module.replace('.', '/')}.py" for root in roots]
  found = [file for file in files if file.is_file()]
  if found and module != "paxlike.cli.harness":  # Its flags are the harness' own.
    check_own_flags(found[0], args)
  assert found or module in ("pytest", "timeit", "venv"), f"there is no module {module}"


def check(words: list[str]):
  """Fails if a command cannot be one."""
  program, *args = words
  if program == "paxlike":
    check_paxlike(args)
  elif program.startswith("--"):
    check_paxlike(words)
  elif program == "paxlike-launch":
    assert args[0] in TARGETS, f"there is no target {args[0]}"
    rest = [arg for arg in args[1:] if re.split("[= ]", arg)[0][2:] not in LAUNCH]
    check_paxlike([with_defaults(arg) for arg in rest])
  elif program == "paxlike-sweep":
    swept = [arg for arg in args if arg.startswith("--sweep.")]
    assert {re.split("[.=]", arg)[1] for arg in swept} <= KNOBS
    check_own_flags(REPOSITORY / OURS[program], [arg for arg in args if arg not in swept])
  elif program in OURS:
    check_own_flags(REPOSITORY / OURS[program], args)
  elif program == "python" and args[0] == "-m":
    check_module(args[1], args[2:])
  elif program == "python" and args[0] != "-c":
    check_own_flags(REPOSITORY / args[0], args[1:])
  elif program == "make":
    assert re.search(rf"^{args[0]}:", (REPOSITORY / "Makefile").read_text(), re.M), args
  elif program == "pip":
    known = (REPOSITORY / "pyproject.toml").read_text()
    extras = re.findall(r"\[([\w,]+)\]", " ".join(args))
    assert all(re.search(rf"^{x} = \[", known, re.M) for e in extras for x in e.split(","))
  else:
    assert program in SHELL | {"python"}, f"what is {program}?"


@every_page
def test_commands_exist(page):
  for block in pages.blocks(page):
    for words in block.commands:
      try:
        check(words)
      except (AssertionError, UserError) as error:
        pytest.fail(f"{page.name}: {' '.join(words)}: {error}")


@every_page
def test_what_python_imports_exists(page):
  for block in pages.blocks(page):
    for node in ast.walk(ast.parse(block.text if block.language == "python" else "")):
      if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("paxlike"):
        for name in node.names:
          exec(f"from {node.module} import {name.name}")


@every_page
def test_flags_knobs_and_experiments_in_the_text_exist(page):
  found = pages.inline(page)
  for span in found:
    for name in re.findall(r"(?<![\w-])--(?!fdl\.)([A-Za-z][\w-]*)", span):
      assert name in FLAGS, f"{span}: there is no flag --{name}"
    for name in re.findall(r"--fdl\.([A-Z][A-Z0-9_]+)", span):
      assert name in KNOBS, f"{span}: there is no knob {name}"
    for name in re.findall(r"(?<![\w.-])[A-Z][A-Z0-9]*(?:_[A-Z0-9]+)+(?![\w.])", span):
      known = name in KNOBS | IMAGINED or re.search(rf"\b{name}", SOURCE)
      assert known, f"{span}: nothing has {name}"
    for name in re.findall(r"--(?:fdl_config|exp)=([\w.]+)", span):
      assert PLACEHOLDER.fullmatch(name) or registry.find(name), span


@every_page
def test_tests_and_modules_in_the_text_exist(page):
  tests = REPOSITORY / "tests"
  for file, name in re.findall(r"([\w/]+\.py)::(\w+)", page.read_text()):
    source = (tests / file).read_text()
    assert f"def {name}(" in source, f"{file}::{name}"
  for span in pages.inline(page):
    for module in re.findall(r"python3? -m ([\w.]+)", span):
      check_module(module, [])


def anchors(page: pathlib.Path) -> set[str]:
  """Returns what links may name in a page, as mkdocs makes it of the headings."""
  headings = re.findall(r"^#+ (.+)$", pages.outside(page), re.M)
  plain = [re.sub(r"[^\w\s-]", "", heading).strip().lower() for heading in headings]
  return {re.sub(r"[-\s]+", "-", heading) for heading in plain}


@every_page
def test_links_lead_somewhere(page):
  for target, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)]+))?\)", page.read_text()):
    if not target.startswith("https://"):
      there = page.parent / target if target else page
      assert there.exists(), target
      assert not anchor or anchor in anchors(there), f"{target}#{anchor}"


@every_page
def test_what_is_marked_is_run(page):
  """A mark that is misspelt, or stands a line too high, would run nothing."""
  marks = re.findall("^ *<!-- run", page.read_text(), re.M)
  assert len(marks) == sum(block.run for block in pages.blocks(page))


def test_every_experiment_is_in_the_zoo():
  rows = re.findall(r"^\| `(\w+)` \| ([\d,]+) \|", (DOCS / "models.md").read_text(), re.M)
  assert sorted(name for name, _ in rows) == sorted(EXPERIMENTS)


def test_messages_are_those_of_the_program():
  rows = re.findall(r"^\| `([^`]+)` \|", (DOCS / "troubleshooting.md").read_text(), re.M)
  assert len(rows) > 30
  literals = [
    node.value
    for path in MODULES
    for node in ast.walk(ast.parse(path.read_text()))
    if isinstance(node, ast.Constant) and isinstance(node.value, str)
  ]
  assert [row for row in rows if not any(row in text for text in literals)] == []


def test_every_page_is_in_the_navigation():
  there = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}
  listed = re.findall(r"([\w/]+\.md)$", (REPOSITORY / "mkdocs.yml").read_text(), re.M)
  assert sorted(listed) == sorted(there)


def test_every_folder_has_a_page_of_reference():
  folders = {path.parent.name for path in PACKAGE.glob("*/__init__.py")} - {"cli", "scripts_gpu"}
  assert {path.stem for path in (DOCS / "reference").glob("*.md")} == folders | {"index", "paxlike"}


def test_pages_are_checked_at_all():
  commands = [words for page in PAGES for block in pages.blocks(page) for words in block.commands]
  assert len(commands) > 100 and SOURCES
  with pytest.raises(AssertionError, match="no flag --modee"):
    check(["paxlike", "--modee=train"])
  with pytest.raises(AssertionError, match="no knob NUM_LAYER"):
    check(["paxlike", "--fdl_config=NAME", "--fdl.NUM_LAYER=2"])
  with pytest.raises(UserError, match="no experiment Syntetic"):
    check(["paxlike", "--fdl_config=Syntetic"])


@pytest.mark.slow
@pytest.mark.parametrize(
  "page",
  [page for page in PAGES if any(block.run for block in pages.blocks(page))],
  ids=lambda page: page.relative_to(REPOSITORY).as_posix(),
)
def test_commands_run(page, tmp_path):
  path = pages.shell(tmp_path / "bin")
  folder = tmp_path / "folder"
  folder.mkdir()
  for name in ("scripts", "benchmarks"):
    (folder / name).symlink_to(REPOSITORY / name)
  environment = os.environ | {"PATH": f"{path}:{os.environ['PATH']}", "PYTHONPATH": str(REPOSITORY)}
  for block in pages.blocks(page):
    if block.file is not None:
      (folder / block.file).write_text(block.text)
    elif block.run:
      program = (
        ["python", "-c"] if block.language == "python" else ["bash", "-euo", "pipefail", "-c"]
      )
      done = subprocess.run(
        [*program, block.text],
        cwd=folder,
        env=environment | {"KNOBS": " ".join(f"--fdl.{knob}" for knob in block.knobs)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
        check=False,
        timeout=1200,
      )
      assert done.returncode == 0, f"{block.text}\n{done.stdout[-3000:]}"
