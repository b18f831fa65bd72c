"""Planted faults: for every cause with signs a line of a log that has it, and lines that have none."""

PLANTED: dict[str, str] = {
    "GW511": "RuntimeError: CUDA error: out of memory",
    "GW512": "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    "GW515": (
        "slurmstepd: error: Detected 1 oom_kill event in StepId=123.batch. Some of the step tasks have been OOM Killed."
    ),
    "GW516": "[ 812.4] Out of memory: Killed process 4242 (python) total-vm:9kB, anon-rss:8kB",
    "GW517": "torch.distributed.elastic ERROR failed (exitcode: -9) local_rank: 3 (pid: 77)",
    "GW518": "RuntimeError: [enforce fail at alloc_cpu.cpp:114] DefaultCPUAllocator: "
    "can't allocate memory: you tried to "
    "allocate 268435456 bytes. Error code 12 (Cannot allocate memory)",
    "GW519": "RuntimeError: DataLoader worker (pid 4711) is killed by signal: Killed.",
    "GW520": "UserWarning: expandable_segments not supported on this platform (function operator())",
    "GW521": "RuntimeError: Error parsing CachingAllocator settings, expected :",
    "GW522": "UserWarning: PYTORCH_CUDA_ALLOC_CONF is ignored: the allocator is already initialized",
    "GW525": "slurmstepd: error: *** JOB 77 ON nid000012 CANCELLED AT 2026-01-01T00:00:00 DUE TO TIME LIMIT ***",
    "GW526": "slurmstepd: error: *** STEP 7.0 ON n2 CANCELLED AT 2026-01-01T00:00:00 DUE TO PREEMPTION ***",
    "GW527": "srun: error: Node failure on nid000345",
    "GW528": "slurmstepd: error: *** JOB 9 ON n1 CANCELLED AT 2026-01-01T00:00:00 DUE TO JOB REQUEUE ***",
    "GW529": "JobState=PENDING Reason=DependencyNeverSatisfied Dependency=afterok:12(failed)",
    "GW530": "sbatch: error: Batch job submission failed: Invalid account or account/partition combination specified",
    "GW531": "slurmstepd: error: *** JOB 10 ON n1 CANCELLED AT 2026-01-01T00:00:00 ***",
    "GW532": (
        "slurmstepd: error: *** STEPD TERMINATED ON n1 AT 2026-01-01T00:00:00 DUE TO JOB NOT ENDING WITH SIGNALS ***"
    ),
    "GW533": "srun: error: nid001: task 5: Exited with exit code 1",
    "GW534": "/var/spool/slurmd/job1/slurm_script: line 9: 17 User defined signal 1 srun torchrun train.py",
    "GW535": "[rank2]:[E ProcessGroupNCCL.cpp:616] [Rank 2] Watchdog caught "
    "collective operation timeout: WorkNCCL(SeqNum=88, "
    "OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=600000) ran for 600020 milliseconds before timing out.",
    "GW536": "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.",
    "GW537": "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:1691, unhandled system error",
    "GW538": "n1:1:1 [0] NCCL INFO NET/Plugin : No plugin found (librccl-net.so), using internal implementation",
    "GW540": "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: ",
    "GW541": "W torch/distributed/elastic/multiprocessing/api.py: Sending process 31 closing signal SIGTERM",
    "GW542": (
        "UserWarning: No device id is provided via `init_process_group` or `barrier`. Using the current device set"
    ),
    "GW543": (
        "RuntimeError: The server socket has failed to listen on any local network address. port: 29500, EADDRINUSE"
    ),
    "GW544": "WARNING: could not find the metadata file out/latest_checkpointed_iteration.txt, will start from random",
    "GW545": "Memory access fault by GPU node-4 (Agent handle: 0x55) on address 0x7f0. Reason: Unknown.",
    "GW546": (
        "Queue error: HSA_STATUS_ERROR_EXCEPTION: An HSAIL operation resulted in a hardware exception. code: 0x1016"
    ),
    "GW547": "NVRM: Xid (PCI:0000:4e:00): 79, pid=4711, GPU has fallen off the bus.",
    "GW549": "RuntimeError: HIP error: invalid device function",
    "GW551": "RuntimeError: CUDA error: an illegal memory access was encountered",
    "GW552": "RuntimeError: CUDA error: device-side assert triggered",
    "GW553": "/bin/bash: line 1: 99 Segmentation fault      (core dumped) python train.py",
    "GW554": "RuntimeError: No HIP GPUs are available",
    "GW556": "FileNotFoundError: [Errno 2] No such file or directory: 'out/checkpoint-500/trainer_state.json'",
    "GW557": "        size mismatch for model.embed_tokens.weight: copying a param with shape torch.Size([32002, 64])",
    "GW558": "ImportError: FlashAttention2 has been toggled on, but it cannot be used "
    "due to the following error: the package "
    "flash_attn seems to be not installed.",
    "GW559": "RuntimeError: FlashAttention only support fp16 and bf16 data type",
    "GW560": "UserWarning: flash attention is not available for this shape; falling back to the math attention kernel",
    "GW561": "RuntimeError: \"addmm_impl_cpu_\" not implemented for 'Half'",
    "GW562": "Could not find the bitsandbytes ROCm binary at PosixPath('/x/libbitsandbytes_rocm62.so')",
    "GW563": (
        "RuntimeError: mat1 and mat2 shapes cannot be multiplied (64x2048 and 512x16) in peft/tuners/lora/layer.py"
    ),
    "GW564": "UserWarning: Merge lora module to 4-bit linear may get different generations due to rounding errors.",
    "GW565": "OSError: [Errno 122] Disk quota exceeded: 'out/checkpoint-10/model.safetensors'",
    "GW566": "OSError: [Errno 28] No space left on device: 'out/model.safetensors'",
    "GW567": "OSError: [Errno 5] Input/output error: 'data/a.parquet'",
    "GW568": "RuntimeError: DataLoader worker (pid 8) is killed by signal: Bus error. "
    "It is possible that dataloader's workers "
    "are out of shared memory.",
    "GW569": "OSError: [Errno 24] Too many open files: 'data/1.arrow'",
    "GW570": "FileNotFoundError: [Errno 2] No such file or directory: '/home/u/.triton/cache/abc/k.ttir.tmp.pid_7_1'",
    "GW571": "MIOpen Error: Internal error while accessing SQLite database: database disk image is malformed",
    "GW572": "OutOfResources: out of resource: shared memory, Required: 245760, Hardware limit: 232448",
    "GW523": "[INFO] [axolotl.utils.trainer] [RANK:0] sample_packing_eff_est across ranks: [0.5127, 0.5131]",
    "GW577": "ZeroDivisionError: All labels in your dataset are -100. Training losses will be all 0.",
    "GW573": "PermissionError: [Errno 13] Permission denied: '/shared/cache'",
    "GW574": "{'loss': nan, 'grad_norm': nan, 'learning_rate': 0.0001, 'epoch': 0.3}",
    "GW575": "Exception: Current loss scale already at minimum - cannot decrease scale anymore. Exiting run.",
    "GW578": (
        "torch.utils.checkpoint.CheckpointError: Recomputed values for the following tensors have different metadata"
    ),
    "GW579": "RuntimeError: Trying to backward through the graph a second time",
    "GW580": "Invalidate trace cache @ step 1: expected module 25, but got module 323",
    "GW581": "RuntimeError: Expected to have finished reduction in the prior iteration before starting a new one.",
    "GW582": "RuntimeError: element 0 of tensors does not require grad and does not have a grad_fn",
    "GW583": "ValueError: No valid checkpoint found in output directory (out)",
    "GW584": (
        "ValueError: loaded state dict contains a parameter group that doesn't match the size of optimizer's group"
    ),
    "GW585": (
        "ZeRORuntimeException: The checkpoint being loaded used a DP world size "
        "of 32 but the current world size is 128."
    ),
    "GW586": "_pickle.UnpicklingError: Weights only load failed. This file can still be loaded",
    "GW587": "safetensors_rust.SafetensorError: Error while deserializing header: InvalidHeaderDeserialization",
    "GW588": (
        "RuntimeError: Error(s) in loading state_dict for PeftModelForCausalLM: "
        "size mismatch for m.q_proj.lora_A.weight"
    ),
    "GW589": "ValueError: Target modules {'q_projj'} not found in the base model. Please check the target modules",
    "GW590": "jinja2.exceptions.TemplateError: Conversation roles must alternate user/assistant/user/assistant/...",
    "GW591": "ValueError: Asking to pad but the tokenizer does not have a padding token.",
    "GW592": "huggingface_hub.errors.LocalEntryNotFoundError: Cannot find an appropriate cached snapshot folder",
    "GW593": "ValueError: Can not map tensor 'model.layers.0.mlp.experts.base_layer.weight'",
    "GW594": "datasets.exceptions.DatasetGenerationError: An error occurred while generating the dataset",
    "GW598": "llama_model_load: error loading model: missing tensor 'blk.40.attn_norm.weight'",
    "GW513": "RuntimeError: DDP expects same model across all ranks, but Rank 0 has 5 params, while rank 1 has 7",
    "GW514": "ModuleNotFoundError: No module named 'deepspeed'",
}
"""Code → line. A code may be answered by a page of its family where the numbers decide (GW511)."""

HARMLESS = """\
Loading checkpoint shards: 100%|██████████| 4/4 [00:12<00:00,  3.1s/it]
All model checkpoint weights were used when initializing LlamaForCausalLM.
The tokenizer has new PAD/BOS/EOS tokens that differ from the model config and generation config.
`use_cache=True` is incompatible with gradient checkpointing. Setting `use_cache=False`.
[INFO|trainer.py:2134] >> ***** Running training *****
[INFO|trainer.py:2135] >>   Num examples = 10,000
[INFO|trainer.py:4021] >> Saving model checkpoint to out/checkpoint-100
nid001:12:12 [0] NCCL INFO Connected all rings
nid001:12:12 [0] NCCL INFO Connected all trees
nid001:12:12 [0] NCCL INFO comm 0x5 rank 0 nranks 8 cudaDev 0 busId c1000 - Init COMPLETE
[2026-01-01 10:00:00,1] [INFO] [engine.py:1] DeepSpeed Flops Profiler Enabled: False
[loss_scaler.py:1] [deepspeed] OVERFLOW! Rank 0 Skipping step. Attempted loss scale: 65536, reducing to 32768
{'loss': 1.31, 'grad_norm': 0.4, 'learning_rate': 9e-05, 'epoch': 0.01, 'infos': 'none', 'error_rate': 0.0}
{'eval_loss': 1.21, 'eval_runtime': 12.1, 'eval_error_rate': 0.1, 'epoch': 0.02}
[rank0]:[W reducer.cpp:1] Warning: find_unused_parameters=True was specified in DDP constructor, but did not find any
wandb: Run data is saved locally in wandb/run-20260101
wandb: WARNING Calling wandb.login() after wandb.init() has no effect.
resuming is off; training starts at step 0
The information in this financial domain is nanoscale and infinite in principle.
User: my program says Killed and I do not know why. Assistant: look at dmesg.
memory limit of the container: 480 GB; time limit of the job: 24:00:00
trainable params: 4,194,304 || all params: 8,034,455,552 || trainable%: 0.0522
"""
