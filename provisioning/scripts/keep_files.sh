#!/bin/bash
# Keep what stands there before icom's first, on a master that somebody has used already. $1…: files.
set -eu
for file; do
  [ ! -e "$file" ] || [ -e "$file.before_icom" ] || cp -p "$file" "$file.before_icom"
done
