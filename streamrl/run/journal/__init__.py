"""The log that a run resumes from, and the only one. ``log`` is its files, ``records`` what is in them; ``run_journal``
writes them, ``recover`` restores a run from them, ``summary`` says what happened (``streamrl show``)."""
