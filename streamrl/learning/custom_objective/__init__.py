"""Trial of a loss, or of advantages, of the user's own, before a run trains with it."""
