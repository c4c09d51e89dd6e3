"""The log that a run resumes from, and the only one. ``log`` is its files, ``records`` what is in them; ``run_journal``
writes them, ``recover`` brings a run back from them, ``summary`` says what happened (``streamrl show``).

Imports ``base``, ``comm``, ``control`` and ``buffers``; ``recover`` gives batches to the trainer ranks of ``run``."""
