"""Job: what any tool's files say about a training run, in one vocabulary, each value with the line it was written
on."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from gatewright.preflight.folder import Folder
from gatewright.spec.finding import Place
from gatewright.spec.hardware import Gpu
from gatewright.spec.plan import MemoryEstimate, Refusal
from gatewright.spec.probe import Probe
from gatewright.spec.shape import ModelShape

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Written(Generic[T]):
    """A value, the key it was given under, and where. Without a value: nobody said it."""

    value: T | None = None
    key: str = ""
    """As the user wrote it: per_device_train_batch_size, --tensor-model-parallel-size, NCCL_SOCKET_IFNAME."""
    file: str = ""
    line: int = 0
    default: bool = False
    """Not written: what the tool does by itself."""

    def get(self, otherwise: T) -> T:
        """The value, or `otherwise` where nobody said it."""
        return otherwise if self.value is None else self.value

    @property
    def given(self) -> bool:
        """Somebody wrote it."""
        return self.value is not None and not self.default

    @property
    def place(self) -> Place:
        return Place(file=self.file, line=self.line)

    def __str__(self) -> str:
        value = ", ".join(map(str, self.value)) if isinstance(self.value, tuple) else self.value
        return f"{self.key} = {value} ({'the default' if self.default else f'{self.file}:{self.line}'})"


Flag = Written[bool]
Count = Written[int]
Number = Written[float]
Word = Written[str]
Words = Written[tuple[str, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One training run as its files describe it together. Every value may be absent."""

    # What is trained
    task: Word = Written()
    """sft, pretrain, dpo, kto, orpo, simpo, grpo, rm, distill, merge, export."""
    model: Word = Written()
    teacher: Word = Written()
    teacher_sharding: Word = Written()
    """DeepSpeed config, server or offload of the teacher."""
    trust_remote_code: Flag = Written()
    adapter: Word = Written()
    """full, lora or another adapter's name."""
    adapter_path: Word = Written()
    lora_rank: Count = Written()
    lora_dropout: Number = Written()
    lora_targets: Words = Written()
    lora_target_parameters: Words = Written()
    lora_rank_pattern: Words = Written()
    lora_modules_to_save: Words = Written()
    lora_dora: Flag = Written()
    expert_share: Number = Written()
    """Part of the experts that has an adapter; 0 where they are named one by one."""
    bits: Count = Written()
    """4 or 8: bitsandbytes storage of the frozen weights."""
    quantize_experts: Flag = Written()
    experts_kernel: Word = Written()

    # Precision and kernels
    fp16: Flag = Written()
    bf16: Flag = Written()
    fp8: Word = Written()
    bf16_states: Flag = Written()
    """Weights are updated, or optimizer state is kept, in bf16 alone."""
    attention: Word = Written()
    """eager, sdpa, flash or another kernel's name."""
    liger: Flag = Written()
    """A fused head and loss that keeps no logits."""
    optimizer: Word = Written()
    use_cache: Flag = Written()
    nan_filter: Flag = Written()

    # Data
    max_tokens: Count = Written()
    packing: Flag = Written()
    isolated: Flag = Written()
    """Packed documents do not see each other."""
    packing_strategy: Word = Written()
    pad_to_max: Flag = Written()
    template: Word = Written()
    train_on_prompt: Flag = Written()
    new_tokens: Words = Written()
    resize_vocab: Flag = Written()
    pad_token: Word = Written()
    eos_token: Word = Written()
    streaming: Flag = Written()
    max_prompt_tokens: Count = Written()

    # Batch and schedule
    micro_batch: Count = Written()
    """Rows of one forward pass on one rank."""
    accumulation: Count = Written()
    global_batch: Count = Written()
    eval_batch: Count = Written()
    evaluates: Flag = Written()
    eval_accumulation: Count = Written()
    lr: Number = Written()
    max_steps: Count = Written()
    epochs: Number = Written()
    warmup_steps: Count = Written()
    warmup_ratio: Number = Written()
    clip_norm: Number = Written()
    beta: Number = Written()

    # Checkpointing and resume
    checkpointing: Flag = Written()
    """Activations are recomputed."""
    reentrant: Flag = Written()
    output_dir: Word = Written()
    save_steps: Count = Written()
    save_strategy: Word = Written()
    save_limit: Count = Written()
    save_only_model: Flag = Written()
    save_in_background: Flag = Written()
    """Checkpoints are written from a copy in host memory."""
    load_only_model: Flag = Written()
    safetensors: Flag = Written()
    resume: Word = Written()
    auto_resume: Flag = Written()
    overwrite: Flag = Written()
    ignore_data_skip: Flag = Written()
    jit_checkpoint: Flag = Written()
    load_best: Flag = Written()
    eval_steps: Count = Written()
    saves_per_epoch: Count = Written()
    evals_per_epoch: Count = Written()
    total_batch_in_axolotl: Count = Written()

    # Router
    aux: Number = Written()
    z: Number = Written()
    capacity: Number = Written()
    router_trains: Flag = Written()
    router_logits: Flag = Written()
    force_balance: Flag = Written()
    router_dtype: Word = Written()

    # Layout
    backend: Word = Written()
    """deepspeed, fsdp, megatron, ddp."""
    zero: Count = Written()
    auto_ep: Flag = Written()
    leaf_modules: Words = Written()
    offload_optimizer: Word = Written()
    offload_params: Word = Written()
    hpz: Count = Written()
    quantized_gradients: Flag = Written()
    fsdp: Flag = Written()
    fsdp_version: Count = Written()
    fsdp_state_dict: Word = Written()
    fsdp_ram_efficient: Flag = Written()
    fsdp_sync: Flag = Written()
    ep: Count = Written()
    etp: Count = Written()
    """TP inside an expert."""
    tp: Count = Written()
    pp: Count = Written()
    cp: Count = Written()
    sequence_parallel: Flag = Written()
    dynamic_cp: Flag = Written()
    per_token_loss: Flag = Written()
    dispatcher: Word = Written()
    ring: Word = Written()
    mca: Flag = Written()
    find_unused: Flag = Written()
    ranks: Count = Written()
    """Processes, one a GPU."""

    # Queue and launcher
    launcher: Word = Written()
    """torchrun, accelerate, deepspeed, srun, python."""
    launcher_srun: Flag = Written()
    launcher_processes: Count = Written()
    launcher_nodes: Count = Written()
    launcher_port: Word = Written()
    launcher_rendezvous: Word = Written()
    launcher_signals: Word = Written()
    slurm: Flag = Written()
    time_limit_s: Count = Written()
    nodes: Count = Written()
    tasks_per_node: Count = Written()
    gpus_per_node: Count = Written()
    cpus_per_task: Count = Written()
    asks_cores: Flag = Written()
    """By an option that does not say how many a task: --exclusive, --cpus-per-gpu."""
    memory_bytes: Count = Written()
    partition: Word = Written()
    signal: Word = Written()
    open_mode: Word = Written()
    requeue: Flag = Written()
    asks_gpus: Flag = Written()
    """By an option that does not say how many a node: --gpus, --gpus-per-task."""
    array: Word = Written()
    dependency: Word = Written()
    log: Word = Written()
    cpu_bind: Word = Written()
    traps: Words = Written()
    stops_on_error: Flag = Written()
    links: Count = Written()
    """Jobs of a chain at most."""

    # Export
    export: Word = Written()
    """merge, gguf or gguf-adapter."""
    export_quant: Word = Written()
    export_options: Words = Written()
    export_legacy: Flag = Written()

    # Beside the values
    tools: frozenset[str] = frozenset()
    env: Mapping[str, Word] = field(default_factory=dict)
    versions: Mapping[str, Word] = field(default_factory=dict)
    """Package to version, where a file or the caller says it."""
    secrets: tuple[Written[str], ...] = ()
    """Keys that hold a credential; the value is replaced by `…`."""
    disagreements: tuple[tuple[Written[object], ...], ...] = ()
    """Values that two files give differently."""
    folders: tuple[Folder, ...] = ()
    """Checkpoints, adapters and models given as folders."""
    shape: ModelShape | None = None
    teacher_shape: ModelShape | None = None
    gpu: Gpu | None = None
    step_s: float | None = None
    """Measured seconds of one optimizer step."""
    p99_tokens: int | None = None
    """99th percentile of the documents' lengths."""
    memory: MemoryEstimate | None = None
    """The planner's answer; None where it cannot be asked."""
    refusals: tuple[Refusal, ...] = ()
    """The planner's rules of layout that this job breaks, advice included."""
    checkpoint_bytes: int | None = None
    """Of one checkpoint with what a resume needs; None where the planner cannot be asked."""
    probe: Probe | None = None
    """What the machine was measured to do."""
    probe_file: str = ""
    unjudged: str = ""
    """What the planner would need to know."""

    # --- what follows from the values -------------------------------------------------------------------------

    @property
    def moe(self) -> bool:
        return self.shape is not None and self.shape.is_moe

    @property
    def lora(self) -> bool:
        return self.adapter.get("full") not in ("full", "freeze", "none")

    @property
    def trains(self) -> bool:
        """This is a training run, not a merge or an export."""
        return self.task.get("sft") not in ("merge", "export")

    @property
    def full(self) -> bool:
        return self.trains and not self.lora and self.adapter.get("full") == "full"

    @property
    def amd(self) -> bool:
        return self.gpu is not None and self.gpu.vendor == "amd"

    @property
    def card(self) -> str:
        """The GPU in a sentence."""
        return self.gpu.title.partition(",")[0] if self.gpu else "this GPU"

    @property
    def lumi(self) -> bool:
        """A GPU partition of LUMI, which no other cluster we know calls so."""
        return self.partition.get("") in ("standard-g", "small-g", "dev-g", "ju-standard-g")

    @property
    def chained(self) -> bool:
        """More than one SLURM job is to run this script."""
        follows = self.dependency.get("").startswith("singleton")
        return bool(self.requeue.value or self.array.value or follows or self.links.get(1) > 1)

    @property
    def world(self) -> int | None:
        """Ranks in all: said outright, or nodes × processes a node."""
        if self.ranks.value is not None:
            return self.ranks.value
        per_node = self.launcher_processes.value or self.gpus_per_node.value
        if per_node is None:
            return None
        return per_node * (self.nodes.value or self.launcher_nodes.value or 1)

    def uses(self, *tools: str) -> bool:
        return not self.tools.isdisjoint(tools)

    def version(self, package: str) -> tuple[int, ...] | None:
        """Numbers of a package's version, or None where nobody says it."""
        if package not in self.versions:
            return None
        text = self.versions[package].get("")
        numbers = []
        for part in text.split("+")[0].split("."):
            digits = part[: len(part) - len(part.lstrip("0123456789"))]
            if not digits:
                break
            numbers.append(int(digits))
        return tuple(numbers) or None
