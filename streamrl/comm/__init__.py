"""Streams between coroutines and processes: the contract (``stream``), in memory, over ZeroMQ; the wire format; who may
connect over tcp (``transport_keys``, ``guarded_sockets``, ``key_gate``). The only room that imports zmq, beside
``weights`` and ``observe.telemetry``."""
