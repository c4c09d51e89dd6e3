"""The weight path without torch: codec, state hash, manifest, publisher, fetch client, checkpoint mirror.

Weights are handled as integers only: a bfloat16 or float16 element is a uint16 bit pattern, a float32
element a uint32 one. Nothing is ever compared or copied as a floating-point number, so ``-0.0`` and
every NaN payload survive.
"""
