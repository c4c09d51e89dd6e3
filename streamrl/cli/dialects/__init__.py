"""Habits of users of other trainers: forms of a command line (``command_line``), and files of settings, which
``setting_files`` reads without running them and ``translation`` makes a recipe of. It imports ``recipe/dialects``."""
