#!/bin/bash
{# The script of a Slurm job, filled by `streamrl launch slurm`. `streamrl launch template slurm FILE` writes a copy to
   edit, and `--template FILE` uses it. Filters: `sbatch` quotes for a line of #SBATCH, `quote` for the shell.
   recipe, folder, runs   paths: of the recipe or the run, the job's working directory, the folder of runs
   settings               SECTION.KEY=VALUE of --set
   name, run_name         run.name, and the beginning of the name of the run's directory
   least_hosts            hosts that the run needs; with fewer than `nodes`, the job outlives a host
   options, setup         (key, value) of --time, --partition, --account and --sbatch; shell lines that run first
   variables              variables of --env by name; the script is a file of Slurm, which this user and root may read
   nodes, gpus_per_node, port, interface, requeue, resume, drain_s as the flags and the recipe have them #}
#SBATCH --job-name={{ name | sbatch }}
#SBATCH --nodes={{ nodes }}
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --chdir={{ folder | sbatch }}
#SBATCH --output={{ (folder | replace("%", "%%") ~ "/slurm-%j.log") | sbatch }}
#SBATCH --open-mode=append
#SBATCH --signal=B:TERM@{{ drain_s }}
#SBATCH --{{ "requeue" if requeue else "no-requeue" }}
{% if least_hosts < nodes %}
#SBATCH --no-kill
{% endif %}
{% if gpus_per_node is not none %}
#SBATCH --gpus-per-node={{ gpus_per_node }}
{% endif %}
{% for key, value in options %}
#SBATCH --{{ key }}{% if value %}={{ value | sbatch }}{% endif +%}
{% endfor %}
{% for line in setup %}
{{ line }}
CODE=$?; [ $CODE = 0 ] || echo "exit code $CODE of the line of --setup: "{{ line | quote }} >&2
{% endfor %}
{% for key, value in variables.items() %}
export {{ key }}={{ value | quote }}
{% endfor %}
set -euo pipefail  # not before: lines of a site look at variables that are not set, as conda's do
JOB={{ (runs ~ "/.launch") | quote }}/$SLURM_JOB_ID
RUN={{ run_name | quote }}-slurm-$SLURM_JOB_ID
mkdir -p -m 700 "$JOB"
trap 'rm -f "$JOB/token" "$JOB/pid" "$JOB/code"; rmdir "$JOB" 2>/dev/null || true' EXIT
if [ -e "$JOB/ended" ]; then echo "the run of this job has ended"; exit 0; fi
mapfile -t NODES < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
address() { scontrol -o show node "$1" | sed -n 's/.*NodeAddr=\([^ ]*\).*/\1/p'; }
HEAD=$(address "${NODES[0]}") PEER=$(address "${NODES[-1]}")
export JOB RUN HEAD PEER
DRAINED= WAIT=1
# Time is nearly up, or `scancel --batch --signal=TERM`: the run drains. Only to that program, on this node: srun would
# signal Ray, too. Set before the step begins, so that a signal never ends this script.
trap 'DRAINED=1 WAIT=1; kill -USR1 "$(cat "$JOB/pid")" 2>/dev/null || true' TERM
# The first host that ends ends the step: after the run (--wait), or because it failed. --export: SBATCH_EXPORT=NONE of
# a site would leave the step without the variables of this script.
srun --export=ALL --cpu-bind=none {{ "--no-kill --kill-on-bad-exit=0 --wait=0" if least_hosts < nodes else "--kill-on-bad-exit=1 --wait=60" }} bash -s <<'NODE' &
exec python -m streamrl.cli.submit.cluster_host --rank "$SLURM_NODEID" --nodes {{ nodes }} --head "$HEAD" --peer "$PEER" \
  --token "$JOB/token" --pid "$JOB/pid" --port {{ port }} \
{% if interface %}
  --interface {{ interface | quote }} \
{% endif %}
{% if gpus_per_node is not none %}
  --gpus "$SLURM_GPUS_ON_NODE" \
{% endif %}
{% if not resume %}
  --begun {{ runs | quote }}/"$RUN" \
{% endif %}
  -- python -m streamrl {{ "resume" if resume else "train" }} {{ recipe | quote }} --cluster '{cluster}'
  {%- for setting in settings %} --set {{ setting | quote }}{% endfor %}
  {%- if not resume %} --set run.name="$RUN"{% endif +%}
NODE
STEP=$!
while [ -n "$WAIT" ]; do WAIT=; CODE=0; wait $STEP || CODE=$?; done  # each signal ends a wait
[ ! -e "$JOB/code" ] || CODE=$(cat "$JOB/code")  # of the run: srun has the largest of all hosts
{% if requeue %}
[ "$CODE" != 0 ] || [ -n "$DRAINED" ] || touch "$JOB/ended"
[ "$CODE$DRAINED" != 01 ] || scontrol requeue "$SLURM_JOB_ID"  # drained: go on in a new allocation
{% endif %}
exit $CODE
