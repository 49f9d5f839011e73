// @ts-check
/** The table of models, with their operations and settings. */

import { operate } from "/ui/api.js";
import { byId, h, reconcile, setText, show } from "/ui/dom.js";
import * as format from "/ui/format.js";
import { levelText, partsOf } from "/ui/parts.js";

const FIRST_TOKENS = 20;

export class Models {
  constructor() {
    this.busy = new Set();
    /** @type {Map<string, number[]>} seconds until the first token of the newest requests, by model */
    this.firsts = new Map();
    /** @type {any} */
    this.status = null;
    this.dialog = byId("settings");
    byId("settings-cancel").onclick = () => this.dialog.close();
    byId("settings-form").onsubmit = (/** @type {Event} */ event) => { event.preventDefault(); this.save(); };
    byId("settings-force").onclick = () => { this.dialog.close(); this.run("unload", this.chosen, { force: true }); };
    this.chosen = "";
  }

  /** Forget what an earlier stream reported. */
  clear() { this.firsts.clear(); }

  /** @param {any[]} requests ended ones */
  learn(requests) {
    for (const { model, first_token_s: first } of requests) {
      if (first === undefined || first === null) continue;
      this.firsts.set(model, [...(this.firsts.get(model) ?? []), first].slice(-FIRST_TOKENS));
    }
  }

  /** @param {any} status a `DaemonStatus` */
  show(status) {
    this.status = status;
    const rows = [...status.models, ...status.unloaded.map((/** @type {string} */ name) => ({ name, state: "unloaded" }))];
    show(byId("models"), rows.length > 0);
    show(byId("models-empty"), rows.length === 0);
    const speed = status.models.reduce((/** @type {number} */ sum, /** @type {any} */ model) => sum + model.stats.tokens_per_s, 0);
    setText(byId("models-sum"), `${status.models.length} loaded, ${status.unloaded.length} unloaded · ${format.count(Math.round(speed))} tok/s`);
    reconcile(byId("models").tBodies[0], rows, (one) => one.name, (one) => this.row(one.name), (node, one) => this.update(node, one, status.budget_bytes));
  }

  /** @param {string} name */
  row(name) {
    const cell = (/** @type {string} */ kind, /** @type {string} */ label, /** @type {any[]} */ ...inside) => h(`td.${kind}`, { "data-label": label }, ...inside);
    const button = (/** @type {string} */ kind, /** @type {() => void} */ onclick) => h(`button.small.${kind}`, { type: "button", onclick });
    return h("tr", {},
      h("th.model", { scope: "row" }, h("button.link", { type: "button", title: name, onclick: () => this.settings(name) }, name)),
      cell("state", "State", h("span.state-text"), h("span.error-text")),
      cell("memory", "Memory", h("span.num"), h("div.mini", { ariaHidden: "true" })),
      cell("level", "KV level"), cell("speed.num.right", "Tokens/s"), cell("rows.num.right", "Rows"),
      cell("queue.num.right", "Queue"), cell("first.num.right", "First token"),
      h("td.operations", {},
        button("load", () => this.toggle(name)),
        button("pin", () => this.run("policy", name, { pinned: !this.find(name)?.pinned })),
      ));
  }

  /** @param {any} node @param {any} one a `ModelStatus`, or a known model @param {number} budget */
  update(node, one, budget) {
    const part = (/** @type {string} */ kind) => node.querySelector(`.${kind}`);
    const loaded = one.state !== "unloaded";
    node.classList.toggle("unloaded", !loaded);
    const state = one.state + (one.restarts ? ` ↻${one.restarts}` : "") + (one.pinned ? " · pinned" : "");
    setText(part("state-text"), state);
    part("state-text").className = `state-text s-${one.state}`;
    setText(part("error-text"), one.error?.message ?? "");
    const stats = one.stats;
    setText(part("memory").firstChild, loaded ? format.bytes(one.granted_bytes) : "");
    const parts = loaded ? partsOf(one) : [];
    reconcile(part("mini"), parts, (each) => each.key, (each) => h(`div.part.${each.key}`), (bar, each) => { bar.style.width = `${(100 * each.bytes) / budget}%`; });
    setText(part("level"), loaded ? levelText(one) : "");
    setText(part("speed"), loaded ? format.count(Math.round(stats.tokens_per_s)) : "");
    setText(part("rows"), loaded ? String(stats.rows_running + stats.rows_prefilling) : "");
    const queued = loaded ? (one.state === "ready" ? stats.rows_waiting : one.requests) : 0;
    setText(part("queue"), loaded ? String(queued) + (one.paused ? `, ${one.paused} paused` : "") : "");
    part("queue").classList.toggle("warn", queued > 0);
    setText(part("first"), format.duration(format.median(this.firsts.get(one.name) ?? [])));
    const going = ["draining", "stopping"].includes(one.state);
    this.button(part("load"), loaded ? "Unload" : "Load", one.name, going || this.busy.has(one.name));
    this.button(part("pin"), one.pinned ? "Unpin" : "Pin", one.name, this.busy.has(one.name));
    part("pin").hidden = !loaded;
  }

  /** @param {any} node @param {string} text @param {string} model @param {boolean} disabled */
  button(node, text, model, disabled) {
    setText(node, text);
    node.setAttribute("aria-label", `${text} ${model}`);
    // Not `disabled`: the focus would be lost.
    node.setAttribute("aria-disabled", String(disabled));
  }

  /** @param {string} name */
  find(name) { return this.status?.models.find((/** @type {any} */ model) => model.name === name); }

  /** @param {string} name */
  toggle(name) { this.run(this.find(name) ? "unload" : "load", name); }

  /** @param {string} op @param {string} name @param {Record<string, unknown>} [fields] */
  async run(op, name, fields = {}) {
    if (this.busy.has(name)) return;
    this.busy.add(name);
    setText(byId("models-error"), "");
    if (this.status) this.show(this.status);
    try {
      await operate(op, name, fields);
    } catch (error) {
      setText(byId("models-error"), `${name}: ${/** @type {Error} */ (error).message}`);
    } finally {
      this.busy.delete(name);
      if (this.status) this.show(this.status);
    }
  }

  /** Open the settings of a model. @param {string} name */
  settings(name) {
    const model = this.find(name);
    this.chosen = name;
    setText(byId("settings-title"), name);
    setText(byId("settings-error"), "");
    byId("settings-priority").value = model?.priority ?? 0;
    byId("settings-ttl").value = model?.idle_ttl_s ?? "";
    byId("settings-pinned").checked = model?.pinned ?? false;
    for (const id of ["settings-force", "settings-policy", "settings-save"]) show(byId(id), Boolean(model));
    byId("settings-facts").replaceChildren(...facts(model).flatMap(([term, text]) => [h("dt", {}, term), h("dd.num", {}, text)]));
    this.dialog.showModal();
  }

  async save() {
    const ttl = byId("settings-ttl").value;
    const fields = {
      priority: Number(byId("settings-priority").value),
      idle_ttl_s: ttl === "" ? null : Number(ttl),
      pinned: byId("settings-pinned").checked,
    };
    try {
      await operate("policy", this.chosen, fields);
      this.dialog.close();
    } catch (error) {
      setText(byId("settings-error"), /** @type {Error} */ (error).message);
    }
  }
}

/** @param {any} model a `ModelStatus` @returns {string} */
function pids(model) {
  if (!model.ranks.length) return String(model.worker_pid ?? "none");
  return model.ranks.map((/** @type {any} */ one, /** @type {number} */ rank) => `rank ${rank}: ${one.pid}`).join(", ");
}

/** @param {any} model a `ModelStatus` @returns {string[][]} */
function facts(model) {
  if (!model) return [["State", "unloaded; a request loads it. Its settings can be changed while it is loaded."]];
  const { info, stats } = model;
  const found = stats.prefix.hit_tokens + stats.prefix.disk_tokens;
  /** @type {string[][]} */
  const all = [["Source", model.source], ["Process", pids(model)]];
  if (info) {
    all.push(["Architecture", `${info.architecture}, ${(info.parameters / 1e6).toFixed(1)} M parameters, ${info.dtype}`]);
    all.push(["Context", `${format.count(info.context_length)} tokens`]);
    all.push(["Attention", `${info.attention_path}, on ${info.device}`]);
  }
  all.push(["Granted", `${format.bytes(model.granted_bytes)}; measured ${format.bytes(stats.memory.footprint)}`]);
  for (const part of partsOf(model)) all.push([part.name, format.bytes(part.bytes)]);
  if (stats.prefix.query_tokens) all.push(["Prefix hits", `${format.percent(found, stats.prefix.query_tokens)} of ${format.count(stats.prefix.query_tokens)} prompt tokens`]);
  if (typeof model.expires_in_s === "number") all.push(["Unloaded in", `${format.duration(model.expires_in_s)} without a request`]);
  if (model.error) all.push(["Error", model.error.message]);
  return all;
}
