# streamrl on CPU. Build from the tree or from an unpacked source distribution:
#   docker build --build-arg TORCH_INDEX=<PyTorch's CPU wheel index> -t streamrl .
#   docker run --rm -it --shm-size=2g -v "$PWD:/work" streamrl init counting --task own --model tiny
# Debian's Python 3.11 comes with the headers for which, with gcc, vLLM compiles.
FROM debian:bookworm-slim

ARG TORCH_INDEX
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PATH=/opt/streamrl/bin:$PATH

# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends ca-certificates gcc g++ libc6-dev python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*

# The packages first: a change of streamrl alone does not install them again.
COPY requirements/cpu.lock /tmp/
RUN python3 -m venv /opt/streamrl \
    && PIP_EXTRA_INDEX_URL="${TORCH_INDEX:?set it to the CPU wheel index of PyTorch}" \
    pip install --no-deps -r /tmp/cpu.lock

COPY pyproject.toml MANIFEST.in README.md LICENSE /tmp/source/
COPY requirements/ /tmp/source/requirements/
COPY streamrl/ /tmp/source/streamrl/
RUN pip install --no-deps --no-build-isolation /tmp/source && rm -r /tmp/source /tmp/cpu.lock

RUN useradd --create-home --uid 1000 streamrl && install -d -o streamrl /work
USER 1000
WORKDIR /work
ENTRYPOINT ["streamrl"]
CMD ["check"]
