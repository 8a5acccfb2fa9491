#!/bin/bash
# Wait until cloud-init is done, which goes on after sshd has started.
command -v cloud-init >/dev/null || exit 0
cloud-init status --wait >/dev/null
if [ $? -eq 1 ]; then  # 2 is "done, with warnings"
  cloud-init status --long >&2
  exit 1
fi
