"""Teachers of a run, which score sampled tokens beside its rewards. The controller asks them."""
