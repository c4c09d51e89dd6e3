"""Whole runs on simulated time, network, disk and processes, with faults (docs/evidence/faults.md)."""
