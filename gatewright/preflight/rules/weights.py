"""GW9xx: checkpoints, adapters and models as files: complete, of one mind, and of this base."""

import re
from collections.abc import Callable
from typing import Any

from gatewright.preflight.fault import Fault, Rule
from gatewright.preflight.folder import MAX_READ_BYTES, Folder, all_zero
from gatewright.preflight.job import Job, Written

_LAYER = re.compile(r"\.experts\.(\d+)\.")
_FLOATS = frozenset({"F32", "F16", "BF16"})
_RANK_STATE = re.compile(r"rng_state_(\d+)\.pth")
_INCOMPLETE = "checkpoint-is-incomplete.txt"

Look = Callable[[Folder, Job], Fault | None]


def _first(look: Look, job: Job) -> Fault | None:
    """The first folder that breaks the rule."""
    return next((fault for folder in job.folders if (fault := look(folder, job)) is not None), None)


def _at(folder: Folder, name: str = "") -> tuple[Written[Any], ...]:
    return (Written(None, name, f"{folder.name}/{name}" if name else folder.name, 0),)


def _some(names: list[str]) -> str:
    return f"{', '.join(names[:2])}{f' and {len(names) - 2} more' if len(names) > 2 else ''}"


def shard_missing(job: Job) -> Fault | None:
    """The index names a file that is not there: an interrupted download or copy."""

    def look(folder: Folder, _: Job) -> Fault | None:
        named = {str(name) for name in folder.index.values()}
        missing = sorted(named - folder.sizes.keys())
        if not missing or not folder.whole:
            return None
        return Fault(f"{len(missing)} of {len(named)} shards are missing: {_some(missing)}", _at(folder), "fetch them")

    return _first(look, job)


def file_cut_short(job: Job) -> Fault | None:
    """A safetensors header says how many bytes follow. Fewer mean a save or a copy that was cut off."""

    def look(folder: Folder, _: Job) -> Fault | None:
        return Fault(folder.broken[0], _at(folder), "fetch or save the file again") if folder.broken else None

    return _first(look, job)


def index_and_shards_differ(job: Job) -> Fault | None:
    """The index promises tensors that no shard has: shards of two saves are mixed."""

    def look(folder: Folder, _: Job) -> Fault | None:
        lacking = sorted(
            name
            for name, file in folder.index.items()
            if str(file) in folder.sizes and (name not in folder.tensors or folder.tensors[name].file != file)
        )
        if not lacking or folder.broken:
            return None
        text = f"the index places {len(lacking)} of {len(folder.index)} tensors where they are not: {_some(lacking)}"
        return Fault(text, _at(folder), "take index and shards from one save")

    return _first(look, job)


def weights_of_several_types(job: Job) -> Fault | None:
    """Matrices in different float types: a merge or a resume that touched some layers only. Norms, routers and biases
    may differ on purpose."""

    def look(folder: Folder, _: Job) -> Fault | None:
        by_type: dict[str, list[str]] = {}
        for tensor in folder.tensors.values():
            plain = not re.search(r"norm|gate\.|router|bias|A_log|embed|lm_head|rotary", tensor.name)
            if tensor.dtype in _FLOATS and len(tensor.shape) >= 2 and plain:
                by_type.setdefault(tensor.dtype, []).append(tensor.name)
        if len(by_type) < 2:
            return None
        counts = ", ".join(f"{len(names)} in {dtype}" for dtype, names in by_type.items())
        rare = min(by_type.values(), key=len)
        return Fault(
            f"matrices are of several types: {counts}; the fewer: {_some(sorted(rare))}",
            _at(folder),
            "save once more in one type",
        )

    return _first(look, job)


def adapter_matches_nothing(job: Job) -> Fault | None:
    """Keys that name no module of the base are passed over when the adapter loads: the model answers as if it had never
    been trained."""

    def look(folder: Folder, job: Job) -> Fault | None:
        shape = job.shape
        if not folder.is_adapter or shape is None or not folder.tensors:
            return None
        known = {linear.name for group in shape.groups for linear in group.linears}
        known |= {"experts", "base_layer", "embed_tokens", "lm_head", "gate", "gate_proj", "up_proj", "down_proj"}
        modules = {name.split(".lora_")[0].rpartition(".")[2] for name in folder.tensors if ".lora_" in name}
        strange = sorted(modules - known)
        if not strange:
            return None
        return Fault(
            f"{shape.name} has no {_some(strange)}, which this adapter adapts",
            _at(folder, "adapter_model.safetensors"),
            "load it on the base it was trained on",
        )

    return _first(look, job)


def adapter_of_another_depth(job: Job) -> Fault | None:
    """An adapter with layers that the base does not have was trained on another model."""

    def look(folder: Folder, job: Job) -> Fault | None:
        if not folder.is_adapter or job.shape is None:
            return None
        layers = [int(match[1]) for name in folder.tensors if (match := re.search(r"\.layers\.(\d+)\.", name))]
        have = len(job.shape.layers)
        if not layers or max(layers) < have:
            return None
        return Fault(
            f"it adapts layer {max(layers)}, and {job.shape.name} has {have}",
            _at(folder),
            "load it on the base it was trained on",
        )

    return _first(look, job)


def adapter_without_all_experts(job: Job) -> Fault | None:
    """Under expert parallelism a save that does not gather writes the experts of one rank: the file loads, and the
    others are untrained."""

    def look(folder: Folder, job: Job) -> Fault | None:
        experts = job.shape.experts if job.shape else 0
        found = {int(match[1]) for name in folder.tensors if (match := _LAYER.search(name))}
        if not folder.is_adapter or not experts or not found or len(found) == experts:
            return None
        return Fault(
            f"it holds {len(found)} of {experts} experts",
            _at(folder),
            "gather the experts of all ranks before the save",
        )

    return _first(look, job)


def adapter_rank_differs(job: Job) -> Fault | None:
    """The file's matrices and its config disagree about the rank: parts of two adapters are mixed, or one shard of a
    sharded save was taken for the whole."""

    def look(folder: Folder, _: Job) -> Fault | None:
        rank = folder.adapter.get("r")
        if not isinstance(rank, int) or folder.adapter.get("rank_pattern"):
            return None
        wrong = sorted(
            f"{tensor.name} {tensor.shape[0]}"
            for tensor in folder.tensors.values()
            if tensor.name.endswith("lora_A.weight")
            and "experts" not in tensor.name
            and tensor.shape
            and tensor.shape[0] != rank
        )
        if not wrong:
            return None
        return Fault(
            f"adapter_config.json says r = {rank}, the file {_some(wrong)}",
            _at(folder, "adapter_config.json"),
            "save the adapter again, gathered",
        )

    return _first(look, job)


def adapter_never_trained(job: Job) -> Fault | None:
    """B starts at zero and moves with the first step. One that is all zero still never took part: its module was not in
    the graph, or got no gradient."""

    def look(folder: Folder, _: Job) -> Fault | None:
        held = [tensor for tensor in folder.tensors.values() if "lora_B" in tensor.name]
        if not folder.is_adapter or not held or sum(tensor.bytes for tensor in held) > MAX_READ_BYTES:
            return None
        still = sorted(tensor.name for tensor in held if all_zero(folder, tensor))
        if not still:
            return None
        return Fault(
            f"{len(still)} of {len(held)} B matrices are all zero: {_some(still)}",
            _at(folder, "adapter_model.safetensors"),
            "these modules did not train; look at targets, gradients and the checkpoint's step",
        )

    return _first(look, job)


def rank_files_missing(job: Job) -> Fault | None:
    """Each rank writes its own random state; one that is missing means a save that was cut off, and a resume that fails
    on that rank."""

    def look(folder: Folder, _: Job) -> Fault | None:
        found = sorted(int(match[1]) for name in folder.sizes if (match := _RANK_STATE.fullmatch(name)))
        missing = sorted(set(range(max(found, default=-1) + 1)) - set(found))
        if not missing:
            return None
        return Fault(
            f"rng_state files of {len(found)} ranks, up to {found[-1]}: no {_some([str(rank) for rank in missing])}",
            _at(folder),
            "resume from the checkpoint before",
        )

    return _first(look, job)


def checkpoint_without_optimizer(job: Job) -> Fault | None:
    """A trainer's checkpoint without the optimizer's state resumes with empty moments: the loss jumps."""

    def look(folder: Folder, _: Job) -> Fault | None:
        if not folder.is_checkpoint:
            return None
        states = [*folder.named("optimizer"), *folder.named("global_step"), *folder.named("pytorch_model_fsdp")]
        if states:
            return None
        return Fault(
            "trainer_state.json is there and no optimizer state",
            _at(folder),
            "resume from a full checkpoint, or start anew from the weights",
        )

    return _first(look, job)


def checkpoint_marked_incomplete(job: Job) -> Fault | None:
    """The Trainer's just-in-time save leaves this file until it is done, and never reads it."""

    def look(folder: Folder, _: Job) -> Fault | None:
        if _INCOMPLETE not in folder.sizes:
            return None
        return Fault(
            f"it holds {_INCOMPLETE}: its save was cut off",
            _at(folder, _INCOMPLETE),
            "resume from the checkpoint before",
        )

    return _first(look, job)


def world_size_changed(job: Job) -> Fault | None:
    """A checkpoint of DeepSpeed or with a random state a rank belongs to that number of ranks; another number cannot
    divide the optimizer's state again."""

    def look(folder: Folder, job: Job) -> Fault | None:
        found = len([name for name in folder.sizes if _RANK_STATE.fullmatch(name)])
        if not folder.is_checkpoint or found < 2 or job.world is None or job.world == found:
            return None
        if job.backend.value != "deepspeed" and not folder.named("global_step"):
            return None
        return Fault(
            f"saved by {found} ranks, and the job has {job.world}",
            _at(folder),
            "take as many ranks, or DeepSpeed's universal checkpoint",
        )

    return _first(look, job)


def tokenizer_larger_than_embedding(job: Job) -> Fault | None:
    """A token id beyond the embedding stops the GPU with a device-side assert that names neither."""

    def look(folder: Folder, _: Job) -> Fault | None:
        text = folder.config.get("text_config")
        rows = folder.config.get("vocab_size", text.get("vocab_size") if isinstance(text, dict) else None)
        if folder.tokens is None or not isinstance(rows, int) or folder.tokens <= rows:
            return None
        return Fault(
            f"the tokenizer has {folder.tokens:,} tokens, the embedding {rows:,}",
            _at(folder, "config.json"),
            "resize the embedding, and train it",
        )

    return _first(look, job)


def no_chat_template(job: Job) -> Fault | None:
    """Conversations are rendered by the tokenizer's chat template; a base model often has none, and tools fall back to
    a format of their own."""

    def look(folder: Folder, job: Job) -> Fault | None:
        told = bool(folder.tokenizer.get("chat_template")) or "chat_template.jinja" in folder.sizes
        if not folder.tokenizer or told or not folder.is_model or job.template.given:
            return None
        return Fault(
            "the tokenizer has no chat template",
            _at(folder, "tokenizer_config.json"),
            "name one before training on conversations",
        )

    return _first(look, job)


def pickled_weights_only(job: Job) -> Fault | None:
    """A .bin file is a pickle: reading it can run code."""

    def look(folder: Folder, _: Job) -> Fault | None:
        pickles = [*folder.named("pytorch_model", ".bin"), *folder.named("adapter_model", ".bin")]
        if not pickles or folder.tensors:
            return None
        return Fault(f"weights are pickled: {_some(pickles)}", _at(folder), "convert them to safetensors in a sandbox")

    return _first(look, job)


def gguf_renormalises_otherwise(job: Job) -> Fault | None:
    """llama.cpp renormalises the chosen experts' weights by family and not by the config: Qwen3-MoE always, OLMoE
    never. A config that says otherwise converts without a word and answers differently (top-1 of 90 %)."""

    def look(folder: Folder, _: Job) -> Fault | None:
        family, told = folder.config.get("model_type"), folder.config.get("norm_topk_prob")
        always = {"qwen3_moe": True, "olmoe": False}
        if family not in always or not isinstance(told, bool) or told == always[family]:
            return None
        return Fault(
            f"norm_topk_prob is {str(told).lower()} in a {family}, which llama.cpp takes for {str(not told).lower()}",
            _at(folder, "config.json"),
            "do not convert it to GGUF, or check the logits",
        )

    return _first(look, job)


def gguf_guesses_the_scoring(job: Job) -> Fault | None:
    """A DeepSeek-V3 config without scoring_func, as transformers writes it, becomes softmax in llama.cpp: top-1 of
    22 %."""

    def look(folder: Folder, _: Job) -> Fault | None:
        if folder.config.get("model_type") != "deepseek_v3" or folder.config.get("scoring_func"):
            return None
        return Fault(
            "config.json has no scoring_func: llama.cpp takes softmax, the model sigmoid",
            _at(folder, "config.json"),
            'add "scoring_func": "sigmoid" before converting',
        )

    return _first(look, job)


RULES = (
    Rule("GW901", "error", shard_missing, "safetensors index format"),
    Rule("GW902", "error", file_cut_short, "lyogavin/airllm#137; huggingface/transformers#35782"),
    Rule("GW903", "error", index_and_shards_differ, "safetensors index format"),
    Rule("GW904", "warning", weights_of_several_types, "axolotl merge: deltas rounded in part of the layers"),
    Rule("GW905", "error", adapter_matches_nothing, "vllm-project/vllm#41754; axolotl 0.19 merge-lora"),
    Rule("GW906", "error", adapter_of_another_depth, "experts4bit-qlora: fingerprint of the base"),
    Rule("GW907", "error", adapter_without_all_experts, "KempnerForge#202; huggingface/accelerate#4206"),
    Rule("GW908", "error", adapter_rank_differs, "huggingface/accelerate#4206"),
    Rule("GW909", "error", adapter_never_trained, "unslothai/unsloth#11014; PEFT initialises B to zero"),
    Rule("GW910", "error", rank_files_missing, "huggingface/transformers#35782"),
    Rule("GW911", "warning", checkpoint_without_optimizer, "shibing624/MedicalGPT#10"),
    Rule("GW912", "error", checkpoint_marked_incomplete, "transformers 5.24, trainer_jit_checkpoint.py"),
    Rule("GW913", "error", world_size_changed, "deepspeedai/DeepSpeed#3810 and #6441"),
    Rule("GW914", "error", tokenizer_larger_than_embedding, "sillsdev/silnlp#1033"),
    Rule("GW915", "note", no_chat_template, "huggingface/transformers#33246"),
    Rule("GW916", "warning", pickled_weights_only, "PyTorch docs, torch.load"),
    Rule("GW917", "warning", gguf_renormalises_otherwise, "measured: converted models against their own logits"),
    Rule("GW918", "warning", gguf_guesses_the_scoring, "measured: converted models against their own logits"),
)
