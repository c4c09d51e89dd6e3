"""``streamrl top``: the figures that a run publishes (``live_figures``, in the process of the controller), and the
terminal application that shows them (``displayed_run``, ``screen_lines``, ``application``, in the process of the
command). Only
``application`` imports Textual."""
