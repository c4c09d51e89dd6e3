"""Whole runs on simulated time, network, disk and processes, with faults (docs/fault_simulation.md)."""
