"""Sources of prompts: files of rows, datasets, tasks, and the user's own iterators. ``prompts`` opens and checks a
source that ``prompt_spec`` names; ``prompt_rows`` turns a row into a prompt."""
