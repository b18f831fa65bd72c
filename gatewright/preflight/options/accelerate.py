"""Keys at the top of an accelerate 1.15 config."""

_TEXT = """
command_file commands compute_environment debug deepspeed_config distributed_type downcast_bf16 dynamo_config
enable_cpu_affinity fp8_config fsdp_config gpu_ids ipex_config machine_rank main_process_ip main_process_port
main_training_function megatron_lm_config mixed_precision mpirun_config num_machines num_processes
parallelism_config rdzv_backend same_network tpu_env tpu_name tpu_use_cluster tpu_use_sudo tpu_vm tpu_zone use_cpu
"""
NAMES = frozenset(_TEXT.split())
