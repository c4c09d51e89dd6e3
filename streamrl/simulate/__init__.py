"""Simulation of runs in virtual time: the real control core with cost models of engines, rewards and training
(docs/evidence/simulation.md). ``simulation`` is the entry, ``what_if`` searches recipes with it, ``calibrate`` fits
its models."""
