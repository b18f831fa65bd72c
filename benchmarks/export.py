"""Merging, converting and quantising beside PEFT's merge_and_unload and llama.cpp's own converter and quantiser.

    python benchmarks/export.py --converter llama.cpp/convert_hf_to_gguf.py [--quantiser bin/llama-quantize]
    python benchmarks/export.py --merge-gib 4 --limit-gib 2          the memory bound alone, on random weights

A Mixtral of random weights is made on the spot, with an adapter of its attention and experts. Each contestant runs in
a child process with one thread; time is CPU time of the child and its children, memory its peak resident set. Without
--quantiser, both sides quantise by the same library call, so that only the conversion differs.
"""

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from measure import peak_resident_bytes, resident_bytes
from peft import LoraConfig, PeftModel, get_peft_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, MixtralConfig, PreTrainedTokenizerFast

from gatewright.export.convert import convert
from gatewright.export.deltas import read_adapter
from gatewright.export.merge import empty_model, merge
from gatewright.export.official import check_converter
from gatewright.export.quantise import parse_recipes, quantise
from gatewright.export.shards import Planned, plan_shards, write_index, write_shard

GOALS = {"time": 0.8, "memory": 0.4}
GIB = 1024**3
PRE_TOKENIZER = "gpt-2"
"""The official converter knows tokenizers by hash only, and this one is made here; its answer is given to it."""


def make_model(folder: Path, *, gib: float) -> None:
    """A Mixtral of about `gib` GiB in bfloat16, written shard by shard, with a tokenizer."""
    layers = max(2, round(gib * GIB / (8 * 3 * 512 * 1792 * 2)))
    config = MixtralConfig(
        vocab_size=2048, hidden_size=512, intermediate_size=1792, num_hidden_layers=layers, num_attention_heads=8,
        num_key_value_heads=4, num_local_experts=8, num_experts_per_tok=2, max_position_embeddings=1024,
        bos_token_id=None, eos_token_id=None, dtype="bfloat16", architectures=["MixtralForCausalLM"],
    )  # fmt: skip
    config.save_pretrained(folder)
    shapes = {"model.embed_tokens.weight": (2048, 512), "lm_head.weight": (2048, 512), "model.norm.weight": (512,)}
    for layer in range(layers):
        at = f"model.layers.{layer}"
        shapes |= {f"{at}.self_attn.{name}_proj.weight": (512, 512) for name in "qo"}
        shapes |= {f"{at}.self_attn.{name}_proj.weight": (256, 512) for name in "kv"}
        shapes |= {f"{at}.{name}_layernorm.weight": (512,) for name in ("input", "post_attention")}
        shapes[f"{at}.block_sparse_moe.gate.weight"] = (8, 512)
        for expert in range(8):
            inside = f"{at}.block_sparse_moe.experts.{expert}"
            shapes |= {f"{inside}.w1.weight": (1792, 512), f"{inside}.w3.weight": (1792, 512)}
            shapes[f"{inside}.w2.weight"] = (512, 1792)
    shards = plan_shards({name: Planned(shape, torch.bfloat16) for name, shape in shapes.items()}, shard_bytes=GIB)
    noise = torch.randn(1792 * 512 * 2, dtype=torch.bfloat16) * 0.05
    for shard in shards:
        write_shard(folder, shard, ((n, noise[: t.bytes // 2].view(t.shape)) for n, t in shard.tensors.items()))
    write_index(folder, shards)
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=alphabet, special_tokens=["<eos>"], show_progress=False
    )
    raw.train_from_iterator(Path(__file__).read_text().splitlines(), trainer)
    PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<eos>").save_pretrained(folder)


def make_adapter(base: Path, folder: Path) -> None:
    """An adapter of rank 8 on attention and experts, random, saved by PEFT from a model without weights."""
    with torch.device("meta"):
        config = MixtralConfig.from_pretrained(base)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        stacks = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
        adapted = get_peft_model(
            model, LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"], target_parameters=stacks)
        )
    adapters = {n: torch.randn(p.shape) * 0.02 for n, p in adapted.named_parameters() if "lora_" in n}
    adapted.peft_config["default"].base_model_name_or_path = str(base)
    adapted.save_pretrained(folder, state_dict=adapters)


def ours_merge(base: Path, adapter: Path, out: Path) -> None:
    model = empty_model(base)
    files = read_adapter(adapter, model, base=base)
    merge(base, files, model, out, dtype=torch.float16, tick=lambda done, total: None)


def ours(base: Path, adapter: Path, out: Path, options: argparse.Namespace) -> None:
    ours_merge(base, adapter, out / "merged")
    convert(out / "merged", out / "f16.gguf", precision="f16", name="x", tick=lambda done, total: None)
    quantise(
        out / "f16.gguf", out / "q4.gguf", parse_recipes("q4_k_m")[0], importance={}, tick=lambda d, t: None, threads=1
    )


def theirs(base: Path, adapter: Path, out: Path, options: argparse.Namespace) -> None:
    """What guides tell people to do: load in bfloat16, merge, save, convert, quantise."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
    merged = PeftModel.from_pretrained(model, str(adapter)).merge_and_unload()
    merged.save_pretrained(out / "merged")
    PreTrainedTokenizerFast.from_pretrained(base).save_pretrained(out / "merged")
    del model, merged
    run_official(options.converter, out / "merged", out / "f16.gguf")
    if options.quantiser:
        subprocess.run([options.quantiser, out / "f16.gguf", out / "q4.gguf", "Q4_K_M", "1"], check=True)
    else:
        recipe = parse_recipes("q4_k_m")[0]
        quantise(out / "f16.gguf", out / "q4.gguf", recipe, importance={}, tick=lambda done, total: None, threads=1)


def run_official(converter: Path, folder: Path, out: Path) -> None:
    """llama.cpp's converter in a process of its own, told which pre-tokenizer this is."""
    program = (
        "import runpy, sys; from conversion.base import TextModel; "
        f"TextModel.get_vocab_base_pre = lambda self, tokenizer: {PRE_TOKENIZER!r}; "
        "sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    path = os.pathsep.join([str(converter.parent / "gguf-py"), str(converter.parent)])
    command = [sys.executable, "-c", program, str(converter), str(folder), "--outfile", str(out), "--outtype", "f16"]
    subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, check=True, capture_output=True)


CONTESTANTS = {"ours": ours, "theirs": theirs}


def child(options: argparse.Namespace) -> None:
    """Runs one contestant and prints its CPU time and its memory over that of the imports."""
    before = resident_bytes()
    out = options.folder / options.child
    out.mkdir()
    if options.limit_gib:
        ours_merge(options.folder / "base", options.folder / "adapter", out / "merged")
    else:
        CONTESTANTS[options.child](options.folder / "base", options.folder / "adapter", out, options)
    own, children = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime
    peak = max(peak_resident_bytes(), children.ru_maxrss * 1024)
    print(json.dumps({"cpu_s": cpu_s, "peak_bytes": peak, "imports_bytes": before}))


def measured(name: str, folder: Path, options: argparse.Namespace) -> dict[str, float]:
    command = [sys.executable, __file__, "--child", name, "--folder", str(folder)]
    command += ["--converter", str(options.converter)] if options.converter else []
    command += ["--quantiser", str(options.quantiser)] if options.quantiser else []
    command += ["--limit-gib", str(options.limit_gib)] if options.limit_gib else []
    done = subprocess.run(command, capture_output=True, text=True, preexec_fn=lambda: limit(options.limit_gib))
    if done.returncode:
        sys.exit(f"{name} failed ({done.returncode}):\n{done.stderr[-3000:]}")
    shutil.rmtree(folder / name)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def limit(gib: float | None) -> None:
    """What the process may write to of its own memory; mapped files do not count (setrlimit(2), RLIMIT_DATA)."""
    if gib:
        resource.setrlimit(resource.RLIMIT_DATA, (int(gib * GIB), int(gib * GIB)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--converter", type=Path, help="llama.cpp's convert_hf_to_gguf.py")
    parser.add_argument("--quantiser", type=Path, help="llama.cpp's llama-quantize")
    parser.add_argument("--gib", type=float, default=0.75, help="size of the model in bfloat16")
    parser.add_argument("--rounds", type=int, default=3, help="times that both do it, in turn")
    parser.add_argument("--merge-gib", type=float, help="only merge a model of this size, under --limit-gib")
    parser.add_argument("--limit-gib", type=float, help="memory that merging may use")
    parser.add_argument("--child", choices=CONTESTANTS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options)
        return
    if options.merge_gib is None and options.converter is None:
        sys.exit("give --converter (in the source archive of llama-cpp-python: vendor/llama.cpp), or --merge-gib")
    if options.converter:
        check_converter(options.converter, wanted=None)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        make_model(folder / "base", gib=options.merge_gib or options.gib)
        make_adapter(folder / "base", folder / "adapter")
        size = sum(file.stat().st_size for file in (folder / "base").glob("*.safetensors"))
        print(f"model: {size / GIB:.2f} GiB in bfloat16", flush=True)
        if options.merge_gib:
            found = measured("ours", folder, options)
            print(
                f"merged in {found['cpu_s']:.1f} s CPU; peak {found['peak_bytes'] / GIB:.2f} GiB, of which imports "
                f"{found['imports_bytes'] / GIB:.2f}"
                + (f"; limit {options.limit_gib} GiB" if options.limit_gib else "")
            )
            return
        # Alternating, so that what else the machine does falls on both.
        rounds = [{name: measured(name, folder, options) for name in CONTESTANTS} for _ in range(options.rounds)]
    for key, goal in (("cpu_s", GOALS["time"]), ("peak_bytes", GOALS["memory"])):
        unit = GIB if key == "peak_bytes" else 1
        ratios = [one["ours"][key] / one["theirs"][key] for one in rounds]
        ratio = statistics.median(ratios)
        verdict = "reached" if ratio <= goal else "MISSED"
        both = ", ".join(f"{one['ours'][key] / unit:.2f}/{one['theirs'][key] / unit:.2f}" for one in rounds)
        print(f"{key}: ours/theirs {both}; median ratio {ratio:.2f} (goal {goal}, {verdict})")


if __name__ == "__main__":
    main()
