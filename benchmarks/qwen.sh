#!/usr/bin/env bash
# Qwen2.5-Coder-0.5B on real questions (configs/qwen_nq.yaml): cold start, RL, and evaluations on 500 test questions.
#
#   benchmarks/qwen.sh TASK MODEL QUESTIONS OUT [SEED] [SETTING VALUE ..]
#   START=runs/nq/cold-1/checkpoints/best/policy STEPS=24 benchmarks/qwen.sh hotpotqa MODEL QUESTIONS OUT 1
#
# TASK is nq or hotpotqa, MODEL a transformers folder. QUESTIONS is a folder with train.jsonl, dev.jsonl (training
# questions that choose the checkpoint), test.jsonl and passages.jsonl.gz. OUT gets all runs, and in SEED.json the figures
# of docs/qwen.jsonl. After an interruption the same command goes on: finished parts stay, RL is resumed, an evaluation
# asks what is open. Settings that follow are of the RL run. START is a policy with which imitation begins in place of
# MODEL, for STEPS steps: HotpotQA's few training questions, with their supporting_facts, are learned after NQ's.
set -euo pipefail
task=$1 model=$2 questions=$3 out=$4 seed=${5:-0}
shift $(($# < 5 ? $# : 5))
data=(--task "$task" --data "$questions/train.jsonl" --eval_data "$questions/dev.jsonl")
data+=(--search.corpus "$questions/passages.jsonl.gz" --seed "$seed")
cold=$out/cold-$seed rl=$out/rl-$seed

evaluate() { # OUT, then the policy and its modes
    [ -e "$out/$1/summary.json" ] && return
    sorl-eval "${@:2}" --limit 500 --hardware.dtype bfloat16 --sampler.max_concurrency 64 \
        --data "$questions/test.jsonl" --out "$out/$1"
}

mkdir -p "$out"
own=(--task "$task" --search.corpus "$questions/passages.jsonl.gz") # a run brings its own task, passages and limits
evaluate as-it-comes "$model" --mode direct rag "${own[@]}"
evaluate as-it-comes-agent "$model" --mode agent "${own[@]}" --limits.max_turns 3 --limits.max_new_tokens 64
if [ ! -e "$cold/summary.json" ]; then # supervised training cannot be resumed
    sorl-train --config qwen_nq --stage sft --model "${START:-$model}" --sft.steps "${STEPS:-40}" "${data[@]}" \
        --run_dir "$cold" --overwrite
fi
evaluate "cold-$seed-test" "$cold" --mode agent
if ! ls "$rl"/checkpoints/step_* > /dev/null 2>&1; then
    sorl-train --config qwen_nq --model "$cold/checkpoints/best/policy" "${data[@]}" --run_dir "$rl" --overwrite "$@"
elif [ ! -e "$rl/summary.json" ]; then
    sorl-train --resume --run_dir "$rl"
fi
evaluate "rl-$seed-test" "$rl" --mode agent
sorl-eval compare "$out/cold-$seed-test" "$out/rl-$seed-test"
sorl-eval compare "$out/as-it-comes:rag" "$out/rl-$seed-test:agent"
python - "$task" "$seed" "$out" << 'EOF'
import json, sys
from pathlib import Path

import yaml

task, seed, out = sys.argv[1], sys.argv[2], Path(sys.argv[3])
scores = {}
for name in ("as-it-comes", "as-it-comes-agent", f"cold-{seed}-test", f"rl-{seed}-test"):
    for found in json.loads((out / name / "summary.json").read_text())["entries"]:
        scores[f"{name.replace(f'-{seed}-test', '')} {found['mode']}"] = found["metrics"]
curve = {}
for file, names in ("metrics.jsonl", ("rollout/success", "eval/success")), ("timings.jsonl", ("time/step_s",)):
    for line in map(json.loads, (out / f"rl-{seed}" / file).read_text().splitlines()):
        curve.setdefault(line["step"], {}).update({name: line[name] for name in names if name in line})
run = json.loads((out / f"rl-{seed}" / "summary.json").read_text())
run = {name: run[name] for name in ("best_step", "wall_s", "peak_rss_mb")}  # step 0: the weights before RL are evaluated
run["sft_steps"] = yaml.safe_load((out / f"cold-{seed}" / "config.yaml").read_text())["sft"]["steps"]
figures = {"task": task, "seed": int(seed), "scores": scores, "rl": curve, **run}
(out / f"{seed}.json").write_text(json.dumps(figures) + "\n")
EOF
