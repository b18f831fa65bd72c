"""Expert LoRA against PEFT's `target_parameters` on the same layer and tokens, and against training the layer in full.

Each contestant runs in child processes with one thread. Time is the process's CPU time for forward and backward, the
least of several. Memory is the largest resident set during a step less that before it, weights touched, in a process of
its own where the C library gives every freed block back at once.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import peft
import torch
import transformers
from measure import forget_peak, peak_resident_bytes, resident_bytes
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from gatewright.data.batch import Batch
from gatewright.model.adapters import add_adapters, train_weights
from gatewright.model.attention import NAME as ATTENTION
from gatewright.model.attention import choose_kernel
from gatewright.model.attention import install as install_attention
from gatewright.model.expert_lora import LORA, ExpertLora
from gatewright.model.experts import NAME, find_experts, lora_shapes
from gatewright.model.experts import install as install_experts
from gatewright.model.head import head_of
from gatewright.model.load import put_seams
from gatewright.spec import run as spec
from gatewright.train.forward import hidden_states
from gatewright.train.loss import token_loss_sum

RANK, ALPHA = 16, 32
EXACT_MALLOC = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """Shape of one layer's experts and the tokens it gets."""

    experts: int
    top_k: int
    hidden: int
    width: int
    tokens: int
    dtype: str


LAYERS = {
    "Qwen3-30B-A3B, 512 tokens": Layer(experts=128, top_k=8, hidden=2048, width=768, tokens=512, dtype="bfloat16"),
    "64 experts, 4,096 tokens": Layer(experts=64, top_k=8, hidden=512, width=256, tokens=4096, dtype="float32"),
}
LAYER_CONTESTANTS = ("ours", "peft grouped_mm", "full, ours", "full, transformers grouped_mm")
MODEL_CONTESTANTS = ("attention", "attention and experts", "full")
GOALS = {
    "Qwen3-30B-A3B, 512 tokens": {"speed": 4.0, "memory": 0.1},
    "64 experts, 4,096 tokens": {"speed": 1.15, "memory": 0.7},
}
DEAREST = 1.2
"""Most that adapters on experts may cost over attention alone, end to end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Of one contestant: the least CPU time of a step, and the memory it needs while it runs."""

    cpu_s: float
    step_bytes: int


def main() -> None:
    """Prints every ratio and, with --json, writes them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=2, help="child processes a contestant")
    parser.add_argument("--repeats", type=int, default=4, help="steps timed in each of them")
    parser.add_argument("--only", help="run what has this in its name")
    parser.add_argument("--json", type=Path, help="write the numbers here")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        what, name, contestant = args.child
        print(measure_memory(name, contestant) if what == "memory" else measure_time(name, contestant, args.repeats))
        return
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, peft {peft.__version__}, one thread")
    found: dict[str, dict[str, dict[str, float]]] = {}
    for name in LAYERS:
        if not args.only or args.only in name:
            found[name] = contest(name, LAYER_CONTESTANTS, args)
            report_layer(name, found[name])
    name = "end to end"
    if not args.only or args.only in name:
        found[name] = contest(name, MODEL_CONTESTANTS, args)
        report_model(found[name])
    if args.json:
        args.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


def contest(name: str, contestants: tuple[str, ...], args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """The best of all rounds, contestants taking turns so that a busy spell of the machine meets all alike."""
    runs: dict[str, list[Measured]] = {contestant: [] for contestant in contestants}
    for _ in range(args.rounds):
        for contestant in contestants:
            cpu_s = child("time", name, contestant, args.repeats, {})
            step_bytes = child("memory", name, contestant, args.repeats, EXACT_MALLOC)
            runs[contestant].append(Measured(cpu_s=cpu_s, step_bytes=round(step_bytes)))
    return {
        contestant: {"cpu_s": min(m.cpu_s for m in all_), "step_bytes": min(m.step_bytes for m in all_)}
        for contestant, all_ in runs.items()
    }


def child(what: str, name: str, contestant: str, repeats: int, more: dict[str, str]) -> float:
    """Runs this file again to measure one thing of one contestant, with `more` in its environment."""
    command = [sys.executable, __file__, "--repeats", str(repeats), "--child", what, name, contestant]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | more)
    if done.returncode:
        sys.exit(f"{name}, {contestant}:\n{done.stderr}")
    return float(done.stdout.splitlines()[-1])


def report_layer(name: str, found: dict[str, dict[str, float]]) -> None:
    """The table of one layer, with ours over each contestant."""
    ours, goal = found["ours"], GOALS[name]
    print(f"\n{name}: {LAYERS[name]}, rank {RANK}")
    for contestant, measured in found.items():
        faster = measured["cpu_s"] / ours["cpu_s"]
        less = ours["step_bytes"] / measured["step_bytes"]
        print(
            f"  {contestant:<30} {measured['cpu_s']:8.3f} CPU s ({faster:5.2f} x ours)"
            f"  {measured['step_bytes'] / 2**20:8.1f} MiB (ours is {less:5.3f} of it)"
        )
    peer = found["peft grouped_mm"]
    speed, memory = peer["cpu_s"] / ours["cpu_s"], ours["step_bytes"] / peer["step_bytes"]
    full = found["full, ours"]["cpu_s"] / ours["cpu_s"]
    print(f"  against PEFT: {speed:.2f} times as fast (goal {goal['speed']}: {_said(speed >= goal['speed'])})")
    print(f"  against PEFT: {memory:.3f} of the step memory (goal {goal['memory']}: {_said(memory <= goal['memory'])})")
    print(f"  against full fine-tuning: {full:.2f} times as fast (goal 1: {_said(full >= 1)})")


def report_model(found: dict[str, dict[str, float]]) -> None:
    """What adapters on experts cost over attention alone, in the whole step."""
    cost = found["attention and experts"]["cpu_s"] / found["attention"]["cpu_s"]
    full = found["full"]["cpu_s"] / found["attention and experts"]["cpu_s"]
    print("\nend to end: 4 layers of Qwen3-MoE, forward, loss and backward")
    for contestant, measured in found.items():
        print(f"  {contestant:<30} {measured['cpu_s']:8.3f} CPU s  {measured['step_bytes'] / 2**20:8.1f} MiB")
    print(f"  experts cost {cost:.2f} of attention alone (goal {DEAREST}: {_said(cost <= DEAREST)})")
    print(f"  against full fine-tuning: {full:.2f} times as fast (goal 1: {_said(full >= 1)})")


def _said(reached: bool) -> str:
    return "reached" if reached else "missed"


def measure_time(name: str, contestant: str, repeats: int) -> float:
    """Least CPU seconds of a step of this contestant in this process."""
    step = prepared_step(name, contestant)
    times = []
    for _ in range(repeats):
        began = time.process_time()
        step()
        times.append(time.process_time() - began)
    return min(times)


def measure_memory(name: str, contestant: str) -> int:
    """Bytes that a step of this contestant needs besides what is there between steps."""
    step = prepared_step(name, contestant)
    forget_peak()
    before = resident_bytes()
    step()
    return peak_resident_bytes() - before


def prepared_step(name: str, contestant: str) -> Callable[[], None]:
    """The contestant's step, run once so that weights are touched and kernels chosen."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    step = model_step(contestant) if name == "end to end" else layer_step(LAYERS[name], contestant)
    step()
    return step


def layer_step(layer: Layer, contestant: str) -> Callable[[], None]:
    """Forward and backward through one layer's experts, gradients dropped afterwards."""
    config = Qwen3MoeConfig(
        hidden_size=layer.hidden,
        moe_intermediate_size=layer.width,
        num_experts=layer.experts,
        num_experts_per_tok=layer.top_k,
    )
    dtype = getattr(torch, layer.dtype)
    experts = Qwen3MoeExperts(config).to(dtype)
    for weight in experts.parameters():
        nn.init.normal_(weight, std=0.02)
    holder = Block(experts)
    holder.requires_grad_(contestant.startswith("full"))
    config._experts_implementation = "grouped_mm"
    if contestant in ("ours", "full, ours"):
        config._experts_implementation = NAME
        install_experts(holder)
    if contestant == "ours":
        lora = ExpertLora(lora_shapes(experts), RANK, ALPHA / RANK, torch.device("cpu"))
        experts.add_module(LORA, lora)
        for factor in (*lora.A.values(), *lora.B.values()):
            nn.init.normal_(factor, std=0.02)
    elif contestant.startswith("peft"):
        targets = ["experts.gate_up_proj", "experts.down_proj"]
        lora_config = LoraConfig(
            r=RANK, lora_alpha=ALPHA, target_modules=[], target_parameters=targets, init_lora_weights=False
        )
        holder = get_peft_model(holder, lora_config)

    x_TH = torch.randn(layer.tokens, layer.hidden, dtype=dtype)
    scores_TE = torch.randn(layer.tokens, layer.experts).softmax(dim=1)
    weight_Tk, index_Tk = scores_TE.topk(layer.top_k)
    weight_Tk = (weight_Tk / weight_Tk.sum(dim=1, keepdim=True)).to(dtype)
    grad_TH = torch.randn(layer.tokens, layer.hidden, dtype=dtype)

    def step() -> None:
        x = x_TH.clone().requires_grad_()
        holder(x, index_Tk, weight_Tk).backward(grad_TH)
        for parameter in holder.parameters():
            parameter.grad = None

    return step


class Block(nn.Module):
    """An experts module under the name that PEFT's targets have for it."""

    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.experts = experts

    def forward(self, x_TH: Tensor, index_Tk: Tensor, weight_Tk: Tensor) -> Tensor:
        """The experts' output, [T, H]."""
        return self.experts(x_TH, index_Tk, weight_Tk)


def model_step(contestant: str) -> Callable[[], None]:
    """Our whole forward, loss and backward on a Qwen3-MoE of 4 layers, 2,048 packed tokens, float32."""
    config = Qwen3MoeConfig(
        vocab_size=2048,
        hidden_size=512,
        intermediate_size=1024,
        moe_intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=16,
        num_key_value_heads=4,
        head_dim=64,
        num_experts=64,
        num_experts_per_tok=8,
        norm_topk_prob=True,
    )
    install_attention(choose_kernel(torch.device("cpu"), torch.float32))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=ATTENTION)
    put_seams(model, source="benchmark")
    if contestant == "full":
        train_weights(model, None, router=False)
    else:
        targets = ["attention", "experts"] if "experts" in contestant else ["attention"]
        add_adapters(model, spec.Adapter(rank=RANK, alpha=float(ALPHA), targets=targets), seed=0)
    assert len(find_experts(model)) == 4
    lengths = (1024, 512, 256, 256)
    ends = torch.tensor([0, *lengths]).cumsum(0)
    batch = Batch(
        tokens_T=torch.randint(0, 2048, (2048,)),
        labels_T=torch.randint(0, 2048, (2048,)),
        positions_T=torch.cat([torch.arange(n) for n in lengths]),
        cu_seqlens_S1=ends.int(),
        lengths=lengths,
        documents=tuple(range(len(lengths))),
    )
    head = head_of(model)
    model.train()

    def step() -> None:
        token_loss_sum(hidden_states(model, batch), head, batch.labels_T, chunk_tokens=256).backward()
        model.zero_grad(set_to_none=True)

    return step


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        os.environ.setdefault("HF_HOME", scratch)
        main()
