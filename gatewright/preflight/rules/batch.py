"""GW42x and GW44x: batch arithmetic, schedule and precision."""

from gatewright.preflight.fault import Fault, Rule, drop, set_to
from gatewright.preflight.job import Job


def batch_does_not_multiply(job: Job) -> Fault | None:
    """DeepSpeed asserts train_batch_size = micro batch × accumulation × data-parallel ranks, and stops at start-up."""
    said, micro, steps = job.global_batch, job.micro_batch, job.accumulation
    if not job.uses("deepspeed") or not (said.given and micro.given and steps.given) or job.world is None:
        return None
    ranks = max(1, job.world // (job.tp.get(1) * job.pp.get(1) * job.cp.get(1)))
    product = micro.get(1) * steps.get(1) * ranks
    if product == said.value:
        return None
    return Fault(
        f"{said}, but {micro.value} × {steps.value} × {ranks} ranks = {product}",
        (said, micro, steps),
        f"write {product}, or auto",
        set_to(said, product),
    )


def files_disagree(job: Job) -> Fault | None:
    """The same setting stands in two files with two values. Which one wins depends on the tool: the Trainer raises on a
    mismatch with DeepSpeed's JSON, a command line wins over a YAML."""
    if not job.disagreements:
        return None
    pair = job.disagreements[0]
    more = f"; {len(job.disagreements) - 1} more settings differ" if len(job.disagreements) > 1 else ""
    return Fault(
        f"{' but '.join(str(said) for said in pair)}{more}",
        pair,
        "write it once; in DeepSpeed's JSON, auto takes the trainer's value",
        set_to(pair[-1], "auto") if pair[-1].file.endswith(".json") else None,
    )


def global_batch_is_no_multiple(job: Job) -> Fault | None:
    """Megatron asserts that the global batch is a whole number of micro batches on every data-parallel rank."""
    said, micro = job.global_batch, job.micro_batch
    if not job.uses("megatron", "swift-megatron") or not (said.given and micro.given) or job.world is None:
        return None
    ranks = max(1, job.world // (job.tp.get(1) * job.pp.get(1) * job.cp.get(1)))
    unit = micro.get(1) * ranks
    if said.get(0) % unit == 0:
        return None
    return Fault(
        f"{said} is no multiple of {micro.value} × {ranks} data-parallel ranks = {unit}",
        (said, micro),
        f"use {max(unit, round(said.get(0) / unit) * unit)}",
        set_to(said, max(unit, round(said.get(0) / unit) * unit)),
    )


def context_parallel_divides_the_batch(job: Job) -> Fault | None:
    """Ranks of one context-parallel group share their sequences, so the effective batch is smaller by that factor than
    micro batch × accumulation × GPUs."""
    if job.cp.get(1) < 2 or not job.uses("axolotl", "trl", "swift") or job.world is None:
        return None
    rows = job.micro_batch.get(1) * job.accumulation.get(1) * job.world // job.cp.get(1)
    return Fault(
        f"{job.cp}: a step has {rows} rows, not {rows * job.cp.get(1)}",
        (job.cp,),
        "raise the accumulation by the same factor, if the batch was meant",
    )


def steps_override_epochs(job: Job) -> Fault | None:
    """Where both are given, max_steps wins and the epochs are ignored."""
    if not (job.max_steps.given and job.max_steps.get(0) > 0 and job.epochs.given) or job.uses("gatewright"):
        return None
    return Fault(
        f"{job.max_steps} wins over {job.epochs}",
        (job.epochs, job.max_steps),
        "keep one of them",
        drop(job.epochs),
    )


def warmup_longer_than_run(job: Job) -> Fault | None:
    """The learning rate never reaches its peak."""
    if not job.max_steps.get(0) > 0 or job.warmup_steps.get(0) < job.max_steps.get(0):
        return None
    return Fault(
        f"{job.warmup_steps} of {job.max_steps.value} steps: the learning rate never reaches its peak",
        (job.warmup_steps, job.max_steps),
        "3 to 10 % of the steps is usual",
        set_to(job.warmup_steps, max(1, job.max_steps.get(0) // 20)),
    )


def warmup_given_twice(job: Job) -> Fault | None:
    """axolotl refuses a config with both; the Trainer takes the steps and ignores the ratio."""
    if not (job.warmup_steps.get(0) > 0 and job.warmup_ratio.get(0) > 0):
        return None
    return Fault(
        f"{job.warmup_steps} and {job.warmup_ratio}: one of them is ignored, or the config refused",
        (job.warmup_ratio, job.warmup_steps),
        "keep one",
        drop(job.warmup_ratio),
    )


def batch_given_twice(job: Job) -> Fault | None:
    """axolotl computes one of batch_size and gradient_accumulation_steps from the other, and refuses both."""
    if not (job.total_batch_in_axolotl.given and job.accumulation.given):
        return None
    return Fault(
        f"{job.total_batch_in_axolotl} and {job.accumulation}: axolotl refuses the config",
        (job.total_batch_in_axolotl, job.accumulation),
        "keep gradient_accumulation_steps",
        drop(job.total_batch_in_axolotl),
    )


def saves_given_twice(job: Job) -> Fault | None:
    """axolotl computes save_steps from saves_per_epoch, and refuses both."""
    if not (job.save_steps.given and job.saves_per_epoch.given):
        return None
    return Fault(
        f"{job.save_steps} and {job.saves_per_epoch}: axolotl refuses the config",
        (job.saves_per_epoch, job.save_steps),
        "keep save_steps",
        drop(job.saves_per_epoch),
    )


def evaluations_given_twice(job: Job) -> Fault | None:
    """axolotl computes eval_steps from evals_per_epoch, and refuses both."""
    if not (job.eval_steps.given and job.evals_per_epoch.given):
        return None
    return Fault(
        f"{job.eval_steps} and {job.evals_per_epoch}: axolotl refuses the config",
        (job.evals_per_epoch, job.eval_steps),
        "keep eval_steps",
        drop(job.evals_per_epoch),
    )


def fp16_on_this_gpu(job: Job) -> Fault | None:
    """Models of today are trained in bf16; their activations leave fp16's range. On MI250X bf16 is as fast as fp16, and
    runs in fp16 ended in NaN."""
    if not job.fp16.value or not job.amd or not job.trains:
        return None
    return Fault(
        f"{job.fp16} on {job.card}: overflow to NaN, for no gain in speed",
        (job.fp16,),
        "use bf16",
        set_to(job.fp16, False),
    )


def fp16_and_bf16(job: Job) -> Fault | None:
    """A run has one training type: the trainers and DeepSpeed refuse a config that asks for both."""
    if not (job.fp16.value and job.bf16.value):
        return None
    return Fault(
        f"{job.fp16} and {job.bf16}: only one can hold",
        (job.fp16, job.bf16),
        "keep bf16",
        set_to(job.fp16, False),
    )


def states_in_bf16(job: Job) -> Fault | None:
    """bf16 has 8 bits of mantissa: an update smaller than 1/256 of a weight is rounded away. At an update of a
    thousandth, 78 % of the weights did not change at all."""
    if not job.bf16_states.value or job.lora:
        return None
    return Fault(
        f"{job.bf16_states}: updates below 1/256 of a weight are lost in full fine-tuning",
        (job.bf16_states,),
        "keep fp32 master weights, or an optimizer with stochastic rounding",
        None if job.bf16_states.key.endswith("dtype") else set_to(job.bf16_states, False),
    )


def fp8_without_units_here(job: Job) -> Fault | None:
    """Not every GPU multiplies in fp8: on MI250X and A100 there is no such unit, and the run stops or emulates it."""
    if job.fp8.value in (None, "false") or job.gpu is None or job.gpu.fp8_flops_per_s is not None:
        return None
    return Fault(
        f"{job.fp8} on {job.card}, which has no fp8 units",
        (job.fp8,),
        "train in bf16",
        drop(job.fp8),
    )


def nan_is_logged_as_zero(job: Job) -> Fault | None:
    """The Trainer leaves NaN and infinite losses out of the mean it prints: a run that is lost shows a loss of 0.0 and
    goes on, for hours."""
    if not job.nan_filter.value or (not job.fp16.value and not job.nan_filter.given) or not job.trains:
        return None
    return Fault(
        f"{job.nan_filter}: a NaN loss is printed as 0.0",
        (job.nan_filter,),
        "set logging_nan_inf_filter to false, and stop on the first NaN gradient norm",
        set_to(job.nan_filter, False),
    )


_AXOLOTL = "axolotl 0.19, utils/schemas/validation.py"
RULES = (
    Rule("GW421", "error", batch_does_not_multiply, "DeepSpeed docs, batch size related parameters"),
    Rule("GW422", "error", files_disagree, "transformers docs, DeepSpeed: shared configuration"),
    Rule("GW423", "error", global_batch_is_no_multiple, "Megatron-LM, num_microbatches_calculator.py"),
    Rule("GW424", "note", context_parallel_divides_the_batch, "axolotl 0.19, docs/nd_parallelism"),
    Rule("GW425", "warning", steps_override_epochs, "transformers TrainingArguments.max_steps"),
    Rule("GW426", "error", warmup_longer_than_run, "arithmetic"),
    Rule("GW427", "warning", warmup_given_twice, f"{_AXOLOTL}: check_warmup"),
    Rule("GW428", "error", batch_given_twice, f"{_AXOLOTL}: check_gas_bsz", safe=True),
    Rule("GW429", "error", saves_given_twice, f"{_AXOLOTL}: check_saves", safe=True),
    Rule("GW430", "error", evaluations_given_twice, f"{_AXOLOTL}: check_evals", safe=True),
    Rule("GW441", "warning", fp16_on_this_gpu, "karpathy/nanoGPT#167; InternLM/xtuner#187"),
    Rule("GW442", "error", fp16_and_bf16, "transformers TrainingArguments; DeepSpeed asserts the same", safe=True),
    Rule("GW443", "warning", states_in_bf16, "measured: rounding of updates in bf16"),
    Rule("GW444", "error", fp8_without_units_here, "data sheets of the catalogue"),
    Rule("GW445", "note", nan_is_logged_as_zero, "hiyouga/LLaMA-Factory#7263; Time-MoE/Time-MoE#31"),
)
