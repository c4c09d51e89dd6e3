"""Models without a trainer: one engine that serves a model, its evaluation, and the way out of a run, export with a
card and push to the Hub. Imports no torch: the engine does when it starts."""
