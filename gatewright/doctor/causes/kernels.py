"""Optional kernels: attention that is missing or silently replaced, bitsandbytes, compiled caches."""

from gatewright.doctor.cause import Cause, Role, env, run_key, sign

CAUSES: tuple[Cause, ...] = (
    Cause(
        code="GW558",
        name="flash-attention-missing",
        kind="flash_attn",
        title="Flash attention was asked for and is not there",
        confidence="certain",
        signs=(
            sign(
                "flash_attn",
                "flash-attn",
                "FlashAttention",
                "flash attention",
                pattern=(
                    r"(?:FlashAttention\s?[23]? has been toggled on, but it cannot be used|flash_attn.*(?:seems to be "
                    r")?not (?:be )?installed"
                    r"|No module named '?flash_attn|[Ii]mportError: .*flash_attn|undefined symbol.*flash|"
                    r"flash_attn_\w*cuda.*(?:undefined symbol|cannot open)"
                    r"|flash[-_]attn.*(?:is not available|not found|is required|undefined symbol|cannot be imported)"
                    r"|[Ff]lash ?[Aa]ttention.*(?:is not available|not installed|cannot be used|is required|not found))"
                ),
            ),
        ),
        text="Flash attention was asked for, but the package is missing or does not load.",
        why="The package is absent, or built for another torch, ROCm or CUDA (undefined symbol).",
        fix=("Install a build for this torch, or ask for sdpa; verify by running it forward and backward.",),
        outranks=5,
    ),
    Cause(
        code="GW559",
        name="flash-attention-unsupported",
        kind="flash_attn",
        title="Flash attention does not run in this combination",
        signs=(
            sign(
                "FlashAttention",
                "flash attention",
                "Flash attention",
                "Flash Attention",
                "flash-attn",
                "flash_attn",
                pattern=(
                    r"FlashAttention only supports? (?P<what>[^.\n]+)|[Ff]lash[ -]?[Aa]ttention (?:only |currently "
                    r")?(?:supports|requires|does not support|doesn't support|is not supported) ?(?P<limit>[^.\n]*)"
                    r"|does not support Flash ?Attention|no attention|[Ff]lash[_ -]?attn?(?:ention)?.*(?:head ?dim|"
                    r"dtype).*(?:support|must)"
                    r"|Supported flash-attn versions are (?P<supported>[^.]+\.[^F]*)Found flash-attn (?P<found>\S+)"
                ),
            ),
            sign("No available kernel", "No dot product attention backend is available"),
            sign(
                "flash_attn",
                "mha_varlen",
                "mha_fwd",
                "mha_bwd",
                pattern=r"(?:mha_\w+|flash_attn\w*).*(?:not implemented|unsupported|must be|invalid argument)",
            ),
            sign(
                "head dimension",
                "head_dim",
                "headdim",
                pattern=(
                    r"(?:head ?dim(?:ension)?|head_dim|headdim).*(?:at most|must be|multiple of|not support|larger "
                    r"than|up to) ?\d*"
                ),
            ),
        ),
        text="The attention kernel does not support this dtype, head size, GPU or version.",
        why="Flash attention needs fp16 or bf16, head sizes up to 256, certain GPUs, and versions that the "
        "caller accepts. "
        "Transformer Engine refuses versions it does not know and falls back to unfused attention, which "
        "then runs out of memory.",
        fix=(
            "Load the model in bf16, or use sdpa; check the accepted versions.",
            "Force the backend so that a fall-back is an error instead of a slower, larger path.",
        ),
        outranks=4,
    ),
    Cause(
        code="GW560",
        name="attention-replaced",
        kind="flash_attn",
        title="Attention silently runs on another path",
        role=Role.HINT,
        severity="warning",
        confidence="likely",
        signs=(
            sign(
                "attention",
                "Attention",
                "attn",
                pattern=(
                    r"(?:[Ff]alling back|[Ff]all back|falls back|[Ff]allback|[Ff]ell back).{0,80}(?:eager|unfused|"
                    r"math|sdpa|native|xformers|[Aa]ttention)"
                    r"|(?:[Ff]lash|[Aa]tten|attn).{0,80}(?:[Ff]alling back|[Ff]all back|falls back|[Ff]allback|"
                    r"[Ff]ell back|[Dd]isabling|disabled|will be disabled)"
                    r"|(?:[Mm]em(?:ory)?[ _-][Ee]fficient|[Ff]lash|"
                    r"[Cc]u[Dd][Nn][Nn]).{0,40}(?:attention)?.{0,20}(?:not|un)(?: being)?\s?(?:used|supported|enabled|"
                    r"compiled)"
                    r"|not compiled with flash attention"
                ),
            ),
            sign("Torch was not compiled with flash attention", "Flash Efficient attention on Current AMD GPU"),
            sign("not initialized on GPU", pattern=r"use Flash Attention .* model not initialized on GPU"),
        ),
        text="The attention kernel asked for is not the one that runs.",
        why="A fall-back builds the matrix of scores: memory grows with the square of the length, and packed "
        "documents may "
        "see one another.",
        fix=("Force one kernel and let its absence be an error; verify it forward and backward before the run.",),
        outranks=6,
    ),
    Cause(
        code="GW562",
        name="bitsandbytes-binary",
        kind="bitsandbytes_rocm",
        title="bitsandbytes has no library for this ROCm or CUDA",
        confidence="certain",
        signs=(
            sign(
                "bitsandbytes",
                "binary not found at",
                pattern=(
                    r"Could not find the bitsandbytes (?:ROCm|CUDA) binary|libbitsandbytes_\w+\.so.*(?:cannot open|"
                    r"not found|undefined)"
                    r"|bitsandbytes.*(?:compiled without GPU support|without GPU support|not compiled with|was not "
                    r"found|Setup failed"
                    r"|library load error|not supported|no GPU|CPU[- ]only)|libbitsandbytes_cpu\.so|No module named "
                    r"'?bitsandbytes"
                    r"|Could not load bitsandbytes native library|Configured \w+ binary not found"
                    r"|^(?!.*Loading binary).*libbitsandbytes_\w+"
                    r"|[Uu]sing (?:the )?`?bitsandbytes`?.*requires|bitsandbytes.*(?:requires|is required)"
                ),
            ),
            sign("ROCm Setup failed", "CUDA Setup failed", "CUDA SETUP: Setup Failed", "binary not found at"),
            sign("ops.hip", "ops.cu", pattern=r"Error .+ at line \d+ in file .*ops\.(?:hip|cu)"),
            sign(
                "int matmul", "get_native_library", "cquantize_blockwise", "cget_managed_ptr", "cdequantize_blockwise"
            ),
            sign(
                "Error named symbol not found",
                pattern=r"bitsandbytes.*ops\.cu|Error named symbol not found at line \d+ in file .*ops",
            ),
        ),
        text="bitsandbytes found no library that matches the GPU stack of this torch.",
        why=(
            "Its library is chosen by the ROCm or CUDA version that torch reports; where they differ it "
            "loads the CPU library."
        ),
        fix=(
            "Build or install bitsandbytes for the version that torch reports (torch.version.hip, torch.version.cuda).",
        ),
        outranks=7,
    ),
    Cause(
        code="GW570",
        name="jit-cache-race",
        kind="jit_cache",
        title="A cache of compiled kernels on a shared file system",
        signs=(
            sign("JSONDecodeError", pattern=r"JSONDecodeError.*(?:triton|inductor)"),
            sign(
                "triton",
                "Triton",
                pattern=(
                    r"(?:Errno 2|Errno 116|Errno 16|Errno 39|FileNotFoundError|Stale file handle|JSONDecodeError|"
                    r"Directory not empty|Device or resource busy|PermissionError|cannot (?:stat|open) shared object|"
                    r"file too short|truncated|corrupt).*[/.]triton|[/.]triton\w*/.*(?:\.tmp\.pid|Stale file handle|"
                    r"file too short|cannot (?:stat|open) shared|No such file|Permission denied|invalid ELF)"
                ),
            ),
            sign(
                "torchinductor",
                "torch_extensions",
                "inductor",
                pattern=(
                    r"(?:Errno 2|Errno 116|Stale file handle|FileNotFoundError|file too short|PermissionError|No such "
                    r"file|cannot open shared object).*(?:torchinductor|torch_extensions|inductor)|(?:torchinductor|"
                    r"torch_extensions|inductor)\w*/.*(?:Stale file handle|No such file|cannot open shared object|"
                    r"file too short|Permission denied|\.lock)"
                ),
            ),
            sign(
                "Error building extension",
                "Ninja is required to load",
                pattern=r"Error building extension '(?P<extension>[^']+)'|Ninja is required",
            ),
            sign(
                "kernel cache",
                "kernel_cache",
                "hsaco",
                "cubin",
                pattern=(
                    r"(?:[Ff]ailed|[Ee]rror|No such file|corrupt).*(?:kernel[ _]cache|\.hsaco|\.cubin)|(?:kernel[ "
                    r"_]cache|\.hsaco|\.cubin).*(?:No such file|corrupt|truncated|[Ff]ailed)"
                ),
            ),
        ),
        text="The cache of compiled kernels is broken or raced for by several processes.",
        why="Triton, Inductor and torch extensions cache in the home directory by default. On NFS or Lustre, "
        "processes on many "
        "nodes overwrite each other's files.",
        fix=("Put the caches on a disk of the node, one folder a job; remove the broken ones.",),
        changes=(
            env("TRITON_CACHE_DIR", "/tmp/triton-$SLURM_JOB_ID"),
            env("TORCHINDUCTOR_CACHE_DIR", "/tmp/inductor-$SLURM_JOB_ID"),
            env("TORCH_EXTENSIONS_DIR", "/tmp/extensions-$SLURM_JOB_ID"),
        ),
        source="https://github.com/pytorch/pytorch/issues/173679",
        outranks=5,
    ),
    Cause(
        code="GW571",
        name="miopen-database",
        kind="miopen_db",
        title="MIOpen's database on a file system that cannot hold it",
        confidence="certain",
        signs=(
            sign(
                "SQLite",
                "sqlite",
                pattern=(
                    r"(?:Internal error while accessing SQLite database|sqlite.*(?:malformed|locked|I/O error|"
                    r"readonly|read-only))(?:: (?P<reason>.+))?"
                ),
            ),
            sign("database disk image is malformed", "database is locked"),
            sign(
                "MIOpen",
                pattern=(
                    r"MIOpen.*(?:[Ee]rror|[Ff]ailed|Unable|[Uu]n(?:able|readable)|Missing|"
                    r"Cannot).*(?:db|DB|[Dd]atabase|cache|file|"
                    r"lock)"
                ),
            ),
            sign("miopenStatus", pattern=r"miopenStatus(?!AllocFailed)\w+"),
        ),
        text="MIOpen cannot use its database of tuned kernels.",
        why="It is an SQLite file in the home directory; locking does not work on Lustre and NFS.",
        fix=("Give it a folder on the node's own disk.",),
        changes=(
            env("MIOPEN_USER_DB_PATH", "/tmp/miopen-$SLURM_JOB_ID"),
            env("MIOPEN_CUSTOM_CACHE_DIR", "/tmp/miopen-$SLURM_JOB_ID"),
        ),
        outranks=5,
    ),
    Cause(
        code="GW572",
        name="kernel-too-large",
        kind="kernel_resources",
        title="A kernel that does not fit on this GPU",
        confidence="certain",
        signs=(
            sign(
                "out of resource",
                "too many resources requested for launch",
                pattern=(
                    r"out of resource: (?P<what>[\w ]+), Required: (?P<required>\d+), Hardware limit: (?P<limit>\d+)|"
                    r"out of resource|too many resources requested for launch"
                ),
            ),
        ),
        text="A kernel asks for more shared memory or registers than this GPU has: its tiles are for another GPU.",
        why="This is memory inside the GPU's cores; neither /dev/shm nor the card's memory is full. Triton kernels are "
        "written and tuned for one family of GPUs, and head sizes and ranks change what a tile needs.",
        fix=(
            "Take another kernel for this step (attention sdpa, experts by grouped_mm), or a release of it for this "
            "GPU.",
        ),
        outranks=7,
    ),
    Cause(
        code="GW561",
        name="dtype-unsupported",
        kind="dtype",
        title="A number format this device does not have",
        signs=(
            sign(
                "bf",
                pattern=(
                    r"(?:bf16|bfloat16).*(?:not supported|requires|unsupported|not implemented)|[Yy]our setup doesn't "
                    r"support bf16"
                ),
            ),
            sign("not implemented for", pattern=r"\"(?P<op>\w+)\" not implemented for '(?P<dtype>\w+)'"),
            sign("Attempting to unscale FP"),
            sign(
                "expected scalar type",
                "to have the same dtype",
                "must have the same dtype",
                pattern=r"expected (?:scalar type|mat1 and mat2 to have the same dtype)|must have the same dtype",
            ),
        ),
        text="An operation does not exist for this number format, or two formats meet in it.",
        why=(
            "bf16 on a GPU without it, fp16 weights under a gradient scaler, or adapter and base weights in "
            "different formats."
        ),
        fix=("Train in bf16 where the GPU has it, adapters in fp32; never fp16 weights with a gradient scaler.",),
        changes=(run_key("model.dtype", "bfloat16"),),
        outranks=1,
    ),
)
