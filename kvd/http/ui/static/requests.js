// @ts-check
/** Requests: those in flight, then the newest that ended. */

import { byId, h, reconcile, setText, show } from "/ui/dom.js";
import { NAMED_REQUEST } from "/ui/events.js";
import * as format from "/ui/format.js";
import { schemes } from "/ui/parts.js";

const KEPT = 256;
const OPEN = new Set(["waiting", "running", "paused"]);

export class Requests {
  constructor() {
    /** @type {any[]} the newest first */
    this.ended = [];
    /** @type {any[]} */
    this.open = [];
    /** @type {Map<string, string>} what events say about a request, by its id */
    this.notes = new Map();
  }

  clear() {
    this.ended = [];
    this.notes.clear();
  }

  /**
   * @param {any[]} open @param {any[]} ended new ones @param {any[]} events new ones
   * @param {any} status
   */
  add(open, ended, events, status) {
    for (const { reason } of events) {
      const found = NAMED_REQUEST.exec(reason ?? "");
      if (found) this.notes.set(found[1], found[2]);
    }
    this.open = open;
    this.ended = [...[...ended].reverse(), ...this.ended].slice(0, KEPT);
    // Not the table: it is hidden while there are no requests.
    if (byId("requests-sum").checkVisibility()) this.render(status);
  }

  /** @param {any} status a `DaemonStatus` */
  render(status) {
    const rows = [...[...this.open].reverse(), ...this.ended];
    const counts = ["running", "waiting", "paused"].map((stage) => [stage, this.open.filter((one) => one.stage === stage).length]);
    setText(byId("requests-sum"), [...counts.filter(([, n]) => n).map(([stage, n]) => `${n} ${stage}`), `${this.ended.length} ended`].join(", "));
    show(byId("requests-empty"), rows.length === 0);
    show(byId("requests"), rows.length > 0);
    const models = new Map(status.models.map((/** @type {any} */ model) => [model.name, model]));
    reconcile(byId("requests").tBodies[0], rows, (one) => one.rid, make, (node, one) => update(node, one, models.get(one.model), this.notes.get(one.rid)));
  }

  /** Bring a request into view and mark it. @param {string} rid */
  find(rid) {
    for (const row of byId("requests").tBodies[0].rows) {
      row.classList.toggle("found", row.dataset.key === rid);
      if (row.dataset.key === rid) row.scrollIntoView({ block: "center" });
    }
  }
}

function make() {
  const cell = (/** @type {string} */ kind, /** @type {string} */ label) => h(`td.${kind}`, { "data-label": label });
  return h("tr", {}, h("th.rid.num", { scope: "row" }), cell("model", "Model"), cell("stage", "State"),
    cell("prompt.num.right", "Prompt"), h("td.cache", { "data-label": "From cache" }, h("span.num"), h("span.dim.miss")),
    cell("completion.num.right", "Completion"), cell("first.num.right", "First token"), cell("time.num.right", "Time"), cell("levels", "Levels"));
}

/**
 * @param {any} node @param {any} one a `RequestRecord` @param {any} model its `ModelStatus`
 * @param {string} [note] what an event says about it
 */
function update(node, one, model, note) {
  const set = (/** @type {string} */ kind, /** @type {string} */ text) => setText(node.querySelector(`.${kind}`), text);
  const open = OPEN.has(one.stage);
  node.classList.toggle("open", open);
  set("rid", one.rid);
  set("model", one.model);
  set("stage", one.code ? `${one.code}: ${one.message ?? ""}` : one.stage);
  node.querySelector(".stage").className = `stage s-${one.stage}`;
  set("prompt", one.prompt_tokens === undefined ? "" : format.count(one.prompt_tokens));
  const cached = one.cached_tokens;
  setText(node.querySelector(".cache").firstChild, cached === undefined || !one.prompt_tokens
    ? "" : `${format.count(cached)} / ${format.count(one.prompt_tokens)}`);
  node.querySelector(".cache").classList.toggle("none", cached === undefined && !note);
  set("miss", one.cache || note || "");
  set("completion", format.count(one.completion_tokens ?? 0));
  set("first", format.duration(one.first_token_s));
  set("time", format.duration(one.age_s));
  const names = model ? schemes(model) : [];
  set("levels", (one.levels ?? []).map((/** @type {number} */ level) => names[level] ?? String(level)).join(" → "));
}
