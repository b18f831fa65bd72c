"""What a person sees of a run: what will happen before step 1, then one line a step in fixed columns."""

from gatewright.router.load import worst_load
from gatewright.spec.event import (
    DataLoaded,
    Evaluated,
    Event,
    Finding,
    GateChecked,
    GuardActed,
    LayoutChosen,
    ModelLoaded,
    ResumeProved,
    StepDone,
)


def announcement(event: Event) -> list[str]:
    """The lines to show for an event, besides steps and evaluations, that a person should not miss."""
    match event:
        case Finding():
            return [f"{event.severity}: {event.text}"]
        case DataLoaded():
            return [data_line(event)]
        case GuardActed():
            done = f"guard     {event.level} at step {event.step}: {event.action} ({event.detail})"
            return [done, *(f"            {reason}" for reason in event.reasons)]
        case ModelLoaded():
            return model_lines(event)
        case ResumeProved():
            return [resume_line(event)]
        case LayoutChosen():
            return [f"layout    {event.layout}: {event.reason}"]
        case GateChecked():
            return [gate_line(event)]
        case _:
            return []


def resume_line(proved: ResumeProved) -> str:
    """E.g. `resume    proved: the loss after step 40 is 1.234567 again; same data and learning rate`, and so on."""
    again = "again" if proved.loss_now == proved.loss_then else f"(was {proved.loss_then:.6f})"
    same = "same data and learning rate"
    same += ", same random numbers" if proved.same_rng else ", other random numbers"
    return f"resume    proved: the loss after step {proved.step} is {proved.loss_now:.6f} {again}; {same}"


def gate_line(gate: GateChecked) -> str:
    """E.g. `gate      step 25: 1.20 s a step; 39:30 needed, 4:00:00 left: on time`."""
    verdict = "hopeless" if gate.hopeless else "on time"
    return (
        f"gate      step {gate.step}: {gate.step_s:.3g} s a step; {clock(gate.needed_s)} needed, {clock(gate.left_s)} "
        f"left: {verdict}"
    )


def data_line(data: DataLoaded) -> str:
    """E.g. `train      1,200 documents, 150,312 tokens (31 % targets), 37 packs of 4,096, fill 99.2 %`."""
    name = {"train": "train", "evaluate": "held out"}.get(data.split, data.split)
    targets = data.target_tokens / data.tokens
    line = (
        f"{name:<9} {data.documents:,} documents, {data.tokens:,} tokens ({targets:.0%} targets), "
        f"{data.packs:,} packs of {data.capacity_tokens:,}, fill {data.fill:.1%} (padded {data.padded_fill:.1%})"
    )
    if data.overlong_documents:
        line += (
            f"; {data.overlong}: {data.overlong_documents:,} over {data.max_tokens:,}, {data.tokens_lost:,} tokens lost"
        )
    return line


def model_lines(model: ModelLoaded) -> list[str]:
    """The model, its kernels, and what will train of it, role by role."""
    adapters = sum(int(row["trainable_parameters"]) for row in model.coverage if row["rank"])
    keys = ("weight_bytes", "gradient_bytes", "optimizer_bytes")
    held = [_mib(sum(int(row[key]) for row in model.coverage)) for key in keys]
    share = model.trainable_parameters / (model.parameters + adapters)
    shape = f"{model.layers} layers"
    if model.moe_layers:
        shape += f", {len(model.moe_layers)} of them with {model.experts} experts, top-{model.top_k}"
    lines = [
        f"model     {model.architecture}, {model.parameters:,} parameters in {model.dtype}, {shape}",
        f"kernels   attention: {model.attention}; experts: {model.experts_kernel}",
        f"trains    {model.trainable_parameters:,} weights ({share:.2%} of all), {held[0]} MiB, with gradients "
        f"{held[1]} and optimizer {held[2]} MiB; by layer in coverage.json:",
    ]
    for row in model.coverage:
        if row["trains"]:
            lines.append(f"            {row['role']:<15} {row['trainable_parameters']:>13,} {_how(row)}")
        else:
            lines.append(f"            {row['role']:<15} {'frozen':>13} ({row['parameters']:,} parameters)")
    return lines


def _how(row: dict[str, int | str | bool]) -> str:
    """E.g. `rank 16 on 96 weights in 48 of 48 layers, 1,536 experts`, or `in full: 48 weights in 48 of 48 layers`."""
    where = f"{row['modules']:,} weights in {row['layers']} of {row['of_layers']} layers"
    rank = f"rank {row['rank']}"
    how = {"adapter": f"{rank} on", "full": "in full:"}.get(str(row["how"]), f"in full, or {rank}:")
    experts = f", {row['experts']:,} experts" if row["experts"] else ""
    return f"{how} {where}{experts}"


def _mib(count: int) -> str:
    return f"{count / 2**20:,.1f}"


def step_line(done: StepDone, *, steps: int, eta_s: float, moe_layers: list[int]) -> str:
    """E.g. `step  12/120  loss 1.8342  lr 9.8e-04  1,204 tok/s  eta 3:41  mem 2.1 GiB  drop 0  worst 1.9x L7`.

    Many ranks: tokens/s of each too, the fullest rank's memory, the longest wait in collectives as a share of the step,
    and the slowest rank's own work over the median.
    """
    columns = [
        f"step {done.step:>{len(str(steps))}}/{steps}",
        f"loss {done.loss:.4f}",
        f"lr {done.lr:.1e}",
        f"{done.tokens_per_s:,.0f} tok/s",
        *([f"({done.tokens_per_s_rank:,.0f} a rank)"] if done.rank_step_s else []),
        *([f"MFU {done.mfu:.1%}"] if done.mfu is not None else []),
        f"eta {clock(eta_s)}",
        f"mem {max(done.memory_bytes, *done.rank_memory_bytes, 0) / 2**30:.1f} GiB",
    ]
    if done.rank_wait_s:
        wait = max(seconds / step_s for seconds, step_s in zip(done.rank_wait_s, done.rank_step_s, strict=True))
        columns.append(f"wait {wait:.0%}")
        columns += [f"spread {done.spread:.2f}x"] if done.spread is not None else []
    if done.expert_tokens:
        ratio, row = worst_load(done.expert_tokens)
        if done.balance_loss is not None:
            columns.append(f"balance {done.balance_loss:.2f}")
        columns += [f"drop {done.dropped_tokens:,}", f"worst {ratio:.1f}x L{moe_layers[row]}"]
    return "  ".join(columns)


def evaluation_line(done: Evaluated, *, before: Evaluated | None) -> str:
    """E.g. `held-out after step 120: loss 0.8412 (was 2.3107), exact match 41/64 (was 3/64)`."""
    was = f" (was {before.loss:.4f})" if before else ""
    line = f"held-out {'before training' if done.step == 0 else f'after step {done.step}'}: loss {done.loss:.4f}{was}"
    if done.asked:
        was = f" (was {before.correct}/{before.asked})" if before and before.asked else ""
        line += f", exact match {done.correct}/{done.asked}{was}"
    return line


def clock(seconds: float) -> str:
    """1:05, 12:40, 3:02:11."""
    minutes, second = divmod(max(0, round(seconds)), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"
