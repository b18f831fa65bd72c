"""Checkpoints and resuming: nothing to resume from, state that does not belong, files that are cut off."""

from gatewright.doctor.cause import Cause, Role, sign

CAUSES: tuple[Cause, ...] = (
    Cause(
        code="GW583",
        name="no-checkpoint-to-resume",
        kind="resume_no_checkpoint",
        title="No checkpoint where one was wanted",
        confidence="certain",
        signs=(
            sign(
                "Can't find a valid checkpoint",
                "No valid checkpoint found",
                "no valid checkpoint",
                "No valid checkpoint",
            ),
            sign(
                "Error",
                "rror:",
                pattern=(
                    r"(?:Error|[Ee]rror:).{0,80}\b[Nn]o (?:such |complete |usable "
                    r")?checkpoints?\b"
                ),
            ),
        ),
        text="There is no checkpoint to resume from.",
        why="The output folder has the job's id in its name, no save happened within one job, or what was "
        "saved is not a whole "
        "state (adapter or projector only).",
        fix=("Name the folder by the run, not by the job; save several times a job; keep optimizer state.",),
        outranks=4,
    ),
    Cause(
        code="GW544",
        name="starts-from-scratch",
        kind="resume_no_checkpoint",
        title="The run starts at step 0",
        role=Role.HINT,
        severity="warning",
        confidence="possible",
        signs=(
            sign(
                "checkpoint",
                "Checkpoint",
                pattern=(
                    r"(?:[Cc]ould not|[Ff]ailed to|[Cc]annot|[Uu]nable to) find (?:a |any |"
                    r"the )?(?:valid |latest |previous )?checkpoints?\b"
                    r"|\b[Nn]o (?:complete |usable |resumable |previous |existing |saved |"
                    r"latest )?checkpoints? (?:was |were )?(?:found|exists?|available|in|at|"
                    r"to)\b"
                    r"|[Cc]heckpoint (?:directory|folder|dir) .*(?:is empty|has no checkpoint)"
                    r"|start(?:s|ing)? (?:training )?from (?:random|scratch)|resum\w+ (?:from|"
                    r"at) (?:step|iteration) 0\b"
                ),
            ),
            sign("could not find the metadata file", "Unable to find latest file"),
        ),
        text="No checkpoint was found: the run starts at step 0.",
        why="Right for a first job. In a chain it means that the output folder has "
        "the job's id in its name, or that no job "
        "lived to its first save.",
        fix=("Name the folder by the run, not by the job; save several times a job.",),
        outranks=2,
    ),
    Cause(
        code="GW556",
        name="resume-path-missing",
        kind="resume_not_found",
        title="The checkpoint named is not there",
        confidence="certain",
        signs=(
            sign(
                "checkpoint",
                "resume",
                "trainer_state.json",
                "optimizer.pt",
                pattern=(
                    r"(?:FileNotFoundError|No such file or directory|does not exist|not found|"
                    r"NotADirectoryError)\b.{0,200}"
                    r"(?:checkpoint-?\d*|/ckpt|trainer_state\.json|optimizer\.pt|scheduler\.pt|global_step\d+|"
                    r"mp_rank_\d+|rng_state)"
                    r"|(?:[Cc]heckpoint|resume_from\w*|trainer_state\.json|optimizer\.pt|"
                    r"global_step\d+)\b.{0,160}(?:does not exist|doesn't exist|not found|No such file|is not a "
                    r"(?:directory|valid))"
                ),
            ),
        ),
        text="The checkpoint to resume from is not at its path.",
        why="It was deleted (save_total_limit), lies below another job's folder, or was never finished.",
        fix=("List the folder; resume from the newest complete checkpoint.",),
        outranks=3,
    ),
    Cause(
        code="GW584",
        name="optimizer-state-differs",
        kind="resume_optimizer_mismatch",
        title="The optimizer's state does not belong to these parameters",
        confidence="certain",
        signs=(
            sign("checkpoint contains only the model", pattern=r"restore optimizer state but checkpoint contains only"),
            sign("Missing key in checkpoint state_dict", pattern=r"Missing key in checkpoint state_dict: \S*optim"),
            sign(
                "KeyError",
                pattern=(
                    r"KeyError: '(?:optimizer|optimizer_state_dict|optimizer_states|"
                    r"lr_scheduler|exp_avg\w*)'"
                ),
            ),
            sign(
                "different number of parameter groups",
                "parameter group that doesn't match",
                "size of optimizer's group",
            ),
            sign(
                "optimizer",
                "Optimizer",
                pattern=(
                    r"[Oo]ptimizer.*(?:state.*(?:mismatch|does not match|doesn't match|not match|incompatible)|"
                    r"param(?:eter)? groups?.*(?:differ|mismatch|match))|loaded state dict contains a parameter group"
                ),
            ),
            sign("exp_avg", pattern=r"size of tensor a .*exp_avg|exp_avg.*(?:size|shape).*(?:match|mismatch)"),
        ),
        text="The saved optimizer state belongs to other trainable parameters than this run's.",
        why=(
            "Rank, targets, what is frozen, the grouping for weight decay, or the optimizer changed between "
            "the two jobs."
        ),
        fix=(
            "Resume with the settings of the first job; or start a new run from the weights, without optimizer state.",
        ),
        outranks=4,
    ),
    Cause(
        code="GW585",
        name="world-size-changed",
        kind="resume_world_size",
        title="The number of ranks changed",
        confidence="certain",
        signs=(
            sign(
                "DP world size",
                "world size of",
                pattern=(
                    r"DP world size of (?P<saved>\d+) but the current world size is (?P<now>\d+)|"
                    r"checkpoint.{0,80}world[ _]size|world[ _]size.{0,60}checkpoint"
                ),
            ),
            sign(
                "world size",
                "world_size",
                "World size",
                pattern=(
                    r"(?:[Ss]aved|[Ll]oad\w*|[Rr]esum\w*|[Cc]heckpoint).{0,100}[Ww]orld[ _]size.{0,80}(?:differ|"
                    r"mismatch|match|but|!=|not equal|expected)"
                ),
            ),
            sign("ZeRORuntimeException"),
            sign(
                "tensor model parallel size",
                "tensor_model_parallel",
                "pipeline_model_parallel",
                pattern=(
                    r"(?:tensor|pipeline)[_ ]model[_ ]parallel[_ ]size.*(?:checkpoint|not equal|differ|does not match|"
                    r"mismatch)"
                ),
            ),
            sign("mismatch after resume", pattern=r"\((?:TP|PP|DP|EP|CP)[^)]*\) mismatch after resume"),
            sign(
                "find an RNG file",
                "rng_state",
                pattern=r"Didn't find an RNG file|rng_state_\d+\.pth.*(?:not found|No such file|does not exist)",
            ),
        ),
        text="The checkpoint was written by another number of ranks (or another layout) than resumes now.",
        why="Sharded optimizer state is one file a rank; most trainers cannot cut it anew.",
        fix=(
            (
                "Resume on as many ranks as saved it; or convert (DeepSpeed universal checkpoint, DCP), or start "
                "from the weights."
            ),
        ),
        outranks=5,
    ),
    Cause(
        code="GW586",
        name="weights-only-load",
        kind="resume_weights_only",
        title="torch.load refuses what is not weights",
        confidence="certain",
        signs=(
            sign(
                "Weights only load failed",
                "WeightsUnpickler",
                "weights_only",
                pattern=(
                    r"Weights only load failed|WeightsUnpickler error|weights_only.*(?:failed|Unsupported|default "
                    r"value)|Unsupported global: GLOBAL"
                ),
            ),
            sign("add_safe_globals", "Unsupported global"),
            sign(
                "upgrade torch to at least",
                "CVE-",
                pattern=r"serious vulnerability issue in `?torch\.load|upgrade torch to at least v2\.6",
            ),
        ),
        text=(
            "Resuming loads RNG or optimizer state that torch.load does not take with weights_only=True (the "
            "default since 2.6)."
        ),
        why="The files hold numpy or Python objects. transformers also refuses torch.load below PyTorch 2.6.",
        fix=(
            "Allow the named types with torch.serialization.add_safe_globals for files you wrote yourself; "
            "or use a newer "
            "trainer that does.",
        ),
        outranks=5,
    ),
    Cause(
        code="GW587",
        name="checkpoint-damaged",
        kind="checkpoint_corrupt",
        title="A weight file is cut off or damaged",
        confidence="certain",
        signs=(
            sign(
                "SafetensorError",
                "deserializing header",
                "MetadataIncompleteBuffer",
                "InvalidHeaderDeserialization",
                "HeaderTooLarge",
                "HeaderTooSmall",
                "InvalidHeader",
                "MetadataIncomplete",
            ),
            sign(
                "PytorchStreamReader",
                "failed finding central directory",
                "invalid header or archive is corrupted",
                "not a ZIP archive",
            ),
            sign(
                "pickle data was truncated",
                "Ran out of input",
                "invalid load key",
                "UnpicklingError",
                pattern=r"pickle data was truncated|EOFError: Ran out of input|invalid load key(?:, '(?P<key>[^']*)')?",
            ),
            sign(
                "corrupt",
                "Corrupt",
                "truncated",
                "incomplete",
                pattern=(
                    r"(?:[Cc]heckpoint|[Ss]hard|safetensors|\.bin|\.pt|\.gguf|weights?|file)\b.{0,80}\b(?:is |was |"
                    r"are |appears |seems )?(?:corrupt(?:ed)?|truncated|incomplete|damaged)\b|[Cc]orrupt(?:ed)? "
                    r"(?:checkpoint|shard|weights?)"
                ),
            ),
            sign(
                "header too large",
                "incomplete metadata",
                "Unable to load weights from pytorch checkpoint file",
                "storage has wrong byte size",
            ),
            sign("JSONDecodeError", pattern=r"JSONDecodeError.*(?:checkpoint|trainer_state|safetensors\.index)"),
            sign("Consistency check failed", pattern=r"Consistency check failed: file should be of size"),
        ),
        text="A weight or checkpoint file is cut off or damaged.",
        why=(
            "A save or download was interrupted, or the disk was full. A Git LFS pointer in place of the "
            "file looks the same."
        ),
        fix=("Remove it and fetch it again, or resume from the checkpoint before it.",),
        outranks=4,
    ),
    Cause(
        code="GW557",
        name="weights-do-not-fit",
        kind="state_dict_mismatch",
        title="Weights of another shape or another model",
        confidence="likely",
        signs=(
            sign("size mismatch for", pattern=r"size mismatch for (?P<tensor>[\w.]+)"),
            sign("Error(s) in loading state_dict", pattern=r"Error\(s\) in loading state_dict for (?P<model>\w+)"),
            sign(
                "Missing key(s) in state_dict",
                "Unexpected key(s) in state_dict",
                "Missing key in checkpoint state_dict",
            ),
        ),
        text="Saved weights do not fit the model: another shape, name or architecture.",
        why=(
            "A base model of another version, an enlarged vocabulary, another adapter rank, or weights saved "
            "by a wrapper."
        ),
        fix=("Load with the settings they were saved with; compare both config.json.",),
        outranks=3,
    ),
)
