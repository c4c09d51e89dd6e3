"""A chat template, which anybody may have made, neither holds its process nor takes all of the memory."""

from __future__ import annotations

import pytest

from streamrl.pretrained.chat_template import ChatError, ChatFormat

MESSAGES = [{"role": "user", "content": "x"}]
LOOPS = "{% for a in range(90000) %}{% for b in range(90000) %}{% endfor %}{% endfor %}"
DOUBLED = "{% set n = namespace(s='ab') %}{% for a in range(60) %}{% set n.s = n.s OP n.s %}{% endfor %}"
PLAIN = """{{ 2 ** 10 }} {{ 'a' * 3 }} {{ [1] * 2 }} {{ 1 + 2 }} {{ 'a' ~ 3 ~ none }}
{%- for m in messages recursive %} {{ m.role ~ loop.index }}{% if m.parts %}{{ loop(m.parts) }}{% endif %}{% endfor %}
{%- for m in messages if m.role == 'tool' %}{% else %} no tool{% endfor %}"""


def write(template: str) -> str:
    return ChatFormat("model", {"default": template}, {}).write(MESSAGES, None, None, generation_prompt=True)


@pytest.mark.seconds(6)
@pytest.mark.parametrize(
    ("template", "problem"),
    [
        (LOOPS, "its loops have more than 10,000,000 iterations"),
        ("{{ ('a' * 1500000000) | length }}", "a text or a list of 1,500,000,000 parts"),
        ("{{ ([0] * 1500000000) | length }}", "a text or a list of 1,500,000,000 parts"),
        (DOUBLED.replace("OP", "~"), "a text or a list of 134,217,728 parts"),
        (DOUBLED.replace("OP", "+"), "a text or a list of 134,217,728 parts"),
        ("{{ 9 ** 99999999 }}", "an exponent above 10,000"),
    ],
)
def test_a_template_beyond_the_limits_is_refused(template: str, problem: str) -> None:
    with pytest.raises(ChatError, match=problem):
        write(template)


def test_the_limits_change_no_other_template() -> None:
    assert write(PLAIN) == "1024 aaa [1, 1] 3 a3None user1 no tool"
    write("{% for a in range(90000) %}{% endfor %}" * 100)  # 9 million iterations
    write("{% for a in range(90000) %}{% endfor %}" * 100)  # which count anew in each rendering
