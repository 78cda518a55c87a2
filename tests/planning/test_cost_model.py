# SPDX-License-Identifier: Apache-2.0
"""Laws of what a configuration costs."""

import dataclasses
import math
from typing import Any

import jax
import pytest
from helpers.configurations import on, sizes, trainer

from paxlike.devices import chips, interconnect
from paxlike.devices.mesh import AXES
from paxlike.layers import flops
from paxlike.layers.pipeline.spec import Pipeline
from paxlike.layers.stack import Remat
from paxlike.planning import cost_model, machines, memory_model, model_sizes, planner
from paxlike.planning.software import Software
from paxlike.training import train_state

DENSE, EXPERTS = ("Synthetic126M", "SyntheticLLaMA70B"), ("Mixtral8x7B", "DeepSeekV3")
MACHINE: Any = machines.find("NVIDIA H100")


def bytes_here(tree: Any) -> int:
  return sum(
    math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
    for leaf in jax.tree.leaves(tree)
    if leaf.ndim
  )


@pytest.mark.parametrize("name", [*DENSE, *EXPERTS])
@pytest.mark.parametrize(
  "axes",
  [
    {"fsdp": 8},
    {"data": 2, "tensor": 4},
    {"fsdp": 2, "expert": 2, "tensor": 4},
    {"pipeline": 2, "fsdp": 4},
    {"data": 2, "fsdp": 4, "tensor": 16},
  ],
)
def test_what_is_held_between_steps_is_exact(name, axes):
  for over_data in (False, True):
    made = trainer(name, SHARD_OPTIMIZER_OVER_DATA=over_data, ADAM_MOMENT_DTYPE="bfloat16")
    how = on(64, **axes)
    shape = jax.sharding.AbstractMesh(tuple(how.sizes.values()), AXES)
    state = train_state.abstract(made.definition, made.optimizer, shape)
    model = model_sizes.of_definition(made.definition, made.optimizer, seq_len=2048)
    held = memory_model.of(model, how, MACHINE.network)
    assert held.weights == bytes_here((state.params, state.extra))
    # Of weights that no optimizer changes there is no such state.
    assert held.optimizer == pytest.approx(bytes_here(state.opt_state), rel=1e-6)
    assert model.num_params >= made.definition.num_params


@pytest.mark.parametrize("name", [*DENSE, *EXPERTS, "Gemma2_2B", "SyntheticGLaM126M64E"])
def test_flops_are_those_of_the_one_place_that_counts_them(name):
  made = trainer(name)
  model = model_sizes.of_definition(made.definition, made.optimizer, seq_len=2048)
  counted = flops.per_token(made.definition, 2048)
  weights = sum(weight.flops for weight in model.weights)
  assert 3 * (weights + model.scores[0]) == pytest.approx(counted.full)
  assert 3 * (weights + model.scores[1]) == pytest.approx(counted.causal)
  assert model.flops == counted


def test_adapters_are_all_that_lora_trains():
  model = sizes("SyntheticLLaMA7B", USE_LORA=True, LORA_RANK=32)
  assert sum(weight.size for weight in model.weights if weight.trained) == 79_953_920
  trained = sum((3 if weight.trained else 2) * weight.flops for weight in model.weights)
  assert trained + 3 * model.scores[0] == pytest.approx(model.flops.full)


@pytest.mark.parametrize("name", [*DENSE, *EXPERTS])
def test_more_devices_hold_less_each(name):
  model = sizes(name)
  held = [
    memory_model.of(model, on(256, fsdp=count), MACHINE.network).total
    for count in (1, 2, 8, 32, 256)
  ]
  assert held == sorted(held, reverse=True)


def test_what_is_saved_is_not_computed_again():
  model = sizes("SyntheticLLaMA70B")
  order = (Remat.SAVE_NOTHING, Remat.SAVE_DOT_WITH_NO_BATCH_DIM, Remat.SAVE_EVERYTHING)
  hows = [dataclasses.replace(on(64, fsdp=8), remat=remat) for remat in order]
  held = [memory_model.of(model, how, MACHINE.network).activations for how in hows]
  seconds = [cost_model.of(model, how, MACHINE).total for how in hows]
  assert held == sorted(held) and seconds == sorted(seconds, reverse=True)
  # Nothing but sums needs the last product of a layer.
  ahead = sum(weight.flops for weight in model.in_stack if not weight.is_last) + model.scores[1]
  more = (
    cost_model.of(model, hows[0], MACHINE) + cost_model.of(model, hows[2], MACHINE) * -1
  ).parts
  tokens = 64 * model.seq_len / 8
  # Large matmuls and causal attention run at nearly the rates of large ones.
  least = tokens * (ahead - model.scores[1]) / (MACHINE.chip.flops * MACHINE.rates.matmul)
  assert more["compute"] == pytest.approx(least, rel=0.1) and more["compute"] > least
  rate = MACHINE.rates.attention_flops(MACHINE.chip, model.seq_len, model.head_dim)
  assert more["attention"] == pytest.approx(tokens * model.scores[1] / rate)


def test_a_pipeline_waits_as_its_schedule_says():
  model = sizes("Synthetic175B")
  found = {}
  for count in (1, 3):
    pipeline = Pipeline(
      schedule="interleaved_1f1b" if count > 1 else "1f1b",
      stages=8,
      chunks=count,
      microbatches=64,
      recompute=False,
    )
    how = dataclasses.replace(on(128, {"pipeline": 8}, tensor=8), pipeline=pipeline)
    found[count] = cost_model.of(model, how, MACHINE)
    layers = found[count].total - found[count].update - found[count].jitter
    assert found[count].bubble == pytest.approx(layers * pipeline.plan.bubble, rel=0.1)
    more = dataclasses.replace(pipeline, recompute=True)
    again = cost_model.of(model, dataclasses.replace(how, pipeline=more), MACHINE)
    assert again.compute > found[count].compute
  assert found[3].bubble < 0.5 * found[1].bubble


def test_stages_that_do_not_divide_the_layers_compute_padding():
  model = sizes("Llama31_405B")
  assert model.in_stages(7, 9) is model
  padded = model.in_stages(8, 1)
  assert (model.repeats, padded.repeats, padded.num_layers) == (126, 128, 128)
  shapes = [axes for axes, _ in planner.meshes(model, (512, 1))]
  assert 8 in {dict(zip(AXES, axes, strict=True))["pipeline"] for axes in shapes}
  pipeline = Pipeline(schedule="1f1b", stages=8, microbatches=64)
  uneven = dataclasses.replace(on(64, {"pipeline": 8}, tensor=8), pipeline=pipeline)
  times = [cost_model.of(one, uneven, MACHINE) for one in (model, padded)]
  assert times[0] == times[1]
  held = memory_model.of(model, uneven, MACHINE.network).weights
  assert held == memory_model.of(padded, uneven, MACHINE.network).weights
  # Each stage holds 16 layers of 128.
  in_stack = sum(weight.held * weight.size for weight in padded.in_stack)
  assert held == pytest.approx(in_stack / 64, rel=0.2)


def test_gathers_over_more_devices_take_more_steps():
  small = sizes("Synthetic126M", FPROP_DTYPE="bfloat16")
  few, many = (cost_model.of(small, on(n, fsdp=n), MACHINE) for n in (64, 4096))
  assert many.weights > 10 * few.weights


def test_shards_of_sequences_share_attention_and_send_keys_around():
  model = sizes("SyntheticLLaMA7B", MAX_SEQ_LEN=32768)
  two, four = (cost_model.of(model, on(8, fsdp=8 // n, context=n), MACHINE) for n in (2, 4))
  assert two.attention == pytest.approx(four.attention)  # Of as many sequences in all.
  assert two.compute == pytest.approx(four.compute)
  held = [memory_model.of(model, on(8, fsdp=8 // n, context=n), MACHINE.network) for n in (1, 2)]
  assert held[0].activations == pytest.approx(held[1].activations)
  assert held[0].weights == pytest.approx(held[1].weights / 2)
  # Keys and values of a device's 8,192 tokens go to three others, in two bytes; with gradients
  # in four bytes three times as much. The links are too slow to be hidden.
  slow = dataclasses.replace(MACHINE, network=dataclasses.replace(MACHINE.network, fast=1e6))
  found = cost_model.of(model, on(1, context=4), slow)
  sent = 3 * (1 + 3 + 1) * 2 * 8192 * 32 * 2 * 4096 / 1e6
  assert found.context == pytest.approx(sent, rel=0.01)
  # A window needs that much of one device's keys, and multiplies fewer blocks.
  local, whole = (sizes("Mistral7B", MAX_SEQ_LEN=32768, WINDOW=w) for w in (4096, None))
  near, far = (cost_model.of(one, on(1, context=4), slow) for one in (local, whole))
  assert near.context == pytest.approx(far.context / 6, rel=0.01)
  assert near.attention < 0.35 * far.attention
  # If it is longer than a shard, keys go around, and all causal blocks are multiplied.
  around = cost_model.of(local, on(1, context=16), slow)
  causal = cost_model.of(whole, on(1, context=16), slow)
  assert around.attention == pytest.approx(causal.attention, rel=0.01)
  assert around.context == pytest.approx(causal.context, rel=0.01)


def test_the_loop_of_a_pipeline_hides_few_collectives():
  tpu: Any = machines.find("TPU v5 lite")
  model = sizes("SyntheticLLaMA70B")
  flat = on(64, fsdp=16, tensor=4)
  stages = Pipeline(schedule="1f1b", stages=4, microbatches=16)
  pipelined = dataclasses.replace(on(64, pipeline=4, fsdp=4, tensor=4), pipeline=stages)
  hidden, exposed = (cost_model.of(model, how, tpu) for how in (flat, pipelined))
  assert hidden.tensor < 0.1 * exposed.tensor and hidden.weights < 0.1 * exposed.weights
  # On GPUs all gathers are exposed, on TPUs half of them.
  as_gpu = dataclasses.replace(tpu, chip=MACHINE.chip)
  assert exposed.weights == pytest.approx(
    cost_model.of(model, pipelined, as_gpu).weights / 2, rel=0.02
  )
  # Gradients of several chunks are copied in and out of their sum, as often for 10 as for 2.
  several = [
    dataclasses.replace(
      pipelined, pipeline=dataclasses.replace(stages, schedule="interleaved_1f1b", chunks=n)
    )
    for n in (2, 10)
  ]
  few, many = (cost_model.of(model, how, tpu).memory for how in several)
  assert 1.1 * exposed.memory < few == pytest.approx(many)


def test_some_attention_kernels_do_not_shard_sequences():
  for name, split, whole in (("auto", True, True), ("ring", True, False), ("xla", False, True)):
    model = sizes("SyntheticLLaMA7B", ATTENTION_KERNEL=name)
    assert (model.splits_sequences, model.whole_sequences) == (split, whole), name
  assert not sizes("SyntheticGLaM126M64E").splits_sequences  # A bias of relative positions.


def test_optimizer_state_on_the_host_takes_its_memory_and_the_time_to_move_it():
  model = sizes("SyntheticLLaMA7B")
  away = dataclasses.replace(model, optimizer_on_host=True)
  how = on(8, fsdp=8)
  here, there = (memory_model.of(one, how, MACHINE.network) for one in (model, away))
  assert here.optimizer == pytest.approx(8 * model.num_params / 8) and there.optimizer == 0
  moved = cost_model.of(away, how, MACHINE).host
  assert moved == pytest.approx(2 * here.optimizer / MACHINE.network.host)
  assert cost_model.of(model, how, MACHINE).host == 0


def test_the_capacity_of_experts_takes_time_and_memory():
  found = []
  for factor in (1.0, 2.0):
    model = sizes("Mixtral8x7B", MOE_DISPATCH="capacity", CAPACITY_FACTOR=factor)
    how = on(64, fsdp=4, expert=2)
    found.append((cost_model.of(model, how, MACHINE), memory_model.of(model, how, MACHINE.network)))
  (little, small), (much, large) = found
  assert much.compute > 1.5 * little.compute and much.expert == pytest.approx(
    2 * little.expert, rel=0.01
  )
  assert large.working > 1.5 * small.working


@pytest.mark.parametrize("policy", [Remat.SAVE_QKV_PROJ, Remat.SAVE_QKV_OUT_PROJ])
def test_policies_compute_again_what_they_do_not_save(policy):
  model = sizes("SyntheticLLaMA70B")
  order = (Remat.SAVE_NOTHING, policy, Remat.SAVE_DOT_WITH_NO_BATCH_DIM)
  times = [
    cost_model.of(model, dataclasses.replace(on(64, fsdp=8), remat=r), MACHINE) for r in order
  ]
  most, some, least = (one.compute for one in times)
  assert most > some > least
  assert times[1].attention == times[0].attention == times[2].attention


def test_int8_and_fp8_take_the_time_of_their_own_peaks():
  found = {}
  for kind in (None, "fp8", "int8"):
    model = sizes("SyntheticLLaMA70B", QUANTIZATION=kind)
    for chip in ("TPU v5 lite", "NVIDIA H100", "NVIDIA A100-SXM4-80GB"):
      machine: Any = machines.find(chip)
      found[kind, chip] = cost_model.of(model, on(64, fsdp=8), machine).compute
  # TPU v5e and A100 have no FP8 units, and multiply in bf16; all have those of int8.
  for chip in ("TPU v5 lite", "NVIDIA A100-SXM4-80GB"):
    assert found["fp8", chip] == pytest.approx(found[None, chip])
    assert found["int8", chip] < 0.8 * found[None, chip]
  assert found["fp8", "NVIDIA H100"] < 0.7 * found[None, "NVIDIA H100"]


def test_windows_and_frozen_weights_take_less_time():
  local, whole = (sizes("Mistral7B", MAX_SEQ_LEN=32768, WINDOW=w) for w in (4096, None))
  how = on(8, fsdp=8)
  times = [cost_model.of(model, how, MACHINE) for model in (local, whole)]
  assert times[0].attention < 0.35 * times[1].attention
  assert times[0].compute == pytest.approx(times[1].compute)
  lora = sizes("SyntheticLLaMA7B", USE_LORA=True, LORA_RANK=32)
  full, frozen = (cost_model.of(m, how, MACHINE) for m in (sizes("SyntheticLLaMA7B"), lora))
  assert 0.6 < frozen.compute / full.compute < 0.85 and frozen.update < 0.1 * full.update


def test_a_tied_head_is_split_by_its_outputs():
  head = sizes("Synthetic126M").head
  assert head.dims[0] == "vocab" and head.splits_outputs


def test_tokens_that_were_gathered_for_experts_are_reduced_as_well():
  """Dropless experts over `expert`: every device adds up the outputs of all tokens of the group."""
  model = sizes("Mixtral8x7B")
  apart, together = on(64, fsdp=4, tensor=2), on(64, expert=4, tensor=2)  # As many tokens each.
  one, gathered = (cost_model.of(model, how, MACHINE) for how in (apart, together))
  assert gathered.tensor > 2 * one.tensor and gathered.expert > 0 == one.expert
  whole = cost_model.of(model, on(64, expert=4), MACHINE)
  assert gathered.expert == pytest.approx(whole.expert / 2, rel=1e-2)  # Half of the columns.
  # One output of each of two experts is reduced, and not their sum.
  for knobs in ({"MOE_DISPATCH": "capacity", "CAPACITY_FACTOR": 1.0}, {"USE_FP8": True}):
    each = cost_model.of(sizes("Mixtral8x7B", **knobs), apart, MACHINE)
    assert each.tensor == pytest.approx(1.5 * one.tensor, rel=1e-2)  # With attention's.


def test_gradients_that_are_reduced_once_are_so_beside_the_last_microbatch():
  model = sizes("SyntheticLLaMA70B")
  each = dataclasses.replace(on(2048, {"data": 8}, fsdp=8), accumulation=16)
  once = dataclasses.replace(each, reduced_once=True)
  many, few = (cost_model.of(model, how, MACHINE).weights for how in (each, once))
  assert few < many
  # With one microbatch, there is no difference on GPUs.
  same = [dataclasses.replace(how, accumulation=1) for how in (each, once)]
  totals = [cost_model.of(model, how, MACHINE).total for how in same]
  assert totals[0] == pytest.approx(totals[1], rel=0.01)


def test_jitter_grows_with_the_number_of_nodes():
  model = sizes("SyntheticLLaMA70B")
  times = [cost_model.of(model, on(16 * n, {"data": n}, fsdp=8), MACHINE) for n in (1, 2, 64)]
  shares = [one.jitter / (one.total - one.jitter) for one in times]
  assert shares[0] == 0 < shares[1] and shares[2] == pytest.approx(6 * shares[1])


def test_rates_fall_with_the_size_of_matmuls_and_the_length_of_sequences():
  rates, chip = MACHINE.rates, MACHINE.chip
  large = rates.matmul_flops(chip, 32768, 8192, 8192)
  assert 0.95 * rates.matmul < large / chip.flops < rates.matmul
  assert rates.matmul_flops(chip, 256, 8192, 8192) < 0.8 * large
  assert rates.matmul_flops(chip, 32768, 8192, 32) < 0.5 * large
  assert rates.matmul_flops(chip, 32768, 8192, 8192, dtype="fp8") > 1.5 * large
  # Experts with 16 tokens each fill an eighth of a tile.
  assert rates.matmul_flops(chip, 16, 8192, 8192, groups=256) < 0.2 * large
  long, short = (rates.attention_flops(chip, length, 128) for length in (32768, 1024))
  assert short < 0.7 * long and rates.attention_flops(chip, 32768, 64) < 0.8 * long
  assert rates.attention_flops(chip, 32768, 128, backward=True) < long


def test_tpus_pad_dims_and_compute_tiles_between_groups_twice():
  tpu: Any = machines.find("TPU v6 lite")
  whole, padded = (tpu.rates.matmul_flops(tpu.chip, 4096, n, 2048) for n in (2816, 2880))
  assert padded == pytest.approx(whole * 2880 / 3072)
  few, many = (tpu.rates.ragged_share(tokens) for tokens in (64, 65536))
  assert few < 0.3 * many and many == pytest.approx(tpu.fitted.grouped, rel=0.01)
  # Experts of a fixed capacity are one batched matmul.
  ragged, slots = sizes("Mixtral8x7B"), sizes("Mixtral8x7B", MOE_DISPATCH="capacity")
  slots = dataclasses.replace(slots, capacity=float(ragged.num_chosen))
  how = on(64, fsdp=64)
  times = [cost_model.of(model, how, tpu).compute for model in (ragged, slots)]
  assert times[0] > 1.1 * times[1]


def test_many_small_microbatches_wait_for_their_kernels_to_start():
  model = sizes("Synthetic126M")
  few, many = (dataclasses.replace(on(8, data=8), accumulation=n) for n in (1, 8))
  one, eight = (cost_model.of(model, how, MACHINE) for how in (few, many))
  assert eight.launch == pytest.approx(8 * one.launch) and one.launch > 0
  tpu: Any = machines.find("TPU v5 lite")
  assert cost_model.of(model, many, tpu).launch == 0


def test_every_chip_with_a_network_has_rates():
  for name in chips.CHIPS:
    found = machines.find(name)
    if interconnect.find(name) is not None:
      assert found is not None and 0.2 < found.rates.matmul < 1, name


def test_what_programs_do_otherwise_changes_the_time():
  """Each difference of `Software` makes the step faster or slower, as it should."""
  dense = sizes("SyntheticLLaMA70B"), on(512, {"data": 8}, fsdp=2, tensor=4)
  experts = sizes("Mixtral8x7B"), on(512, {"data": 8}, expert=4, tensor=2)
  pipelined = dataclasses.replace(
    on(128, {"pipeline": 8}, tensor=8),
    pipeline=Pipeline(schedule="1f1b", stages=8, microbatches=64, recompute=False),
  )
  cases: dict[str, tuple[Any, Any, Any]] = {
    "hides_tensor": (*dense, True),
    "optimizer_over_data": (*dense, True),
    "attention": (*dense, "flash2"),
    "libraries_of_2023": (*dense, True),
    "power": (*dense, 0.7),
    "bandwidth": (*dense, 2.4e12),
    "all_to_all": (*experts, True),
    "sends_once": (*experts, True),
    "splits_experts": (*experts, False),
    "scans_ticks": (sizes("Synthetic175B"), pipelined, False),
    "spreads_loss": (sizes("Synthetic175B"), pipelined, False),
  }
  assert set(cases) == {field.name for field in dataclasses.fields(Software)}
  slower = {"attention", "libraries_of_2023", "power", "bandwidth", "spreads_loss"}
  for name, (model, how, value) in cases.items():
    ours = Software(all_to_all=name == "sends_once")
    pair = (ours, dataclasses.replace(ours, **{name: value}))
    found: Any = [machines.find("NVIDIA H100", software=software) for software in pair]
    before, after = (cost_model.of(model, how, machine).total for machine in found)
    assert (after > before) == (name in slower) and after != before, name
