"""The journal, from which a run resumes. ``journal_file`` has its files and ``records`` their content; ``run_journal``
writes records, ``recover`` restores a run from them, and ``summary`` summarizes them for ``streamrl show``."""
