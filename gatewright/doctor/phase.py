"""Which phase of a run a failure fell into, from its traceback or from the lines shortly before it."""

import re
from collections.abc import Sequence
from itertools import takewhile

PHASES = ("load", "forward", "loss", "backward", "optimizer", "evaluate", "save", "resume", "merge", "generate")

_FRAMES: tuple[tuple[str, re.Pattern[str]], ...] = (
    (
        "merge",
        re.compile(r"merge_and_unload|save_pretrained_merged|in merge_adapter|get_delta_weight|merge_lora|in merge\b"),
    ),
    (
        "resume",
        re.compile(
            r"in (?:_?load_from_checkpoint|_load_optimizer_and_scheduler|_load_rng_state|load_checkpoint|load_state"
            r"|_load_checkpoint|_load_zero_checkpoint|load_optimizer|load_optimizer_state|resume\w*)\b"
            r"|optimizer.*load_state_dict|resume_from_checkpoint"
        ),
    ),
    (
        "save",
        re.compile(
            r"in (?:_?save_checkpoint|_save|save_model|save_pretrained|save_16bit_model|save_state|"
            r"_save_zero_checkpoint"
            r"|get_model_state_dict|full_optim_state_dict|_zero3_consolidated_16bit_state_dict)\b|in torch\.save"
        ),
    ),
    (
        "evaluate",
        re.compile(
            r"in (?:evaluate|evaluation_loop|evaluation_step|eval_step|prediction_step|prediction_loop|predict"
            r"|nested_concat|_maybe_log_save_evaluate|compute_metrics|validation_step|_pad_across_processes)\b"
        ),
    ),
    (
        "optimizer",
        re.compile(
            r"optimizer\.step\(|torch/optim/|deepspeed/ops/adam|bitsandbytes/optim|in (?:_init_group|"
            r"_multi_tensor_adamw?"
            r"|_single_tensor_adamw?|init_state|prefetch_state|optimizer_step|clip_grad_norm_?)\b"
        ),
    ),
    ("backward", re.compile(r"\.backward\(|_engine_run_backward|run_backward|in backward\b|torch/autograd/")),
    (
        "loss",
        re.compile(
            r"cross_entropy|in compute_loss_func|ForCausalLMLoss|loss_function\(|loss_fct\(|logits\.float\(\)|"
            r"loss/loss_utils"
            r"|upcast|selective_log_softmax|in lm_head\b|self\.lm_head\("
        ),
    ),
    ("generate", re.compile(r"in (?:generate|_sample|_beam_search|greedy_search|sample)\b|generation/utils\.py")),
    (
        "load",
        re.compile(
            r"in (?:from_pretrained|_load_pretrained_model|load_shard_file|_load_state_dict_into_meta_model|load_model"
            r"|set_module_tensor_to_device|create_quantized_param|dispatch_model|prepare_model|_move_model_to_device)\b"
            r"|model\.(?:to|cuda)\(|in _apply\b|in convert\b"
        ),
    ),
    (
        "forward",
        re.compile(r"in forward\b|modeling_\w+\.py|in _call_impl\b|outputs = model\(|in training_step\b|compute_loss"),
    ),
)

_MARKS: tuple[tuple[str, re.Pattern[str]], ...] = (
    (
        "resume",
        re.compile(
            r"[Rr]esuming (?:from|training|at|checkpoint)|[Rr]esume from|on resume|loading checkpoint|Loading optimizer"
            r"|load_checkpoint|torch\.load\(optimizer"
        ),
    ),
    (
        "evaluate",
        re.compile(r"\*+ Running (?:Evaluation|Prediction)|[Ee]valuating|validation|eval_accumulation|compute_metrics"),
    ),
    ("save", re.compile(r"Saving (?:model )?checkpoint|[Ss]aving (?:model|checkpoint|state)")),
    ("merge", re.compile(r"[Mm]erging|save_pretrained_merged|merge_and_unload")),
    ("load", re.compile(r"Loading checkpoint shards|Loading weights|loading weights file")),
)

_FRAME_START = re.compile(r'^\W*(?:\[?(?:rank|default)?\d+\]?:)?\W*(?:File "|.*\.py(?:"|:\d+| in )|❱)')
_TRACEBACK = "Traceback (most recent call last)"
_INDENTED = re.compile(r"(?:\[?(?:rank|default)?\d+\]?:)?\s{2,}\S")
_PROGRESS = re.compile(r"\d+%\||'loss'|lm loss|\"kind\": \"step\"|it/s|s/it")
_LOOK_BACK_LINES = 40


def traceback_above(before: Sequence[str]) -> tuple[str, ...]:
    """The lines of the traceback that ends right after `before`; empty where there is none."""
    for back, line in enumerate(reversed(before)):
        if _TRACEBACK in line:
            return tuple(before[len(before) - back :])
    return ()


def phase_of(before: Sequence[str], line: str = "") -> str:
    """The phase in which the code that raised was called; empty where nothing tells."""
    above = traceback_above(before) or _bare_frames(before)
    frames = "\n".join(above) or (line if 'File "' in line or "traceback" in line else "")
    if frames:
        for phase, pattern in _FRAMES:
            if pattern.search(frames):
                return phase
    return _marked(before, line)


def _bare_frames(before: Sequence[str]) -> tuple[str, ...]:
    """The frames right above, where the head of the traceback was cut off: indented lines, a frame among them."""
    frames = list(takewhile(_INDENTED.match, reversed(before)))[::-1]
    return tuple(frames) if any('File "' in line for line in frames) else ()


def _marked(before: Sequence[str], line: str) -> str:
    """Without a traceback: the last announcement before the failure, unless training went on after it."""
    for text in (line, *reversed(before[-_LOOK_BACK_LINES:])):
        if _PROGRESS.search(text) and "checkpoint shards" not in text and text is not line:
            return ""
        for phase, pattern in _MARKS:
            if pattern.search(text):
                return phase
    return ""
