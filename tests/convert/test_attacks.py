# SPDX-License-Identifier: Apache-2.0
"""Folders made to harm: `paxlike-convert` refuses each in one line, in little time and memory."""

import json
import math
import os
import pathlib
import pickle
import random
import socket
import struct
import subprocess
import sys
import zipfile

import numpy as np
import pytest
from helpers import campaign, damaged_files, tiny_llama
from helpers.damaged_files import write_meta, write_tokenizer

from paxlike.convert import torch_pickle
from paxlike.convert.main import run
from paxlike.errors import UserError

INDEX = "model.safetensors.index.json"
HUGE = 10**9


def edit(**changes):
  """Changes keys of config.json; None removes one."""

  def attack(folder):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))

  return attack


def text(name, content):
  return lambda folder: (folder / name).write_text(content)


def index(*names):
  return indexed(text(INDEX, json.dumps({"weight_map": dict(enumerate(names))})))


def indexed(attack):
  """An attack by the index, which counts where there is no whole model."""

  def alone(folder):
    attack(folder)
    (folder / "model.safetensors").unlink()

  return alone


def header(change):
  """Changes the header of model.safetensors."""

  def attack(folder):
    path = folder / "model.safetensors"
    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")
    entries = json.loads(content[8 : 8 + size])
    changed = change(entries)
    said = changed if isinstance(changed, bytes) else json.dumps(entries).encode()
    path.write_bytes(struct.pack("<Q", len(said)) + said + content[8 + size :])

  return attack


NORM, EMBEDDING = "model.norm.weight", "model.embed_tokens.weight"


def entry(name, **changes):
  return header(lambda entries: entries[name].update(changes))


def replaced(name, make):
  """Puts something else in the place of a file."""

  def attack(folder):
    (folder / name).unlink(missing_ok=True)
    make(folder / name)

  return attack


def link(target):
  return lambda path: path.symlink_to(target)


def moved_out(name):
  """Has a link to the file outside of the folder in its place."""

  def attack(folder):
    (folder / name).rename(folder.parent / "elsewhere")
    (folder / name).symlink_to("../elsewhere")

  return attack


def bound_socket(path):
  with socket.socket(socket.AF_UNIX) as one:
    here = os.getcwd()
    os.chdir(path.parent)  # Names of sockets are short.
    one.bind(path.name)
    os.chdir(here)


def pth(content, **options):
  """Replaces the pickle of consolidated.00.pth."""

  def attack(folder):
    with zipfile.ZipFile(folder / "consolidated.00.pth", "w", **options) as archive:
      archive.writestr("archive/data.pkl", content)

  return attack


def only_sentencepiece(folder, content):
  (folder / "tokenizer.json").unlink()
  (folder / "tokenizer.model").write_bytes(content)


def bomb(folder):
  arrays = {"tok_embeddings.weight": np.zeros((30_000_000,), np.float32)}
  damaged_files.torch_file(folder / "consolidated.00.pth", arrays, compressed=True)


DEEP = {"num_hidden_layers": 1900}


def deep(layers):
  """A weight of each layer."""
  return {
    f"model.layers.{i}.input_layernorm.weight": np.ones(64, np.float32) for i in range(layers)
  }


HUGGING_FACE = {
  "index_up": (index("../x.safetensors"), "not the name of a file in its folder"),
  "index_absolute": (index("/etc/passwd"), "not the name of a file in its folder"),
  "index_dots": (index(".."), "not the name of a file in its folder"),
  "index_null_byte": (index("a\0b"), "not a valid file name"),
  "index_numbers": (index(1, 2), "weight_map is not a mapping"),
  "index_list": (indexed(text(INDEX, '{"weight_map": [1]}')), "weight_map is not a mapping"),
  "index_folder": (index("sub"), "cannot be read"),
  "weights_outside": (moved_out("model.safetensors"), "copy the file into the folder"),
  "config_outside": (moved_out("config.json"), "copy the file into the folder"),
  "tokenizer_outside": (
    replaced("tokenizer.json", link("/etc/passwd")),
    "copy the file into the folder",
  ),
  "template_outside": (
    replaced("chat_template.jinja", link("/etc/passwd")),
    "copy the file into the folder",
  ),
  "link_to_itself": (replaced("config.json", link("config.json")), "cannot be read"),
  "link_to_nothing": (replaced("tokenizer.json", link("nothing")), "No such file"),
  "config_pipe": (replaced("config.json", os.mkfifo), "is a pipe, not a file"),
  "weights_pipe": (replaced("model.safetensors", os.mkfifo), "is a pipe, not a file"),
  "index_pipe": (indexed(replaced(INDEX, os.mkfifo)), "is a pipe, not a file"),
  "tokenizer_pipe": (replaced("tokenizer.json", os.mkfifo), "is a pipe, not a file"),
  "template_pipe": (replaced("chat_template.jinja", os.mkfifo), "is a pipe, not a file"),
  "config_device": (replaced("config.json", link("/dev/zero")), "is a device, not a file"),
  "weights_socket": (replaced("model.safetensors", bound_socket), "is a socket, not a file"),
  "config_folder": (replaced("config.json", os.mkdir), "is a folder, not a file"),
  "weights_folder": (replaced("model.safetensors", os.mkdir), "is a folder, not a file"),
  "header_2_to_60": (
    lambda folder: (folder / "model.safetensors").write_bytes(struct.pack("<Q", 2**60) + b"{}"),
    "no header",
  ),
  "header_long": (
    lambda folder: os.truncate(folder / "model.safetensors", 10**12)
    or _at(folder / "model.safetensors", struct.pack("<Q", 10**11)),
    "has a header of 100,000,000,000 bytes",
  ),
  "header_deep": (header(lambda _: b"[" * 1_000_000), "nested too deep"),
  "header_lists": (header(lambda _: b"[" + b"[]," * 3_000_000 + b"0]"), "lists and mappings"),
  "header_list": (header(lambda _: b"[1]"), "its header is not a mapping"),
  "header_twice": (header(lambda _: b'{"a": {}, "a": {}}'), "duplicate key 'a'"),
  "header_not_utf8": (header(lambda _: b'{"\xff": 1}'), "not UTF-8 text"),
  "negative_offsets": (entry(NORM, data_offsets=[-64, 0]), "has invalid data_offsets"),
  "offsets_of_other_bytes": (entry(NORM, data_offsets=[0, 64]), "overlaps the tensor before it"),
  "offsets_behind": (entry(NORM, data_offsets=[10**9, 10**9 + 64]), "leaves a gap"),
  "offsets_huge": (entry(NORM, data_offsets=[2**64, 2**64 + 64]), "has invalid data_offsets"),
  "offsets_fractions": (entry(NORM, data_offsets=[0.0, 64.0]), "has invalid data_offsets"),
  "shape_other": (entry(NORM, shape=[17]), "does not have the size of its shape"),
  "shape_huge": (entry(NORM, shape=[2**62, 16]), "does not have the size of its shape"),
  "shape_zero_and_huge": (entry(NORM, shape=[2**62, 0]), "does not have the size of its shape"),
  "shape_negative": (entry(NORM, shape=[-4, -4]), "has an invalid shape"),
  "shape_many_dims": (entry(NORM, shape=[16] + [1] * 100), "has an invalid shape"),
  "shape_of_truths": (entry(NORM, shape=[True]), "has an invalid shape"),
  "dtype_unknown": (entry(NORM, dtype="U1"), "is of dtype 'U1'"),
  "dtype_list": (entry(NORM, dtype=[]), "is of dtype []"),
  "name_of_lines": (header(lambda e: e.update({"a\n\x1b[2J": e.pop(NORM)})), r"a \x1b[2J"),
  "layers_10_to_7": (edit(num_hidden_layers=10**7), "num_hidden_layers is 10000000"),
  "layers_10_to_30": (edit(num_hidden_layers=10**30), "num_hidden_layers is 1"),
  "layers_too_deep": (
    lambda folder: tiny_llama.write(folder, deep(1900), {**tiny_llama.CONFIG, **DEEP}),
    "num_hidden_layers is 1900; paxlike makes models of at most 1024",
  ),
  "layers_negative": (edit(num_hidden_layers=-1), "config.json"),
  "vocabulary": (edit(vocab_size=HUGE), f"vocab_size is {HUGE}"),
  "hidden": (edit(hidden_size=HUGE), f"hidden_size is {HUGE}"),
  "heads_huge": (edit(num_attention_heads=HUGE), f"num_attention_heads is {HUGE}"),
  "heads_none": (edit(num_attention_heads=0), "config.json"),
  "heads_negative": (edit(num_attention_heads=-4), "config.json"),
  "head_dim": (edit(head_dim=HUGE), f"head_dim is {HUGE}"),
  "experts": (
    edit(
      model_type="mixtral",
      num_local_experts=10**8,
      num_experts_per_tok=2,
      router_aux_loss_coef=0.1,
      sliding_window=None,
    ),
    "num_local_experts is 100000000",
  ),
  "config_deep": (text("config.json", '{"a":' * 100_000), "nested too deep"),
  "config_nan": (edit(rms_norm_eps=float("nan")), "NaN is not a finite number"),
  "config_infinity": (text("config.json", '{"rope_theta": 1e999}'), "not a finite number"),
  "config_digits": (text("config.json", '{"a": ' + "1" * 10**6 + "}"), "is not JSON"),
  "config_twice": (text("config.json", '{"a": 1, "a": 2}'), "duplicate key 'a'"),
  "config_list": (text("config.json", "[]"), "is not a JSON mapping"),
  "config_long": (lambda f: os.truncate(f / "config.json", 10**12), "the limit for such a file"),
  "config_types": (edit(hidden_size=[16], rope_scaling=5, quantization_config=3), "config.json"),
  "tokenizer_long": (
    lambda f: os.truncate(f / "tokenizer.json", 10**12),
    "the limit for such a file",
  ),
  "tokenizer_deep": (text("tokenizer.json", "[" * 10**6), "is not a tokenizer.json"),
  "tokenizer_huge_id": (
    text("tokenizer.json", '{"model": {"type": "WordLevel", "vocab": {"a": 4294967295}, '
      '"unk_token": "a"}, "added_tokens": []}'),
    "4294967296 ids",
  ),
  "byte_order_mark": (
    lambda f: (f / "config.json").write_text("{}", encoding="utf-8-sig"),
    "config.json begins with a byte order mark: save it in UTF-8 without one",
  ),
  "tokenizer_junk": (
    lambda f: only_sentencepiece(f, b"\x0a\x05" + b"x" * 99),
    "not a SentencePiece model",
  ),
  "tokenizer_empty": (lambda f: only_sentencepiece(f, b""), "is empty"),
  "eos_no_text": (text("tokenizer_config.json", '{"eos_token": [1]}'), "eos_token is not a string"),
}  # fmt: skip
META = {
  "pth_bomb": (bomb, "compressed, which torch.save never does"),
  "pth_listing_bomb": (
    pth(b"\0" * 10**8, compression=zipfile.ZIP_DEFLATED),
    "compressed, which torch.save never does",
  ),
  "pth_listing_long": (pth(b"\0" * 10**7), "lists its weights in more than"),
  "pth_code": (pth(pickle.dumps({"a": os.system}, 2)), "needs posix.system"),
  "pth_instance": (pth(pickle.dumps(pathlib.PurePosixPath("a"), 2)), "more than weights"),
  "pth_memory": (pth(b"\x80\x02}r\xff\xff\xff\x7f."), "holds more than named weights|missing"),
  "pth_tuples": (pth(b"\x80\x02)" + b"\x85" * 500_000 + b"."), "more than named weights"),
  "pth_instructions": (pth(b"\x80\x02" + b")" * 2_000_000), "more than 1,000,000 instructions"),
  "pth_many": (pth(b"\x80\x02" + b"N0" * 10), "more than weights"),
  "pth_outside": (moved_out("consolidated.00.pth"), "copy the file into the folder"),
  "pth_pipe": (replaced("consolidated.00.pth", os.mkfifo), "is a pipe, not a file"),
  "pth_no_zip": (text("consolidated.00.pth", "x" * 1000), "not a file of torch.save"),
  "params_pipe": (replaced("params.json", os.mkfifo), "is a pipe, not a file"),
  "params_zero": (text("params.json", '{"dim": 16, "n_heads": 0}'), "lacks n_layers"),
  "params_layers": (
    text("params.json", '{"dim":16,"n_layers":100000000,"n_heads":4,"n_kv_heads":2,"norm_eps":1}'),
    "n_layers: expected an int",
  ),
}


def _at(path, content):
  with open(path, "r+b") as file:
    file.write(content)


def refused(kind, folder, capfd):
  """Runs the command, and returns the line that it printed."""
  with damaged_files.within(20):
    assert run([f"--from={kind}", f"--path={folder}", f"--to={folder.parent / 'made'}"]) == 2
  out, error = capfd.readouterr()
  assert error.startswith("paxlike-convert: ") and error.count("\n") == 1 and not out
  assert len(error) < 3000 and "Traceback" not in error
  assert not list(folder.parent.glob("*made*"))
  return error


@pytest.mark.parametrize(("attack", "said"), HUGGING_FACE.values(), ids=HUGGING_FACE)
def test_a_folder_of_hugging_face_that_attacks_is_refused(tmp_path, capfd, attack, said):
  folder = tmp_path / "model"
  tiny_llama.write(folder)
  write_tokenizer(folder)
  attack(folder)
  assert said in refused("hf", folder, capfd)


@pytest.mark.parametrize(("attack", "said"), META.values(), ids=META)
def test_a_folder_of_meta_that_attacks_is_refused(tmp_path, capfd, attack, said):
  folder = tmp_path / "model"
  write_meta(folder)
  attack(folder)
  line = refused("meta", folder, capfd)
  assert any(one in line for one in said.split("|"))


def test_what_the_attacks_were_made_of_is_read(tmp_path):
  tiny_llama.write(tmp_path / "hf")
  write_tokenizer(tmp_path / "hf")
  write_meta(tmp_path / "meta")
  for kind in ("hf", "meta"):
    assert run([f"--from={kind}", f"--path={tmp_path / kind}", "--to=x", "--dry_run"]) == 0


def test_a_cache_of_hugging_face_is_read_through_its_links(tmp_path, capfd):
  repository = tmp_path / "hub" / "models--a--b"
  tiny_llama.write(repository / "blobs")
  snapshot = repository / "snapshots" / "0123"
  snapshot.mkdir(parents=True)
  for number, path in enumerate(sorted((repository / "blobs").iterdir())):
    blob = path.rename(path.with_name(f"{number}abc"))
    (snapshot / path.name).symlink_to(f"../../blobs/{blob.name}")
  assert run(["--from=hf", f"--path={snapshot}", "--to=x", "--dry_run"]) == 0
  (tmp_path / "model").symlink_to(snapshot)
  assert run(["--from=hf", f"--path={tmp_path / 'model'}", "--to=x", "--dry_run"]) == 0
  capfd.readouterr()
  # Blobs that are elsewhere themselves are not the cache's.
  (repository / "blobs").rename(tmp_path / "elsewhere")
  (repository / "blobs").symlink_to(tmp_path / "elsewhere")
  assert "copy the file into the folder" in refused("hf", snapshot, capfd)


@pytest.mark.slow
def test_attacks_on_memory_are_refused_in_a_gigabyte(tmp_path):
  attacks = {"hf": HUGGING_FACE, "meta": META}
  names = (
    "pth_bomb",
    "pth_listing_bomb",
    "pth_memory",
    "header_long",
    "header_lists",
    "header_deep",
  )
  names += ("tokenizer_long", "config_long", "vocabulary", "experts", "layers_10_to_30")
  folders = []
  for name in names:
    kind = "meta" if name in META else "hf"
    folder = tmp_path / name
    write_meta(folder) if kind == "meta" else tiny_llama.write(folder)
    if "tokenizer" in name:
      write_tokenizer(folder)
    attacks[kind][name][0](folder)
    folders.append((kind, folder))
  program = (
    "import resource, sys\n"
    "from paxlike.convert import importing\n"
    "from paxlike.convert.main import run\n"
    "used = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
    "resource.setrlimit(resource.RLIMIT_AS, (used + 2**30,) * 2)\n"
    "for kind, path in zip(sys.argv[1::2], sys.argv[2::2]):\n"
    "  assert run([f'--from={kind}', f'--path={path}', '--to=unused', '--dry_run']) == 2\n"
  )
  arguments = [str(part) for pair in folders for part in pair]
  done = subprocess.run(
    [sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=False
  )
  assert done.returncode == 0, done.stderr
  assert done.stderr.count("\n") == len(names) and "memory of this process" not in done.stderr


def test_a_pickle_cannot_call_or_make_anything_else():
  for instructions in (
    b"cos\nsystem\n.",
    b"ctorch._utils\n_rebuild_tensor_v2\n)R.",
    b"N)R.",
    b"(b.",
  ):
    with pytest.raises(UserError):
      torch_pickle.load(b"\x80\x02" + instructions)


@pytest.mark.fuzz
@pytest.mark.parametrize("name", damaged_files.FORMATS)
def test_damaged_files_are_read_or_refused(tmp_path, name, capfd):
  # Of all formats together as many as there are inputs of the other campaigns.
  count = math.ceil(campaign.EXAMPLES / len(damaged_files.FORMATS)) or 20
  seed = random.randrange(2**32) if campaign.EXAMPLES else 0
  counts = damaged_files.campaign(name, tmp_path / "damaged", count=count, seed=seed)
  campaign.COUNTS[name].update(counts)
  assert counts["refused"] > 5
  assert "Traceback" not in capfd.readouterr().err
