# icom in an image: for docker, podman, Kubernetes and Slurm's containers. `make image` builds it, docs/containers.md is
# how to use it. For NVIDIA GPUs: --build-arg TORCH_INDEX_URL=https://download.pytorch.org/whl/cu130

# By date: the same tomorrow. `make image BASE=…` takes a newer one, or a copy of it in a registry of your own.
ARG BASE=docker.io/library/debian:bookworm-20251117-slim

# What both the build and the image stand on.
FROM ${BASE} AS base
# The keys that Debian's sshd makes for itself would be the same in every container: nobody's secret.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends ca-certificates openssh-client openssh-server python3 \
    && rm -rf /var/lib/apt/lists/* /var/cache/* /var/log/* /etc/ssh/ssh_host_*

# The libraries, of which an image keeps a layer of their own: one that changes with constraints.txt, not with the code.
FROM base AS environment
# hadolint ignore=DL3008,DL3009
RUN apt-get update \
    && apt-get install --yes --no-install-recommends python3-venv \
    && python3 -m venv /opt/icom
WORKDIR /opt/icom/src
COPY LICENSE NOTICE constraints.txt environment.yml pyproject.toml textual_inversion_icom.py finetune_icom.py ./
COPY icom/__init__.py icom/
COPY icom/setup_env icom/setup_env
COPY provisioning/__init__.py provisioning/
ARG EXTRAS=mpi
ARG ICOM_ALLOW_CUDA_TORCH=
ARG TORCH_INDEX_URL=
# Secrets are there while this runs and leave nothing behind: a pip.conf (a mirror, with its password) and a CA's
# certificates. `make image` gives the ones that pip has on this machine. What torch brings for compilers and for its own
# tests, a tenth of the image, is left out.
RUN --mount=type=secret,id=pip.conf --mount=type=secret,id=ca.pem \
    if [ -e /run/secrets/ca.pem ]; then export SSL_CERT_FILE=/run/secrets/ca.pem; fi \
    && touch README.md \
    && export PIP_CONFIG_FILE=/run/secrets/pip.conf PIP_NO_CACHE_DIR=1 ENV_MANAGER=venv VENV=/opt/icom \
    && export EXTRAS ICOM_ALLOW_CUDA_TORCH TORCH_INDEX_URL \
    && python3 -I icom/setup_env setup \
    && rm -rf /opt/icom/lib/python3*/site-packages/torch/include /opt/icom/lib/python3*/site-packages/torch/test \
    && find /opt/icom/lib/python3*/site-packages/torch/bin -type f ! -name torch_shm_manager -delete

FROM base AS source
WORKDIR /opt/icom/src
COPY . .
# Nothing can be compiled on first use where the image is read-only.
RUN python3 -m compileall -q icom provisioning textual_inversion_icom.py finetune_icom.py

FROM base
RUN useradd --uid 1000 --user-group --create-home --shell /bin/bash icom
COPY --from=environment /opt/icom /opt/icom
COPY --from=source /opt/icom/src /opt/icom/src
RUN install /opt/icom/src/provisioning/scripts/icom_sshd.sh /opt/icom/bin/icom-sshd \
    && install --mode=0644 /opt/icom/src/provisioning/scripts/icom_ssh.conf /etc/ssh/ssh_config.d/icom.conf
ENV PATH=/opt/icom/bin:$PATH \
    HOME=/home/icom \
    PYTHONUNBUFFERED=1
ARG BASE
ARG REVISION=
LABEL org.opencontainers.image.title=icom \
      org.opencontainers.image.description="Teach Stable Diffusion a new concept (textual inversion) on CPUs" \
      org.opencontainers.image.licenses=Apache-2.0 \
      org.opencontainers.image.base.name=${BASE} \
      org.opencontainers.image.revision=${REVISION}
# A number, by which Kubernetes sees that it is not root.
USER 1000:1000
WORKDIR /home/icom
CMD ["icom", "--help"]
