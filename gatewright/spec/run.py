"""Run: what a person writes in a run file, one frozen model a section; counts in tokens and steps."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

PositiveInt = Annotated[int, Field(gt=0)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Role = Literal["attention", "mlp", "experts", "shared_experts", "router", "embedding", "head"]
Pattern = Annotated[str, Field(pattern=r"[*?\[]", examples=["*.q_proj"])]
Percentile = Annotated[str, Field(pattern=r"^p(\d{1,2}(\.\d+)?|100)$", examples=["p99", "p100"])]
Tracker = Literal["tensorboard", "wandb", "mlflow", "trackio"]


class Section(BaseModel):
    """A section of the run file: unknown keys are errors, values are never coerced across types."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class Model(Section):
    path: str = Field(min_length=1)
    """Folder of a Hugging Face causal LM: config.json, tokenizer and safetensors. Never a hub name that is fetched."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Type of the frozen weights and of the activations. Adapters and optimizer state are always float32."""
    trust_remote_code: bool = False
    """Run modelling code that lies in the model's folder. Off unless this file says so."""


class LayerExperts(Section):
    layer: Annotated[int, Field(ge=0)]
    """Index of the layer in the model."""
    experts: Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]
    """Experts of that layer."""


class ExpertSubset(Section):
    """Which experts of each layer get an adapter; the others stay as they are."""

    most_routed: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    """Share of each layer's experts, those that the training data routes to most; measured before step 1."""
    documents: PositiveInt = 64
    """Training documents that the measurement reads."""
    layers: Annotated[list[LayerExperts], Field(min_length=1)] | None = None
    """The experts, layer by layer. A layer that is not named gets none."""

    @model_validator(mode="after")
    def _one_way(self) -> "ExpertSubset":
        if (self.most_routed is None) == (self.layers is None):
            raise ValueError("give either most_routed or layers")
        return self


class Adapter(Section):
    rank: PositiveInt
    """Rank r of each low-rank update."""
    alpha: Annotated[float, Field(gt=0)] | None = None
    """The update is scaled by alpha / rank (alpha / sqrt(rank) with rslora). Default: 2 × rank."""
    targets: Annotated[list[Role | Pattern], Field(min_length=1)] = ["attention", "experts"]
    """What gets an adapter: roles, or patterns over module names such as "*.q_proj". One that matches nothing stops
    the run."""
    experts: ExpertSubset | None = None
    """Restrict the adapters of experts to some of them; default: every expert."""
    full: list[Literal["router", "embedding", "head", "norm"]] = []
    """Roles whose weights train in full beside the adapters, saved as PEFT's modules_to_save."""
    dropout: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    """Dropout on the input of each adapter while training; a router's takes none."""
    rslora: bool = False
    """Scale by alpha / sqrt(rank) instead of alpha / rank."""
    start: str | None = None
    """Folder of an adapter to go on from, ours or PEFT's, of the same base model, rank, alpha and targets."""

    @property
    def alpha_value(self) -> float:
        """alpha, or its default of 2 × rank."""
        return self.alpha if self.alpha is not None else 2.0 * self.rank

    @property
    def scale(self) -> float:
        """Factor on the low-rank product B·A·x."""
        return self.alpha_value / self.rank**0.5 if self.rslora else self.alpha_value / self.rank


class Method(Section):
    kind: Literal["sft"] = "sft"
    """Supervised fine-tuning on the assistant's tokens."""
    adapter: Adapter | None = None
    """LoRA settings. Without them the weights themselves train (full fine-tuning)."""
    roles: Annotated[list[Role | Literal["norm"]], Field(min_length=1)] | None = None
    """Full fine-tuning: the roles whose weights train. Default: all but the router, which router.train adds."""
    quantize: Literal["none", "nf4", "fp8"] = "none"
    """Storage of the frozen base weights. nf4: 4 bits with double quantisation (QLoRA). fp8: as an FP8 checkpoint holds
    them. Dequantised a layer at a time. none: in model.dtype."""

    @model_validator(mode="after")
    def _adapter_or_weights(self) -> "Method":
        if self.adapter and self.roles:
            raise ValueError("roles is for full fine-tuning; with an adapter use adapter.targets and adapter.full")
        if self.quantize != "none" and not self.adapter:
            raise ValueError(f"quantize: {self.quantize} freezes the base weights; add adapter, or set quantize: none")
        return self


class Data(Section):
    train: str = Field(min_length=1)
    """JSONL, Parquet, or a folder written by Hugging Face `datasets`: messages, prompt/completion, or text."""
    max_tokens: PositiveInt | Percentile = "p100"
    """Longest document: a number, or a percentile of the data itself such as p99. p100 keeps all."""
    overlong: Literal["error", "truncate", "split", "drop"] = "error"
    """What happens to a longer document. Each choice counts and reports the tokens it costs."""
    pack: bool = True
    """Put several documents on one token axis, up to train.micro_batch_tokens. Without: one document a micro-batch."""
    alike: bool = False
    """Put micro-batches that cost about the same into the same step; the steps are shuffled. Ranks then wait less."""
    chat_template: str | None = None
    """Path of a Jinja chat template to use in place of the tokenizer's own."""


class Evaluate(Section):
    data: str = Field(min_length=1)
    """Held-out data, in the form of data.train."""
    every_steps: PositiveInt | None = None
    """Evaluate after every so many steps, besides before the first and after the last one."""
    exact_match: PositiveInt | None = None
    """Answer the last assistant turn of so many held-out rows by greedy decoding, before and after training."""
    max_new_tokens: PositiveInt = 64
    """Longest answer in exact_match."""


class Train(Section):
    tokens_per_step: PositiveInt
    """Tokens that one optimizer step sees, summed over its micro-batches."""
    micro_batch_tokens: PositiveInt | Literal["auto"] = "auto"
    """Tokens in one forward and backward pass. auto: 4,096, or tokens_per_step if that is less, or the longest document
    if that is more."""
    steps: PositiveInt | None = None
    """Optimizer steps. Give this or epochs."""
    epochs: PositiveInt | None = None
    """Passes over the training data. Give this or steps."""
    lr: Annotated[float, Field(gt=0)]
    """Peak learning rate."""
    schedule: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    """Course of the learning rate after warm-up. wsd: constant, then linear over the last decay_fraction."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Steps over which the learning rate rises linearly from 0."""
    decay_fraction: Annotated[float, Field(gt=0.0, le=1.0)] = 0.2
    """Share of the run over which wsd decays."""
    min_lr_fraction: Fraction = 0.0
    """Floor of cosine, linear and wsd, as a share of lr."""
    optimizer: Literal["adamw", "adamw8bit"] = "adamw"
    """adamw: torch, fused. adamw8bit: bitsandbytes, optimizer state in 8 bits."""
    betas: tuple[Fraction, Fraction] = (0.9, 0.999)
    """AdamW's decay rates of the first and second moment."""
    eps: Annotated[float, Field(gt=0)] = 1e-8
    """AdamW's epsilon."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Decoupled weight decay, on matrices only (never on norms, biases and the router)."""
    clip_norm: Annotated[float, Field(gt=0)] | None = 1.0
    """Largest global gradient norm; null turns clipping off (the norm is still reported)."""
    checkpointing: Literal["none", "selective", "full"] = "none"
    """Recompute activations in the backward pass: of no layer, of every second layer, or of every layer."""
    loss_chunk_tokens: PositiveInt = 256
    """Tokens whose logits exist at one time; the loss's memory is this many rows of the vocabulary in float32."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Seed of adapter initialisation, dropout and data order."""
    save_every_steps: PositiveInt = 100
    """Steps between two checkpoints. The last step is always saved."""
    save_in_background: bool = True
    """Write checkpoints while training goes on, from a copy in host memory; false: training waits for the disk."""
    keep_checkpoints: PositiveInt = 2
    """Newest checkpoints kept, besides the one with the best held-out loss."""
    threads: PositiveInt | None = None
    """CPU threads of torch; default: torch's own choice."""

    @field_validator("betas", mode="before")
    @classmethod
    def _pair(cls, value: object) -> object:
        return tuple(value) if isinstance(value, list) else value

    @model_validator(mode="after")
    def _one_length(self) -> "Train":
        if self.steps is None and self.epochs is None:
            raise ValueError("steps and epochs are both missing; give one of them")
        if self.steps is not None and self.epochs is not None:
            raise ValueError("steps and epochs are both given; keep one (null takes the other away)")
        return self


class Guard(Section):
    """What watches the router, against step 0 on a fixed probe batch, and what it does. Thresholds are provisional."""

    action: list[Literal["lower_lr", "freeze", "balance", "bias", "rollback", "reset", "stop"]] = []
    """What to do at each further alarm, in order. lower_lr and balance answer yellow and worse, freeze and bias orange
    and worse, rollback, reset and stop red only."""
    every_steps: PositiveInt = 25
    """Steps between two looks at the router. Over the first two such spans the looks are two fifths of that apart."""
    probe_tokens: PositiveInt = 4096
    """Size of the fixed probe batch, taken from the held-out data, or from the training data without one."""
    yellow_kl: Annotated[float, Field(gt=0)] = 0.3
    """Yellow: mean KL from the probe's routing probabilities at step 0, nats."""
    yellow_overlap: Fraction = 0.6
    """Yellow: mean share of the probe's top-k choices that are still those of step 0, below this."""
    yellow_entropy: Fraction = 0.85
    """Yellow: token entropy over that of step 0, below this."""
    orange_starved: Fraction = 0.05
    """Orange: share of all experts that starve (under a tenth of the fair share) and did not at step 0."""
    orange_cv: Annotated[float, Field(gt=1)] = 1.3
    """Orange: largest load CV of any layer over the largest at step 0."""
    red_dead: PositiveInt = 1
    """Red: experts without a token, on two looks in a row with enough tokens, that had some at step 0."""
    lower_lr_to: Annotated[float, Field(gt=0, lt=1)] = 0.1
    """Factor on the router's learning rate in lower_lr."""
    balance: Annotated[float, Field(gt=0)] = 0.01
    """Weight of the balance loss that the action balance switches on."""
    bias: Annotated[float, Field(gt=0)] = 0.01
    """Rate of the bias update that the action bias switches on."""
    after_rollback: Literal["skip", "repeat"] = "skip"
    """Whether a run that was rolled back skips the data that led there, or takes it again."""


class Router(Section):
    train: bool = False
    """Train the router. Frozen is the default: see docs/router.md."""
    lr_scale: Annotated[float, Field(gt=0)] = 0.1
    """The router's learning rate over train.lr, where it trains."""
    balance: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the load-balancing loss, the mean over layers of E·Σ f·P (1 when balanced)."""
    balance_over: Literal["micro", "sequence", "global"] = "global"
    """Tokens over which f is taken: those of a micro-batch, of one document, or of the whole step on all ranks."""
    z: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the z-loss, the mean over layers and tokens of logsumexp(logits)²."""
    bias_rate: Annotated[float, Field(ge=0)] = 0.0
    """Step of the balancing update of e_score_correction_bias, for models that have one; 0: the bias stays."""
    capacity: Literal["dropless"] | Annotated[float, Field(gt=0)] = "dropless"
    """Capacity factor, or dropless. What exceeds it in a micro-batch is dropped, counted and shown."""
    capacity_per: Literal["expert", "rank"] = "expert"
    """Whether the capacity bounds each expert, or the experts of an expert-parallel rank together."""
    drop: Literal["probs", "position"] = "probs"
    """Which assignments are dropped first: those of the smallest routing weight, or the last in the micro-batch."""
    placement: Literal["contiguous", "measured"] = "contiguous"
    """Experts on expert-parallel ranks: in order, or spread by loads measured before step 1. Undone when saved."""
    guard: Guard = Guard()
    """What watches the router, and what it does."""


class Parallel(Section):
    ep: PositiveInt = 1
    """Expert-parallel size: each rank holds experts / ep whole experts."""
    dense: Literal["replicate", "zero2", "zero3"] = "replicate"
    """How everything but the experts is laid out over the ranks."""
    dp_replicate: PositiveInt = 1
    """Replicas of the sharded model."""
    cp: PositiveInt | Literal["dynamic"] = 1
    """Context-parallel size, or a size chosen for each micro-batch."""
    exchange: Literal["auto", "moved", "gathered", "heads", "ring"] = "auto"
    """How ranks that share documents exchange keys and values. auto: the cheapest, for each micro-batch."""
    probe: str | None = None
    """probe.json whose costs, measured by `gatewright probe --attention`, steer schedules. Default: the catalogue's."""
    timeout_s: PositiveInt = 600
    """How long ranks wait for one that does not come, in seconds, before the run ends."""


class Hardware(Section):
    gpu: str
    """Name in `gatewright gpus`."""
    per_node: PositiveInt = 8
    """GPUs (GCDs on MI250X) in one node."""
    nodes: PositiveInt = 1
    """Nodes of the job."""


class Gate(Section):
    step: PositiveInt = 25
    """Step at which the run's end is predicted and compared with the time it has."""


class Container(Section):
    kind: Literal["apptainer", "singularity", "pyxis"] = "apptainer"
    """How processes are started in it; pyxis is srun's own plugin."""
    image: str = Field(min_length=1)
    """Path of the image, or what pyxis takes for one."""
    binds: list[str] = []
    """Further folders to bind, as from[:to[:options]]. The working directory is always bound."""
    python: str = "python"
    """Interpreter in the image that has gatewright."""


class Cluster(Section):
    kind: Literal["slurm"] = "slurm"
    """Queue that runs the campaign."""
    machine: str = "plain"
    """Preset of the machine, such as lumi-g, mi300x or h200: `gatewright cluster show` lists them."""
    partition: str | None = None
    """SLURM partition; default: the preset's, else the cluster's own default."""
    cpu_partition: str | None = None
    """SLURM partition of stages without GPUs; default: the preset's, else `partition`."""
    account: str | None = None
    """Account, or project, that pays."""
    qos: str | None = None
    """Quality of service."""
    time_limit: Annotated[str, Field(pattern=r"^\d+(s|m|h|d)$", examples=["90m", "24h", "2d"])] = "24h"
    """Time limit of one job, in minutes, hours or days (or seconds: the queue rounds them up, the run does not)."""
    links: PositiveInt = 1
    """Jobs in the chain at most."""
    gate: Gate = Gate()
    """When to stop a hopeless run."""
    launcher: Literal["auto", "srun", "torchrun"] = "auto"
    """srun: one task a GPU. torchrun: one task a node. auto: the preset's."""
    container: Container | None = None
    """Image that training runs in. Default: the Python that submits, or `venv`."""
    venv: str | None = None
    """Virtual environment that training runs in."""
    cpus_per_gpu: PositiveInt | None = None
    """CPU cores a GPU; default: the preset's."""
    memory_gib: PositiveInt | None = None
    """Memory of a node to ask for; default: the preset's, else the partition's."""
    setup: list[str] = []
    """Shell lines before the launch, such as module load."""
    env: list[Annotated[str, Field(pattern=r"^[A-Za-z_]\w*=", examples=["NCCL_DEBUG=INFO"])]] = []
    """Environment variables as NAME=value, over those of the preset."""
    sbatch: list[Annotated[str, Field(pattern=r"^--[a-z]", examples=["--reservation=training"])]] = []
    """Further options of sbatch, such as --reservation=training."""
    usd_per_gpu_hour: Annotated[float, Field(ge=0)] | None = None
    """Price of a GPU-hour; default: the catalogue's."""


class Run(Section):
    """A training run. Its name is also its folder, `runs/<name>`, whatever job executes it."""

    run: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$", examples=["judge-35b"])]
    """Name of the run: letters, digits, dot, dash and underscore; the first is a letter or a digit."""
    model: Model
    """The base model."""
    method: Method = Method()
    """What is trained, and how."""
    data: Data
    """The training documents."""
    evaluate: Evaluate | None = None
    """The held-out documents."""
    train: Train
    """The optimisation."""
    router: Router = Router()
    """The router of a mixture of experts."""
    parallel: Parallel | Literal["auto"] = "auto"
    """Layout over ranks; auto: one process takes no layout, many ask the planner."""
    hardware: Hardware | None = None
    """The machines, for planning."""
    cluster: Cluster | None = None
    """The queue, for campaigns."""
    track: list[Tracker] = []
    """Experiment trackers that get every logged number besides events.jsonl."""
    runs_dir: str = "runs"
    """Folder of all runs."""

    @model_validator(mode="after")
    def _cut_documents(self) -> "Run":
        if self.parallel == "auto" or self.parallel.cp == 1:
            return self
        if not self.data.pack:
            raise ValueError("data.pack: false and parallel.cp: a schedule packs and cuts documents; set pack: true")
        if self.data.alike:
            raise ValueError(
                "data.alike and parallel.cp: a step is one pack, which a schedule balances; leave alike out"
            )
        if self.router.balance and self.router.balance_over == "sequence":
            raise ValueError(
                "router.balance_over: sequence needs whole documents on a rank, parallel.cp cuts them; set global"
            )
        return self

    @property
    def timeout_s(self) -> int:
        """Patience of ranks with each other, seconds."""
        return (Parallel() if self.parallel == "auto" else self.parallel).timeout_s

    @property
    def folder(self) -> Path:
        return Path(self.runs_dir) / self.run

    @property
    def router_trains(self) -> bool:
        """Whether the router's weights, or adapters of them, change."""
        adapter = self.method.adapter
        named = [*adapter.targets, *adapter.full] if adapter else self.method.roles or []
        return self.router.train or "router" in named

    @property
    def adapter(self) -> Adapter | None:
        """method.adapter with `full` naming all that its files hold besides low-rank updates.

        That is the router too where router.train trains it, or where its balancing bias moves.
        """
        adapter, router = self.method.adapter, self.router
        moves = router.train or router.bias_rate > 0 or "bias" in router.guard.action
        if adapter is None or not moves or "router" in [*adapter.targets, *adapter.full]:
            return adapter
        return adapter.model_copy(update={"full": [*adapter.full, "router"]})
