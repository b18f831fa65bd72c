"""The report as one page that stands alone: no file, no font and no script comes from elsewhere."""

import math
from collections.abc import Iterable
from html import escape

from gatewright.report import facts, units
from gatewright.report.charts import Curve, Scale, fill_bars, line_chart, linear_scale, log_scale, share_bar, table
from gatewright.report.page import page
from gatewright.report.router import router_html
from gatewright.report.routing import routing
from gatewright.report.series import Series, median, smooth
from gatewright.report.summary import Answer, Report

_LONGEST_TEXT = 1500
_SMOOTHED_POINTS = 60
_EVALUATIONS_SHOWN = 10


def render_html(report: Report) -> str:
    """The page as text; everything that came from the run is escaped."""
    sections = {
        "Findings": _findings(report),
        "Loss": _loss(report),
        "Answers": _answers(report),
        "Routing": routing(report),
        "Router": router_html(report),
        "Learning rate and gradient": _optimization(report),
        "Throughput": _throughput(report),
        "Data": _data(report),
        "What trains": _coverage(report),
        "Checkpoints": _checkpoints(report),
        "Model and machine": _facts([*(facts.model(report.model) if report.model else []), *facts.machine(report)]),
        "Run file": _run_file(report),
        "Not used": _unread(report),
    }
    shown = {title: content for title, content in sections.items() if content}
    links = "".join(f'<a href="#{_anchor(title)}">{title}</a>' for title in shown)
    body = "\n".join(f'<h2 id="{_anchor(title)}">{title}</h2>\n{content}' for title, content in shown.items())
    return page(
        title=f"{report.run} · {facts.progress(report)}",
        body=f"{_header(report)}\n{_cards(report)}\n<nav>{links}</nav>\n{body}\n{_footer(report)}",
    )


def _anchor(title: str) -> str:
    return f"section-{title.lower().replace(' ', '-')}"


def _header(report: Report) -> str:
    state = {"silent": "no sign of life"}.get(report.state, report.state)
    kind = report.state if report.state in ("finished", "failed", "interrupted", "silent", "running") else "silent"
    lead = facts.progress(report)
    if report.model:
        lead += f" · {report.model.path}"
    if report.start:
        lead += f" · {report.start.device}"
    note = facts.state_note(report)
    notice = f'<p class="notice {kind}">{escape(note)}</p>' if note else ""
    return (
        f'<header><h1>{escape(report.run)}<span class="state {kind}">{escape(state)}</span></h1>'
        f'<p class="lead">{escape(lead)}</p>{notice}</header>'
    )


def _cards(report: Report) -> str:
    cards = [*_result_cards(report), *_pace_cards(report)]
    items = "".join(
        f'<div class="card"><dt>{escape(label)}</dt><dd>{escape(value)}</dd><dd>{escape(remark)}</dd></div>'
        for label, value, remark in cards
    )
    return f'<dl class="cards">{items}</dl>'


def _result_cards(report: Report) -> list[tuple[str, str, str]]:
    cards = []
    if report.evaluations:
        first, last = report.evaluations[0], report.evaluations[-1]
        value = units.decimal(last.loss, digits=3)
        remark = f"nats a token, over {units.count(last.target_tokens)} tokens"
        if last is not first:
            value = f"{units.decimal(first.loss, digits=3)} → {value}"
        cards.append(("Held-out loss", value, remark))
    if report.exact_match:
        first, last = report.exact_match[0], report.exact_match[-1]
        value, remark = facts.matched(last), units.share(last.correct / last.asked)
        if last is not first:
            value = f"{facts.matched(first)} → {value}"
            remark = f"{units.share(first.correct / first.asked)} → {remark}"
        cards.append(("Held-out exact match", value, remark))
    return cards


def _pace_cards(report: Report) -> list[tuple[str, str, str]]:
    totals = report.totals
    planned = f" of {units.count(report.steps_planned)}" if report.steps_planned else ""
    cards = [("Steps", f"{units.count(report.steps_done)}{planned}", f"in {units.duration(report.elapsed_s)}")]
    if totals.steps:
        cards += [
            (
                "Tokens a second",
                units.count(totals.median_tokens_per_s),
                f"median; {units.count(totals.tokens / totals.steps)} tokens a step",
            ),
            ("Peak memory", units.memory(totals.peak_memory_bytes), facts.memory_kind(report)),
        ]
    for split in report.data[:1]:
        cards.append(("Packing fill", units.share(split.fill), f"{units.share(split.padded_fill)} if padded"))
    if report.model:
        model = report.model
        part = units.share(model.trainable_parameters / model.parameters) if model.parameters else "–"
        remark = f"{part} of {units.rounded_count(model.parameters)} parameters"
        cards.append(("Trained", units.rounded_count(model.trainable_parameters), remark))
    if report.loads:
        worst = report.loads.worst
        ill = sum(len(layer.dead) + len(layer.starved) for layer in report.loads.layers)
        remark = f"its fair share, in layer {worst.layer}; {ill or 'none'} dead or starved"
        cards.append(("Busiest expert", f"{worst.max_load:.2f} ×", remark))
    return cards


def _findings(report: Report) -> str:
    rows = "".join(
        f'<li class="{escape(finding.severity)}"><b>{escape(finding.severity)}</b> {escape(finding.text)}</li>'
        for finding in report.findings
    )
    return f'<ul class="findings">{rows}</ul>' if rows else ""


def _loss(report: Report) -> str:
    series, evaluations = report.curves.loss, report.evaluations
    if not series.steps and not evaluations:
        return ""
    curves = []
    if len(series.steps) > _SMOOTHED_POINTS:
        window = max(5, len(series.steps) // 20)
        smoothed = smooth(series.mean, window=window)
        curves.append(_curve(series, label="training", look="raw"))
        label = f"training, mean of {units.count(window * series.steps_per_bucket)} steps"
        curves.append(Curve(label=label, look="smooth", steps=series.steps, values=smoothed))
    elif series.steps:
        curves.append(_curve(series, label="training", look="only"))
    held_out = Curve(
        label="held out", look="points", steps=[e.step for e in evaluations], values=[e.loss for e in evaluations]
    )
    if evaluations:
        curves.append(held_out)
    y = _scale([*series.finite, *(value for value in held_out.values if math.isfinite(value))], zero=False)
    chart = line_chart(
        curves,
        key="loss",
        title="Training and held-out loss",
        unit="cross-entropy, nats a target token" + (", log scale" if y.log else ""),
        about=f"Training loss over {report.steps_done} steps, and held-out loss at {len(evaluations)} of them.",
        y=y,
        last_step=max(report.steps_done, *held_out.steps, 0),
        restarts=report.restarts,
        not_finite=series.not_finite,
        note=_bucket_note(series),
    )
    training = f"<div><h3>Training</h3>{_facts(facts.training(report))}</div>"
    return f'{chart}<div class="pair words">{_held_out(report)}{training}</div>'


def _held_out(report: Report) -> str:
    if not report.evaluations:
        return ""
    rows = [facts.evaluation_row(evaluation) for evaluation in report.evaluations]
    if len(rows) <= _EVALUATIONS_SHOWN:
        return f'<div><h3>Held out</h3><div class="wide">{table(facts.evaluation_columns(), rows)}</div></div>'
    ends = table(facts.evaluation_columns(), [*rows[:2], *rows[2 - _EVALUATIONS_SHOWN :]])
    every = table(facts.evaluation_columns(), rows)
    return (
        f'<div><h3>Held out</h3><div class="wide">{ends}</div><details><summary>All {len(rows)} evaluations</summary>'
        f'<div class="wide">{every}</div></details></div>'
    )


def _optimization(report: Report) -> str:
    lr, norm = report.curves.lr, report.curves.grad_norm
    if not lr.steps:
        return ""
    lr_scale, norm_scale = linear_scale(lr.finite, zero=True), _scale(norm.finite, zero=True)
    unit = "global L2, before clipping"
    return (
        f'<div class="pair">{_plain_chart(report, lr, key="lr", title="Learning rate", unit="", y=lr_scale)}'
        f"{_plain_chart(report, norm, key='norm', title='Gradient norm', unit=unit, y=norm_scale)}</div>"
    )


def _scale(values: list[float], *, zero: bool) -> Scale:
    """Linear, or in decades when the highest value would flatten the rest."""
    return log_scale(values) if max(values, default=0.0) > 20 * median(values) > 0 else linear_scale(values, zero=zero)


def _throughput(report: Report) -> str:
    if not report.totals.steps:
        return ""
    speed, memory = report.curves.tokens_per_s, report.curves.memory_bytes
    speed_chart = _plain_chart(
        report, speed, key="speed", title="Tokens a second", unit="by step", y=linear_scale(speed.finite, zero=True)
    )
    unit = f"peak so far, {facts.memory_kind(report)}"
    memory_chart = _plain_chart(
        report, memory, key="memory", title="Memory", unit=unit, y=memory_scale(memory.finite), format_y="memory"
    )
    clock = share_bar(facts.clock(report), key="clock", title=f"Where the {units.duration(report.elapsed_s)} went")
    return f'<div class="pair">{speed_chart}{memory_chart}</div>{clock}{_facts(facts.throughput(report))}'


def memory_scale(values: Iterable[float]) -> Scale:
    """From zero, with ticks at round numbers of a binary unit."""
    highest = max(values, default=1.0)
    size, _ = units.binary_unit(highest)
    scale = linear_scale([highest / size], zero=True)
    return Scale(low=0.0, high=scale.high * size, ticks=tuple(tick * size for tick in scale.ticks))


def _plain_chart(
    report: Report, series: Series, *, key: str, title: str, unit: str, y: Scale, format_y: str = "decimal"
) -> str:
    return line_chart(
        [_curve(series, label=title.lower(), look="only")],
        key=key,
        title=title,
        unit=f"{unit}, log scale" if y.log else unit,
        about=f"{title} over {report.steps_done} steps.",
        y=y,
        last_step=report.steps_done,
        restarts=report.restarts,
        not_finite=series.not_finite,
        format_y=format_y,
        note=_bucket_note(series),
    )


def _curve(series: Series, *, label: str, look: str) -> Curve:
    if series.steps_per_bucket == 1:
        return Curve(label=label, look=look, steps=series.steps, values=series.mean)
    return Curve(label=label, look=look, steps=series.steps, values=series.mean, low=series.low, high=series.high)


def _bucket_note(series: Series) -> str:
    if series.steps_per_bucket == 1:
        return ""
    return f"Line: means of {units.count(series.steps_per_bucket)} steps. Band: the lowest and the highest of them."


def _data(report: Report) -> str:
    parts = [
        f"<div><h3>{escape(facts.split_name(split).capitalize())}</h3>{fill_bars(facts.fills(split))}{_facts(facts.data(split))}</div>"
        for split in report.data
    ]
    if not parts:
        return ""
    about = (
        "Fill: share of the token slots of all micro-batches that hold a token. The rest would be computed for nothing."
    )
    return f'<p class="note">{about}</p><div class="pair">{"".join(parts)}</div>'


def _answers(report: Report) -> str:
    if not report.answers:
        return ""
    shared = facts.shared_beginning(report.answers)
    begin = (
        f"<details><summary>Every prompt begins with</summary><pre>{_clipped(shared)}</pre></details>" if shared else ""
    )
    rows = "".join(
        f"<tr><td>{_clipped(answer.prompt[len(shared) :])}</td><td>{_clipped(answer.expected)}</td>"
        f"{_said(answer, answer.before)}{_said(answer, answer.after)}</tr>"
        for answer in report.answers
    )
    heads = "".join(f'<th scope="col" class="w">{name}</th>' for name in ("prompt", "expected", "before", "after"))
    return (
        '<p class="note">A few held-out rows, answered by greedy decoding before and after training.</p>'
        f'<div class="wide"><table class="answers"><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table></div>'
        f"{begin if shared else ''}"
    )


def _said(answer: Answer, said: str | None) -> str:
    if said is None:
        return "<td>–</td>"
    same = said.strip() == answer.expected.strip()
    return f'<td class="{"same" if same else "other"}">{_clipped(said)}</td>'


def _clipped(text: str) -> str:
    if len(text) <= _LONGEST_TEXT:
        return escape(text)
    return f"{escape(text[:_LONGEST_TEXT])}… ({units.count(len(text))} characters)"


def _coverage(report: Report) -> str:
    if report.model is None or not report.model.coverage:
        return ""
    rows = [facts.coverage_row(row) for row in report.model.coverage]
    return f'<div class="wide">{table(facts.coverage_columns(), rows, words=["role", "trains"])}</div>'


def _checkpoints(report: Report) -> str:
    rows = [
        [
            units.count(save.step),
            units.memory(save.bytes),
            units.duration(save.seconds),
            "best" if save.step == report.best_step else "",
            save.path,
        ]
        for save in report.saves[-20:]
    ]
    if not rows:
        return ""
    hidden = len(report.saves) - len(rows)
    note = f'<p class="note">{units.plural(hidden, "earlier one")} not shown.</p>' if hidden else ""
    return (
        f'<div class="wide">{table(["step", "size", "time", "best", "path"], rows, words=["path", "best"])}</div>{note}'
    )


def _facts(pairs: list[facts.Fact]) -> str:
    rows = "".join(f"<dt>{escape(label)}</dt><dd>{escape(value)}</dd>" for label, value in pairs)
    return f'<dl class="facts">{rows}</dl>' if rows else ""


def _run_file(report: Report) -> str:
    if report.run_file is None:
        return ""
    return f"<details><summary>run.yaml, as it was resolved</summary><pre>{escape(report.run_file)}</pre></details>"


def _unread(report: Report) -> str:
    if not report.unread:
        return ""
    pairs = [(f"{units.count(times)} ×", what) for what, times in report.unread.items()]
    return f'<p class="note">Lines or fields of events.jsonl that this version did not use.</p>{_facts(pairs)}'


def _footer(report: Report) -> str:
    version = report.start.versions.get("gatewright", "") if report.start else ""
    return (
        f"<footer>gatewright {escape(version)} · {escape(report.folder)} · report of {units.moment(report.read_at)}"
        "</footer>"
    )
