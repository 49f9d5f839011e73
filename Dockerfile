# kvd in a container: Linux on a CPU, or on NVIDIA GPUs with --build-arg EXTRA=cuda.
# deploy/docker/README.md has the commands.
ARG PYTHON=3.13

FROM python:${PYTHON}-slim-trixie AS build
# An extra of the distribution; "cuda" adds MLX's CUDA build.
ARG EXTRA=""
ENV UV_COMPILE_BYTECODE=1 UV_NO_CACHE=1
WORKDIR /src
RUN pip install --no-cache-dir "uv>=0.8,<1"
COPY pyproject.toml README.md LICENSE ./
COPY actors ./actors
COPY kvd ./kvd
COPY protocol ./protocol
RUN uv venv --quiet /opt/kvd \
 && uv pip install --quiet --python /opt/kvd/bin/python ".${EXTRA:+[${EXTRA}]}"

FROM python:${PYTHON}-slim-trixie
# With a compiler and OpenBLAS, workers on a CPU are several times as fast.
RUN apt-get update \
 && apt-get install --yes --no-install-recommends g++ libopenblas0-pthread \
 && rm -rf /var/lib/apt/lists/*
RUN useradd --uid 10001 --user-group --create-home kvd \
 && install -d -o kvd -g kvd -m 0700 /data /data/models
COPY --from=build /opt/kvd /opt/kvd
ENV PATH=/opt/kvd/bin:$PATH \
    KVD_HOME=/data \
    XDG_CACHE_HOME=/data/cache \
    HF_HOME=/data/hub \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER kvd
WORKDIR /data
VOLUME ["/data", "/data/models"]
EXPOSE 11711
HEALTHCHECK --interval=30s --timeout=5s --start-period=30s --retries=3 \
  CMD ["python", "-c", "import os, urllib.request as r; r.urlopen(f\"http://127.0.0.1:{os.environ.get('KVD_PORT') or 11711}/health\", timeout=4)"]
STOPSIGNAL SIGTERM
ENTRYPOINT ["kvd"]
CMD ["serve"]
