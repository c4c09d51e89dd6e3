"""Engines that sample: the ``Engine`` protocol, hosts in processes of their own and the controller's end of them, the
pool that routes requests."""
