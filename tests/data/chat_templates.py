# ruff: noqa: E501, RUF001
"""Chat templates of the shapes that public models have, written for these tests, with the tokens that end an answer.

They have the turns, the special tokens and the peculiarities of each family (what opens an answer, what an earlier turn
loses, how tools are shown), but not the families' own texts.
"""

CALLS = "{% for call in m.tool_calls or [] %}<tool_call>\n{{ call.function | tojson }}\n</tool_call>{% endfor %}"
TOOLS = "{% if tools %}<|im_start|>system\n# Tools\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
LAST_QUERY = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}"
)
SPLIT = (
    "{% set content, thought = m.content or '', m.reasoning_content or '' %}"
    "{% if '</think>' in content %}{% set thought = content.split('</think>')[0].split('<think>')[-1].strip() %}"
    "{% set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}"
)
THINKS = "<think>\n{{ thought }}\n</think>\n\n"

# ChatML, as Qwen2.5 has it.
QWEN25 = (
    TOOLS + "{% for m in messages %}<|im_start|>{{ 'user\n<tool_response>' if m.role == 'tool' else m.role }}\n"
    "{{ m.content or '' }}"
    + CALLS
    + "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Reasoning is written after the last question only, and the model opens it itself.
QWEN3 = (
    TOOLS + LAST_QUERY + "{% for m in messages %}{% if m.role == 'assistant' %}" + SPLIT + "<|im_start|>assistant\n"
    "{% if loop.index0 > ns.last and (loop.last or thought) %}"
    + THINKS
    + "{% endif %}{{ content }}"
    + CALLS
    + "<|im_end|>\n{% elif m.role == 'tool' %}<|im_start|>user\n<tool_response>\n{{ m.content }}\n</tool_response><|im_end|>\n"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
# The prompt of an answer opens the reasoning, and arguments of calls are shown only if they are an object.
QWEN35 = (
    QWEN3.replace("(loop.last or thought)", "true")
    .replace(
        "{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}",
        "<think>\n{{ '\n</think>\n\n' if enable_thinking is false }}",
    )
    .replace(
        "{{ call.function | tojson }}",
        "<function={{ call.function.name }}>{% if call.function.arguments is mapping %}"
        "{% for k, v in call.function.arguments.items() %}<parameter={{ k }}>{{ v }}{% endfor %}{% endif %}</function>",
    )
)
LLAMA3 = (
    "{{ bos_token }}{% if tools %}<|start_header_id|>system<|end_header_id|>\n\n{{ tools | tojson }}<|eot_id|>{% endif %}"
    "{% for m in messages %}<|start_header_id|>{{ 'ipython' if m.role == 'tool' else m.role }}<|end_header_id|>\n\n"
    "{% if 'tool_calls' in m %}{% if m.tool_calls | length != 1 %}{{ raise_exception('one call at once') }}{% endif %}"
    "{{ m.tool_calls[0].function | tojson }}{% else %}{{ m.content | trim }}{% endif %}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
# The system's words become the user's, and roles take turns.
GEMMA3 = (
    "{{ bos_token }}{% set first = messages[0].content + '\n\n' if messages[0].role == 'system' else '' %}"
    "{% set rest = messages[1:] if first else messages %}{% for m in rest %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must take turns') }}{% endif %}<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{{ first if loop.first }}{{ m.content | trim }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
# A text without a prompt of an answer ends with the tokenizer's eos token.
PHI3 = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% else %}{{ eos_token }}{% endif %}"
)
# The first Phi-3 knew no system.
PHI3_FIRST = PHI3.replace("{% for m in messages %}", "{% for m in messages if m.role != 'system' %}")
PHI4 = "{% for m in messages %}<|im_start|>{{ m.role }}<|im_sep|>{{ m.content }}<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant<|im_sep|>{% endif %}"
# Reasoning is left out of every turn, and the prompt of an answer opens it.
R1 = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}<｜User｜>{{ m.content }}{% elif m.role == 'assistant' %}"
    "<｜Assistant｜>{{ m.content.split('</think>')[-1] }}<｜end▁of▁sentence｜>{% else %}{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<｜Assistant｜><think>\n{% endif %}"
)
# Messages of several channels; an earlier turn keeps its last one and ends with another token.
GPT_OSS = (
    "{% if tools %}<|start|>developer<|message|>{{ tools | tojson }}<|end|>{% endif %}"
    "{% for m in messages %}{% if m.role == 'assistant' %}"
    "{% if m.thinking and loop.last %}<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>{% endif %}"
    "{% if m.tool_calls %}<|start|>assistant to=functions.{{ m.tool_calls[0].function.name }}<|channel|>commentary json<|message|>"
    "{{ m.tool_calls[0].function.arguments | tojson }}<|call|>{% else %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}"
    "{{ '<|return|>' if loop.last else '<|end|>' }}{% endif %}{% elif m.role == 'tool' %}<|start|>functions<|message|>{{ m.content | tojson }}<|end|>"
    "{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
# Nothing but a bracket precedes an answer, and tools are shown before the last question.
MISTRAL = (
    "{{ bos_token }}" + LAST_QUERY + "{% for m in messages %}{% if m.role == 'user' %}"
    "{% if tools and loop.index0 == ns.last %}[AVAILABLE_TOOLS] {{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}[INST] {{ m.content }}[/INST]"
    "{% elif m.role == 'tool' %}[TOOL_RESULTS] {{ m.content }}[/TOOL_RESULTS]{% elif m.tool_calls is defined %}[TOOL_CALLS] "
    "{{ m.tool_calls | map(attribute='function') | list | tojson }}{{ eos_token }}{% else %} {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
)

# The template, the tokenizer's eos and bos token, and the tokens that end an answer.
FAMILIES = {
    "Qwen2.5": (QWEN25, "<|im_end|>", None, ["<|im_end|>", "<|endoftext|>"]),
    "Qwen3": (QWEN3, "<|im_end|>", None, ["<|im_end|>", "<|endoftext|>"]),
    "Qwen3.5": (QWEN35, "<|im_end|>", None, ["<|im_end|>", "<|endoftext|>"]),
    "Llama 3": (LLAMA3, "<|eot_id|>", "<|begin_of_text|>", ["<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"]),
    "Gemma 3": (GEMMA3, "<eos>", "<bos>", ["<eos>", "<end_of_turn>"]),
    "Phi-3": (PHI3, "<|endoftext|>", None, ["<|endoftext|>", "<|assistant|>", "<|end|>"]),
    "Phi-4": (PHI4, "<|im_end|>", None, ["<|endoftext|>", "<|im_end|>"]),
    "DeepSeek-R1": (R1, "<｜end▁of▁sentence｜>", "<｜begin▁of▁sentence｜>", ["<｜end▁of▁sentence｜>"]),
    "gpt-oss": (GPT_OSS, "<|return|>", None, ["<|return|>", "<|endoftext|>", "<|call|>"]),
    "Mistral": (MISTRAL, "</s>", "<s>", ["</s>"]),
}  # fmt: skip
