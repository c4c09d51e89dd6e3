"""A recipe under several systems, side by side: the runs in turns, their figures, and the page of runs
(``observe.dashboard``) with them."""
