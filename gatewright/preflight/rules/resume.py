"""GW2xx: checkpoints and resume. What a campaign loses when a job ends before its run does."""

import re

from gatewright.preflight.fault import Fault, Rule, add_after, drop, set_to
from gatewright.preflight.job import Job

_JOB_ID = re.compile(r"SLURM_JOB_?ID|SLURM_ARRAY_JOB_ID|%[jA]\b|\$\(date|`date|\{now|%Y")
_CHANGING = re.compile(r"[-_.]*(\$\{?SLURM_\w+\}?|%[jA]|\$\([^)]*\)|`[^`]*`)")
STARTUP_S = 600
"""Allowed for loading and compiling before step 1 where nobody measured it."""


def steps_per_job(job: Job) -> int | None:
    """Steps that fit one job, by the measured step time and the time limit."""
    if job.step_s is None or job.time_limit_s.value is None:
        return None
    return max(0, int((job.time_limit_s.value - STARTUP_S) / job.step_s))


def job_id_in_output_dir(job: Job) -> Fault | None:
    """A folder named by the job is a new folder in the next job: nothing is found there, and training starts again
    at step 0. Name it by the run."""
    if not _JOB_ID.search(job.output_dir.get("")):
        return None
    parent, _, last = job.output_dir.get("").rstrip("/").rpartition("/")
    last = _CHANGING.sub("", last) or "run"
    parent = _CHANGING.sub("", parent)
    return Fault(
        f"the output folder {job.output_dir.value} changes with every job, so a resumed run starts at step 0",
        (job.output_dir,),
        "name the folder by the run, and put the job id into the log's name only",
        set_to(job.output_dir, f"{parent}/{last}" if parent else last),
    )


def nothing_is_saved(job: Job) -> Fault | None:
    """Without checkpoints the time limit, a node failure or a preemption costs everything so far."""
    if job.save_strategy.get("steps") != "no" or not (job.slurm.value or job.chained):
        return None
    return Fault(
        f"{job.save_strategy} in a job that the queue may end at any time: nothing is saved",
        (job.save_strategy,),
        "save by steps, at least twice in one job",
        set_to(job.save_strategy, "steps"),
    )


def save_interval_longer_than_job(job: Job) -> Fault | None:
    """A job that ends before its first checkpoint leaves nothing to resume from: the next one starts at the same step,
    for ever. The Trainer's default of 500 steps has cost whole campaigns at minutes a step."""
    fits, every = steps_per_job(job), job.save_steps
    if fits is None or every.value is None or job.save_strategy.get("steps") != "steps" or every.value <= fits:
        return None
    return Fault(
        f"{every}: one job of {job.time_limit_s.get(0) / 3600:.1f} h fits {fits} steps at {job.step_s:g} s, "
        "so no job ever saves",
        (every, job.time_limit_s),
        f"save every {max(1, fits // 3)} steps or fewer",
        set_to(every, max(1, fits // 3)),
    )


def saves_once_per_job(job: Job) -> Fault | None:
    """With one save a job, an interruption costs up to the whole job, and a slow start the save itself."""
    fits, every = steps_per_job(job), job.save_steps
    if fits is None or every.value is None or job.save_strategy.get("steps") != "steps":
        return None
    if not fits / 2 < every.value <= fits:
        return None
    return Fault(
        f"{every}: only {fits} steps fit one job, so it saves once",
        (every,),
        f"save every {max(1, fits // 3)} steps",
        set_to(every, max(1, fits // 3)),
    )


def save_interval_longer_than_run(job: Job) -> Fault | None:
    """The first checkpoint would come after the last step; a crash near the end costs the run."""
    every, steps = job.save_steps, job.max_steps
    if every.value is None or not steps.get(0) > 0 or job.save_strategy.get("steps") != "steps":
        return None
    if every.value < steps.get(0) or job.uses("gatewright"):
        return None
    return Fault(
        f"{every}, but the run has {steps.value} steps: no checkpoint before the end",
        (every, steps),
        "save at least twice",
        set_to(every, max(1, steps.get(0) // 4)),
    )


def keeps_one_checkpoint(job: Job) -> Fault | None:
    """The newest checkpoint is not the newest complete one: a save that is cut short by the time limit leaves a damaged
    folder, and the one before it is gone already."""
    if job.save_limit.value != 1 or (job.auto_resume.value and job.uses("gatewright")):
        return None
    return Fault(
        f"{job.save_limit} keeps one checkpoint: if its save is cut short, there is none",
        (job.save_limit,),
        "keep two at least",
        set_to(job.save_limit, 2),
    )


def optimizer_not_saved(job: Job) -> Fault | None:
    """Without the optimizer's state a resumed run is another run: the moments start at zero and the loss jumps."""
    if not job.save_only_model.value or not (job.slurm.value or job.chained or job.resume.value):
        return None
    return Fault(
        f"{job.save_only_model}: a resumed job starts with empty optimizer state",
        (job.save_only_model,),
        "save the optimizer's state while the run may have to resume",
        set_to(job.save_only_model, False),
    )


def resume_forgets_optimizer(job: Job) -> Fault | None:
    """These options load weights and forget the step, the optimizer or the learning rate: a chain with them starts at
    iteration 0 in every job."""
    if not job.load_only_model.value or not job.chained:
        return None
    return Fault(
        f"{job.load_only_model} in a chain of jobs: each one starts its step count and optimizer anew",
        (job.load_only_model,),
        "use it for the first job of a run only",
        drop(job.load_only_model),
    )


def resume_without_checkpoint(job: Job) -> Fault | None:
    """The Trainer raises `No valid checkpoint found` when it is told to resume and the folder is empty, as it is in the
    first job of a chain."""
    if job.resume.get("").lower() != "true" or not job.uses("transformers", "trl") or not job.chained:
        return None
    return Fault(
        f"{job.resume} fails in the first job, when {job.output_dir.get('the output folder')} holds no checkpoint",
        (job.resume,),
        "pass it only when a checkpoint-* folder exists",
    )


def overwrites_what_it_should_resume(job: Job) -> Fault | None:
    """LLaMA-Factory looks for the last checkpoint only where it may not overwrite the folder; with
    overwrite_output_dir every job of a chain starts at step 0 and writes over the steps of the one before."""
    if not job.overwrite.value or not job.chained or job.resume.value:
        return None
    if not job.uses("llamafactory", "transformers"):
        return None
    return Fault(
        f"{job.overwrite} in a chain of jobs: each starts at step 0 and overwrites the last",
        (job.overwrite,),
        "write false, so that the last checkpoint is found",
        set_to(job.overwrite, False),
    )


def chain_without_resume(job: Job) -> Fault | None:
    """The next job of a chain runs the same command. Unless that command looks for a checkpoint, it trains from the
    start again and exits with success."""
    if not job.chained or not job.trains or not job.uses("axolotl", "trl", "transformers"):
        return None
    if job.resume.value or job.auto_resume.value:
        return None
    at = next(said for said in (job.array, job.dependency, job.requeue, job.links) if said.value)
    option = "auto_resume_from_checkpoints: true" if job.uses("axolotl") else "--resume_from_checkpoint"
    return Fault(
        f"{at.key} starts this script more than once, and nothing in it resumes: every job begins at step 0",
        (at, job.output_dir),
        f"add {option}",
        add_after(job.output_dir, "auto_resume_from_checkpoints: true") if job.uses("axolotl") else None,
    )


def activations_kept_on_a_large_model(job: Job) -> Fault | None:
    """Gradient checkpointing that was switched off for an experiment fits a short test and runs out of memory on the
    first long sequence, or at once on resume, when optimizer state is there from the start."""
    off, shape = job.checkpointing, job.shape
    if off.value is not False or not off.given or shape is None or shape.parameters < 5e9:
        return None
    tokens = job.max_tokens.get(4096) * job.micro_batch.get(1)
    kept = 34 * shape.hidden * len(shape.layers) * tokens
    boundary = 2 * shape.hidden * len(shape.layers) * tokens
    return Fault(
        f"{off} on {shape.parameters / 1e9:.0f} B parameters: about {kept / 2**30:.0f} GiB of activations for "
        f"{tokens:,} tokens, against {boundary / 2**30:.1f} GiB with it (34 and 2 bytes × hidden × layers)",
        (off,),
        "switch it on",
        set_to(off, True),
    )


def best_model_needs_matching_saves(job: Job) -> Fault | None:
    """The Trainer loads the best checkpoint at the end only if each save falls on an evaluation; otherwise it raises
    before step 1."""
    if not job.load_best.value or not job.uses("transformers", "trl", "llamafactory"):
        return None
    save, evaluate = job.save_steps, job.eval_steps
    if job.save_strategy.get("steps") != "steps" or not evaluate.get(0) > 0 or save.get(0) % evaluate.get(1) == 0:
        return None
    return Fault(
        f"{save} is no multiple of {evaluate}, which load_best_model_at_end needs",
        (save, evaluate),
        f"save every {evaluate.get(1) * max(1, round(save.get(0) / evaluate.get(1)))} steps",
        set_to(save, evaluate.get(1) * max(1, round(save.get(0) / evaluate.get(1)))),
    )


def jit_checkpoint_in_three_seconds(job: Job) -> Fault | None:
    """The Trainer's just-in-time checkpoint acts on SIGTERM after a wait of 3 s, each rank by itself: at the time limit
    SLURM sends SIGTERM 30 s before SIGKILL, which a large save does not fit. Its mark of an incomplete folder is never
    read again."""
    if not job.jit_checkpoint.value or not job.slurm.value:
        return None
    return Fault(
        f"{job.jit_checkpoint}: SIGTERM comes 30 s before SIGKILL, and a save that is cut short is taken for complete",
        (job.jit_checkpoint,),
        "save by steps; with #SBATCH --signal=B:USR1@300 and a stop file, the last save fits",
    )


def full_state_on_one_rank(job: Job) -> Fault | None:
    """FULL_STATE_DICT gathers the model and the optimizer on rank 0 at every save: an out-of-memory error at the first
    checkpoint, hours into the run."""
    said, shape = job.fsdp_state_dict, job.shape
    if said.get("").upper() != "FULL_STATE_DICT" or shape is None or shape.parameters < 2e10 or not job.full:
        return None
    return Fault(
        f"{said} gathers {2 * shape.parameters / 1e9:.0f} GB of weights, and optimizer state, on rank 0 at each save",
        (said,),
        "use SHARDED_STATE_DICT, and merge after training",
        set_to(said, "SHARDED_STATE_DICT"),
    )


def resume_repeats_data(job: Job) -> Fault | None:
    """ignore_data_skip starts the data at its beginning again after each resume: the first part of the epoch is seen
    once a job, the last part never."""
    if not job.ignore_data_skip.value or not (job.chained or job.resume.value):
        return None
    return Fault(
        f"{job.ignore_data_skip}: each resumed job starts at the first batch again",
        (job.ignore_data_skip,),
        "leave the Trainer to skip what was seen",
        set_to(job.ignore_data_skip, False),
    )


RULES = (
    Rule("GW201", "error", job_id_in_output_dir, "facebookresearch/detr#237"),
    Rule(
        "GW202", "error", nothing_is_saved, "NVIDIA-NeMo/NeMo-RL checkpoint_must_save_by; huggingface/accelerate#3400"
    ),
    Rule("GW203", "error", save_interval_longer_than_job, "measured: a 6,060-step campaign at 125 s a step"),
    Rule(
        "GW204", "warning", saves_once_per_job, "stas00/ml-engineering, fault tolerance: save interval and job length"
    ),
    Rule("GW205", "warning", save_interval_longer_than_run, "open-instruct#1875 (4,770 steps lost)"),
    Rule("GW206", "warning", keeps_one_checkpoint, "huggingface/transformers#35782", safe=True),
    Rule("GW207", "warning", optimizer_not_saved, "modelscope/ms-swift#8240; transformers TrainingArguments"),
    Rule("GW208", "error", resume_forgets_optimizer, "modelscope/ms-swift#6008"),
    Rule("GW209", "error", resume_without_checkpoint, "huggingface/transformers#15341"),
    Rule("GW210", "error", overwrites_what_it_should_resume, "LLaMA-Factory 0.9.5, hparams/parser.py", safe=True),
    Rule("GW211", "error", chain_without_resume, "facebookresearch/fairchem#803 and #1051"),
    Rule("GW212", "warning", activations_kept_on_a_large_model, "modelscope/ms-swift#5992; arXiv:2205.05198 §4"),
    Rule("GW213", "error", best_model_needs_matching_saves, "transformers 5.24, TrainingArguments.__post_init__"),
    Rule("GW214", "warning", jit_checkpoint_in_three_seconds, "transformers 5.24, trainer_jit_checkpoint.py"),
    Rule("GW215", "warning", full_state_on_one_rank, "huggingface/transformers#23386"),
    Rule("GW216", "warning", resume_repeats_data, "transformers TrainingArguments.ignore_data_skip", safe=True),
)
