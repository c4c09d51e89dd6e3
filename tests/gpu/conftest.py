"""Checks of one GPU. ``benchmarks/first_contact.py`` runs them all, in order, with their figures."""

from __future__ import annotations

import sys
from pathlib import Path

for folder in (".", "../learning", "../weights"):  # tests are imported without packages
    sys.path.insert(0, str((Path(__file__).parent / folder).resolve()))
