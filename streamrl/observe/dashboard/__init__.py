"""The page about runs (``streamrl dashboard``), the same page as one file (``streamrl report``), and the Chrome trace
of a run (``streamrl trace``), all read from the files of runs in the process of the command. Texts of models are data
everywhere: nothing here formats such a text into HTML. Imports ``observe/run_files`` and ``observe/report``."""
