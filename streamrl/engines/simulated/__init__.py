"""An engine without a model, which makes up text at the pace of a real one and holds the weights that are published."""
