"""The page's part on routing: a heat map by layer, how it drifted, and the worst layer over time."""

from html import escape

from gatewright.report import facts, units
from gatewright.report.charts import Curve, json_block, line_chart, linear_scale, step_scale, table
from gatewright.report.heat import heat, heat_legend
from gatewright.report.loads import LayerLoad, Loads
from gatewright.report.summary import Report

_MANY_LAYERS = 20
_FEW_EXPERTS = 8
"""So few fit twice side by side."""


def routing(report: Report) -> str:
    """HTML of the section; empty for a dense model."""
    if report.loads is None:
        return ""
    loads = report.loads
    few = len(loads.worst.load) <= _FEW_EXPERTS
    by_layer = _by_layer(loads) + (_drift(loads) if loads.tenth_steps else "")
    over_time = _busiest(report) + (_worst_over_time(loads) if len(loads.window_steps) > 1 else "")
    return "\n".join(
        [
            f"<p>{escape(facts.routing_summary(report))}</p>",
            heat_legend(),
            f'<div class="pair" style="--cell:{160 / len(loads.worst.load):.0f}px">{by_layer}</div>'
            if few
            else by_layer,
            f'<div class="pair">{over_time}</div>',
        ]
    )


def _by_layer(loads: Loads) -> str:
    rows = "".join(
        f'<tr><th scope="row">{layer.layer}</th><td class="cells">{heat([layer.load], row_name=str(place))}</td>'
        f"<td>{layer.max_load:.2f} ×</td><td>{_busiest_expert(layer)}</td><td>{layer.variation:.2f}</td>"
        f'<td class="w ill">{escape(facts.layer_note(layer))}</td></tr>'
        for place, layer in enumerate(loads.layers)
    )
    layer = loads.layers[0]
    data = {
        str(place): [{"name": f"layer {layer.layer}", "load": _short(layer.load), "tokens": layer.tokens}]
        for place, layer in enumerate(loads.layers)
    }
    return (
        '<figure id="loads"><figcaption><b>Load of each expert</b> '
        f"<span>{units.count(sum(layer.tokens))} assignments a layer; experts 0 to {len(layer.load) - 1}</span>"
        "</figcaption>"
        f'<div class="wide"><table class="heats{_many(loads)}" style="--columns:{len(layer.load)}"><thead><tr>'
        '<th scope="col">layer</th><th scope="col" class="w">experts</th>'
        '<th scope="col">busiest</th><th scope="col">which</th>'
        '<th scope="col" title="standard deviation / mean of the loads">variation</th><th scope="col" class="w"></th>'
        f"</tr></thead><tbody>{rows}</tbody></table></div>{json_block(data)}{_numbers(loads)}</figure>"
    )


def _drift(loads: Loads) -> str:
    rows = "".join(
        f'<tr><th scope="row">{layer.layer}</th>'
        f'<td class="cells">{heat([layer.first], row_name=f"first {place}")}</td>'
        f'<td class="cells">{heat([layer.last], row_name=f"last {place}")}</td>'
        f"<td>{max(layer.first):.2f} → {max(layer.last):.2f} ×</td><td>{_moved(layer):.1f} %</td></tr>"
        for place, layer in enumerate(loads.layers)
    )
    data = {
        f"{when} {place}": [{"name": f"layer {layer.layer}, {when} tenth", "load": _short(part)}]
        for place, layer in enumerate(loads.layers)
        for when, part in (("first", layer.first), ("last", layer.last))
    }
    return (
        '<figure id="drift"><figcaption><b>First against last tenth of the run</b> '
        f"<span>{units.count(loads.tenth_steps)} steps each; moved: went to another expert</span></figcaption>"
        f'<div class="wide"><table class="heats drift{_many(loads)}" '
        f'style="--columns:{len(loads.worst.load)}"><thead><tr>'
        '<th scope="col">layer</th><th scope="col" class="w">first tenth</th><th scope="col" class="w">last tenth</th>'
        '<th scope="col">busiest</th><th scope="col">moved</th></tr></thead>'
        f"<tbody>{rows}</tbody></table></div>{json_block(data)}</figure>"
    )


def _busiest(report: Report) -> str:
    series = report.curves.busiest
    curve = Curve(
        label="busiest expert", look="only", steps=series.steps, values=series.mean, low=series.low, high=series.high
    )
    return line_chart(
        [curve],
        key="busiest",
        title="Busiest expert of any layer",
        unit="× the fair share, step by step",
        about="The largest load of any expert in any layer at each step; 1 would be perfect balance.",
        y=linear_scale([1.0, *series.finite], zero=False),
        last_step=report.steps_done,
        restarts=report.restarts,
        note="Within a step all wait for the busiest expert when experts are spread over devices.",
    )


def _worst_over_time(loads: Loads) -> str:
    experts = range(len(loads.worst.load))
    by_expert = [[window[expert] for window in loads.worst_over_time] for expert in experts]
    ends = [f"to step {units.count(step)}" for step in loads.window_steps]
    data = {
        "time": [
            {"name": f"expert {expert}", "load": _short(row), "columns": ends} for expert, row in enumerate(by_expert)
        ]
    }
    x = step_scale(loads.window_steps[-1])
    words = "".join(
        f'<span class="x" style="left:{100 * x.place(tick):.2f}%">{units.count(tick)}</span>' for tick in x.ticks
    )
    names = experts if len(experts) <= 16 else (0, len(experts) - 1)
    words += "".join(
        f'<span class="y" style="bottom:{100 * (1 - (name + 0.5) / len(experts)):.2f}%">{name}</span>' for name in names
    )
    return (
        f'<figure class="time" id="worst"><figcaption><b>Layer {loads.worst.layer} over time</b> '
        f"<span>the worst layer; one row an expert</span></figcaption>"
        f'<div class="plot">{heat(by_expert, row_name="time", marks=False)}{words}</div>{json_block(data)}</figure>'
    )


def _numbers(loads: Loads) -> str:
    experts = len(loads.layers[0].load)
    rows = [[str(layer.layer), *(f"{load:.2f}" for load in layer.load)] for layer in loads.layers]
    numbers = table(["layer", *map(str, range(experts))], rows)
    return f'<details><summary>Numbers: load by layer and expert</summary><div class="wide">{numbers}</div></details>'


def _busiest_expert(layer: LayerLoad) -> str:
    return f"expert {max(range(len(layer.load)), key=layer.load.__getitem__)}"


def _moved(layer: LayerLoad) -> float:
    """Percent of the assignments that would have to change expert to turn the first tenth into the last."""
    distance = sum(abs(last - first) for first, last in zip(layer.first, layer.last, strict=True))
    return 100 * distance / 2 / len(layer.load)


def _many(loads: Loads) -> str:
    return " many" if len(loads.layers) > _MANY_LAYERS else ""


def _short(loads: tuple[float, ...] | list[float]) -> list[float]:
    return [round(load, 3) for load in loads]
