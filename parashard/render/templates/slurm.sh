#!/bin/bash
# The job @{name} on Slurm, written by `parashard render slurm`. It is yours to change; docs/slurm.md says how it works.
#
#     ./@{file} up         submit the coordinator, shards and workers; again: only what is missing
#     ./@{file} scale 8    have 8 workers: submit those that are missing, cancel those above
#     ./@{file} down       cancel everything; `up` goes on from the last checkpoints
#
# Each process is one task of a job array. A task that is preempted, out of time or on a lost node is queued again, and
# its process goes on. All nodes see the folder RUN; processes find the coordinator's address there.
#SBATCH --requeue
#SBATCH --signal=B:TERM@@{notice_s}
#SBATCH --open-mode=append
set -uo pipefail

RUN=@{run}
NAME=@{id} # the Slurm jobs are called $NAME-coordinator, $NAME-shard and $NAME-worker
PYTHON=@{python}
JOB=(@{job})
SHARDS=@{shards}
WORKERS=@{workers}
SERVER_OPTIONS=(@{server_options}) # of sbatch, for the coordinator and the shards: where nothing is preempted
WORKER_OPTIONS=(@{worker_options}) # of sbatch, for the workers, which may be preempted
HOST=@{host} # where processes listen: auto, what the node's own name stands for, or interface:NAME
PORTS=@{ports} # 0, any that are free, or a range
SECURE=@{secure} # empty: no certificates, every process is started with --insecure

up() {
  ! over || { echo "$RUN is done"; exit; }
  mkdir -p "$RUN/logs" "$RUN/owners" || exit 1
  if [ -n "$SECURE" ]; then # the authority's key stays in RUN, for this user alone; each task makes its own key
    [ -e "$RUN/ca/ca.pem" ] || certs init "$RUN/ca" || exit 1
    certs issue "$RUN/ca" "$RUN/tls/operator" --role operator || exit 1
  fi
  have coordinator 1 "${SERVER_OPTIONS[@]}"
  have shard "$SHARDS" "${SERVER_OPTIONS[@]}"
  have worker "$WORKERS" "${WORKER_OPTIONS[@]}"
}

have() { # ROLE COUNT [OPTION...]: submit what is missing of the tasks 0 to COUNT - 1
  local role=$1 count=$((10#$2)) tasks first missing; shift 2
  tasks=$(queued "$role") && first=$(queued coordinator | awk '{print $2}') || exit 1
  missing=$(comm -23 <(seq 0 $((count - 1)) | sort) <(awk '{print $1}' <<<"$tasks" | sort) | paste -sd,)
  if [ -n "$missing" ]; then # the others wait in the queue until the coordinator has started
    sbatch --job-name="$NAME-$role" --array="$missing" --chdir="$RUN" --output="logs/$role-%a.log" \
      ${first:+--dependency="after:$first"} "$@" "$0" task "$role" || exit 1
  fi
}

queued() { # ROLE: number and id of each task in the queue, once none is about to leave: it may be queued again
  local tasks waited states=PENDING,CONFIGURING,RUNNING,SUSPENDED,COMPLETING
  for ((waited = 0; waited < 60; waited++)); do
    tasks=$(squeue --me --noheader --array --states=$states --name="$NAME-$1" --format="%K %i %T") || exit 1
    [[ $tasks == *COMPLETING* ]] || break
    sleep 1
  done
  echo "$tasks"
}

task() { # ROLE: keep one process running on this node until the job is over
  role=$1 me=$1-$SLURM_ARRAY_TASK_ID id=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID child=''
  copy=$id.${SLURM_RESTART_COUNT:-0}
  trap leave TERM
  local words hosts=() code=0 tries began
  echo "$copy" >"owners/$copy" && mv "owners/$copy" "owners/$me" || exit 1
  echo "$me: task $id, start ${SLURM_RESTART_COUNT:-0}, on $(hostname)"
  case $role in
    coordinator) words=(-m parashard_coordinator "${JOB[@]}" --run-dir "$RUN" --run-id "$NAME" --linger-s 5) ;;
    shard) words=(-m parashard_server --connect "$RUN" --index "$SLURM_ARRAY_TASK_ID" --data-port "$PORTS" --linger-s 0) ;;
    worker) words=(-m parashard_worker --connect "$RUN" --name "$me") ;;
  esac
  if [ -n "$SECURE" ]; then
    [ "$role" = worker ] || hosts=(--host "$HOST")
    certs issue ca "tls/$me" --role "$role" --name "$me" "${hosts[@]}" || exit 1
    words+=(--tls-dir "tls/$me")
  else
    words+=(--insecure)
  fi
  for ((tries = 1; tries <= 20; tries++)); do
    mine || exit 3
    over && break
    began=$SECONDS
    "$PYTHON" -P "${words[@]}" --host "$HOST" --port "$PORTS" --http-port "$PORTS" --stopped-exit-code 75 & child=$!
    wait "$child"; code=$? child=''
    case $role:$code in # done; a mistake in the job; the job has failed
      *:0 | *:2 | coordinator:1 | worker:4) break ;;
    esac
    ((SECONDS - began < 60)) || tries=0
    sleep 5 & wait $!
  done
  if [ "$role" = coordinator ]; then # the job is over: nobody waits for it in the queue any more
    cancel worker 0
    cancel shard 0
  fi
  exit "$code"
}

leave() { # Slurm wants the node: save, ask to be queued again, and stay. A task that leaves with 0 now is COMPLETED.
  trap '' TERM # the request sends another one
  [ -z "$child" ] || { kill -TERM "$child" && wait "$child"; }
  # In another state it is cancelled, or queued again already. What got no answer is asked again.
  while mine && ! { now=$(state) && { [ "$now" != RUNNING ] || scontrol requeue "$id"; }; }; do sleep 1; done
  while mine && [[ "$(state)" =~ ^(RUNNING)?$ ]]; do sleep 1; done
  exit 143
}

cancel() { queued "$1" | awk -v count="$2" 'NF && $1 >= count {print $2}' | xargs -r scancel; } # ROLE COUNT: from COUNT on
is_up() { now=$(queued coordinator) || exit 1; [ -n "$now" ] || { echo "found no coordinator; first: $0 up" >&2; exit 2; }; }
usage() { sed -n '2,6s/^# \{0,1\}//p' "$0" >&2; exit 2; }
over() { grep -qs '^  "state": "done"' "$RUN/report.json"; }
certs() { "$PYTHON" -P -m parashard certs "$@"; }
state() { squeue --noheader --jobs="$id" --format=%T; }
mine() { [ "$(cat "owners/$me")" = "$copy" ]; } # after a lost node two copies of a task may run: the later one has it

case "${1:-} ${2:-}" in
  "up ") up ;;
  "scale "*) [[ ${2:-} =~ ^[0-9]{1,4}$ ]] || usage; is_up; have worker "$2" "${WORKER_OPTIONS[@]}"; cancel worker "$2" ;;
  "down ") cancel worker 0 && cancel shard 0 && cancel coordinator 0 ;;
  "task "*) task "$2" ;;
  *) usage ;;
esac
