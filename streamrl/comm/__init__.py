"""Typed streams between coroutines and processes, in memory (``memory_stream``) and over ZeroMQ (``zmq_stream``).

``stream`` is the contract of both kinds, ``wire`` the encoding of items. ``transport_keys``, ``guarded_sockets`` and
``key_gate`` decide which peers may connect over tcp. Only this room, ``weights`` and ``observe.telemetry`` import
zmq."""
