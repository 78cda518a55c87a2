# SPDX-License-Identifier: Apache-2.0
"""What is said to a model, and what it learns to say."""

import json

import numpy as np
import pytest
import tokenizers

from paxlike.data.chat import templates, tokenizer_template
from paxlike.data.tokenizers.huggingface_tokenizer import HuggingFaceTokenizer
from paxlike.data.tokenizers.tokenizer import ByteTokenizer
from paxlike.data.tuning.conversations import Conversations
from paxlike.data.tuning.preferences import ScoredPreferences
from paxlike.errors import UserError

TALK = [
  {"role": "system", "content": "Be brief."},
  {"role": "user", "content": "Hi"},
  {"role": "assistant", "content": "Hello!"},
  {"role": "user", "content": "Bye"},
  {"role": "assistant", "content": "See you."},
]
ANSWER = {"role": "assistant", "content": "b"}
OWN = (
  "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] | trim }}"
  "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
  monkeypatch.setenv("PAXLIKE_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize(
  ("name", "whole", "learnt"),
  [
    ("plain", "Be brief.HiHello!ByeSee you.", ["Hello!", "See you."]),
    (
      "alpaca",
      "Be brief.\n\n### Instruction:\nHi\n\n### Response:\nHello!### Instruction:\nBye\n\n"
      "### Response:\nSee you.",
      ["Hello!", "See you."],
    ),
    (
      "chatml",
      "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
      "<|im_start|>assistant\nHello!<|im_end|>\n<|im_start|>user\nBye<|im_end|>\n"
      "<|im_start|>assistant\nSee you.<|im_end|>\n",
      ["Hello!<|im_end|>", "See you.<|im_end|>"],
    ),
    (
      "gemma",
      "<start_of_turn>user\nBe brief.\n\nHi<end_of_turn>\n<start_of_turn>model\nHello!"
      "<end_of_turn>\n<start_of_turn>user\nBye<end_of_turn>\n<start_of_turn>model\nSee you."
      "<end_of_turn>\n",
      ["Hello!<end_of_turn>", "See you.<end_of_turn>"],
    ),
    (
      "llama2",
      "[INST] <<SYS>>\nBe brief.\n<</SYS>>\n\nHi [/INST]Hello![INST] Bye [/INST]See you.",
      ["Hello!", "See you."],
    ),
    (
      "llama3",
      "<|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
      "<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
      "<|start_header_id|>assistant<|end_header_id|>\n\nHello!<|eot_id|>"
      "<|start_header_id|>user<|end_header_id|>\n\nBye<|eot_id|>"
      "<|start_header_id|>assistant<|end_header_id|>\n\nSee you.<|eot_id|>",
      ["Hello!<|eot_id|>", "See you.<|eot_id|>"],
    ),
  ],
)
def test_templates(name, whole, learnt):
  parts = templates.TEMPLATES[name](TALK)
  assert "".join(part.text for part in parts) == whole
  assert [part.text for part in parts if part.is_target] == learnt


def make(tmp_path, *rows, tokenizer=None, **options):
  path = tmp_path / "talks.jsonl"
  path.write_text("".join(json.dumps(row) + "\n" for row in rows))
  tokenizer = tokenizer or ByteTokenizer()
  return Conversations(path=str(path), tokenizer=tokenizer, vocab_size=400, **options)


def documents(corpus):
  tokens, offsets, columns = corpus.index()
  cuts = offsets[1:-1]
  return list(zip(np.split(tokens, cuts), np.split(columns["weights"], cuts), strict=True))


@pytest.mark.parametrize(
  "row",
  [
    {"prompt": "one and one is", "completion": " two"},
    {"instruction": "one and one is", "input": "", "output": " two"},
    {
      "prompt": [{"role": "user", "content": "one and one is"}],
      "completion": [{"role": "assistant", "content": " two"}],
    },
    {
      "messages": [
        {"role": "user", "content": "one and one is"},
        {"role": "assistant", "content": " two"},
      ]
    },
  ],
)
def test_only_answers_and_their_end_count(tmp_path, row):
  ((tokens, weights),) = documents(make(tmp_path, row))
  assert tokens.tolist() == [*b"one and one is two", 256]
  assert weights.tolist() == [0] * 14 + [1] * 5


def test_the_first_token_of_an_answer_counts_without_a_prompt_too(tmp_path):
  ((tokens, weights),) = documents(make(tmp_path, {"prompt": "", "completion": "a"}))
  assert tokens.tolist() == [256, ord("a"), 256]
  assert weights.tolist() == [0, 1, 1]


@pytest.mark.parametrize(
  "row",
  [
    {"prompt": "a"},
    {"prompt": "a", "completion": 1},
    {"messages": []},
    {"messages": [{"role": "user"}]},
    {"text": "a"},
  ],
)
def test_what_is_no_conversation_is_named(tmp_path, row):
  good = {"prompt": "a", "completion": "b"}
  with pytest.raises(UserError, match=r"talks\.jsonl:2: a record needs messages.*It has: "):
    make(tmp_path, good, row).index()


@pytest.mark.parametrize(
  ("messages", "more", "says"),
  [
    ([{"role": "user", "content": "a"}], {}, "no token has loss"),
    (
      [{"role": "user", "content": "a"}, {"role": "assistant"}],
      {},
      "needs a record|needs messages",
    ),
    ([{"role": "assistant", "content": "b", "thinking": "c"}], {}, "no place for thinking: set"),
    ([{"role": "assistant", "tool_calls": [{"name": "f"}]}], {}, "no place for .*tool_calls: set"),
    (
      [{"role": "assistant", "content": "b"}],
      {"tools": [{"name": "f"}]},
      "no place for tools: set",
    ),
    ([{"role": "assistant", "content": "b"}], {"tools": "f"}, "tools needs a list"),
  ],
)
def test_a_record_that_is_not_learnt_as_it_is_is_named(tmp_path, messages, more, says):
  good = {"prompt": "a", "completion": "b"}
  with pytest.raises(UserError, match=rf"talks\.jsonl:2: .*{says}"):
    make(tmp_path, good, {"messages": messages, **more}).index()


def test_a_mask_of_everything_is_refused(tmp_path, own):
  source = "{% generation %}{% for m in messages %}{{ m.content }}{% endfor %}{% endgeneration %}"
  (tmp_path / "chat_template.jinja").write_text(source)
  options = {"tokenizer": HuggingFaceTokenizer(own), "template": "tokenizer", "vocab_path": own}
  with pytest.raises(UserError, match=r"talks\.jsonl:1: all tokens have loss"):
    make(tmp_path, {"messages": TALK}, **options).index()


def test_what_changes_is_tokenized_again(tmp_path, capsys):
  make(tmp_path, {"prompt": "a", "completion": "b"})
  for template in ("plain", "plain", "chatml"):
    path = str(tmp_path / "talks.jsonl")
    documents(
      Conversations(path=path, tokenizer=ByteTokenizer(), vocab_size=400, template=template)
    )
  assert capsys.readouterr().err.count("tokenizing the conversations") == 2


def test_files_are_looked_for_before_anything_else(tmp_path):
  missing = Conversations(
    path=str(tmp_path / "none"), tokenizer=ByteTokenizer(), vocab_size=300, knob="EVAL_DATA_PATH"
  )
  with pytest.raises(UserError, match=r"EVAL_DATA_PATH=.*matches no file"):
    missing.check()
  make(tmp_path, {})
  path = str(tmp_path / "talks.jsonl")
  with pytest.raises(UserError, match="VOCAB_SIZE=100"):
    Conversations(path=path, tokenizer=ByteTokenizer(), vocab_size=100).check()


@pytest.fixture
def own(tmp_path):
  """The path of a tokenizer with special tokens and a template."""
  made = tokenizers.Tokenizer(tokenizers.models.BPE())
  made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore
  made.decoder = tokenizers.decoders.ByteLevel()  # pyright: ignore
  trainer = tokenizers.trainers.BpeTrainer(
    special_tokens=["<s>", "<|im_start|>", "<|im_end|>"],
    initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    show_progress=False,
  )
  made.train_from_iterator([message["content"] for message in TALK] * 3, trainer)
  made.save(str(tmp_path / "tokenizer.json"))
  config = {"bos_token": "<s>", "eos_token": "<|im_end|>", "chat_template": OWN}
  (tmp_path / "tokenizer_config.json").write_text(
    json.dumps(config | {"tokenizer_class": "PreTrainedTokenizerFast"})
  )
  return str(tmp_path / "tokenizer.json")


@pytest.mark.slow
def test_the_own_template_makes_what_transformers_makes(tmp_path, own):
  import transformers

  theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
  ours = HuggingFaceTokenizer(own)
  ((tokens, weights),) = documents(
    make(tmp_path, {"messages": TALK}, tokenizer=ours, template="tokenizer", vocab_path=own)
  )
  assert tokens.tolist() == theirs.apply_chat_template(TALK, return_dict=False)
  learnt = [ours.decode(run) for run in np.split(tokens, np.flatnonzero(np.diff(weights)) + 1)]
  assert [text for text in learnt if "Hello" in text or "See" in text] == ["Hello!\n", "See you.\n"]
  assert weights.sum() == len(ours.encode("Hello!<|im_end|>\nSee you.<|im_end|>\n"))


@pytest.mark.slow
def test_a_reward_model_scores_what_its_template_makes_of_any_answer(tmp_path, own):
  """Also where a model that is trained on it could not learn what the assistant writes."""
  import transformers

  theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
  ours = HuggingFaceTokenizer(own)
  corpus = ScoredPreferences(
    path=None, tokenizer=ours, vocab_size=400, template="tokenizer", vocab_path=own
  )
  config = json.loads((tmp_path / "tokenizer_config.json").read_text())
  config["chat_template"] = OWN.replace("['content']", "['content'].split('</think>')[-1]")
  (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
  asked, refused = {"role": "user", "content": "Hi"}, 0
  for said in ("Hello!", "", " ", "<think>Ends.</think>See", "</think>", "See<|im_end|>", "Hi "):
    talk = [asked, {"role": "assistant", "content": said}]
    expected = theirs.apply_chat_template(
      talk, return_dict=False, chat_template=config["chat_template"]
    )
    assert corpus.scored(talk).tolist() == expected
    try:
      corpus.document(talk)
    except UserError:
      refused += 1
  assert refused
  with pytest.raises(UserError, match="no answer of role assistant"):
    corpus.scored([asked])


@pytest.mark.slow
def test_templates_have_what_transformers_gives_them(tmp_path, own):
  import transformers

  (tmp_path / "tokenizer_config.json").write_text(
    json.dumps(
      {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "extra_special_tokens": {"image_token": "<img>"},
      }
    )
  )
  (tmp_path / "special_tokens_map.json").write_text('{"eos_token": "<|im_end|>"}')
  talk = [{"role": "user", "content": "é<>&'"}, {"role": "assistant", "content": "a"}]
  sources = (
    "{{ messages | tojson }}{{ messages | tojson(indent=2) }}",
    "{% if tools is none and documents is none %}none{% endif %}",
    "{{ eos_token }}{{ image_token }}{% if bos_token is defined %}wrong{% endif %}",
    "{{ strftime_now('%Y') }}",
    "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
  )
  for source in sources:
    (tmp_path / "chat_template.jinja").write_text(source)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    text, file, tokens = tokenizer_template.read(tmp_path / "tokenizer.json")
    values = {"messages": talk, "tools": None, "documents": None, **tokens}
    expected = theirs.apply_chat_template(talk, tokenize=False)
    assert tokenizer_template.TokenizerTemplate(text, file=file).render(values) == expected


def test_a_template_in_a_file_of_its_own_is_read(tmp_path, own):
  source = (
    "{% for m in messages %}{% if m.content == 'stop' %}{% break %}{% endif %}"
    "[{{ m.content }}]{% endfor %}"
  )
  (tmp_path / "chat_template.jinja").write_text(source)
  parts = templates.template("tokenizer", vocab_path=own)(TALK)
  assert "".join(part.text for part in parts) == "".join(f"[{m['content']}]" for m in TALK)


def test_templates_that_cannot_be_used_are_said(tmp_path, own):
  row = {"messages": TALK}
  config = tmp_path / "tokenizer_config.json"
  options = {"tokenizer": HuggingFaceTokenizer(own), "template": "tokenizer", "vocab_path": own}
  for source, says in (
    ("{{ messages | length }}", "does not render the content of the last"),
    ("{{ raise_exception('No system here') }}", "No system here"),
    ("{% if %}", "CHAT_TEMPLATE=tokenizer: "),
    ("{{ messages[0].role.what.who }}", "CHAT_TEMPLATE=tokenizer: .*what"),
  ):
    config.write_text(json.dumps({"chat_template": source}))
    with pytest.raises(UserError, match=says):
      make(tmp_path, row, **options).index()
  config.unlink()
  with pytest.raises(UserError, match=r"there is no template in .*tokenizer_config\.json"):
    make(tmp_path, row, **options).check()
