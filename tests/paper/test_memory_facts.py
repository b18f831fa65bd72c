"""The figures a plan must get right: optimizer state of adapters, what fits where, what a stage of ZeRO leaves."""

from dataclasses import replace

from gatewright.planner.catalogue import find_gpu, find_shape
from gatewright.planner.cost import estimate_cost
from gatewright.planner.job import Adapter, Job, Layout
from gatewright.planner.memory import estimate_memory
from gatewright.planner.plan import plan
from gatewright.planner.weights import total_bytes
from gatewright.spec.hardware import GB, GIB
from gatewright.spec.plan import MemoryEstimate, Plan


def bytes_of(memory: MemoryEstimate, *names: str) -> int:
    return sum(part.bytes for part in memory.peak.parts if part.name in names)


def memory_of(answer: Plan) -> MemoryEstimate:
    assert answer.chosen is not None and answer.chosen.memory is not None
    return answer.chosen.memory


def adapter_state(adapter: Adapter) -> float:
    """Decimal GB of fp32 adapters with Adam's two moments on one GPU."""
    job = Job(shape=find_shape("Qwen3-235B-A22B"), method="lora", adapter=adapter, storage="fp8", loss="linear")
    return bytes_of(estimate_memory(job), "adapters", "optimizer state") / GB


def test_a_rank_32_adapter_is_small_until_the_experts_are_targeted() -> None:
    q_and_v = Adapter(rank=32, roles=frozenset({"attention"}), names=frozenset({"q_proj", "v_proj"}))
    with_experts = Adapter(rank=32, roles=frozenset({"attention", "routed_experts"}))
    assert round(adapter_state(q_and_v), 2) == 0.61
    assert round(adapter_state(with_experts)) == 60


def test_qwen3_235b_in_fp8_with_rank_32_fits_two_h200_and_not_one() -> None:
    answer = plan("Qwen3-235B-A22B", gpu="h200", rank=32, target_names=("q_proj", "v_proj"), storage="fp8")
    assert answer.fewest_gpus == 2
    assert round(total_bytes(find_shape("Qwen3-235B-A22B"), "fp8") / GB) in range(234, 238)
    room = answer.gpu_memory_bytes - memory_of(answer).device.bytes
    assert 0 < room < 20 * GIB


def test_deepseek_v4_pro_wants_eight_h200_and_leaves_about_250_gb() -> None:
    """Its compressed keys allow no CP: a micro-batch of 4,096 tokens fits, one of 4,608 does not."""
    assert plan("DeepSeek-V4-Pro", gpu="h200", rank=16).fewest_gpus == 8
    assert plan("DeepSeek-V4-Pro", gpu="h200", gpus=4, rank=16).fewest_gpus == 8
    assert plan("DeepSeek-V4-Pro", gpu="h200", gpus=8, rank=16, tokens=4096).chosen is not None
    assert plan("DeepSeek-V4-Pro", gpu="h200", gpus=8, rank=16, tokens=4608).chosen is None
    native = total_bytes(find_shape("DeepSeek-V4-Pro"), "fp8-mxfp4", mtp=True)
    assert 235 < 8 * 141 - native / GB < 275


def test_deepseek_v4_flash_fits_two_h200() -> None:
    assert plan("DeepSeek-V4-Flash", gpu="h200", rank=16).fewest_gpus == 2


def test_glm_5_2_in_four_bits_wants_six_h200_though_three_hold_the_weights() -> None:
    answer = plan("GLM-5.2", gpu="h200", method="qlora", rank=32, targets=("attention", "experts"))
    assert answer.fewest_gpus == 6
    assert total_bytes(find_shape("GLM-5.2"), "nf4") < 3 * 141 * GB
    memory = memory_of(answer)
    transient = memory.peak.bytes - memory.resident_bytes
    assert transient > 15 * GIB  # kept and recomputed activations, gathered and dequantised weights


def test_72_hours_on_eight_h200() -> None:
    cost = estimate_cost(find_gpu("h200"), gpus=8, hours=72, usd_per_gpu_hour=4.54)
    assert cost.usd is not None and round(cost.usd) == 2615


def test_a_price_names_its_date_and_source() -> None:
    cost = estimate_cost(find_gpu("h200"), gpus=8, hours=72)
    assert cost.usd is not None and cost.price_date.startswith("2026") and cost.price_source


def test_dense_8b_under_zero2_on_eight_gcds_holds_about_30_gib() -> None:
    job = Job(
        shape=find_shape("Qwen3-8B"), method="full", framework="deepspeed", layout=Layout(ranks=8, sharding="zero2")
    )
    assert 28.5 < estimate_memory(job).resident_bytes / GIB < 31


def test_zero2_replicates_frozen_weights_and_zero3_does_not() -> None:
    adapter = Adapter(rank=16, roles=frozenset({"attention"}))
    sizes = {}
    for sharding in ("zero2", "zero3"):
        job = Job(
            shape=find_shape("Qwen3-32B"),
            method="lora",
            framework="deepspeed",
            adapter=adapter,
            layout=Layout(ranks=8, sharding=sharding),  # type: ignore[arg-type]
        )
        sizes[sharding] = bytes_of(estimate_memory(job), "frozen weights") / GIB
    assert 60 < sizes["zero2"] < 62
    assert round(sizes["zero2"] / sizes["zero3"]) == 8


def test_ep_divides_experts_and_nothing_else() -> None:
    shape = find_shape("Qwen3-30B-A3B")
    experts = shape.parameters_by_role()["routed_experts"]
    for ep in (1, 2, 8):
        job = Job(
            shape=shape,
            method="lora",
            adapter=Adapter(rank=8, roles=frozenset({"attention"})),
            layout=Layout(ranks=8, ep=ep),
        )
        held = bytes_of(estimate_memory(job), "frozen weights")
        assert held == 2 * (shape.parameters - experts + experts // ep)


def test_memory_follows_all_parameters_not_the_active_ones() -> None:
    dense, sparse = find_shape("Qwen3-4B"), find_shape("Qwen3-30B-A3B")
    assert sparse.active_parameters < dense.parameters
    resident = {
        shape.name: estimate_memory(Job(shape=shape, method="full")).resident_bytes for shape in (dense, sparse)
    }
    assert resident[sparse.name] > 7 * resident[dense.name]


def test_no_part_is_negative_and_each_phase_is_the_sum_of_its_parts() -> None:
    for checkpointing in ("none", "per_op", "alternate", "full"):
        job = Job(shape=find_shape("Qwen3.6-35B-A3B"), method="full", checkpointing=checkpointing)  # type: ignore[arg-type]
        memory = estimate_memory(job)
        assert [phase.name for phase in memory.phases] == ["load", "loss", "backward", "step", "save"]
        assert all(part.bytes > 0 for phase in memory.phases for part in phase.parts)
        assert memory.allocated.low_bytes < memory.allocated.bytes < memory.allocated.high_bytes
        assert memory.allocated.bytes <= memory.reserved.bytes <= memory.device.bytes


def test_the_busiest_rank_of_expert_parallelism_is_planned_not_the_mean() -> None:
    """OLMoE on Tulu 3: 1.25 times the mean at EP 8, 1.56 at EP 16."""
    shape, adapter = find_shape("Qwen3-30B-A3B"), Adapter(rank=16, roles=frozenset({"attention", "routed_experts"}))
    job = Job(shape=shape, method="lora", adapter=adapter, checkpointing="none", loss="linear")
    assert [replace(job, layout=Layout(ranks=16, ep=ep)).overload for ep in (1, 2, 8, 16, 64)] == [
        1,
        1.15,
        1.25,
        1.55,
        1.55,
    ]
    spread = replace(job, layout=Layout(ranks=8, ep=8))
    busiest, even = estimate_memory(spread), estimate_memory(replace(spread, imbalance=1.0))
    kept = [bytes_of(memory, "kept activations") for memory in (busiest, even)]
    assert 1.05 < kept[0] / kept[1] < 1.25


def test_a_stack_of_experts_is_reduced_as_one_tensor_and_adapters_in_buckets() -> None:
    """gatewright/parallel: 16 Mi elements a collective, in float32; a larger tensor is one by itself."""
    shape = find_shape("Qwen3-30B-A3B")
    full = Job(shape=shape, method="full", loss="linear", layout=Layout(ranks=8, sharding="zero2"))
    adapter = Adapter(rank=16, roles=frozenset({"attention", "routed_experts"}))
    lora = replace(full, method="lora", adapter=adapter)
    stack = max(linear.parameters for _, linear in shape.linears(["routed_experts"]))
    vocabulary = shape.vocab * shape.hidden
    for job, elements, grad in ((full, max(stack, vocabulary), 2), (lora, 16 * 2**20, 4)):
        [backward] = [phase for phase in estimate_memory(job).phases if phase.name == "backward"]
        [flight] = [part.bytes for part in backward.parts if part.name == "gradients in flight"]
        assert flight == elements * (2 * 4 + grad)
    alone = estimate_memory(replace(lora, layout=Layout()))
    assert not any(part.name == "gradients in flight" for phase in alone.phases for part in phase.parts)
