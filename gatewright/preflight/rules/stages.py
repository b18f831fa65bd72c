"""GW8xx: preference tuning, distillation, merge and export."""

from gatewright.preflight.fault import Fault, Rule, set_to
from gatewright.preflight.job import Job
from gatewright.spec.hardware import GIB

_PREFERENCE = ("dpo", "ipo", "simpo", "kto", "orpo")
_K_QUANTS = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")
_NEXTN = ("qwen3_next", "qwen3_5", "qwen3_5_moe")


def preference_learning_rate(job: Job) -> Fault | None:
    """Preference losses move a model that is already trained: rates of supervised fine-tuning make it forget. 1e-5 for
    adapters and 1e-6 for all weights are where DPO starts."""
    start = 1e-5 if job.lora else 1e-6
    if job.task.value not in ("dpo", "ipo", "simpo", "kto") or job.lr.get(0) <= 5 * start:
        return None
    return Fault(
        f"{job.lr} for {job.task.value}: {job.lr.get(0) / start:.0f} × the usual start of {start:g}",
        (job.lr, job.task),
        f"start at {start:g}",
        set_to(job.lr, f"{start:.1e}"),
    )


def preference_from_a_base_model(job: Job) -> Fault | None:
    """DPO ranks answers that the model can give. A base model that was never taught to answer has none to rank: it
    comes after supervised fine-tuning."""
    name = job.model.get("")
    if job.task.value not in ("dpo", "ipo", "kto") or not name.lower().rstrip("/").endswith("-base"):
        return None
    if job.adapter_path.value:
        return None
    return Fault(
        f"{job.task.value} from {job.model}: a base model has not learned to answer yet",
        (job.model, job.task),
        "start from the SFT checkpoint",
    )


def reference_adapter_crashes(job: Job) -> Fault | None:
    """Before PEFT 0.20 the reference pass of DPO cannot switch off an adapter on fused experts, and crashes."""
    peft = job.version("peft")
    if job.task.value != "dpo" or not job.lora_target_parameters.get(()) or peft is None or peft >= (0, 20):
        return None
    said = job.versions["peft"]
    return Fault(
        f"{said.key}{said.value}: DPO with target_parameters crashes at the reference pass",
        (said, job.lora_target_parameters),
        "use PEFT 0.20 or later",
        set_to(said, "0.20.0"),
    )


def template_between_stages(job: Job) -> Fault | None:
    """A tokenizer that an SFT stage saved may carry another chat template than its base: the next stage then fails on
    the first row, or trains on another format."""
    local = job.model.get("").startswith(("./", "../", "/", "outputs/", "saves/", "runs/", "output/"))
    if job.task.value not in _PREFERENCE or not local or job.template.given or job.uses("gatewright"):
        return None
    return Fault(
        f"{job.model} is the result of an earlier stage, and no chat template is named",
        (job.model,),
        "name the template of the SFT stage",
    )


def teacher_does_not_fit(job: Job) -> Fault | None:
    """Student and teacher share the GPUs. ZeRO-2 of the student does not divide the teacher: each rank holds it whole
    unless it is sharded, offloaded or served from elsewhere."""
    teacher, gpu = job.teacher_shape, job.gpu
    if teacher is None or gpu is None or job.teacher_sharding.value or job.zero.get(0) == 3:
        return None
    size = 2 * teacher.parameters
    if size < 0.8 * gpu.memory_bytes:
        return None
    return Fault(
        f"{job.teacher}: {size / GIB:.0f} GiB in bf16 on each GPU of {gpu.memory_gib:.0f} GiB, besides the student",
        (job.teacher,),
        "give the teacher ZeRO-3 of its own (teacher_deepspeed: zero3), offload it, or serve it elsewhere",
    )


def vocabularies_differ(job: Job) -> Fault | None:
    """Distillation compares the probability of each token: token 1,000 must mean the same to both models."""
    teacher, student = job.teacher_shape, job.shape
    if teacher is None or student is None or abs(teacher.vocab - student.vocab) < 1024:
        return None
    return Fault(
        f"{job.teacher} has {teacher.vocab:,} tokens, {job.model} {student.vocab:,}",
        (job.teacher, job.model),
        "take a student of the teacher's family, or train on the teacher's answers as text",
    )


def merge_into_four_bits(job: Job) -> Fault | None:
    """An adapter that is merged into 4-bit weights is rounded to their grid with them; GGUF converters cannot read the
    result."""
    if job.task.value not in ("export", "merge") or job.bits.value != 4 or not job.adapter_path.value:
        return None
    return Fault(
        f"{job.bits.key} at 4 bits while merging {job.adapter_path.value}: the update is lost in the rounding",
        (job.bits,),
        "merge into the 16-bit base, then quantise",
    )


def merge_needs_host_memory(job: Job) -> Fault | None:
    """A merge reads the base model into host memory; a 72B model in 252 GB was killed without a message."""
    if job.export.value not in ("merge", "gguf") or job.shape is None or job.memory_bytes.value is None:
        return None
    need = 2 * job.shape.checkpoint_parameters
    if need * 1.2 <= job.memory_bytes.value:
        return None
    return Fault(
        f"{job.memory_bytes.key} {job.memory_bytes.value / GIB:.0f} GiB for {need / GIB:.0f} GiB of weights",
        (job.memory_bytes, job.export),
        f"ask for {need * 1.5 / GIB:.0f}G, or merge shard by shard",
        set_to(job.memory_bytes, f"{need * 1.5 / GIB:.0f}G"),
    )


def adapter_cannot_become_gguf(job: Job) -> Fault | None:
    """llama.cpp's converter of adapters does not know fused experts: `Unprocessed experts`."""
    if job.export.value != "gguf-adapter" or not job.lora_target_parameters.get(()):
        return None
    return Fault(
        f"{job.export.key} on an adapter of {job.lora_target_parameters.key}: it stops with `Unprocessed experts`",
        (job.export, job.lora_target_parameters),
        "merge first and convert the model",
    )


def converter_wants_no_nextn(job: Job) -> Fault | None:
    """transformers drops the multi-token-prediction layers of these families when it saves; the converter then asserts,
    unless it is told."""
    family = job.shape.family.removesuffix("_text") if job.shape else ""
    if job.export.value != "gguf" or family not in _NEXTN or "--no-nextn" in job.export_options.get(()):
        return None
    return Fault(
        f"{job.export.key} of {job.model.get(family)} without --no-nextn: MTP tensors are missing, and it asserts",
        (job.export,),
        "add --no-nextn, or copy mtp.* from the base model",
    )


def converter_reads_no_quantised_weights(job: Job) -> Fault | None:
    """GPTQ and AWQ files hold qweight tensors that the converter cannot map."""
    name = f"{job.model.get('')} {' '.join(job.export_options.get(()))}".upper()
    kind = next((kind for kind in ("GPTQ", "AWQ") if kind in name), None)
    if job.export.value != "gguf" or kind is None:
        return None
    return Fault(
        f"{job.export.key} of {kind} weights: `Can not map tensor … qweight`",
        (job.export,),
        "convert the 16-bit model and quantise with llama-quantize",
    )


def merge_into_fp8(job: Job) -> Fault | None:
    """torch does not add to float8 tensors: PEFT's merge raises."""
    name = job.model.get("")
    quantised = job.shape.quantization if job.shape else None
    if job.export.value != "merge" or not ("FP8" in name.upper() or quantised == "fp8") or not job.adapter_path.value:
        return None
    return Fault(
        f"{job.model} is in fp8, and adding to float8 weights raises",
        (job.model, job.export),
        "load it dequantised to bf16 for the merge",
    )


def pickled_weights(job: Job) -> Fault | None:
    """A .bin file is a pickle: reading it can run code, and a truncated one is not noticed before use."""
    legacy = job.export_legacy.value or job.safetensors.value is False
    if not legacy:
        return None
    said = job.export_legacy if job.export_legacy.value else job.safetensors
    return Fault(
        f"{said}: weights are written as pickles",
        (said,),
        "write safetensors",
        set_to(said, said is job.safetensors),
    )


def width_that_k_quants_cannot_divide(job: Job) -> Fault | None:
    """K-quants work on blocks of 256. Where the width is no multiple, tensors fall back to larger types without
    stopping: 181 tensors of a small model did, and Q4_K_M was 105 MB of 271."""
    quant, shape = job.export_quant, job.shape
    if shape is None or not quant.get("").upper().startswith(_K_QUANTS) or shape.hidden % 256 == 0:
        return None
    return Fault(
        f"{quant.value} of {shape.name}: its width {shape.hidden} is no multiple of 256, so tensors fall back",
        (quant, job.model),
        "expect Q8_0's size, or choose Q8_0",
    )


_MERGE = "measured with PEFT 0.21.2 and llama.cpp"
RULES = (
    Rule("GW801", "warning", preference_learning_rate, "TRL 1.16 DPOConfig (1e-6); a campaign's DPO at 1e-5 from SFT"),
    Rule("GW802", "warning", preference_from_a_base_model, "arXiv:2305.18290 §4: DPO starts from the SFT model"),
    Rule("GW803", "error", reference_adapter_crashes, "huggingface/trl#5222"),
    Rule("GW804", "note", template_between_stages, "huggingface/alignment-handbook#93"),
    Rule("GW805", "error", teacher_does_not_fit, "arithmetic: 2 bytes a parameter"),
    Rule("GW806", "error", vocabularies_differ, "arithmetic on the two configs"),
    Rule("GW851", "error", merge_into_four_bits, "unslothai/unsloth#2580; LLaMA-Factory docs, merging"),
    Rule("GW852", "error", merge_needs_host_memory, "huggingface/peft#1939; Lightning-AI/litgpt#1181"),
    Rule("GW853", "error", adapter_cannot_become_gguf, _MERGE),
    Rule("GW854", "error", converter_wants_no_nextn, f"{_MERGE}; llama.cpp#23033; ms-swift#9802"),
    Rule("GW855", "error", converter_reads_no_quantised_weights, "ggml-org/llama.cpp#7505"),
    Rule("GW856", "error", merge_into_fp8, _MERGE),
    Rule("GW857", "warning", pickled_weights, "PyTorch docs, torch.load; safetensors README", safe=True),
    Rule("GW858", "note", width_that_k_quants_cannot_divide, _MERGE),
)
