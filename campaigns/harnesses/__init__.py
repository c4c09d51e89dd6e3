"""Harnesses of others, as they are installed from their registries, on the endpoint of agents. ``harness.py`` has what
each is and how it is run, ``campaign.py`` installs and runs them. Nothing here is imported by other campaigns."""
