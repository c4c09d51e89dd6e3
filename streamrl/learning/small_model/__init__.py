"""Programs that make starting policies, in a process of their own; ``cli.init`` and the examples call them.

``warm_up`` makes a small policy out of examples: ``characters`` has its tokenizer, ``imitation`` its training.
``chats`` has a tokenizer for chats. ``packaged`` unpacks a pretrained policy that a Python package holds."""
