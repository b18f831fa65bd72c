"""The page's style sheet: light and dark, from a phone to a wide screen, and on paper."""

from gatewright.report.heat import shade_rules

_LIGHT = """
--bg: #fff; --ink: #16191d; --soft: #59636e; --rule: #dfe3e8; --panel: #f6f7f9; --empty: #e4e7eb;
--line: #1d5fa6; --pale: #9dbfe3; --band: #1d5fa626; --held: #b4450b; --mark: #fff;
--good: #1a6b3c; --bad: #b3261e; --warn: #8a5a00;
--p0: #7a8794; --p1: #1d5fa6; --p2: #5b9bd5; --p3: #b4450b; --p4: #c9d1d9;
--p5: #8c2f39; --p6: #3f7d58; --p7: #93b7a3; --p8: #e4e7eb;
"""
_DARK = """
--bg: #121417; --ink: #e7e9ec; --soft: #9aa4af; --rule: #2b3036; --panel: #1a1d21; --empty: #2b3036;
--line: #6cb0f5; --pale: #3c5f85; --band: #6cb0f52e; --held: #f39a5f; --mark: #000;
--good: #6cc48f; --bad: #ff8a80; --warn: #e0b25c;
--p0: #8996a3; --p1: #6cb0f5; --p2: #3a77b5; --p3: #f39a5f; --p4: #3c444d;
--p5: #d4707b; --p6: #6cc48f; --p7: #4a7a5f; --p8: #2b3036;
"""
_LIGHT_SHADES = ("#1b5a9c", "#f1f1ee", "#b4450b")
_DARK_SHADES = ("#58b0ff", "#24292f", "#ff9c54")
"""Under, at and over the fair share: blue and orange, which the colour-blind tell apart."""

_SANS = 'system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", "Helvetica Neue", Arial, sans-serif'
_MONO = 'ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace'

_TEXT = f"""
* {{ box-sizing: border-box }}
body {{ margin: 0; background: var(--bg); color: var(--ink); font: 15px/1.5 {_SANS} }}
body {{ font-variant-numeric: tabular-nums; -webkit-text-size-adjust: 100% }}
main {{ max-width: 1240px; margin: 0 auto; padding: 32px 32px 48px }}
h1 {{ font-size: 26px; line-height: 1.25; font-weight: 650; letter-spacing: -.01em; margin: 0 }}
h1 {{ overflow-wrap: anywhere }}
h2 {{ font-size: 18px; font-weight: 650; margin: 40px 0 12px; padding-top: 12px; border-top: 1px solid var(--rule) }}
h3 {{ font-size: 15px; font-weight: 650; margin: 24px 0 8px }}
p {{ margin: 0 0 12px; max-width: 92ch }}
a {{ color: var(--line) }}
pre, .answers td {{ font: 13px/1.5 {_MONO} }}
pre {{ background: var(--panel); padding: 14px 16px; overflow: auto; margin: 0; max-height: 60em }}
p.note, figcaption span, .scale-note {{ color: var(--soft); font-size: 13px }}
p.note {{ margin: 6px 0 0; max-width: none }}
details {{ margin: 8px 0 0; font-size: 14px }}
summary {{ cursor: pointer; color: var(--soft); font-size: 13px; width: max-content }}
details[open] > summary {{ margin-bottom: 8px }}
footer {{ margin-top: 48px; padding-top: 12px; border-top: 1px solid var(--rule); color: var(--soft); font-size: 13px }}
"""

_HEAD = """
.lead { font-size: 16px; color: var(--soft); margin: 6px 0 0; overflow-wrap: anywhere }
.state { display: inline-block; font-size: 13px; font-weight: 600; line-height: 1; letter-spacing: 0 }
.state { padding: 5px 8px; border: 1px solid; border-radius: 3px; vertical-align: 4px; margin-left: 10px }
.finished { color: var(--good) }
.running { color: var(--line) }
.interrupted, .silent { color: var(--warn) }
.failed { color: var(--bad) }
header .notice { color: var(--ink); border-left: 3px solid var(--warn); padding: 2px 0 2px 12px; margin: 16px 0 0 }
header .failed.notice { border-color: var(--bad) }
.cards { display: grid; grid-template-columns: repeat(4, 1fr); gap: 20px 32px; margin: 26px 0 0 }
.card { border-top: 1px solid var(--rule); padding-top: 10px }
.card dt { font-size: 13px; color: var(--soft) }
.card dd { margin: 2px 0 0; font-size: 25px; line-height: 1.25; font-weight: 600; letter-spacing: -.01em }
.card dd { white-space: nowrap }
.card dd + dd { font-size: 13px; line-height: 1.4; font-weight: 400; letter-spacing: 0; color: var(--soft) }
.card dd + dd { white-space: normal }
nav { margin: 28px 0 0; font-size: 14px; display: flex; flex-wrap: wrap; gap: 2px 18px }
nav a { text-decoration: none }
nav a:hover { text-decoration: underline }
.findings { margin: 0; padding: 0; list-style: none }
.findings li { padding: 5px 0 5px 12px; border-left: 3px solid var(--rule); margin: 0 0 6px; max-width: 90ch }
.findings b { font-weight: 600 }
.findings .error { border-color: var(--bad) }
.findings .warning { border-color: var(--warn) }
"""

_TABLES = """
.pair { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 440px), 1fr)); gap: 28px 40px }
.pair > * { min-width: 0 }
.wide { overflow-x: auto; display: flex; gap: 40px; align-items: flex-start; padding-bottom: 4px }
table { border-collapse: collapse; font-size: 14px }
th, td { padding: 4px 12px 4px 0; text-align: right; vertical-align: top; white-space: nowrap }
th:last-child, td:last-child { padding-right: 0 }
thead th { color: var(--soft); font-weight: 500; font-size: 13px; border-bottom: 1px solid var(--rule) }
thead th { vertical-align: bottom }
tbody tr + tr > * { border-top: 1px solid var(--rule) }
.w { text-align: left; white-space: normal }
.facts { display: grid; grid-template-columns: minmax(9em, max-content) 1fr; gap: 4px 20px }
.facts { margin: 0 0 20px; font-size: 14px }
.facts dt { color: var(--soft) }
.facts dd { margin: 0; overflow-wrap: anywhere }
.answers td { text-align: left; white-space: pre-wrap; overflow-wrap: anywhere; min-width: 9em }
.answers td, .answers th { padding-right: 28px }
.answers .same::after, .answers .other::after { font: 12px/1.4 system-ui, sans-serif; display: block }
.answers .same::after { content: "= expected"; color: var(--good) }
.answers .other::after { content: "≠ expected"; color: var(--soft) }
"""

_CHARTS = """
figure { margin: 0 0 20px; break-inside: avoid }
figcaption b { font-weight: 650 }
.legend, .parts { list-style: none; margin: 4px 0 0; padding: 0; font-size: 13px }
.legend { display: flex; flex-wrap: wrap; gap: 2px 18px }
.legend li::before, .parts li::before { content: ""; display: inline-block; margin-right: 6px }
.legend li::before { width: 18px; border-top: 2px solid var(--line); vertical-align: 4px }
.legend .key-raw::before { border-color: var(--pale) }
.legend .key-points::before { width: 9px; height: 9px; border: 0; border-radius: 50%; background: var(--held) }
.legend .key-points::before { vertical-align: 0 }
.legend .key-lost::before { content: "×"; width: auto; border: 0; color: var(--bad); font-weight: 700 }
.legend .key-lost::before { vertical-align: 0 }
.plot { position: relative; height: 180px; margin: 14px 8px 26px 60px; touch-action: pan-y }
#loss .plot { height: 300px }
.plot svg, .shares > svg, .ramp svg, .fills svg { display: block; width: 100%; height: 100% }
.plot svg, .shares > svg { overflow: visible; pointer-events: none }
.plot span { position: absolute; font-size: 12px; line-height: 1; color: var(--soft); white-space: nowrap }
.plot span { pointer-events: none }
.plot .y { right: calc(100% + 8px); transform: translateY(50%) }
.plot .x { top: calc(100% + 8px); transform: translateX(-50%) }
.plot .mark { top: 0; margin-left: 4px }
.plot .lost { top: -8px; transform: translateX(-50%); color: var(--bad); font-weight: 700 }
.chart path { fill: none; stroke-width: 1.5; vector-effect: non-scaling-stroke }
.chart path { stroke-linejoin: round; stroke-linecap: round }
.chart .grid { stroke: var(--rule); stroke-width: 1; stroke-linecap: butt }
.chart .restart { stroke: var(--soft); stroke-width: 1; stroke-dasharray: 3 3 }
.chart .raw { stroke: var(--pale); stroke-width: 1 }
.chart .only { stroke: var(--line) }
.chart .smooth { stroke: var(--line); stroke-width: 2 }
.chart .dot { stroke: var(--line); stroke-width: 6 }
.chart .band { fill: var(--band); stroke: none }
.chart .points { stroke: var(--held); stroke-width: 9 }
.chart .small { stroke-width: 5 }
.chart .points-line { stroke: var(--held); stroke-width: 1; stroke-dasharray: 2 4 }
.cursor { position: absolute; top: 0; bottom: 0; width: 1px; background: var(--soft); pointer-events: none }
.tip { position: fixed; z-index: 9; max-width: 320px; padding: 6px 9px; border-radius: 3px; pointer-events: none }
.tip { background: var(--ink); color: var(--bg); font-size: 13px; line-height: 1.4; white-space: pre-line }
.shares > svg { height: 26px; margin-top: 8px }
.parts { display: grid; grid-template-columns: repeat(auto-fill, minmax(230px, 1fr)); gap: 4px 18px; margin-top: 10px }
.parts b { font-weight: 600 }
.parts span { color: var(--soft) }
.parts li::before { width: 11px; height: 11px; background: var(--c); outline: 1px solid var(--rule) }
.parts li::before { vertical-align: -1px }
.fills { margin: 4px 0 20px }
.fills dt { font-size: 14px }
.fills dd { display: grid; grid-template-columns: 1fr 4.5em; gap: 0 12px; margin: 0 0 10px; align-items: center }
.fills svg { height: 14px }
.fills b { text-align: right; font-weight: 600 }
.fills span { color: var(--soft); font-size: 13px }
.slots { fill: var(--empty) }
.fill0 { fill: var(--line) }
.fill1 { fill: var(--pale) }
.fill2 { fill: var(--p0) }
"""

_HEAT = """
.heats td, .heats th { vertical-align: middle; padding-top: 2px; padding-bottom: 2px }
.heats tbody th { font-weight: 400 }
.heats tbody tr + tr > * { border-top: 0 }
.heats td.cells { text-align: left; padding-right: 20px }
.heats .ill { color: var(--bad) }
.many td, .many th { padding-top: 1px; padding-bottom: 1px; line-height: 1.15 }
.heat { display: block; width: 100%; height: calc(var(--rows) * 20px); shape-rendering: crispEdges }
.many .heat { height: calc(var(--rows) * 14px) }
.heats { --whole: min(calc(var(--columns) * var(--cell, 44px)), max(150px, 56vw - 60px), 634px) }
.drift { --whole: min(calc(var(--columns) * var(--cell, 44px)), max(120px, 36vw - 60px), 386px) }
.cells .heat { width: var(--whole) }
.time .plot { height: auto }
.time .plot .heat { height: clamp(90px, calc(var(--rows) * 14px), 420px); pointer-events: auto; overflow: hidden }
.seam { stroke: var(--bg); stroke-width: 1; vector-effect: non-scaling-stroke; fill: none }
.cross { stroke: var(--mark); stroke-width: 1.5; vector-effect: non-scaling-stroke; fill: none }
.cross { shape-rendering: auto }
.qdead { fill: var(--ink) }
.scale { display: flex; flex-wrap: wrap; gap: 6px 24px; align-items: center; margin: 4px 0 16px }
.scale-note b { font-weight: 400; white-space: nowrap; margin-left: 12px }
.ramp { position: relative; width: 260px; max-width: 100%; height: 12px; margin: 0 8px 18px }
.ramp span { position: absolute; top: 16px; transform: translateX(-50%); font-size: 12px; line-height: 1 }
.ramp span { color: var(--soft); white-space: nowrap }
.mark-key { width: 16px; height: 12px; vertical-align: -1px }
"""

_NARROW = """
@media (max-width: 900px) { .cards { grid-template-columns: 1fr 1fr } }
@media (max-width: 640px) {
  main { padding: 20px 16px 32px }
  h1 { font-size: 22px }
  .cards { gap: 16px 20px }
  .card dd { font-size: 20px }
  .facts { grid-template-columns: 9em 1fr; gap: 4px 12px }
  .plot { margin-left: 48px }
  #loss .plot { height: 220px }
  .parts { grid-template-columns: 1fr }
  .seam { display: none }
  .heats td, .heats th { padding-right: 8px }
}
"""

_PRINT = """
@media print {
  main { max-width: none; padding: 0 16px 0 4px }
  body { font-size: 11pt }
  nav, summary { display: none }
  h2 { break-after: avoid }
  tr, .card { break-inside: avoid }
  .pair { grid-template-columns: 1fr 1fr; gap: 16px 24px }
  .words { grid-template-columns: 1fr; gap: 0 }
  .wide, pre { overflow: visible; max-height: none }
  * { print-color-adjust: exact; -webkit-print-color-adjust: exact }
}
"""


def style() -> str:
    """The whole sheet; paper is always light."""
    parts = "".join(f".part{n} {{ fill: var(--p{n}) }}\n.key-part{n} {{ --c: var(--p{n}) }}\n" for n in range(9))
    light = f":root {{{_LIGHT}color-scheme: light dark }}\n{shade_rules(*_LIGHT_SHADES)}"
    dark = f"@media screen and (prefers-color-scheme: dark) {{\n:root {{{_DARK}}}\n{shade_rules(*_DARK_SHADES)}}}\n"
    return light + dark + _TEXT + _HEAD + _TABLES + _CHARTS + _HEAT + parts + _NARROW + _PRINT
