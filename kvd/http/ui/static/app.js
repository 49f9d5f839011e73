// @ts-check
/** Connects the stream of snapshots to the parts of the page. */

import { forgetKey, hasKey, setKey } from "/ui/api.js";
import { showBudget } from "/ui/budget.js";
import { Chart } from "/ui/chart.js";
import { Chat } from "/ui/chat.js";
import { byId, h, setText, show } from "/ui/dom.js";
import { Events } from "/ui/events.js";
import * as format from "/ui/format.js";
import { Models } from "/ui/models.js";
import { Requests } from "/ui/requests.js";
import { Stream } from "/ui/stream.js";

const VIEWS = ["overview", "requests", "chat"];
const chart = new Chart(), models = new Models(), events = new Events(), requests = new Requests(), chat = new Chat();
/** @type {any} */
let status = null;

/** @param {any} snapshot */
function onSnapshot(snapshot) {
  status = snapshot.status;
  show(byId("key"), false);
  show(byId("views"), true);
  show(byId("forget"), hasKey());
  showDaemon();
  showBudget(status);
  chart.add(status);
  models.learn(snapshot.ended);
  models.show(status);
  events.add(snapshot.events, [...status.models.map((/** @type {any} */ model) => model.name), ...status.unloaded]);
  requests.add(snapshot.open, snapshot.ended, snapshot.events, status);
  chat.offer(status);
}

function showDaemon() {
  byId("daemon").replaceChildren(
    h("span", { className: status.state === "serving" ? "good" : "warn" }, status.state),
    h("span.dim", {}, ` ${status.version} · up ${format.duration(status.uptime_s)} · pid ${status.pid}`),
  );
}

/** @param {string} text shown above the page; empty: nothing */
function notice(text) {
  const place = byId("connection");
  setText(place, text);
  show(place, text !== "");
  document.body.classList.toggle("stale", text !== "");
}

const stream = new Stream({
  begins() {
    notice("");
    models.clear();
    events.clear();
    requests.clear();
  },
  snapshot: onSnapshot,
  lost(seconds) {
    notice(`The daemon does not answer. ${status ? "The page shows its last state" : "Is it running? Start it with kvd serve"}; next try in ${seconds} s.`);
  },
  refused(error) {
    if (error.status !== 401) {
      notice(error.message);
      return;
    }
    setText(byId("key-error"), hasKey() ? error.message : "");
    forgetKey();
    show(byId("views"), false);
    show(byId("forget"), false);
    show(byId("key"), true);
    byId("daemon").replaceChildren(h("span.dim", {}, "key required"));
    byId("key-input").focus();
  },
});

byId("key").onsubmit = (/** @type {Event} */ event) => {
  event.preventDefault();
  const input = byId("key-input");
  setKey(input.value.trim());
  input.value = "";
  stream.restart();
};
byId("forget").onclick = () => { forgetKey(); stream.restart(); };

function showView() {
  const [wanted, request] = location.hash.slice(1).split("/");
  const chosen = VIEWS.includes(wanted) ? wanted : VIEWS[0];
  for (const view of document.querySelectorAll("[data-view]")) show(/** @type {HTMLElement} */ (view), /** @type {HTMLElement} */ (view).dataset.view === chosen);
  for (const link of document.querySelectorAll("nav a")) {
    if (link.getAttribute("href") === `#${chosen}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  document.body.dataset.at = chosen;
  if (status) { requests.render(status); chart.draw(); }
  if (request) requests.find(request);
}
addEventListener("hashchange", showView);
showView();
stream.restart();
