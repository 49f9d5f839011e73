// @ts-check
/** The event log, the newest first: what the governor and other parts did, and why. */

import { byId, h, setText, show } from "/ui/dom.js";
import * as format from "/ui/format.js";

const SHOWN = 500;
/** The beginning of a reason that concerns one request: its id, and the text about it. */
export const NAMED_REQUEST = /^request (\S+): ([^]*)$/;
const COSTLY = new Set(["evict", "requeue", "reclaim_precision", "reclaim_preempt", "hold", "first"]);
const FAILED = new Set(["load_refused", "excess", "over_limit", "violation", "quarantine"]);

export class Events {
  constructor() {
    /** @type {any[]} */
    this.records = [];
    this.filter = byId("events-model");
    this.filter.onchange = () => this.render();
  }

  clear() {
    this.records = [];
    this.render();
  }

  /** @param {any[]} records new ones @param {string[]} models names for the filter */
  add(records, models) {
    this.offer(models);
    if (!records.length) return;
    this.records = [...this.records, ...records].slice(-SHOWN);
    const list = byId("events");
    for (const record of records) if (this.passes(record)) list.prepend(line(record));
    while (list.children.length > SHOWN) list.lastElementChild?.remove();
    this.empty();
  }

  /** @param {string[]} models */
  offer(models) {
    const known = [...this.filter.options].map((option) => option.value);
    for (const name of models) if (!known.includes(name)) this.filter.append(h("option", { value: name }, name));
  }

  render() {
    byId("events").replaceChildren(...this.records.filter((one) => this.passes(one)).map(line).reverse());
    this.empty();
  }

  empty() {
    const none = byId("events").children.length === 0;
    show(byId("events-empty"), none);
    show(byId("events"), !none);
    setText(byId("events-empty"), this.filter.value
      ? `No events of ${this.filter.value}.` : "No events so far. The governor writes here what it does, and why.");
  }

  /** @param {any} record */
  passes(record) {
    const model = this.filter.value;
    return !model || !record.model || [record.model, record.requester].includes(model);
  }
}

/** Link the request that a reason begins with. @param {string} reason @returns {(Node | string)[]} */
function linked(reason) {
  const found = NAMED_REQUEST.exec(reason);
  if (!found) return [reason];
  return [h("a", { href: `#requests/${found[1]}` }, `request ${found[1]}`), `: ${found[2]}`];
}

/** @param {any} record an `EventRecord` */
function line(record) {
  const numbers = Object.entries(record.numbers ?? {}).map(([name, value]) => (name.endsWith("_bytes")
    ? `${name.slice(0, -6).replaceAll("_", " ")} ${format.bytes(Number(value))}` : `${name.replaceAll("_", " ")} ${value}`));
  const kind = FAILED.has(record.kind) ? "bad" : COSTLY.has(record.kind) ? "warn" : "plain";
  return h("li", {},
    h("time.num.dim", { title: new Date(record.at * 1000).toISOString() }, format.clock(record.at)),
    h("div", {},
      h(`b.${kind}`, {}, record.kind.replaceAll("_", " ")),
      record.model ? h("span.of", {}, ` ${record.model}`) : null,
      record.requester && record.requester !== record.model ? h("span.dim", {}, ` for ${record.requester}`) : null,
      record.reason ? h("p.why", {}, ...linked(record.reason)) : null,
      numbers.length ? h("p.numbers.num.dim", {}, numbers.join(" · ")) : null,
    ));
}
