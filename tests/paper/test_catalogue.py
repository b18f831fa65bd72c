"""The catalogue: sizes against published ones, look-up by name, GPUs with their prices, tables in 100 columns."""

import io
import re

import pytest
from rich.console import Console
from rich.table import Table

from gatewright.planner.catalogue import Entry, find_gpu, find_model, gpus, models
from gatewright.planner.catalogue_tables import gpus_table, models_table
from gatewright.spec.errors import UserError
from gatewright.spec.hardware import GIB, Cluster, Gpu, Node

MODELS = models()


def printed(table: Table, *, width: int = 100) -> str:
    stream = io.StringIO()
    Console(width=width, file=stream).print(table)
    return stream.getvalue()


@pytest.mark.parametrize("entry", MODELS, ids=[entry.name for entry in MODELS])
def test_size_is_the_published_one(entry: Entry) -> None:
    shape = entry.shape()
    difference = abs(entry.counted(shape) - entry.published_parameters)
    assert difference <= entry.within * entry.published_parameters
    assert shape.vocab > 0 and len(shape.layers) > 0


def test_catalogue_is_large_and_mostly_exact() -> None:
    assert len(MODELS) >= 40
    assert sum(entry.within == 0 for entry in MODELS) >= 60
    assert all(entry.source and "/" in entry.hub for entry in MODELS)


def test_names_and_aliases_are_unique() -> None:
    names = [name.lower() for entry in MODELS for name in (entry.name, *entry.also)]
    assert len(names) == len(set(names))


def test_nothing_of_a_published_config_is_assumed_but_patterns() -> None:
    """Sizes come from the configs; only Llama 4's interval of full attention is left to the default."""
    assumed = {text for entry in MODELS for text in entry.shape().assumed}
    assert assumed <= {"no_rope_layer_interval=4"}


@pytest.mark.parametrize(
    ("asked", "name"),
    [
        ("Qwen3-235B-A22B", "Qwen3-235B-A22B"),
        ("qwen/qwen3-235b-a22b", "Qwen3-235B-A22B"),
        ("Qwen3-30B-A3B-Instruct-2507", "Qwen3-30B-A3B"),
        ("meta-llama/Llama-3.1-8B-Instruct", "Llama-3.1-8B"),
        ("deepseek-ai/DeepSeek-R1-0528", "DeepSeek-R1"),
    ],
)
def test_models_are_found_by_name_hub_and_alias(asked: str, name: str) -> None:
    assert find_model(asked).name == name


def test_gpus_are_many_and_sane() -> None:
    assert len(gpus()) >= 20
    for gpu in gpus():
        sold = re.search(r"(\d+) GB", gpu.title)
        assert sold is None or gpu.memory_gib <= int(sold.group(1))
        assert 0 < gpu.network_bytes_per_s <= gpu.link_bytes_per_s < gpu.bandwidth_bytes_per_s
        assert gpu.fp8_flops_per_s is None or gpu.fp8_flops_per_s > gpu.bf16_flops_per_s
        assert gpu.memory_source and gpu.source
        for price in gpu.prices:
            assert 0 < price.low_usd <= price.high_usd
            assert re.fullmatch(r"20\d\d(-\d\d){0,2}", price.date) and price.source


@pytest.mark.parametrize(
    ("asked", "gib"),
    [("h200", 139.7), ("H200", 139.7), ("MI250X", 64.0), ("mi300x", 191.7), ("h100", 79.1), ("mi325x", 256.0)],
)
def test_memory_is_what_the_driver_reports(asked: str, gib: float) -> None:
    assert find_gpu(asked).memory_gib == pytest.approx(gib, abs=0.05)


def test_mi250x_is_a_gcd_with_half_the_cards_price() -> None:
    gcd = find_gpu("mi250x-gcd")
    assert gcd.memory_bytes == round(63.98 * GIB)
    price = gcd.price()
    assert price and price.usd_per_hour == 1.35 / 2


def test_price_falls_back_to_another_kind_and_never_invents_one() -> None:
    single = find_gpu("mi325x").price("hyperscaler")
    assert single and single.kind == "low"
    assert find_gpu("mi355x").price() is None


def test_unknown_gpu_names_the_nearest() -> None:
    with pytest.raises(UserError, match=r"No GPU is called 'h201'\. Nearest: h200"):
        find_gpu("h201")


def test_groups_that_leave_a_node_count_with_the_network() -> None:
    gpu: Gpu = find_gpu("h200")
    cluster = Cluster(node=Node(gpu=gpu, gpus=8), nodes=4)
    assert cluster.gpus == 32
    assert cluster.slowest_link_bytes_per_s(8) == 450e9
    assert cluster.slowest_link_bytes_per_s(16) == 50e9


def test_tables_fit_100_columns_without_cutting() -> None:
    for table, rows in ((models_table(), len(MODELS)), (gpus_table(), len(gpus()))):
        text = printed(table)
        assert "…" not in text
        assert len(text.splitlines()) == rows + 1
    assert "235.1" in printed(models_table())
    assert re.search(r"h200 +139\.7 4\.80 +989 +1979 .* 3\.50-4\.50 typical, 2026-05", printed(gpus_table()))
