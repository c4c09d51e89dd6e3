"""Inputs of strangers, each tried on the product and on the library that they are made for. A further kind is a module
of this folder with a table ``VARIANTS``, and its name in ``KINDS``."""

from __future__ import annotations

import argparse

from campaigns.front_door import campaign

KINDS = ("layouts", "caches", "rows", "first_row", "template_arguments")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this campaign."""
    campaign.add_arguments(parser, "campaigns.foreign_inputs", KINDS)
