# SPDX-License-Identifier: Apache-2.0
"""The folder of a newcomer: a model of Hugging Face, conversations, and a module of experiments."""

import json

from helpers import tiny_llama
from helpers.tiny_tokenizers import words, write_json

CHAT = (
  "{% for m in messages %}t3 {{ m['content'] }}{% if m['role'] == 'assistant' %} <end>"
  "{% endif %}{% endfor %}{% if add_generation_prompt %}{% endif %}"
)
MODULE = '''
import fiddle as fdl

from paxlike.experiments import datasets
from paxlike.experiments.llama import Llama
from {name}_parts import my_init


class MyChat(datasets.Jsonl, Llama):
  """A chat."""

  VOCAB_SIZE = 64
  MAX_SEQ_LEN = 32
  NUM_LAYERS = 2
  MODEL_DIMS = 16
  HIDDEN_DIMS = 24
  NUM_HEADS = 4
  NUM_KV_HEADS = 2
  PERCORE_BATCH_SIZE = 1
  LEARNING_RATE = 1e-2
  LR_COS_WARMUP = 1
  MAX_STEPS = 1
  TOKENIZER = "huggingface"
  VOCAB_PATH = "ours/tokenizer.json"
  DATA_PATH = "chats.jsonl"
  CHECKPOINT_RESTORE_PATH = "ours"
  FPROP_DTYPE = "float32"


class Mine(MyChat):
  """With a function of the user's."""

  def init(self):
    return fdl.Partial(my_init, std=0.1)
'''
PARTS = """
from paxlike import layers


def my_init(*args, **kwargs):
  return layers.gaussian(*args, **kwargs)
"""


def make(folder, name, *, eos=1, template=CHAT):
  """Writes `theirs`, `chats.jsonl` and the module of this name."""
  source = folder / "theirs"
  config = {**tiny_llama.CONFIG, "eos_token_id": eos, "bos_token_id": 0}
  tiny_llama.write(source, config=config)
  vocabulary = words()
  vocabulary.add_special_tokens(["<|im_start|>", "<|im_end|>"])
  vocabulary.save(str(source / "tokenizer.json"))
  settings = {"bos_token": "<s>", "eos_token": "</s>"}
  write_json(source / "tokenizer_config.json", settings | {"chat_template": template})
  write_json(source / "generation_config.json", {"eos_token_id": eos, "temperature": 0.6})
  talks = [
    [{"role": "user", "content": f"t{i}"}, {"role": "assistant", "content": f"t{i + 1} t5"}]
    for i in range(5, 45)
  ]
  lines = [json.dumps({"messages": talk}) for talk in talks]
  (folder / "chats.jsonl").write_text("\n".join(lines))
  (folder / f"{name}.py").write_text(MODULE.replace("{name}", name))
  (folder / f"{name}_parts.py").write_text(PARTS)
