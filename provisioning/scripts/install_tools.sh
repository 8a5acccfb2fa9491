#!/bin/bash
# Install what make setup-master itself needs, and mpirun where PyPI has none.
as_root() { if [ "$(id -u)" = 0 ]; then "$@"; else sudo -n "$@"; fi; }
# A fresh image looks for updates in the background: installing waits for its lock by itself, `update` does not.
get() { as_root env DEBIAN_FRONTEND=noninteractive apt-get -qq -o DPkg::Lock::Timeout=600 "$@"; }
mpi=()
[ "$(uname -m)" = x86_64 ] || command -v mpirun >/dev/null || mpi=(mpich)
if [ ${#mpi[@]} = 0 ] && command -v make >/dev/null && python3 -c 'import ensurepip' 2>/dev/null; then exit 0; fi
if command -v apt-get >/dev/null; then
  for _ in $(seq 60); do get update && break; sleep 10; done
  get install --yes --no-install-recommends make python3-venv "${mpi[@]}"
elif command -v dnf >/dev/null; then
  as_root dnf -q -y install make python3.11 "${mpi[@]}"
else
  echo 'This image has no make or no venv for Python, and neither apt-get nor dnf to get them.' >&2
  exit 1
fi
