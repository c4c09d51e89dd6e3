"""Files of a Hugging Face model folder, read without torch: sizes, weight headers, tokenizer, chat template. The dry
run and all processes of a run use them."""
