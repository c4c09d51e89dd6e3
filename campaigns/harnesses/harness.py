"""The harnesses: packages, the program or command of a task of two turns with a tool, and what the policy says."""

from __future__ import annotations

import json
from typing import Any

import msgspec

QUESTION = "How much is 17 times 23? Use a tool."
RESULT = "391"
PYPI = (
    *("openai-agents", "pydantic-ai-slim[openai,anthropic]", "langgraph", "langchain", "langchain-openai"),
    *("langchain-anthropic", "smolagents[openai]", "litellm"),
)
NPM = ("@openai/codex", "@anthropic-ai/claude-code", "opencode-ai", "@qwen-code/qwen-code")


class Harness(msgspec.Struct, frozen=True):
    """A harness.

    ``tool``: name of the tool that the policy calls, which stands in the prompts that offer it;
    ``calling``: text of the policy's first turn;
    ``program``: source of a Python program; empty: ``command`` is run;
    ``command``: command, below ``node_modules/.bin``;
    ``files``: configuration files by their path in the home folder; ``@URL`` and ``@KEY`` are replaced;
    ``answering``: text of the policy's turn after the result of the tool;
    ``rewrites``: whether it sends its earlier turns in words of its own, so that no turn goes on from them."""

    tool: str
    calling: str
    program: str = ""
    command: tuple[str, ...] = ()
    files: dict[str, str] = {}
    answering: str = f"It is {RESULT}."
    rewrites: bool = False


def call(name: str, **arguments: Any) -> str:
    """Return a turn that calls a tool."""
    body = json.dumps({"name": name, "arguments": arguments})
    return f"I use a tool.\n<tool_call>\n{body}\n</tool_call>"


_MULTIPLY = f'''
import asyncio, json, os
QUESTION = {QUESTION!r}
def multiply(a: int, b: int) -> int:
    """Multiply two integers.

    Args:
        a: The first.
        b: The second.
    """
    return a * b
'''
_CALLING = call("multiply", a=17, b=23)
_LITELLM = """
import litellm
tool = {"name": "multiply", "description": "Multiply.", "parameters": {"type": "object", "properties": {
    "a": {"type": "integer"}, "b": {"type": "integer"}}}}
chat = [{"role": "user", "content": QUESTION}]
for _ in range(2):
    chunks = list(litellm.completion(model=MODEL, messages=chat, tools=[{"type": "function", "function": tool}],
                                     stream=True, drop_params=True, num_retries=2, **ADDRESS))
    message = litellm.stream_chunk_builder(chunks, messages=chat).choices[0].message
    chat.append(message.model_dump())
    for one in message.tool_calls or ():
        result = multiply(**json.loads(one.function.arguments))
        chat.append({"role": "tool", "tool_call_id": one.id, "content": str(result)})
print(message.content)
"""
_OPENAI = '{"api_base": os.environ["OPENAI_BASE_URL"], "api_key": os.environ["OPENAI_API_KEY"]}'
_ANTHROPIC = '{"api_base": os.environ["ANTHROPIC_BASE_URL"], "api_key": os.environ["ANTHROPIC_API_KEY"]}'
_SMOLAGENTS = """
from smolagents import CodeAgent, OpenAIServerModel, ToolCallingAgent, tool
address = {"api_base": os.environ["OPENAI_BASE_URL"], "api_key": os.environ["OPENAI_API_KEY"]}
"""
SHELL = "echo $((17 * 23))"
HARNESSES = {
    "openai-agents": Harness(
        tool="multiply",
        calling=_CALLING,
        program=_MULTIPLY
        + """
from agents import Agent, Runner, function_tool, set_tracing_disabled
set_tracing_disabled(True)
agent = Agent(name="calculator", instructions="Use the tool.", tools=[function_tool(multiply)], model="policy")
print(Runner.run_sync(agent, QUESTION).final_output)
""",
    ),
    "pydantic-ai (chat completions)": Harness(
        tool="multiply",
        calling=_CALLING,
        program=_MULTIPLY
        + """
from pydantic_ai import Agent
print(Agent("openai-chat:policy", tools=[multiply]).run_sync(QUESTION).output)
""",
    ),
    "pydantic-ai (messages)": Harness(
        tool="multiply",
        calling=_CALLING,
        program=_MULTIPLY
        + """
from pydantic_ai import Agent
print(Agent("anthropic:policy", tools=[multiply]).run_sync(QUESTION).output)
""",
    ),
    "langgraph (chat completions)": Harness(
        tool="multiply",
        calling=_CALLING,
        program=_MULTIPLY
        + """
from langchain.agents import create_agent
from langchain_openai import ChatOpenAI
agent = create_agent(ChatOpenAI(model="policy"), tools=[multiply])
print(agent.invoke({"messages": [("user", QUESTION)]})["messages"][-1].content)
""",
    ),
    "langgraph (messages)": Harness(
        tool="multiply",
        calling=_CALLING,
        program=_MULTIPLY
        + """
from langchain.agents import create_agent
from langchain_anthropic import ChatAnthropic
agent = create_agent(ChatAnthropic(model="policy"), tools=[multiply])
print(agent.invoke({"messages": [("user", QUESTION)]})["messages"][-1].content)
""",
    ),
    "litellm (chat completions)": Harness(
        tool="multiply",
        calling=_CALLING,
        program=_MULTIPLY + f"MODEL, ADDRESS = 'openai/policy', {_OPENAI}\n" + _LITELLM,
    ),
    "litellm (messages)": Harness(
        tool="multiply",
        calling=_CALLING,
        program=_MULTIPLY + f"MODEL, ADDRESS = 'anthropic/policy', {_ANTHROPIC}\n" + _LITELLM,
    ),
    "smolagents (code)": Harness(
        tool="multiply",
        rewrites=True,
        calling="Thought: I multiply.\n<code>\nprint(multiply(17, 23))\n</code>",
        answering=f'Thought: I know it.\n<code>\nfinal_answer("{RESULT}")\n</code>',
        program=_MULTIPLY
        + _SMOLAGENTS
        + """
agent = CodeAgent(tools=[tool(multiply)], model=OpenAIServerModel("policy", **address), max_steps=4)
print(agent.run(QUESTION))
""",
    ),
    "smolagents (calls, tool_choice auto)": Harness(
        tool="multiply",
        rewrites=True,
        calling=_CALLING,
        answering=call("final_answer", answer=RESULT),
        program=_MULTIPLY
        + _SMOLAGENTS
        + """
model = OpenAIServerModel("policy", tool_choice="auto", **address)
print(ToolCallingAgent(tools=[tool(multiply)], model=model, max_steps=4).run(QUESTION))
""",
    ),
    "codex": Harness(
        tool="exec_command",
        calling=call("exec_command", cmd=SHELL),
        command=("codex", "exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", QUESTION),
        files={
            ".codex/config.toml": 'model = "policy"\nmodel_provider = "run"\n[model_providers.run]\nname = "run"\n'
            'base_url = "@URL/v1"\nenv_key = "OPENAI_API_KEY"\nwire_api = "responses"\n'
        },
    ),
    "claude code": Harness(
        tool="Bash",
        calling=call("Bash", command=SHELL, description="multiply"),
        command=("claude", "-p", QUESTION, "--model", "policy", "--allowedTools", "Bash"),
    ),
    "opencode": Harness(
        tool="bash",
        calling=call("bash", command=SHELL, description="multiply"),
        command=("opencode", "run", "--model", "run/policy", QUESTION),
        files={
            ".config/opencode/opencode.json": json.dumps(
                {
                    "autoupdate": False,
                    "permission": {"bash": "allow"},
                    "provider": {
                        "run": {
                            "npm": "@ai-sdk/openai-compatible",
                            "options": {"baseURL": "@URL/v1", "apiKey": "@KEY"},
                            "models": {"policy": {}},
                        }
                    },
                }
            )
        },
    ),
    "qwen-code": Harness(
        tool="run_shell_command",
        calling=call("run_shell_command", command=SHELL, is_background=False),
        command=("qwen", "--yolo", "--auth-type", "openai", "--model", "policy", "-p", QUESTION),
    ),
}
