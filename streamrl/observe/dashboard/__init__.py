"""The page of runs (``streamrl dashboard``), the same as one file (``streamrl report``), and the Chrome trace of a run
(``streamrl trace``), all read from files of runs. Texts of models are data everywhere: nothing here formats one into
HTML. Imports ``observe/follow`` and ``observe/report``."""
