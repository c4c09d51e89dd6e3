"""The policy model: loading it, packed attention, adapters, and the probe that trusts a model on packed rows."""
