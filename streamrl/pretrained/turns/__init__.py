"""Chats of several turns as tokens: the tokens between turns (``seam_tokens``), the tool calls of a turn
(``tool_calls``), and the behavior of a chat template (``template_facts``). Used by environment workers and the dry run,
without torch."""
