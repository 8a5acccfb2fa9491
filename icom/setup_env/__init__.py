"""Builds and enters the environment that icom runs in; the logic behind the Makefile.

It runs before anything is installed: standard library only. `make` starts it as `python3 -I icom/setup_env COMMAND`
(-I keeps what lies in the current folder off the import path, so that nothing there can hide a module of Python's).

Settings come from the environment, where make puts what is given on its command line:

ENV_MANAGER            conda or venv; default: conda where there is one, else venv
VENV                   folder of the venv; default .venv
EXTRAS                 extras of pyproject.toml to install as well, comma separated (aws,ipex,...)
TORCH_INDEX_URL        the index to take torch from; default: PyTorch's CPU index, if it answers
ICOM_ALLOW_CUDA_TORCH  1 accepts a torch that brings the CUDA packages along
TORCH_VERSION          for `constraints`: move the pin of torch to this version
CONDA_PREFIX_DIR       where install-miniconda installs; default ~/miniforge3
CONDA_INSTALLER_URL    what it installs; default: the latest Miniforge
IMAGE                  for `image` and `push`: its name; default icom:cpu
CONTAINER_TOOL         docker, podman or buildah; default: the first of them that works
BASE                   the image to build on; default: the one that the Dockerfile names
BUILD_OPTIONS          more options of the tool's `build`, PUSH_OPTIONS of its `push`
HF_ENDPOINT            the Hugging Face Hub or a mirror of it
"""
