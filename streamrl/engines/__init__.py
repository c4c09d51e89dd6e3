"""Engines that sample: the ``Engine`` protocol, hosts in processes of their own and the controller's end of them, the
pool that routes requests, and the start of what died; simulated engines and a plain vLLM engine. Imports ``base``,
``comm`` and ``recipe``."""
