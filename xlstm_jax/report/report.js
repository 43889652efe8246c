// Draws the charts and shows the samples of a report, from the data in the page. It loads nothing.
"use strict";

const root = document.documentElement;
window.addEventListener("error", (event) => { root.dataset.error = event.message; });

const report = JSON.parse(document.getElementById("data").textContent);
const hasRuns = report.runs.length > 1;
const view = { axis: "step", smoothing: 0.2, zoom: null, hiddenRuns: new Set() };
const SVG = new DOMParser().parseFromString("<svg></svg>", "text/html").querySelector("svg").namespaceURI;
const MARGIN = { left: 50, right: 10, top: 8, bottom: 24 };
const NUM_COLOURS = 8, MOST_DOTS = 60, MOST_IN_TIP = 14, MOST_KEYS = 16, NOISY_TRAVEL = 8;
const STROKES = [["none", "solid"], ["6 4", "dashed"], ["1.5 4", "dotted"]];

function element(name, attributes = {}, ...children) {
    const node = document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    node.append(...children);
    return node;
}

function shape(parent, name, attributes = {}, text = null) {
    const node = document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    if (text !== null) node.textContent = text;
    parent.append(node);
    return node;
}

// Numbers

function compact(value) {
    const [scale, letter] = [[1e12, "T"], [1e9, "B"], [1e6, "M"], [1e3, "k"]].find(([s]) => Math.abs(value) >= s) || [1, ""];
    return Number((value / scale).toPrecision(4)) + letter;
}

// The unit of a time is that of the longest on an axis.
function unitOfTime(longest) { return longest < 120 ? [1, "s"] : longest < 7200 ? [60, "min"] : [3600, "h"]; }

function duration(seconds, longest = seconds) {
    const [unit, name] = unitOfTime(longest);
    return `${Number((seconds / unit).toPrecision(3))} ${name}`;
}

function written(value, unit, largest = value) {
    if (unit === "percent") return `${Number((100 * value).toPrecision(4))} %`;
    if (unit === "seconds") return duration(value, largest);
    if (unit === "gib") return `${Number(value.toPrecision(3))} GiB`;
    if (unit === "count" || Math.abs(value) >= 1e5) return compact(value);
    return value !== 0 && Math.abs(value) < 1e-3 ? value.toExponential(2) : String(Number(value.toPrecision(4)));
}

function writtenPlace(value) {
    if (view.axis === "seconds") return duration(value);
    return view.axis === "tokens" ? `${compact(value)} tokens` : `step ${Math.round(value).toLocaleString("en")}`;
}

function linearTicks(low, high, count) {
    const rough = (high - low) / count || 1, power = 10 ** Math.floor(Math.log10(rough));
    const step = power * [1, 2, 2.5, 5, 10].find((factor) => factor * power >= rough * 0.999);
    const ticks = [];
    for (let index = Math.ceil(low / step - 1e-9); index * step <= high + step * 1e-9; index++) ticks.push(index * step);
    return ticks;
}

function logTicks(low, high) {
    const ticks = [], decades = Math.log10(high / low);
    if (decades < 0.4) return linearTicks(low, high, 4);
    const factors = decades < 1 ? [1, 1.5, 2, 3, 4, 6, 8] : decades < 3 ? [1, 2, 5] : [1], skip = Math.max(1, Math.ceil(decades / 6));
    for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power += skip) {
        for (const factor of factors) {
            const tick = factor * 10 ** power;
            if (tick >= low * 0.999 && tick <= high * 1.001) ticks.push(tick);
        }
    }
    return ticks;
}

// Series

function interpolate(clock, step) {
    let low = 0, high = clock.length / 2 - 1;
    while (high - low > 1) {
        const middle = (low + high) >> 1;
        if (clock[2 * middle] <= step) low = middle; else high = middle;
    }
    const [x0, y0, x1, y1] = [clock[2 * low], clock[2 * low + 1], clock[2 * high], clock[2 * high + 1]];
    return x1 === x0 ? y1 : y0 + (y1 - y0) * Math.min(1, Math.max(0, (step - x0) / (x1 - x0)));
}

function places(series) {
    if (view.axis === "step") return series.x;
    const clock = report.runs[series.run].clock[view.axis];
    return series.x.map((step) => interpolate(clock, step));
}

// A line is noisy if it travels many times its range, up and down.
function isNoisy(values) {
    const finite = values.filter((value) => value !== null), [low, high] = extent(finite);
    const travelled = finite.reduce((sum, value, index) => sum + Math.abs(value - finite[Math.max(0, index - 1)]), 0);
    return travelled > NOISY_TRAVEL * (high - low);
}

// Sums of all values so far and of their weights, which fade with distance.
function fadingSums(values, weight) {
    let sum = 0, norm = 0;
    return values.map((value) => {
        sum = weight * sum + (value ?? 0);
        norm = weight * norm + (value === null ? 0 : 1);
        return [sum, norm];
    });
}

// Means over both sides, so that a smooth line is not late.
function smoothed(values) {
    const weight = Math.exp(-10 / (view.smoothing ** 2 * values.length));
    const before = fadingSums(values, weight), after = fadingSums([...values].reverse(), weight).reverse();
    return values.map((value, index) => (value === null ? null : (before[index][0] + after[index][0]) / (before[index][1] + after[index][1])));
}

function nearest(sorted, target) {
    let low = 0, high = sorted.length - 1;
    while (high - low > 1) {
        const middle = (low + high) >> 1;
        if (sorted[middle] <= target) low = middle; else high = middle;
    }
    return target - sorted[low] <= sorted[high] - target ? low : high;
}

// Charts

class Chart {
    constructor(figure, data) {
        Object.assign(this, { figure, data, log: data.log, hidden: new Set() });
        this.labels = [...new Set(data.series.map((series) => series.label))];
        this.height = figure.classList.contains("wide") ? 300 : 210;
        const caption = element("figcaption", {}, element("span", {}, data.title));
        if (!data.stack) caption.append(this.logButton());
        this.svg = shape(figure, "svg", { role: "img", height: this.height });
        figure.prepend(caption);
        if (this.labels.length <= MOST_KEYS) figure.append(this.keys());
        this.svg.addEventListener("pointermove", (event) => this.point(event));
        this.svg.addEventListener("pointerleave", () => this.leave());
        this.svg.addEventListener("pointerdown", (event) => { if (event.pointerType === "mouse") this.from = this.valueAt(event); });
        this.svg.addEventListener("pointerup", (event) => this.release(event));
        this.svg.addEventListener("dblclick", () => zoomTo(null));
        new ResizeObserver(() => { if (figure.clientWidth !== this.drawnWidth) this.draw(); }).observe(figure);
    }

    logButton() {
        const button = element("button", { type: "button", "aria-pressed": this.log, title: "Logarithmic scale" }, "log");
        button.addEventListener("click", () => { this.log = !this.log; button.setAttribute("aria-pressed", this.log); this.draw(); });
        return button;
    }

    keys() {
        const buttons = this.labels.map((label, index) => {
            const colour = this.coloursLabels() ? `line-${index % NUM_COLOURS}` : "muted";
            const style = `--colour: var(--${colour}); --stroke: ${this.stroke(label)[1]}; --width: ${this.isSparse(label) ? 3 : 1.5}px`;
            const button = element("button", { type: "button", "aria-pressed": true }, element("i", { class: "swatch", style }), label);
            button.addEventListener("click", () => {
                if (!this.hidden.delete(label)) this.hidden.add(label);
                button.setAttribute("aria-pressed", !this.hidden.has(label));
                this.draw();
            });
            return button;
        });
        return element("div", { class: "keys" }, ...buttons);
    }

    // One run has a colour for each of its lines; of several, each has one colour and lines differ by their strokes.
    coloursLabels() { return !hasRuns || this.data.stack; }

    // Lines of few points, such as those of validations, are thick and have dots.
    isSparse(label) { return this.data.series.every((series) => series.label !== label || series.x.length <= MOST_DOTS); }

    stroke(label) {
        if (this.coloursLabels()) return STROKES[0];
        return STROKES[this.labels.filter((other) => this.isSparse(other) === this.isSparse(label)).indexOf(label) % STROKES.length];
    }

    colour(series) {
        const index = this.coloursLabels() ? this.labels.indexOf(series.label) : series.run;
        return `--colour: var(--line-${index % NUM_COLOURS})`;
    }

    name(series) {
        if (!hasRuns || this.data.stack) return series.label;
        return this.labels.length > 1 ? `${report.runs[series.run].name}, ${series.label}` : report.runs[series.run].name;
    }

    visible() {
        let below = null;
        return this.data.series.filter((s) => !this.hidden.has(s.label) && !view.hiddenRuns.has(s.run)).map((series) => {
            const xs = places(series), raw = series.y;
            if (this.data.stack) {
                const bottom = below || raw.map(() => 0);
                below = raw.map((value, index) => bottom[index] + (value || 0));
                return { series, xs, ys: below, bottom, raw };
            }
            const isSmoothed = view.smoothing && isNoisy(this.log ? raw.map((value) => (value > 0 ? Math.log(value) : null)) : raw);
            return { series, xs, raw, ys: isSmoothed ? smoothed(raw) : raw };
        });
    }

    range(lines, positive) {
        let low = Infinity, high = -Infinity;
        const include = (value) => {
            if (value === null || (positive && value <= 0)) return;
            low = Math.min(low, value);
            high = Math.max(high, value);
        };
        for (const { xs, ys, raw } of lines) (this.data.stack ? ys : raw).forEach((value, index) => { if (isShown(xs[index])) include(value); });
        this.data.references.forEach(([, value]) => include(value));
        if (this.data.stack) return [0, Math.max(1, high)];
        if (low > high) return positive ? [1, 10] : [0, 1];
        if (positive) return low === high ? [low / 2, high * 2] : [low / 1.05, high * 1.05];
        const padding = 0.05 * (high - low) || Math.abs(high) * 0.1 || 1;
        return [low >= 0 ? Math.max(0, low - padding) : low - padding, high + padding];
    }

    draw() {
        const width = this.figure.clientWidth ? this.svg.getBoundingClientRect().width : 480;
        this.drawnWidth = this.figure.clientWidth;
        this.svg.replaceChildren();
        this.lines = this.visible();
        const [left, right, top, bottom] = [MARGIN.left, width - MARGIN.right, MARGIN.top, this.height - MARGIN.bottom];
        const [x0, x1] = view.zoom || extent(this.lines.flatMap(({ xs }) => [xs[0], xs[xs.length - 1]]));
        const [y0, y1] = this.range(this.lines, this.log);
        const scale = this.log ? Math.log : (value) => value;
        this.toX = (value) => left + (right - left) * (value - x0) / (x1 - x0 || 1);
        this.fromX = (pixel) => x0 + (x1 - x0) * Math.min(1, Math.max(0, (pixel - left) / (right - left)));
        this.toY = (value) => bottom - (bottom - top) * (scale(value) - scale(y0)) / (scale(y1) - scale(y0) || 1);
        this.drawAxes({ left, right, top, bottom, x0, x1, y0, y1 });
        const id = `clip-${this.figure.dataset.chart}`;
        shape(shape(this.svg, "clipPath", { id }), "rect", { x: left - 3, y: top - 4, width: right - left + 6, height: bottom - top + 8 });
        this.plot = shape(this.svg, "g", { "clip-path": `url(#${id})` });
        for (const [name, value] of this.data.references) this.drawReference(name, value, left, right);
        for (const { series, xs, ys, raw } of this.data.stack ? [] : this.lines) {
            if (ys !== raw) shape(this.plot, "path", { class: "line raw", style: this.colour(series), d: this.path(xs, raw) });
        }
        for (const line of this.lines) this.drawLine(line);
        this.cursor = shape(this.svg, "g");
        this.svg.setAttribute("aria-label", `${this.data.title}: ${this.lines.map(({ series, raw }) => `${this.name(series)} ends at ${raw.findLast((v) => v !== null)}`).join("; ")}`);
    }

    drawAxes({ left, right, top, bottom, x0, x1, y0, y1 }) {
        const ticks = this.log ? logTicks(y0, y1) : linearTicks(y0, y1, this.height > 250 ? 6 : 4);
        for (const tick of ticks) {
            const y = this.toY(tick);
            shape(this.svg, "line", { class: "grid", x1: left, x2: right, y1: y, y2: y });
            shape(this.svg, "text", { x: left - 8, y: y + 4, "text-anchor": "end" }, written(tick, this.data.unit, y1));
        }
        const isTime = view.axis === "seconds", [unit] = isTime ? unitOfTime(x1) : [1];
        for (const tick of linearTicks(x0 / unit, x1 / unit, Math.max(3, Math.floor((right - left) / 64)))) {
            const x = this.toX(tick * unit), text = isTime ? duration(tick * unit, x1) : compact(tick);
            shape(this.svg, "text", { x, y: bottom + 17, "text-anchor": x > right - 16 ? "end" : "middle" }, text);
        }
        shape(this.svg, "line", { class: "axis", x1: left, x2: right, y1: bottom, y2: bottom });
    }

    drawLine(line) {
        const style = this.colour(line.series), count = line.xs.length;
        if (this.data.stack) {
            const back = line.bottom.map((_, index) => count - 1 - index).map((index) => `L${this.at(line.xs[index], line.bottom[index])}`);
            shape(this.plot, "path", { class: "area", style, d: `${this.path(line.xs, line.ys)}${back.join("")}Z` });
            return;
        }
        const isSparse = this.isSparse(line.series.label), dash = this.stroke(line.series.label)[0];
        shape(this.plot, "path", { class: isSparse ? "line thick" : "line", style, "stroke-dasharray": dash, d: this.path(line.xs, line.ys) });
        if (!isSparse) return;
        line.ys.forEach((value, index) => {
            if (this.can(value)) shape(this.plot, "circle", { class: "dot", style, r: 2.6, cx: this.toX(line.xs[index]), cy: this.toY(value) });
        });
    }

    drawReference(name, value, left, right) {
        const y = this.toY(value);
        shape(this.plot, "line", { class: "reference", x1: left, x2: right, y1: y, y2: y });
        shape(this.plot, "text", { class: "reference", x: left + 6, y: y - 5 }, `${name} ${written(value, this.data.unit)}`);
    }

    can(value) { return value !== null && (!this.log || value > 0); }
    at(x, y) { return `${this.toX(x).toFixed(1)} ${this.toY(y).toFixed(1)}`; }

    // A value that cannot be drawn is a gap; one between two gaps is a line of no length, which its round ends show.
    path(xs, ys) {
        let text = "", isOpen = false;
        xs.forEach((x, index) => {
            if (!this.can(ys[index])) { isOpen = false; return; }
            text += isOpen ? `L${this.at(x, ys[index])}` : `M${this.at(x, ys[index])}h0`;
            isOpen = true;
        });
        return text;
    }

    valueAt(event) { return this.fromX(event.clientX - this.svg.getBoundingClientRect().left); }

    point(event) {
        const target = this.valueAt(event), span = this.fromX(1e9) - this.fromX(-1e9);
        const found = this.lines.filter(({ xs }) => xs.length).map((line) => ({ ...line, index: nearest(line.xs, target) }));
        if (!found.length) return;
        const distance = ({ xs, index }) => Math.abs(xs[index] - target);
        const closest = found.reduce((best, line) => (distance(line) < distance(best) ? line : best));
        const place = closest.xs[closest.index];
        this.cursor.replaceChildren();
        if (this.from !== undefined && this.from !== null) {
            const [a, b] = [this.toX(this.from), this.toX(target)];
            shape(this.cursor, "rect", { class: "zone", x: Math.min(a, b), width: Math.abs(a - b), y: MARGIN.top, height: this.height - MARGIN.top - MARGIN.bottom });
        }
        shape(this.cursor, "line", { class: "cursor", x1: this.toX(place), x2: this.toX(place), y1: MARGIN.top, y2: this.height - MARGIN.bottom });
        const rows = found.slice(0, MOST_IN_TIP).map(({ series, xs, ys, raw, index }) => {
            const style = this.colour(series), isElsewhere = Math.abs(xs[index] - place) > 0.004 * span;
            if (this.can(ys[index])) shape(this.cursor, "circle", { class: "dot", style, r: 3.4, cx: this.toX(xs[index]), cy: this.toY(ys[index]) });
            const value = raw[index] === null ? "not finite" : written(raw[index], this.data.unit);
            const where = isElsewhere ? ` (${writtenPlace(xs[index])})` : "";
            return element("div", {}, element("i", { class: "swatch", style }), element("span", {}, this.name(series) + where), value);
        });
        if (found.length > MOST_IN_TIP) rows.push(element("div", {}, element("span", {}, `and ${found.length - MOST_IN_TIP} more`)));
        showTip(event, element("b", {}, writtenPlace(place)), ...rows);
    }

    release(event) {
        const from = this.from, to = this.valueAt(event), span = this.fromX(1e9) - this.fromX(-1e9);
        this.from = null;
        if (typeof from === "number" && Math.abs(to - from) > 0.02 * span) zoomTo([Math.min(from, to), Math.max(from, to)]);
    }

    leave() {
        this.from = null;
        this.cursor.replaceChildren();
        tip.hidden = true;
    }
}

function isShown(x) { return !view.zoom || (x >= view.zoom[0] && x <= view.zoom[1]); }

function extent(values) {
    const finite = values.filter(Number.isFinite);
    return finite.length ? [Math.min(...finite), Math.max(...finite)] : [0, 1];
}

function showTip(event, ...content) {
    tip.replaceChildren(...content);
    tip.hidden = false;
    const isRight = event.clientX > root.clientWidth / 2;
    tip.style.top = `${event.pageY + 14}px`;
    tip.style.left = `${Math.max(4, event.pageX + (isRight ? -tip.offsetWidth - 14 : 14))}px`;
}

function zoomTo(range) {
    view.zoom = range;
    document.getElementById("unzoom").hidden = !range;
    drawAll();
}

function drawAll() { charts.forEach((chart) => chart.draw()); }

// Samples: one slider for all runs; a run shows the last samples that it had written by then.

function showSamples(container) {
    const steps = [...new Set(report.runs.flatMap((run) => run.samples.map(({ step }) => step)))].sort((a, b) => a - b);
    const slider = element("input", { type: "range", min: 0, max: steps.length - 1, value: steps.length - 1, "aria-label": "Step of the samples" });
    const output = element("output"), rows = element("div");
    const show = () => {
        const step = steps[slider.value];
        output.textContent = `Step ${step.toLocaleString("en")}`;
        const written = report.runs.map((run) => ({ run, at: run.samples.findLast((samples) => samples.step <= step) }));
        const most = Math.max(...written.map(({ at }) => (at ? at.texts.length : 0)));
        const cardsOf = (index) => written.filter(({ at }) => at && at.texts[index]).map(({ run, at }) => sampleCard(run, at.step, ...at.texts[index]));
        const cards = Array.from({ length: most }, (_, index) => cardsOf(index));
        rows.replaceChildren(...(hasRuns ? cards : [cards.flat()]).map((row) => element("div", { class: "samples" }, ...row)));
    };
    const move = (by) => { slider.value = Number(slider.value) + by; show(); };
    const [back, on] = [["‹", -1, "Earlier"], ["›", 1, "Later"]].map(([text, by, label]) => {
        const button = element("button", { type: "button", "aria-label": label }, text);
        button.addEventListener("click", () => move(by));
        return button;
    });
    slider.addEventListener("input", show);
    container.append(element("div", { class: "chooser" }, output, back, slider, on), rows);
    show();
}

function sampleCard(run, step, prompt, text) {
    const content = element("pre", {}, element("b", {}, prompt), text);
    const swatch = element("i", { class: "swatch", style: `--colour: var(--line-${report.runs.indexOf(run) % NUM_COLOURS})` });
    const header = hasRuns ? [element("p", {}, swatch, `${run.name}, step ${step.toLocaleString("en")}`)] : [];
    return element("div", { class: "sample" }, ...header, content);
}

// Tables

function makeSortable(table) {
    const body = table.tBodies[0];
    const valueOf = (row, column) => row.cells[column].dataset.value ?? row.cells[column].textContent;
    [...table.tHead.rows[0].cells].forEach((cell, column) => cell.addEventListener("click", () => {
        const isDescending = cell.getAttribute("aria-sort") === "ascending";
        for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
        cell.setAttribute("aria-sort", isDescending ? "descending" : "ascending");
        const rows = [...body.rows].sort((a, b) => valueOf(a, column).localeCompare(valueOf(b, column), "en", { numeric: true }));
        body.append(...(isDescending ? rows.reverse() : rows));
    }));
}

// Controls

const tip = element("div", { id: "tip", hidden: "" });
document.body.append(tip);
const charts = [...document.querySelectorAll("[data-chart]")].map((figure) => new Chart(figure, report.charts[figure.dataset.chart]));

for (const input of document.querySelectorAll("[name=axis]")) {
    input.disabled = input.value !== "step" && !report.runs.every((run) => run.clock[input.value]);
    input.addEventListener("change", () => { view.axis = input.value; zoomTo(null); });
}
for (const button of document.querySelectorAll("[data-run]")) {
    const run = Number(button.dataset.run);
    button.addEventListener("click", () => {
        if (!view.hiddenRuns.delete(run)) view.hiddenRuns.add(run);
        button.setAttribute("aria-pressed", !view.hiddenRuns.has(run));
        drawAll();
    });
}
document.getElementById("smoothing").addEventListener("input", (event) => { view.smoothing = Number(event.target.value); drawAll(); });
document.getElementById("unzoom").addEventListener("click", () => zoomTo(null));
document.querySelectorAll("table.sortable").forEach(makeSortable);
const samples = document.getElementById("samples");
if (samples) showSamples(samples);
drawAll();
root.dataset.charts = charts.length;
root.dataset.ready = "true";
