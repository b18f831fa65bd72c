"""One TRL run in this process: reads a job as JSON on its command line, trains, prints its measurements as JSON."""

import json
import sys
import time
from typing import Any

import torch
from datasets import Dataset
from measure import forget_peak, peak_resident_bytes, resident_bytes
from peft import LoraConfig, PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from transformers.utils import logging
from trl import SFTConfig, SFTTrainer


class StepClock(TrainerCallback):
    """Time, loss and tokens of each optimizer step; the first step begins when training does."""

    def __init__(self) -> None:
        self.ends: list[float] = []
        self.cpu_ends: list[float] = []
        self.losses: list[float] = []
        self.tokens: list[float] = []
        self.loaded_bytes = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        forget_peak()
        self.loaded_bytes = resident_bytes()
        self.on_step_end(args, state, control)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.ends.append(time.perf_counter())
        self.cpu_ends.append(time.process_time())

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any) -> None:
        if logs and "loss" in logs:
            self.losses.append(logs["loss"])
            self.tokens.append(logs["num_tokens"])


def main(job: dict[str, Any]) -> dict[str, Any]:
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(job["threads"])
    dtype = getattr(torch, job["dtype"])
    tokenizer = AutoTokenizer.from_pretrained(job["model"])
    model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=dtype, **job["model_settings"])
    peft_config = None
    if job["adapter"]:
        model = PeftModel.from_pretrained(model, job["adapter"], is_trainable=True)
    else:
        peft_config = LoraConfig(
            r=job["rank"], lora_alpha=job["alpha"], target_modules=["q_proj", "k_proj", "v_proj", "o_proj"],
            target_parameters=["experts.gate_up_proj", "experts.down_proj"], task_type="CAUSAL_LM",
        )  # fmt: skip
    rows = [json.loads(line) for line in open(job["data"], encoding="utf-8")]
    defaults = {
        "output_dir": job["folder"], "report_to": [], "save_strategy": "no", "logging_steps": 1, "disable_tqdm": True,
        "use_cpu": True, "max_length": job["max_tokens"], "max_steps": job["steps"], "learning_rate": job["lr"],
        "lr_scheduler_type": "constant", "seed": job["seed"], "bf16": dtype == torch.bfloat16, "max_grad_norm": 1.0,
    }  # fmt: skip
    clock = StepClock()
    trainer = SFTTrainer(
        model=model, args=SFTConfig(**defaults | job["settings"]), train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer, peft_config=peft_config, callbacks=[clock],
    )  # fmt: skip
    for parameter in trainer.model.parameters():
        parameter.data.sum()  # weights mapped from the file count as loaded, not as a step's memory
    leak = largest_leak(trainer, tokenizer.eos_token_id)
    trainer.train()
    return {
        "step_s": [b - a for a, b in zip(clock.ends, clock.ends[1:], strict=False)],
        "step_cpu_s": [b - a for a, b in zip(clock.cpu_ends, clock.cpu_ends[1:], strict=False)],
        "tokens": [b - a for a, b in zip([0.0, *clock.tokens], clock.tokens, strict=False)],
        "losses": clock.losses,
        "loaded_bytes": clock.loaded_bytes,
        "peak_bytes": peak_resident_bytes(),
        "leak": leak,
        "trainable": sum(p.numel() for p in trainer.model.parameters() if p.requires_grad),
        "experts": model.config._experts_implementation,
        "attention": model.config._attn_implementation,
    }


@torch.no_grad()
def largest_leak(trainer: SFTTrainer, eos: int) -> float:
    """How far a document's log-probabilities move when another document of its micro-batch changes. 0: isolated.

    The micro-batch is the trainer's own. The document changed is the first of the first row; the one looked at is
    the next in that row, or, where padding follows, the one in the next row.
    """
    for batch in trainer.get_train_dataloader():
        batch = {k: v for k, v in batch.items()}
        ids = batch["input_ids"]
        first_end = int((ids[0] == eos).nonzero()[0])
        labels = batch["labels"]
        followed = bool((labels[0, first_end + 1 :] != -100).any())
        if not followed and ids.shape[0] == 1:
            continue
        poisoned = batch | {"input_ids": ids.clone()}
        poisoned["input_ids"][0, :first_end] = (ids[0, :first_end] + 11) % eos_safe(ids) + 2
        model = trainer.model
        model.eval()
        outputs = [model(**b, fused_lm_head=True).log_probs for b in (batch, poisoned)]
        model.train()
        look = (slice(0, 1), slice(first_end + 1, None)) if followed else (slice(1, None), slice(None))
        return float((outputs[0][look] - outputs[1][look]).abs().max())
    return 0.0


def eos_safe(ids: torch.Tensor) -> int:
    return max(3, int(ids.max()) - 2)


if __name__ == "__main__":
    result = main(json.loads(sys.argv[1]))
    print("RESULT " + json.dumps(result))
