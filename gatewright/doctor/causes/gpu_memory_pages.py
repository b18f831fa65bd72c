"""The pages of an out-of-memory error: one for each cause, and one for each phase that explains it by itself."""

from gatewright.doctor.cause import Cause

LESS = "Lower live memory: smaller micro-batch, shorter samples, activation checkpointing, sharding, or 4-bit weights."

PAGES: dict[str, Cause] = {
    page.name: page
    for page in (
        Cause(
            code="GW501",
            name="oom-absurd-request",
            kind="gpu_oom",
            title="One tensor larger than the card",
            text="",
            why="A single allocation exceeds the whole device. That is a wrong shape or dtype, attention scores "
            "of a very "
            "long sample held as a matrix, or logits of too many tokens at once; a negative size prints as "
            "'more than 1EB'.",
            fix=(
                "Find the tensor in the traceback's last frame and check its shape; cap the sample length.",
                (
                    "Where it is an attention matrix, use a kernel that does not build one; where it is logits, a "
                    "chunked loss."
                ),
            ),
        ),
        Cause(
            code="GW502",
            name="oom-fraction-cap",
            kind="gpu_oom",
            title="A cap on the process's share of the card",
            text="",
            why="PyTorch prints `X allowed` when set_per_process_memory_fraction (or per_process_memory_fraction "
            "in the "
            "allocator settings) limits this process; the card itself may be nearly empty.",
            fix=("Remove the cap, or reset it: torch.cuda.set_per_process_memory_fraction(1.0).",),
        ),
        Cause(
            code="GW503",
            name="oom-misreport",
            kind="gpu_oom",
            title="Free memory that cannot be had",
            text="",
            why="The driver reports enough free memory and still refuses: the limit of a container, MPS or WSL, "
            "an APU that "
            "shares memory with the host, a driver that answers wrongly, or memory that another process took "
            "meanwhile.",
            fix=(
                "Allocate the same size in a fresh process on this GPU; if it fails too, look at the limits "
                "(container, MPS, WSL, cgroup) and the driver, not at the model.",
            ),
        ),
        Cause(
            code="GW504",
            name="oom-other-process",
            kind="gpu_oom",
            title="Somebody else's memory on the same card",
            text="",
            why="A large part of the card belongs neither to free memory nor to this process's PyTorch: another job, a "
            "process that did not end, a second rank bound to the same GPU, or memory outside PyTorch in this process.",
            fix=(
                "Look who holds it (nvidia-smi, rocm-smi --showpids) and end what is left over.",
                "Check that every rank has its own GPU: torch.cuda.set_device(LOCAL_RANK) before the first allocation.",
            ),
        ),
        Cause(
            code="GW505",
            name="oom-fragmentation",
            kind="gpu_oom",
            title="Enough memory, but not in one piece",
            text="",
            why="The request fits into free plus reserved-but-unallocated memory, and the unused part is more than the "
            "ordinary slack of the allocator. Varying shapes split the segments. The head-room says whether "
            "joining the "
            "pieces would have been enough.",
            fix=(
                "Let segments grow instead of splitting them, from the launcher, before the first import of "
                "torch; then "
                "check that it is active (a ROCm build may only print a warning).",
                "Fewer different shapes: packed batches of one size, or lengths rounded up.",
            ),
            source="https://pytorch.org/docs/stable/notes/cuda.html#optimizing-memory-usage-with-pytorch-alloc-conf",
        ),
        Cause(
            code="GW506",
            name="oom-pressure",
            kind="gpu_oom",
            title="The live tensors fill the card",
            text="",
            why="What is allocated, not what is reserved, fills the device; no allocator setting can help.",
            fix=(LESS,),
        ),
        Cause(
            code="GW507",
            name="oom-resume",
            kind="gpu_oom_resume",
            title="Out of memory while resuming",
            text="",
            why="Saved tensors carry the device they were saved from and are loaded there beside the live ones, or the "
            "resumed job lacks a setting of the first (activation checkpointing, micro-batch).",
            fix=(
                "Load the state on the host and copy it: torch.load(..., map_location='cpu').",
                "Compare the resumed job's settings with those of the first one; gradient checkpointing first.",
            ),
        ),
        Cause(
            code="GW508",
            name="oom-evaluation",
            kind="gpu_oom_eval",
            title="Out of memory in evaluation",
            text="",
            why="Evaluation keeps the logits of the whole set on the GPU (tokens × vocabulary × 4 bytes) when "
            "metrics are "
            "computed from them, or runs a larger batch than training does.",
            fix=(
                "Keep the argmax only (preprocess_logits_for_metrics), or move results to the host as they come.",
                "Evaluate with a batch of 1.",
            ),
        ),
        Cause(
            code="GW509",
            name="oom-save",
            kind="gpu_oom_save",
            title="Out of memory while saving",
            text="",
            why="Saving gathers sharded weights or optimizer state into whole tensors on one GPU.",
            fix=("Save sharded state, or gather on the host (offload to CPU, rank 0 only).",),
        ),
        Cause(
            code="GW510",
            name="oom-merge",
            kind="gpu_oom_merge",
            title="Out of memory while merging an adapter",
            text="",
            why="Merging expands quantised weights to 16 bit, layer by layer, beside the adapter.",
            fix=("Merge on the CPU from the 16-bit base; it needs host memory for one copy of the weights, no GPU.",),
        ),
    )
}
