"""Hugging Face files, read without torch: the folder of a model, its sizes, its tokenizer and chat template."""
