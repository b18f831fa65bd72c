"""One TRL run in this process: takes a job as JSON on its command line, trains, prints what it measured."""

import itertools
import json
import os
import sys
import time
from pathlib import Path
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
    rows = [json.loads(line) for line in Path(job["data"]).read_text(encoding="utf-8").splitlines()]
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
        "rank": int(os.environ.get("RANK", 0)),
        "step_s": [b - a for a, b in itertools.pairwise(clock.ends)],
        "step_cpu_s": [b - a for a, b in itertools.pairwise(clock.cpu_ends)],
        "tokens": [b - a for a, b in itertools.pairwise([0.0, *clock.tokens])],
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
    model = trainer.model
    vocabulary = model.get_input_embeddings().num_embeddings
    for batch in trainer.get_train_dataloader():
        ids = batch["input_ids"]
        first_end = int((ids[0] == eos).nonzero()[0])
        labels = batch["labels"]
        followed = bool((labels[0, first_end + 1 :] != -100).any())
        if not followed and ids.shape[0] == 1:
            continue
        poisoned = batch | {"input_ids": ids.clone()}
        poisoned["input_ids"][0, :first_end] = (ids[0, :first_end] + 11) % (vocabulary - 2) + 2
        model.eval()
        outputs = [model(**b, fused_lm_head=True).log_probs for b in (batch, poisoned)]
        model.train()
        look = (slice(0, 1), slice(first_end + 1, None)) if followed else (slice(1, None), slice(None))
        return float((outputs[0][look] - outputs[1][look]).abs().max())
    return 0.0


if __name__ == "__main__":
    result = main(json.loads(sys.argv[1]))
    print("RESULT " + json.dumps(result))
