"""A machine's preset as `gatewright cluster show` prints it: what is set for a job, and why."""

from gatewright.campaign.presets import Preset


def render_preset(preset: Preset) -> str:
    """What a machine's preset sets, and why."""
    whole = "all of the node, for a job of all its GPUs" if preset.per_node else None
    facts = {
        "GPUs": f"{preset.per_node} × {preset.gpu} a node" if preset.gpu else None,
        "partition": preset.partition,
        "CPU partition": preset.cpu_partition,
        "limits": ", ".join(f"{name} {limit}" for name, limit in preset.limits.items()) or None,
        "launcher": {"srun": "srun, one task a GPU", "torchrun": "torchrun, one task a node"}[preset.launcher],
        "asks for GPUs": preset.gpu_option.format(gpus=preset.per_node or "N"),
        "cores": f"{preset.cpus_per_gpu} a GPU" if preset.cpus_per_gpu else whole,
        "memory": f"{preset.memory_gib} GiB a node" if preset.memory_gib else whole,
        "core binding": f"{preset.cpu_bind} ({preset.cpu_bind_why})" if preset.cpu_bind else None,
        "container": preset.container_option or None,
        "binds": ", ".join(preset.binds) or None,
    }
    lines = [f"{preset.name}: {preset.title}", f"  from {preset.source} ({preset.date})"]
    lines += [f"  {name + ':':<15} {text}" for name, text in facts.items() if text is not None]
    lines += [f"  export {one.name}={one.value}\n      {one.why}" for one in preset.env]
    return "\n".join([*lines, *(f"  Note: {note}" for note in preset.notes)])
