"""Inputs of kinds that strangers brought, beyond those of the tests. ``campaign`` tries all; a module of this folder
holds one kind in a table ``VARIANTS``, as in ``campaigns.front_door``."""
