# An image with gpuserve in it, for models that are in a ConfigMap or in an image made FROM this one.
#
#   docker build -t registry.example/gpuserve:0.1.0 .
#   docker build -t registry.example/gpuserve:0.1.0-cuda --build-arg EXTRAS=cuda13 \
#       --build-arg REQUIREMENTS="cupy-cuda13x[ctk]" .
#
# EXTRAS        of pyproject.toml, with commas: cuda12, cuda13, otel, quickstart
# REQUIREMENTS  what the models import, with spaces: "torch==2.11.0"; cupy's [ctk] brings the libraries of CUDA,
#               as "onnxruntime-gpu[cuda,cudnn]" does for ONNX files. The driver is the node's.
# BASE          a Debian or Ubuntu with Python of at least 3.11 as python3
ARG BASE=python:3.12-slim-bookworm

FROM ${BASE} AS build
ARG EXTRAS=""
ARG REQUIREMENTS=""
ENV PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /src
RUN python3 -m venv /opt/gpuserve
COPY pyproject.toml README.md LICENSE ./
COPY scripts/packaging scripts/packaging
COPY gpuserve gpuserve
COPY gpuserve_worker gpuserve_worker
# Without quotes: each requirement is a word. Compiled here, because the root of a pod is read only.
# hadolint ignore=SC2086
RUN /opt/gpuserve/bin/pip install --no-cache-dir --compile ".${EXTRAS:+[$EXTRAS]}" ${REQUIREMENTS}

FROM ${BASE} AS serve
LABEL org.opencontainers.image.title="gpuserve" \
      org.opencontainers.image.licenses="Apache-2.0"
# The number is that of runAsUser in the manifests. There is no home: HOME is /tmp there.
RUN groupadd --gid 10001 gpuserve \
    && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /tmp --shell /usr/sbin/nologin gpuserve
COPY --from=build /opt/gpuserve /opt/gpuserve
# What the NVIDIA container toolkit brings in; which GPUs is for the device plugin to say.
ENV PATH="/opt/gpuserve/bin:${PATH}" \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 10001:10001
WORKDIR /tmp
# HTTP, gRPC, metrics
EXPOSE 8000 8001 8002
STOPSIGNAL SIGTERM
ENTRYPOINT ["gpuserve"]
CMD ["--help"]
