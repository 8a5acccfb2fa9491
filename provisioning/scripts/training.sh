#!/bin/bash
# A training, on the master of a cluster. ~/runs/ID has the run's folder, what it printed (`log`), and how it ended
# (`exit`); ~/runs/lock is locked by whatever belongs to a training, and says which.

# The kernel lets go of the lock when the last process that inherited it ends, whatever became of it.
lock() { mkdir -p runs; exec 9>>runs/lock; flock -n 9; }

# $1: ID/NAME, of an output folder. Prints home, whether it knows that folder, and what trains.
state() {
  if [ -e /dev/nvidiactl ]; then echo gpus; exit 0; fi
  echo "$HOME"
  if [ -d "runs/$1" ]; then echo known; else echo new; fi
  lock || cat runs/lock
}

# $1: the exit code when another one trains, $2: ID, $3…: training options. HF_TOKEN is the line on stdin.
# A job with `set -m` gets a process group of its own, in which signals are not ignored. The shell that waits there for
# the exit code does not end from them.
start() {
  lock || exit "$1"
  IFS= read -r HF_TOKEN
  if [ -n "$HF_TOKEN" ]; then export HF_TOKEN; else unset HF_TOKEN; fi
  run=$2
  shift 2
  mkdir -p "runs/$run"
  cd "runs/$run" || exit
  rm -f exit
  touch started
  : > log
  set -m
  {
    trap : INT TERM
    group=$BASHPID
    echo "$group $run" > ../lock
    # shellcheck disable=SC2016  # for the other shell
    bash -lc 'cd ~/icom && exec icom launch mpirun --hosts ~/hosts -- "$@"' icom "$@"
    echo $? > exit.new
    # Intel's mpirun is a script that ends from a signal before what it started, which still saves.
    # shellcheck disable=SC2094  # one after the other; in a pipe, the shell of wc would be counted
    while pgrep --pgroup "$group" > group; [ "$(wc -l < group)" -gt 1 ]; do sleep 0.1; done
    mv exit.new exit
  } >> log 2>&1 < /dev/null &
  set +m  # else bash tells us when the job is done
  exec 9>&-
  tail -n +1 -s 0.2 -f --pid=$! log
}

# $1: ID.
stop() {
  lock && exit 0
  read -r pid run < runs/lock
  [ "$run" != "$1" ] || kill -s INT -- "-$pid"
}

# $1: ID, $2: NAME. Prints the exit code, if it has ended, and a file that it wrote, if there is one.
outcome() {
  cd "runs/$1" && cat exit 2>/dev/null
  find "./$2" -newer started -type f -print -quit 2>/dev/null
  true
}

case $1 in
  state) state "$2" ;;
  start) start "${@:2}" ;;
  stop) stop "$2" ;;
  outcome) outcome "$2" "$3" ;;
esac
exit  # bash would become tail in its last command, and nobody would collect the job, for whose end tail waits
