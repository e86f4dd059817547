"""A tokenizer of bytes and chat templates for tests, in the manners that people's models have."""

from functools import cache
from typing import Any

SPECIAL = (
    "<pad>", "<eos>", "<bos>", "<|im_start|>", "<|im_end|>", "<|head|>", "<|/head|>", "<|eot|>", "<turn>",
    "</turn>", "<end>",
)  # fmt: skip

CALLS = (
    "{% for c in m.tool_calls or [] %}"
    "[{{ c.function.name }}({{ c.function.arguments | tojson }})]"
    "{% endfor %}"
)
LISTED = "{% if tools %}{% for t in tools %}[{{ t | tojson }}]{% endfor %}{% endif %}"

# a system prompt of its own where the messages have none
CHATML = f"""
{{%- if messages[0]['role'] != 'system' %}}<|im_start|>system
Be kind.{LISTED}<|im_end|>
{{% endif %}}
{{%- for m in messages %}}<|im_start|>{{{{ m['role'] }}}}
{{{{ m['content'] }}}}{{% if loop.first and m['role'] == 'system' %}}{LISTED}{{% endif %}}{CALLS}<|im_end|>
{{% endfor %}}
{{%- if add_generation_prompt %}}<|im_start|>assistant
{{% endif %}}"""

# a token that begins the text, tools in the first turn, turns of tools by another name
LLAMA3 = f"""
{{%- set style = style or 'plain' %}}{{{{- bos_token }}}}
{{%- for m in messages %}}
{{%- set role = 'ipython' if m.role == 'tool' else m.role %}}
{{{{- '<|head|>' + role + '<|/head|>\n\n' }}}}
{{%- if loop.first and style == 'dated' %}}{{{{ '26 Jul\n' }}}}{{% endif %}}
{{%- if loop.first %}}{LISTED}{{% endif %}}{{{{ m.content | trim }}}}{CALLS}<|eot|>
{{%- endfor %}}
{{%- if add_generation_prompt %}}{{{{ '<|head|>assistant<|/head|>\n\n' }}}}{{% endif %}}"""

# neither a system prompt nor two turns of one side
GEMMA2 = """
{{- bos_token }}
{%- for m in messages %}
{%- if m.role == 'system' %}{{ raise_exception('no system role here') }}{% endif %}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('turns alternate') }}{% endif %}
{{- '<turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' }}
{{- m.content | trim }}{{ '</turn>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<turn>model\n' }}{% endif %}"""

# thoughts of earlier turns are dropped; without thinking they are there and empty
QWEN3 = f"""
{{%- set ns = namespace(last=-1) %}}
{{%- for m in messages if m.role == 'user' %}}{{% set ns.last = messages.index(m) %}}{{% endfor %}}
{{%- for m in messages %}}{{{{ '<|im_start|>' + m.role + '\n' }}}}
{{%- if m.role == 'assistant' %}}
{{%- set parts = m.content.split('</think>') %}}
{{%- set thought = m.reasoning_content or (parts[0].split('<think>')[-1] if parts | length > 1 else '') %}}
{{%- if loop.index0 > ns.last %}}{{{{ '<think>\n' + thought.strip('\n') + '\n</think>\n\n' }}}}{{% endif %}}
{{{{- parts[-1].lstrip('\n') }}}}{CALLS}
{{%- else %}}{{{{ m.content }}}}{{% endif %}}{{{{ '<|im_end|>\n' }}}}
{{%- endfor %}}
{{%- if add_generation_prompt %}}{{{{ '<|im_start|>assistant\n' }}}}
{{%- if enable_thinking is defined and not enable_thinking %}}{{{{ '<think>\n\n</think>\n\n' }}}}{{% endif %}}
{{%- endif %}}"""

# marks around what the assistant says, but not around the token that ends it
MARKED = """
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}
{%- if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}
{%- else %}{{ m.content }}{% endif %}{{ '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

# no token of its own ends a turn
BARE = """
{%- for m in messages %}{{ {'user': 'Q', 'assistant': 'A'}[m.role] + ': ' + m.content + '\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ 'A: ' }}{% endif %}"""

# asks for a thought, and shows answers without one
ASKED = """
{%- for m in messages %}<|head|>{{ m.role }}<|/head|>{{ m.content.split('</think>')[-1] }}<|eot|>{% endfor %}
{%- if add_generation_prompt %}{{ '<|head|>assistant<|/head|><think>\n' }}{% endif %}"""


@cache
def _core(more: tuple[str, ...] = ()) -> Any:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    # every byte is a token, and two ends of a line are one, as in the vocabularies of real models
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {c: i for i, c in enumerate([*SPECIAL, *alphabet, "ĊĊ", *more])}
    core = Tokenizer(models.BPE(vocab=vocab, merges=[("Ċ", "Ċ")]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(x, special=True, normalized=False) for x in (*SPECIAL, *more)])
    return core


def tokenizer(template: str | None, *, end: str = "<eos>", more: tuple[str, ...] = ()) -> Any:
    """A tokenizer of its own, with that chat template, that end of a sequence and `more` special tokens."""
    from transformers import PreTrainedTokenizerFast

    names = {"pad_token": "<pad>", "eos_token": end, "bos_token": "<bos>"}
    return PreTrainedTokenizerFast(tokenizer_object=_core(more), chat_template=template, **names)


def ending(ends: str = "<eos>") -> Any:
    """A tokenizer without a chat template that puts <bos> before and `ends` behind every text."""
    from tokenizers.processors import TemplateProcessing

    tok = tokenizer(None)
    special = [(x, tok.convert_tokens_to_ids(x)) for x in {"<bos>", *ends.split()}]
    tok.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"<bos> $A {ends}", special_tokens=special
    )
    return tok


def shown(tok: Any, lesson: Any) -> str:
    """A lesson as text, «what is learned» in quotes."""
    parts = []
    for token, learned in zip(lesson.ids, lesson.mask, strict=True):
        text = tok.decode([token])
        if learned:
            text = f"«{text}»"
        parts.append(text)
    return "".join(parts).replace("»«", "")


def folder(path: Any, template: str | None) -> str:
    """A folder of a narrow model that speaks these bytes."""
    import tiny

    from rft_fn import model

    tok = tokenizer(template)
    lm = tiny.llama(vocab_size=len(tok), max_position_embeddings=512, num_hidden_layers=1)
    model.save(path, lm, tok)
    return str(path)
