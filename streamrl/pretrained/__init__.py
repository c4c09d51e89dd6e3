"""What people bring from the Hugging Face world, read without torch: the folder of a model, its sizes, its tokenizer
and chat template."""
