# SPDX-License-Identifier: Apache-2.0
"""The text of `--help`."""

#: Values of --mode.
MODES = ("train", "eval", "decode", "show", "check", "compile", "plan", "profile", "transfer")

#: The default experiment of `--mode=check`.
CHECKED = "Synthetic126M"

HELP = f"""\
Usage: paxlike --fdl_config=EXPERIMENT --job_log_dir=DIR [flags]

Trains, evaluates, decodes or shows an experiment. Everything a run writes goes to its DIR; the same
command again resumes it.

Which experiment
  --fdl_config=NAME       a registered name (--list), a unique dotted suffix of one, or the dotted
                          path of a class, also of the working directory. Alias: --exp
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
                          train: train, with evaluations (the default); eval: evaluate a checkpoint;
                          decode: continue prompts; show: print knobs, graph, parameters and memory;
                          check: compare this machine's kernels, collectives and a training step on
                          its mesh with exact references;
                          compile: compile the step, also for devices that are not attached; plan:
                          find the fastest parallel configuration for such devices; profile: train
                          a few steps, and print where their time goes, beside a roofline;
                          transfer: whether activations and learning rates stay the same as the
                          model grows, by muP and CompleteP
  --job_log_dir=DIR       a local folder, or gs://... (pip install 'paxlike[gcs]')
  --step=N|best           eval, decode: this checkpoint instead of the newest
  --continuous            eval: all checkpoints of a running job until it ends
  --topology=h200-1       show, compile, plan: for this many GPUs (a100, h100, h200, b200, b300,
                          gb200), or a slice of TPUs (v4-128, v5e-256, v5p-128, v6e-256, v7x-128),
                          instead of this machine's devices
  --slices=N              show, compile, plan: for this many slices of TPUs
  --kernels               compile: the kernels of the step with bytes, FLOPs and roofline time
  --full                  check: the step of the full-size model instead of a shrunk one
  --json                  check, compile, plan, profile, transfer: print one JSON object instead of
                          text
  --global_batch=N        plan: for N sequences per step instead of the experiment's
  --confirm=K             plan: also compile the best K, which takes minutes each; default 0
  --tokens=15e12          plan: how many days and device-hours a run on this many tokens takes
  --price=2.50            plan: also what it costs, at this price of a device for an hour; for
                          several kinds of devices h100:2.50,v5e:1.20
  --target=time|cost      plan: sort the topologies in --topology=h100-64,h100-256,v5e-256 by the
                          time of a token (the default), or by its cost
  --dcn_bandwidth=25e9    plan: bytes/s that a device sends to other nodes or slices, if not those
                          of the data sheet
  --calibrate=FILE        plan: at the rates of a machine on which --mode=profile --json > FILE ran
  --save=FILE             compile: also write the compiled step to a file
                          profile: the duration of each instruction (FILE.pbtxt), for --pgle_profile
                          transfer: a picture (FILE.png)
  --compiled_step=FILE    train: load the compiled step from this file, which must match the run
  --pgle_profile=FILE.pbtxt
                          train, compile: let XLA for GPUs schedule the step by these durations;
                          train: if there is no such file, profile the step first and write it
  --widths=128,256,512    transfer: MODEL_DIMS of the models; heads and other widths grow with it
  --rates=0.001,0.002     transfer: find the best of these LEARNING_RATEs for each width
  --depths=2,4,8          transfer: and for each of these NUM_LAYERS
  --draws=4               transfer: average over so many initial weights
  --against=NAME          show: print the difference from this experiment
  --changed               show: print only the knobs that differ from the family's default: that of
                          the nearest base class which is not registered (--list)
  --list, --fdl_help, --help
                          print all experiments; the knobs of one with their ranges; this text
  --traceback             also print the Python traceback of an error

How to decode (eval and decode need no --fdl_config: they use the run's own config.json)
  --prompt=TEXT, --prompt_file=FILE
                          what to continue; repeatable; a .txt file has a prompt per line, a .jsonl
                          file one per record: the field "prompt", or a conversation in "messages"
  --chat                  a conversation in the terminal with the run's CHAT_TEMPLATE, or the chat
                          template of its tokenizer; /reset clears it, Ctrl-D ends it
  --max_new_tokens=256, --num_samples=1, --stop=TEXT, --stop_token=ID
                          length and number of samples per prompt, and the strings and token ids
                          that end a sample; --stop... are repeatable
  --temperature=0, --top_k=K, --top_p=P, --min_p=P, --decode_seed=0
                          sampling; temperature 0 is greedy, and the others need one above 0
  --decode_rows=64        number of decode slots, which are decoded together

How to run
  --enable_checkpoint_saving=false, --enable_summary_writer=false
                          write no checkpoints; no metrics.jsonl, and nothing to any tracker
  --tfds_data_dir=DIR     folder of TFDS datasets
  --num_cpu_devices=N     run on N fake CPU devices, to try a mesh
  --server_addr=HOST:PORT --num_hosts=N --host_idx=I
                          process I of N, which join at process 0; detected under Slurm, Open MPI,
                          Kubernetes and on TPUs (--multiprocess_gpu: error if none is detected)
  --heartbeat_timeout=60  seconds without a heartbeat after which a process counts as lost
  --join_timeout=300      seconds in which all processes must join

Examples
  paxlike --list
  paxlike --fdl_config=Synthetic126M --fdl.NUM_LAYERS=4 --fdl.optimizer.b2=0.99 --mode=show
  paxlike --fdl_config=my_experiments.MyGpt --fdl.ICI_MESH_SHAPE=[1,8,1] --job_log_dir=/data/run1
"""
