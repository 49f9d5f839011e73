// @ts-check
/** The budget as one bar: a group for each model, its parts, and what is free. */

import { byId, h, reconcile, setText } from "/ui/dom.js";
import * as format from "/ui/format.js";
import { partsOf } from "/ui/parts.js";

/** @typedef {{key: string, name: string, bytes: number}} Total */

/** @param {any} status a `DaemonStatus` */
export function showBudget(status) {
  const { budget_bytes: budget, granted_bytes: granted } = status;
  const free = Math.max(0, budget - granted);
  const over = Math.max(0, granted - budget);
  const models = status.models.filter((/** @type {any} */ model) => model.granted_bytes > 0);

  const sum = byId("budget-sum");
  sum.replaceChildren(
    h("strong.num", {}, format.bytes(granted)), h("span.dim", {}, " of "),
    h("strong.num", {}, format.bytes(budget)),
    h("span", { className: over ? "warn" : "dim" }, over
      ? `  ${format.bytes(over)} above the lowered budget; models give it back`
      : `  granted, ${format.percent(granted, budget)}`),
  );
  const { total, available, pressure } = status.host;
  sum.append(h("span.dim", {}, ` · machine: ${format.bytes(available)} of ${format.bytes(total)} free`));
  if (pressure !== "normal") sum.append(h("span.warn", {}, ` · memory pressure ${pressure}`));

  const bar = byId("bar");
  bar.setAttribute("aria-label", summary(models, granted, budget));
  const groups = [...models, { name: "", free: true, bytes: free }];
  reconcile(bar, groups, (one) => `m:${one.name}`, makeGroup, (node, one) => updateGroup(node, one, budget + over));
  legend(models, free);
  problems(status);
}

function makeGroup() {
  return h("div.group", {}, h("div.parts"), h("div.caption", {}, h("span.name"), h("span.size.num")));
}

/** @param {any} node @param {any} one a `ModelStatus`, or what is free @param {number} whole */
function updateGroup(node, one, whole) {
  const size = one.free ? one.bytes : one.granted_bytes;
  node.style.flexGrow = String(size / whole);
  node.classList.toggle("free", Boolean(one.free));
  node.title = `${one.free ? "free" : one.name}: ${format.bytes(size)}`;
  node.hidden = one.free && size === 0;
  setText(node.querySelector(".name"), one.free ? "free" : one.name);
  setText(node.querySelector(".size"), format.bytes(size));
  const parts = one.free ? [] : partsOf(one);
  reconcile(node.firstElementChild, parts, (part) => part.key, (part) => h(`div.part.${part.key}`), (part, { name, bytes }) => {
    part.style.flexGrow = String(bytes / size);
    part.title = `${one.name}: ${name} ${format.bytes(bytes)}`;
  });
}

/** @param {any[]} models @param {number} granted @param {number} budget */
function summary(models, granted, budget) {
  const each = models.map((model) => {
    const parts = partsOf(model).map((part) => `${part.name} ${format.bytes(part.bytes)}`);
    return `${model.name} ${format.bytes(model.granted_bytes)}: ${parts.join(", ")}`;
  });
  return [`${format.bytes(granted)} of ${format.bytes(budget)} granted`, ...each].join("; ");
}

/** @param {any[]} models @returns {Total[]} the parts of all models together */
export function totals(models) {
  /** @type {Map<string, Total>} */
  const found = new Map();
  for (const part of models.flatMap(partsOf)) {
    const level = part.key.startsWith("kv") ? part.name : part.key;
    const total = found.get(level) ?? { key: part.key, name: part.name, bytes: 0 };
    total.bytes += part.bytes;
    found.set(level, total);
  }
  const order = ["weights", "runtime", "kv0", "kv1", "kv2", "kv3", "reserved", "prefixes", "spare"];
  return [...found.values()].sort((a, b) => order.indexOf(a.key) - order.indexOf(b.key));
}

/** @param {any[]} models @param {number} free */
function legend(models, free) {
  const all = [...totals(models), { key: "free", name: "free", bytes: free }];
  reconcile(byId("legend"), all, (part) => part.name, (part) => h("li", {}, h(`i.swatch.${part.key}`, { ariaHidden: "true" }), h("span.name"), h("span.num")),
    (node, part) => { setText(node.children[1], part.name); setText(node.children[2], format.bytes(part.bytes)); });
}

/** @param {any} status */
function problems(status) {
  const all = status.problems.map((/** @type {any} */ one) => `${one.observed}; ${one.advice}`);
  if (status.state === "draining") all.unshift("The daemon is draining: it finishes running requests and accepts no new ones.");
  if (status.violations) all.unshift(`The budget was exceeded ${status.violations} times: a bug in kvd; see its log.`);
  if (status.config_error) all.push(`The last reload of the configuration failed: ${status.config_error}`);
  if (status.config_pending.length) all.push(`After a restart of the daemon: ${status.config_pending.join(", ")}`);
  reconcile(byId("problems"), all, (text) => text, (text) => h("p.notice", {}, text), () => undefined);
}
