"""Chat templates wherever models keep them: texts and ids of chats are those of transformers, or both refuse."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from campaigns.front_door.folders import edit_json
from campaigns.front_door.tokenizers import bpe, write
from streamrl.pretrained.chat_template import ChatError
from streamrl.pretrained.tokenizer import load_tokenizer

USER = {"role": "user", "content": "  1 <b>& é\n"}
SYSTEM = {"role": "system", "content": "Be {{ brief }}."}
SAYS = {"role": "assistant", "content": "<think>\nhm\n</think>\n\n2 "}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": [None, True, 1.5, "é"]}}}
CALLS = {"role": "assistant", "content": None, "tool_calls": [CALL]}
RESULT = {"role": "tool", "name": "add", "content": "3"}
TOOL = {"type": "function", "function": {"name": "add", "description": "<sum> é", "parameters": {"default": None}}}
PARTS = {"role": "user", "content": [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]}
CHATS: tuple[tuple[list[Mapping[str, Any]], dict[str, Any]], ...] = (
    ([USER], {}),
    ([SYSTEM, USER], {"enable_thinking": False}),
    ([USER, SAYS, USER], {}),
    ([SYSTEM, USER, SAYS], {}),
    ([USER, {"role": "assistant", "content": "1 + "}], {}),
    ([USER, CALLS, RESULT], {"tools": [TOOL]}),
    ([USER], {"tools": []}),
    ([PARTS], {}),
    ([SYSTEM], {}),
    ([USER, USER], {"bos_token": "</s>"}),
)
TURNS = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m['content'] }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TEMPLATES = {
    "turns": TURNS,
    "trimmed turns": TURNS.replace("m['content']", "m['content'] | trim"),
    "a BOS, and turns that must alternate": "{{ bos_token }}{% if messages[0].role == 'system' %}{{ raise_exception("
    "'System role not supported') }}{% endif %}{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0"
    ") %}{{ raise_exception('Roles must alternate') }}{% endif %}[{{ m.content | trim }}]{% endfor %}",
    "a date": "{%- if date_string is not defined %}{%- set date_string = strftime_now('%d %b %Y') %}{%- endif %}\n"
    "Today: {{ date_string }}\n" + TURNS,
    "tools as JSON": "{%- if tools %}{{ tools | tojson(indent=4) }}{% for t in tools %}{{ t | tojson }}{% endfor %}"
    "{%- endif %}" + TURNS,
    "calls as JSON": "{% for m in messages %}{% if m.tool_calls is defined %}{% for c in m.tool_calls %}"
    "{{ c.function.name }}({{ c.function.arguments | tojson }}){% endfor %}{% else %}{{ m.content }}{% endif %}"
    "{% endfor %}",
    "thoughts that history loses": "{% for m in messages %}{% set c = m.content %}{% if m.role == 'assistant' and "
    "'</think>' in c %}{% set c = c.split('</think>')[-1].lstrip('\\n') %}{% endif %}[{{ c }}]{% endfor %}",
    "a namespace": "{%- set ns = namespace(last=-1, seen=[]) %}{%- for m in messages[::-1] %}{%- if "
    "m.role == 'user' and ns.last < 0 %}{%- set ns.last = (messages | length - 1) - loop.index0 %}{%- endif %}"
    "{%- endfor %}{{ ns.last }}" + TURNS,
    "break and continue": "{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}{% if "
    "loop.index > 2 %}{% break %}{% endif %}{{ m.content }}{% endfor %}",
    "generation blocks": "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}</s>"
    "{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}",
    "macros": "{% macro turn(m, last=false) -%}<{{ m.role }}>{{ caller() if caller else m.content }}{%- endmacro %}"
    "{% for m in messages %}{{ turn(m, loop.last) }}{% call turn(m) %}x{% endcall %}{% endfor %}",
    "parts of a message": "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for p in "
    "m.content %}{{ p.text }}{% endfor %}{% endif %}{% endfor %}",
    "what is forbidden": "{{ messages.__class__.__mro__ }}",
    "a list that is changed": "{{ messages.append(1) }}",
    "an error of syntax": "{% for m in messages %}",
    "CRLF": TURNS.replace("\n", "\r\n"),
    "a line break at its end": TURNS + "\n",
    "half a block": "  {% if messages %}\n    {{ messages[0].content }}\n  {%- endif %}  \n",
    "names of tokens": "{{ bos_token }}{{ eos_token }}{{ unk_token }}{{ pad_token }}{{ cls_token }}{{ x_token }}",
    "tools that are not asked for": "{{ tools }}{{ documents }}{{ builtin_tools is defined }}{{ tools is none }}"
    + TURNS,
    "filters of jinja2": "{{ messages[0] | dictsort }}{{ messages | map(attribute='role') | join }}",
}


def compare(model: Path, chats: Sequence[tuple[list[Mapping[str, Any]], dict[str, Any]]] = CHATS) -> str:
    """The first chat that the product writes otherwise than transformers, or takes where that refuses; '': none."""
    from transformers import AutoTokenizer

    ours, theirs = load_tokenizer(model), AutoTokenizer.from_pretrained(model)
    for messages, given in chats:
        tools, arguments = given.get("tools"), {k: value for k, value in given.items() if k != "tools"}
        begun = messages[-1]["role"] == "assistant"
        how = {"tools": tools, "continue_final_message": begun, "add_generation_prompt": not begun, **arguments}
        try:
            text = theirs.apply_chat_template(messages, tokenize=False, **how)
            expected = (text, list(theirs.apply_chat_template(messages, return_dict=False, **how)))
        except Exception as error:  # noqa: BLE001 - of a template, or of transformers
            expected = (type(error).__name__, [])
        try:
            found = (
                ours.render_chat(messages, tools, arguments),
                ours.encode_chat(messages, tools, arguments).tolist(),
            )
        except ChatError as error:
            found = (str(error), [])
        if found != expected and (found[1] or expected[1]):
            return f"{[m['role'] for m in messages]}, {given} is {found}, of transformers {expected}"
    return ""


def _kept(config: object = None, tokens: Mapping[str, Any] = {}, **files: str) -> Callable[[Path], str]:
    """Templates in ``tokenizer_config.json``, and files of the names given, ``__`` for a folder."""

    def try_it(directory: Path) -> str:
        model = write(directory, bpe())
        edit_json(model / "tokenizer_config.json", lambda content: content.update(chat_template=config, **tokens))
        (model / "additional_chat_templates").mkdir(exist_ok=True)
        for name, text in files.items():
            (model / (name.replace("__", "/") + ".jinja")).write_text(text, newline="")
        return compare(model)

    return try_it


def _of_vllm(directory: Path) -> str:
    """All templates that vLLM ships."""
    spec = find_spec("vllm.transformers_utils.chat_templates")
    found = sorted(Path(str(spec.origin)).parent.glob("*.jinja")) if spec else []
    said = [f"{file.name}: {_kept(chat_template=file.read_text())(directory)}" for file in found]
    return "; ".join(one for one in said if not one.endswith(": "))


_named = [{"name": "default", "template": "D" + TURNS}, {"name": "tool_use", "template": "T{{ tools | tojson }}"}]
VARIANTS: dict[str, Callable[[Path], str]] = {
    **{name: _kept(chat_template=template) for name, template in TEMPLATES.items()},
    "of vLLM": _of_vllm,
    "in tokenizer_config": _kept(TURNS),
    "named ones in tokenizer_config": _kept(_named),
    "a tool_use without default": _kept(_named[1:]),
    "a file beside named ones": _kept(_named, chat_template="F" + TURNS),
    "additional ones": _kept(None, chat_template="F" + TURNS, additional_chat_templates__tool_use="A{{ tools }}"),
    "additional ones beside one in tokenizer_config": _kept(
        "C" + TURNS, chat_template="F" + TURNS, additional_chat_templates__tool_use="A{{ tools }}"
    ),
    "an additional default": _kept("C", additional_chat_templates__default="A" + TURNS),
    "none": _kept(None),
    "tokens as objects": _kept(
        "{{ bos_token }}{{ x_token }}", {"x_token": {"__type": "AddedToken", "content": "<new>"}}
    ),
    "tokens that are null": _kept("[{{ bos_token }}]", {"bos_token": None, "add_bos_token": True}),
}
