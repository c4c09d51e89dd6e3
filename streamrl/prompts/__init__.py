"""Where prompts come from: files of rows, datasets, tasks, and the user's own iterators; and the tokenizer.

``prompts`` opens and checks a source that ``prompt_spec`` names; ``prompt_rows`` turns a row into a prompt. Imports
``base``, ``recipe`` and ``comm``; ``probe`` also looks at models for a dry run.
"""
