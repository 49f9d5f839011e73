// @ts-check
/** The last minutes as stacked areas, from the snapshots since the page was opened. */

import uPlot from "/ui/vendor/uPlot.esm.js";
import { totals } from "/ui/budget.js";
import { byId, setText } from "/ui/dom.js";
import * as format from "/ui/format.js";

const KEPT_S = 600;
const SHADES = 6;
const NAMED = 8;
/** Distances of lines in bytes: round in MiB and GiB. */
const POWERS = Array.from({ length: 44 }, (_, power) => 2 ** power);

/** @typedef {{at: number, budget: number, model: Map<string, number>, part: Map<string, number>, speed: Map<string, number>}} Sample */

export class Chart {
  constructor() {
    /** @type {Sample[]} */
    this.samples = [];
    /** @type {any} */
    this.plot = null;
    this.shape = "";
    this.kind = byId("chart-kind");
    this.kind.onchange = () => this.draw();
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { this.shape = ""; this.draw(); });
    new ResizeObserver(() => this.resize()).observe(byId("chart"));
  }

  /** @param {any} status a `DaemonStatus` */
  add(status) {
    /** @type {Sample} */
    const sample = { at: Date.now() / 1000, budget: status.budget_bytes, model: new Map(), part: new Map(), speed: new Map() };
    for (const model of status.models) {
      sample.model.set(model.name, model.granted_bytes);
      sample.speed.set(model.name, model.stats.tokens_per_s);
    }
    for (const part of totals(status.models)) sample.part.set(part.name, part.bytes);
    this.samples.push(sample);
    while (this.samples[0].at < sample.at - KEPT_S) this.samples.shift();
    this.draw();
  }

  /** Draw the newest samples, if the chart is visible. */
  draw() {
    const box = byId("chart");
    if (!box.clientWidth || !this.samples.length) return;
    const kind = /** @type {"model" | "part" | "speed"} */ (this.kind.value);
    const names = [...new Set(this.samples.flatMap((sample) => [...sample[kind].keys()]))];
    const shape = JSON.stringify([kind, names]);
    if (shape !== this.shape) {
      this.shape = shape;
      this.plot?.destroy();
      this.plot = new uPlot(options(kind, names, box, (index) => this.values(index)), [[]], box);
    }
    this.plot.setData(stacked(this.samples, kind, names));
    box.setAttribute("aria-label", this.description(kind, names));
    if (this.plot.cursor.idx === null || this.plot.cursor.idx === undefined) this.values(null);
  }

  resize() {
    const box = byId("chart");
    if (!box.clientWidth) return;
    if (this.plot) this.plot.setSize({ width: box.clientWidth, height: box.clientHeight });
    else this.draw();
  }

  /** Show the values at the cursor, or the newest ones. @param {number | null | undefined} index */
  values(index) {
    const sample = this.samples[index ?? this.samples.length - 1];
    if (!sample) return;
    const kind = /** @type {"model" | "part" | "speed"} */ (this.kind.value);
    const unit = kind === "speed" ? (/** @type {number} */ v) => `${format.count(Math.round(v))} tok/s` : format.bytes;
    const largest = [...sample[kind]].filter(([, value]) => value > 0).sort(([, a], [, b]) => b - a);
    const texts = largest.slice(0, NAMED).map(([name, value]) => `${name} ${unit(value)}`);
    if (largest.length > NAMED) texts.push(`${largest.length - NAMED} more`);
    setText(byId("chart-values"), `${format.clock(sample.at)}  ${texts.join(" · ") || "nothing"}`);
  }

  /** @param {"model" | "part" | "speed"} kind @param {string[]} names */
  description(kind, names) {
    const seconds = this.samples[this.samples.length - 1].at - this.samples[0].at;
    return `Chart of the last ${format.duration(seconds)}: ${this.kind.selectedOptions[0].text}; ${names.join(", ")}`;
  }
}

/**
 * Return uPlot's data: the sums from the bottom, the highest first, so that lower areas cover it.
 * @param {Sample[]} samples @param {"model" | "part" | "speed"} kind @param {string[]} names
 */
function stacked(samples, kind, names) {
  const times = samples.map((sample) => sample.at);
  const sums = samples.map(() => 0);
  const areas = names.map((name) => samples.map((sample, i) => { sums[i] += sample[kind].get(name) ?? 0; return sums[i]; }));
  const rows = [times, ...areas.reverse()];
  if (kind !== "speed") rows.push(samples.map((sample) => sample.budget));
  return rows;
}

/**
 * @param {string} kind @param {string[]} names @param {HTMLElement} box
 * @param {(index: number | null | undefined) => void} onCursor
 * @returns {any}
 */
function options(kind, names, box, onCursor) {
  const style = getComputedStyle(document.documentElement);
  const color = (/** @type {string} */ name) => style.getPropertyValue(`--${name}`).trim();
  const areas = names.map((_, i) => ({ stroke: color("card"), width: 1, fill: color(`shade-${i % SHADES}`), points: { show: false } }));
  const line = kind === "speed" ? [] : [{ stroke: color("ink"), width: 1.5, dash: [5, 4], points: { show: false } }];
  const axis = { stroke: color("dim"), font: "12px system-ui, sans-serif", ticks: { show: false } };
  const grid = { stroke: color("line"), width: 1 };
  const unit = kind === "speed" ? (/** @type {number} */ v) => format.count(v) : (/** @type {number} */ v) => format.bytes(v);
  return {
    width: box.clientWidth, height: box.clientHeight, padding: [8, 8, 0, 0],
    legend: { show: false }, cursor: { y: false, points: { show: false }, drag: { x: false, y: false } },
    scales: {
      x: { range: (/** @type {any} */ _, /** @type {number} */ from, /** @type {number} */ to) => [Math.min(from, to - 30), to] },
      y: { range: (/** @type {any} */ _, /** @type {number} */ __, /** @type {number} */ top) => [0, (top || 1) * 1.06] },
    },
    axes: [
      { ...axis, grid: { show: false }, space: 90, size: 30, values: (/** @type {any} */ _, /** @type {number[]} */ all) => all.map(format.clock) },
      { ...axis, grid, size: 76, space: 36, ...(kind === "speed" ? {} : { incrs: POWERS }), values: (/** @type {any} */ _, /** @type {number[]} */ all) => all.map(unit) },
    ],
    series: [{}, ...areas.reverse(), ...line],
    hooks: { setCursor: [(/** @type {any} */ plot) => onCursor(plot.cursor.idx)] },
  };
}
