# SPDX-License-Identifier: Apache-2.0
"""What `--help` prints."""

#: What `paxlike.main` can do.
MODES = ("train", "eval", "decode", "show", "check", "compile", "plan")

#: What `--mode=check` checks where no experiment is named.
CHECKED = "Synthetic126M"

HELP = f"""\
Usage: paxlike --fdl_config=EXPERIMENT --job_log_dir=DIR [flags]

Trains, evaluates, decodes or shows an experiment. Everything a run writes goes to its DIR; the same
command again resumes it.

Which experiment
  --fdl_config=NAME       a registered name (--list), a unique dotted suffix of one, or the dotted
                          path of a class; modules of the working directory count. Alias: --exp
  --fdl_config_file=FILE  instead: the config.json of a run
  --fdl_allow_modules=A,B modules outside of paxlike that FILE, or the config.json of a run that is
                          evaluated or decoded, may use: loading imports them

What to change, applied in this order
  --fdl.KNOB=VALUE        UPPER CASE: a knob of the experiment (--fdl_help lists them)
  --fiddler=NAME(ARGS)    a function that edits the whole graph; repeatable
  --fdl.path.to=VALUE     lower case: one value in the graph (--mode=show lists them)
  Text needs no inner quotes: bfloat16, 6e-4, true, none, [8,1,1], "{{data: 2, fsdp: 4}}".

What to do
  --mode={"|".join(MODES)}
                          train (the default) and evaluate on the way; eval: evaluate a checkpoint;
                          decode: continue prompts; show: print knobs, graph, parameters and memory;
                          check: compare this machine's kernels, collectives and a step on its mesh
                          with exact references;
                          compile: compile the step, for devices that need not be here; plan: tell
                          how to spread it over such devices
  --job_log_dir=DIR       a local folder, or gs://... (pip install 'paxlike[gcs]')
  --step=N|best           eval, decode: this checkpoint rather than the newest
  --continuous            eval: all checkpoints of a running job until it ends
  --topology=h200-1       show, compile, plan: for so many GPUs (a100, h100, h200, b200, b300,
                          gb200), or a slice of TPUs (v5e-256, v5p-128, v6e-256, v7x-128), instead
                          of the devices here
  --slices=N              show, compile, plan: for so many slices of TPUs
  --kernels               compile: the kernels of the step with bytes, FLOPs and roofline time
  --full                  check: the step of the whole experiment, not of a small model like it
  --json                  check, compile, plan: one JSON object instead of the page
  --global_batch=N        plan: for so many sequences a step, rather than the experiment's
  --confirm=K             plan: also compile the best K, which takes minutes for each; default 0
  --save=FILE             compile: also write the step to a file
  --compiled_step=FILE    train: with the step of that file, if it is the one that is needed
  --against=NAME          show: print the difference from this experiment
  --list, --fdl_help, --help
                          all experiments; the knobs of one with their ranges; this text
  --traceback             of what ends the program print the Python traceback too

How to decode (eval and decode need no --fdl_config: the run's own config.json serves)
  --prompt=TEXT, --prompt_file=FILE
                          what to continue; repeatable; a .txt file has one prompt a line, a .jsonl
                          file one in the field "prompt" of each, or a conversation in "messages"
  --chat                  a conversation in the terminal by the run's CHAT_TEMPLATE, or by the chat
                          template of its tokenizer; /reset forgets it, Ctrl-D ends it
  --max_new_tokens=256, --num_samples=1, --stop=TEXT, --stop_token=ID
                          texts for each prompt, and where they end; --stop... are repeatable
  --temperature=0, --top_k=K, --top_p=P, --min_p=P, --decode_seed=0
                          how tokens are chosen; temperature 0 takes the likeliest, the others are
                          for draws, at a temperature above 0
  --decode_rows=64        texts that are decoded together

How to run
  --enable_checkpoint_saving=false, --enable_summary_writer=false
                          write no checkpoints; no TensorBoard files and metrics.jsonl
  --tfds_data_dir=DIR     where TFDS keeps its data sets
  --num_cpu_devices=N     run on N fake CPU devices, to try a mesh
  --server_addr=HOST:PORT --num_hosts=N --host_idx=I
                          process I of N, which meet at process 0; Slurm, Open MPI, Kubernetes and
                          TPUs tell of themselves (--multiprocess_gpu: it is an error if none does)
  --heartbeat_timeout=60  seconds without a sign after which a process counts as gone
  --join_timeout=300      seconds that the processes have to come together

Examples
  paxlike --list
  paxlike --fdl_config=Synthetic126M --fdl.NUM_LAYERS=4 --fdl.optimizer.b2=0.99 --mode=show
  paxlike --fdl_config=my_experiments.MyGpt --fdl.ICI_MESH_SHAPE=[1,8,1] --job_log_dir=/data/run1
"""
