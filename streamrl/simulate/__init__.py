"""Virtual time: the real control core against cost models of engines, rewards and training (docs/simulate.md)."""
