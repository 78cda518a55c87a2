# SPDX-License-Identifier: Apache-2.0
"""The built-in templates of `templates` in Jinja, for export beside a tokenizer."""

_SYSTEM_IN_USER = (
  "{% if messages|length > 1 and messages[0]['role'] == 'system' %}"
  "{% set first = messages[0]['content'] %}{% set messages = messages[1:] %}"
  "{% else %}{% set first = none %}{% endif %}"
)
_CONTENT = (
  "{% set content = message['content'] if first is none or not loop.first"
  " else SYSTEM ~ message['content'] %}"
)
_PLAIN = (
  "{% for message in messages %}{{ message['content'] }}"
  "{% if message['role'] == 'assistant' %}EOS{% endif %}{% endfor %}"
)
_ALPACA = (
  "{% for message in messages %}"
  "{% if message['role'] == 'assistant' %}{{ '### Response:\\n' ~ message['content'] }}EOS"
  "{% else %}{% if message['role'] == 'user' %}{{ '### Instruction:\\n' }}{% endif %}"
  "{{ message['content'] ~ '\\n\\n' }}{% endif %}{% endfor %}"
  "{% if add_generation_prompt %}{{ '### Response:\\n' }}{% endif %}"
)
_CHATML = (
  "{% for message in messages %}"
  "{{ '<|im_start|>' ~ message['role'] ~ '\\n' ~ message['content'] ~ '<|im_end|>\\n' }}"
  "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
_LLAMA3 = (
  "{% for message in messages %}{{ '<|start_header_id|>' ~ message['role'] ~ '<|end_header_id|>"
  "\\n\\n' ~ message['content'] ~ '<|eot_id|>' }}{% endfor %}{% if add_generation_prompt %}"
  "{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"
)
_GEMMA = (
  _SYSTEM_IN_USER
  + "{% for message in messages %}"
  + _CONTENT.replace("SYSTEM", "first ~ '\\n\\n'")
  + "{% set role = 'model' if message['role'] == 'assistant' else message['role'] %}"
  "{{ '<start_of_turn>' ~ role ~ '\\n' ~ content ~ '<end_of_turn>\\n' }}"
  "{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"
)
_LLAMA2 = (
  _SYSTEM_IN_USER
  + "{% for message in messages %}"
  + _CONTENT.replace("SYSTEM", "'<<SYS>>\\n' ~ first ~ '\\n<</SYS>>\\n\\n'")
  + "{% if message['role'] == 'assistant' %}{{ content }}EOS"
  "{% else %}{{ '[INST] ' ~ content ~ ' [/INST]' }}{% endif %}{% endfor %}"
)
_SOURCES = {
  "alpaca": _ALPACA,
  "chatml": _CHATML,
  "gemma": _GEMMA,
  "llama2": _LLAMA2,
  "llama3": _LLAMA3,
  "plain": _PLAIN,
}


def source(name: str, *, bos: str, eos: str) -> str:
  """Returns the Jinja source of a template of `templates.TEMPLATES`.

  Args:
    name: The template.
    bos: The text of the token that begins conversations; "" if there is none.
    eos: The text of the token that ends answers, for templates without an end token of their own.
  """

  def spelt(text: str) -> str:
    return "{{ " + repr(text) + " }}" if text else ""

  return spelt(bos) + _SOURCES[name].replace("EOS", spelt(eos))
