"""A GPU that is not there: torch on a CPU whose tensors say ``cuda:N``, and a driver that answers for named cards.

- ``devices.pretended_gpus(cards)``: values are computed on the CPU; what a GPU refuses is refused, and where the host
  waits for the device is counted. ``plugin``: the same for a session of pytest.
- ``driver.variables(cards)``: environment variables by which a process finds these cards through NVML, so that
  placement and the dry run answer for them. Nothing can be computed on them.
- ``python -m campaigns pretended_gpu``: the parts of a trainer on it, in a table.

Not seen: what happens below one operator in C++ or in a kernel (precision, limits of launches, shared memory), streams,
memory, and CUDA's own list of operators under autocast (the CPU's is used)."""
