"""Sources of prompts: files of rows, datasets, tasks, and the user's own iterators. ``prompt_spec`` parses the name of
a source, ``open_prompts`` opens and checks it, and ``prompt_rows`` turns a row into a prompt."""
