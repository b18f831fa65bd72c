"""The page around the report: its few lines of script, and a policy that lets nothing else in."""

import base64
import hashlib
from html import escape

from gatewright.report.style import style

_SCRIPT = """
"use strict";
const tip = document.createElement("div");
tip.className = "tip"; tip.hidden = true; document.body.append(tip);
const digits = (v) => v === 0 || (Math.abs(v) >= 1e-3 && Math.abs(v) < 1e9)
  ? v.toLocaleString("en", {maximumSignificantDigits: 4}) : v.toExponential(2);
const read = {
  decimal: digits,
  memory: (v) => (v / 2 ** 30).toFixed(2) + " GiB",
};
const show = (event, text) => {
  tip.textContent = text; tip.hidden = false;
  const right = event.clientX + 16 + tip.offsetWidth > innerWidth;
  tip.style.left = Math.max(4, event.clientX + (right ? -16 - tip.offsetWidth : 16)) + "px";
  tip.style.top = Math.max(4, event.clientY - tip.offsetHeight - 12) + "px";
};
const data = (element) => JSON.parse(element.closest("figure").querySelector("script").textContent);

for (const plot of document.querySelectorAll(".chart .plot")) {
  const {high, unit, lines} = data(plot);
  const cursor = document.createElement("div");
  cursor.className = "cursor"; cursor.hidden = true; plot.append(cursor);
  const hide = () => { cursor.hidden = tip.hidden = true; };
  plot.addEventListener("pointerleave", hide);
  plot.addEventListener("pointermove", (event) => {
    const box = plot.getBoundingClientRect();
    const wanted = (event.clientX - box.left) / box.width * high;
    const nearest = (xs) => xs.reduce((best, x, i) => Math.abs(x - wanted) < Math.abs(xs[best] - wanted) ? i : best, 0);
    const step = lines[0].x[nearest(lines[0].x)];
    cursor.style.left = 100 * step / high + "%"; cursor.hidden = false;
    const rows = lines.filter((line) => line.x.length).map((line) => {
      const i = nearest(line.x), value = line.y[i];
      const band = line.low.length && line.low[i] !== line.high[i] && value !== null
        ? ` (${read[unit](line.low[i])} to ${read[unit](line.high[i])})` : "";
      const at = line.x[i] === step ? "" : ` at step ${line.x[i].toLocaleString("en")}`;
      return `${line.label}${at}: ${value === null ? "not finite" : read[unit](value)}${band}`;
    });
    show(event, [`step ${step.toLocaleString("en")}`, ...rows].join("\\n"));
  });
}

for (const map of document.querySelectorAll("svg.heat")) {
  const rows = data(map)[map.dataset.rows];
  const {width, height} = map.viewBox.baseVal;
  map.addEventListener("pointerleave", () => { tip.hidden = true; });
  map.addEventListener("pointermove", (event) => {
    const box = map.getBoundingClientRect();
    const right = Math.min(width - 1, Math.max(0, Math.floor((event.clientX - box.left) / box.width * width)));
    const down = Math.min(height - 1, Math.max(0, Math.floor((event.clientY - box.top) / box.height * height)));
    const {name, columns, load, tokens} = rows[down];
    const where = columns ? columns[right] : "expert " + right;
    const lines = [`${name}, ${where}`, `${digits(load[right])} × the fair share`];
    if (tokens) lines.push(`${tokens[right].toLocaleString("en")} tokens`);
    show(event, lines.join("\\n"));
  });
}
"""


def page(*, title: str, body: str) -> str:
    """One HTML document that fetches nothing and runs no script but its own, whatever the body holds."""
    digest = base64.b64encode(hashlib.sha256(_SCRIPT.encode()).digest()).decode()
    policy = "default-src 'none'; base-uri 'none'; form-action 'none'; style-src 'unsafe-inline'"
    policy += f"; script-src 'sha256-{digest}'"
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{style()}</style>\n</head>\n<body>\n"
        f"<main>\n{body}\n</main>\n<script>{_SCRIPT}</script>\n</body>\n</html>\n"
    )
