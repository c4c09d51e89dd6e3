"""A recipe under several systems, side by side: the runs in turns, their figures, a step of each as a timeline on the
slots of ``observe.dashboard``, and the report as one page."""
