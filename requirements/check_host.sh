#!/usr/bin/env bash
# check_host.sh DEVICE PYTHON [DRIVER] [ROOT]: what the packages for DEVICE (cpu or cuda) need of this host and pip cannot
# bring. DRIVER: the file in which the NVIDIA driver names its version. ROOT: where /dev and /usr are, for the tests.
# CHOSEN=file: nobody has named DEVICE, so nvidia-smi lists no GPU where it is cpu.
set -euo pipefail
device=$1 python=$2 driver=${3:-/proc/driver/nvidia/version} root=${4:-}
refuse() { echo "make: $1" >&2; exit 1; }
command -v gcc >/dev/null 2>&1 || refuse "gcc was not found, and vLLM compiles with it: install gcc"
headers=$("$python" -c 'import sysconfig; print(sysconfig.get_path("include"))')
[ -f "$headers/Python.h" ] || refuse "$headers/Python.h was not found, and vLLM compiles with it: install Python's headers (python3-dev)"
if [ "$device" = cpu ] && [ "${CHOSEN:-}" = file ]; then
  # Containers without the driver's tools, WSL, and drivers that do not answer.
  for node in "$root"/dev/nvidiactl "$root"/dev/nvidia[0-9]* "$root"/usr/lib/wsl/lib/libcuda.so.1; do
    [ ! -e "$node" ] || refuse "this host has $node, and nvidia-smi lists no GPU: run make DEVICE=cuda to use it, or make DEVICE=cpu"
  done
fi
if [ "$device" = cuda ] && [ -r "$driver" ]; then
  version=$(sed -nE 's/^NVRM version:.* ([0-9]{3,})\.([0-9.]+) .*/\1.\2/p' "$driver")
  [ -z "$version" ] || [ "${version%%.*}" -ge 580 ] ||
    refuse "CUDA 13 needs driver R580 or newer, and this host has $version: update the NVIDIA driver, or run make DEVICE=cpu"
fi
