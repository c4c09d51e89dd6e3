"""``streamrl top``: what a run publishes of its race (``live_figures``, in the controller's process), and the terminal
application that shows it (``picture``, ``boxes``, ``application``). Textual is imported by ``application`` alone."""
