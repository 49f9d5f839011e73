// @ts-check
/** A conversation over `/v1/chat/completions`, streamed. */

import { events, post } from "/ui/api.js";
import { byId, h, setText, show } from "/ui/dom.js";
import * as format from "/ui/format.js";

/** @typedef {{role: string, content: string | null, tool_calls?: any[], tool_call_id?: string, reasoning_content?: string}} Message */

export class Chat {
  constructor() {
    /** @type {Message[]} */
    this.messages = [];
    /** @type {AbortController | null} */
    this.running = null;
    this.list = byId("chat-messages");
    this.input = byId("chat-input");
    byId("chat-form").onsubmit = (/** @type {Event} */ event) => { event.preventDefault(); this.send(); };
    byId("chat-stop").onclick = () => this.stop();
    byId("chat-new").onclick = () => this.clear();
    this.input.onkeydown = (/** @type {KeyboardEvent} */ event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); this.send(); }
    };
    document.addEventListener("keydown", (event) => { if (event.key === "Escape" && this.running) this.stop(); });
    this.clear();
  }

  /** Offer the models that requests can name, loaded ones first. @param {any} status */
  offer(status) {
    const select = byId("chat-model"), chosen = select.value;
    const names = [...status.models.map((/** @type {any} */ model) => model.name), ...status.unloaded];
    if (names.join("\n") === [...select.options].map((option) => option.value).join("\n")) return;
    select.replaceChildren(...names.map((name) => h("option", { value: name }, name)));
    if (names.includes(chosen)) select.value = chosen;
  }

  clear() {
    this.stop();
    this.running = null; // what still arrives belongs to the conversation that is dropped
    this.ended();
    this.messages = [];
    this.list.replaceChildren(h("p.empty", {}, "The conversation stays in this tab."));
    this.input.focus();
  }

  stop() { this.running?.abort(); }

  /** Offer to send again. */
  ended() {
    show(byId("chat-stop"), false);
    show(byId("chat-send"), true);
  }

  send() {
    const text = this.input.value.trim();
    if (this.running || !text || !byId("chat-model").value) return;
    if (!this.tools()) return;
    this.input.value = "";
    for (const form of this.list.querySelectorAll("form.results")) form.remove();
    this.append({ role: "user", content: text });
    this.answer();
  }

  /** @param {Message} message */
  append(message) {
    if (!this.messages.length) this.list.replaceChildren();
    this.messages.push(message);
    const body = h("div.text");
    renderText(body, message.content ?? "");
    this.list.append(h(`article.message.${message.role}`, {}, h("h3", {}, message.role === "user" ? "You" : "Tool result"), body));
    this.scroll(true);
  }

  /** @returns {{tools?: any[]} | null} null if the text is not a list */
  tools() {
    const text = byId("chat-tools").value.trim();
    setText(byId("chat-tools-error"), "");
    if (!text) return {};
    try {
      const tools = JSON.parse(text);
      if (!Array.isArray(tools)) throw new SyntaxError("the tools are not a list: put [ ] around them");
      return { tools };
    } catch (error) {
      setText(byId("chat-tools-error"), `Tools: ${/** @type {Error} */ (error).message}`);
      document.querySelector("details.more")?.setAttribute("open", "");
      byId("chat-tools").focus();
      return null;
    }
  }

  request() {
    const system = byId("chat-system").value.trim();
    const reasoning = byId("chat-reasoning").value;
    const tools = this.tools() ?? {};
    return {
      model: byId("chat-model").value,
      messages: [...(system ? [{ role: "system", content: system }] : []), ...this.messages],
      temperature: Number(byId("chat-temperature").value),
      max_tokens: Number(byId("chat-tokens").value) || undefined,
      ...(reasoning ? { reasoning_effort: reasoning } : {}),
      ...(tools.tools ? { ...tools, tool_choice: byId("chat-choice").value } : {}),
      stream: true, stream_options: { include_usage: true },
    };
  }

  async answer() {
    const own = (this.running = new AbortController());
    const request = this.request();
    const answer = new Answer(request.model);
    this.list.append(answer.node);
    show(byId("chat-stop"), true);
    show(byId("chat-send"), false);
    this.scroll(true);
    try {
      const reply = await post("/v1/chat/completions", request, own.signal);
      for await (const { data, comment } of events(reply)) {
        if (data && data !== "[DONE]") answer.take(JSON.parse(data));
        else if (comment) answer.note(comment);
        this.scroll(false);
      }
      answer.ended("");
    } catch (error) {
      answer.ended(own.signal.aborted ? "stopped" : /** @type {Error} */ (error).message, !own.signal.aborted);
    }
    if (this.running !== own) return;
    this.running = null;
    this.ended();
    if (answer.content || answer.asks) this.messages.push(answer.message());
    if (answer.asks) this.ask(answer);
    if (document.activeElement === document.body) this.input.focus();
    this.scroll(false);
  }

  /** Ask for the results of calls; the conversation goes on when all are given. @param {Answer} answer */
  ask(answer) {
    const fields = answer.calls.map((call) => ({ call, field: h("textarea.code", { rows: 2, ariaLabel: `Result of ${call.function.name}` }) }));
    const form = h("form.results", {}, ...fields.flatMap(({ call, field }) => [h("p.dim", {}, `Result of ${call.function.name}`), field]), h("button", {}, "Send results"));
    form.onsubmit = (/** @type {Event} */ event) => {
      event.preventDefault();
      if (this.running) return;
      form.remove();
      for (const { call, field } of fields) this.append({ role: "tool", tool_call_id: call.id, content: field.value });
      this.answer();
    };
    answer.node.append(form);
  }

  /** Follow the newest text, unless the reader has scrolled up. @param {boolean} always */
  scroll(always) {
    const { scrollHeight, scrollTop, clientHeight } = this.list;
    if (always || scrollHeight - scrollTop - clientHeight < 120) this.list.scrollTop = scrollHeight;
  }
}

/** One answer while it arrives. */
class Answer {
  /** @param {string} model */
  constructor(model) {
    this.content = "";
    this.reasoning = "";
    /** @type {any[]} */
    this.calls = [];
    this.began = performance.now();
    /** @type {number | null} */
    this.first = null;
    /** @type {any} */
    this.usage = null;
    /** @type {any} */
    this.kvd = null;
    this.reason = "";
    this.thinking = h("details.reasoning", { hidden: true }, h("summary", {}, "Reasoning"), h("div.text"));
    this.body = h("div.text");
    this.callList = h("div.calls");
    this.foot = h("p.foot.num.dim", { role: "status" }, "waiting");
    this.node = h("article.message.assistant", {}, h("h3", {}, model), this.thinking, this.body, this.callList, this.foot);
  }

  /** @param {any} chunk of OpenAI's stream */
  take(chunk) {
    if (chunk.error) throw new Error(chunk.error.message);
    if (chunk.usage) this.usage = chunk.usage;
    const choice = chunk.choices?.[0];
    if (chunk.kvd ?? choice?.kvd) this.kvd = chunk.kvd ?? choice.kvd;
    if (!choice) return;
    const { content, reasoning_content: reasoning, tool_calls: calls } = choice.delta ?? {};
    if ((content || reasoning || calls) && this.first === null) this.first = performance.now();
    if (content) { this.content += content; renderText(this.body, this.content); }
    if (reasoning) {
      this.reasoning += reasoning;
      show(this.thinking, true);
      setText(this.thinking.lastElementChild, this.reasoning);
    }
    for (const call of calls ?? []) this.takeCall(call);
    if (choice.finish_reason) this.reason = choice.finish_reason;
    this.note(this.reason || "writing");
  }

  /** @param {any} delta */
  takeCall(delta) {
    let call = this.calls[delta.index];
    if (!call) {
      call = this.calls[delta.index] = { id: delta.id, type: "function", function: { name: delta.function.name, arguments: "" } };
      this.callList.append(h("div.call", {}, h("b", {}, `calls ${call.function.name}`), h("pre", { tabIndex: 0 }, h("code"))));
    }
    call.function.arguments += delta.function?.arguments ?? "";
    setText(this.callList.children[delta.index].querySelector("code"), pretty(call.function.arguments));
  }

  /** @param {string} text */
  note(text) { setText(this.foot, text); }

  /** @param {string} text why it ended, if not by itself @param {boolean} [failed] */
  ended(text, failed = false) {
    this.foot.classList.toggle("bad", failed);
    const facts = [text || this.reason || "ended"];
    if (this.usage) {
      const { prompt_tokens: prompt, completion_tokens: made, prompt_tokens_details: details } = this.usage;
      facts.push(`prompt ${format.count(prompt)}, ${format.count(details?.cached_tokens ?? 0)} from cache`, `${format.count(made)} tokens`);
      const seconds = this.first === null ? 0 : (performance.now() - this.first) / 1000;
      if (made > 1 && seconds > 0.2) facts.push(`${Math.round((made - 1) / seconds)} tok/s`);
    }
    if (this.first !== null) facts.push(`first after ${format.duration((this.first - this.began) / 1000)}`);
    if (this.kvd?.level) facts.push(`KV level ${this.kvd.level}`);
    this.note(facts.join(" · "));
  }

  /** Whether its calls are complete: those of an answer that was cut off have half of their arguments. */
  get asks() { return this.reason === "tool_calls"; }

  /** @returns {Message} */
  message() {
    return {
      role: "assistant", content: this.content || null,
      ...(this.reasoning ? { reasoning_content: this.reasoning } : {}),
      ...(this.asks ? { tool_calls: this.calls } : {}),
    };
  }
}

/** @param {string} json @returns {string} indented, or as it is while it is incomplete */
function pretty(json) {
  try { return JSON.stringify(JSON.parse(json), null, 2); } catch { return json; }
}

/** Show plain text; what is between ``` lines is code. @param {HTMLElement} place @param {string} text */
function renderText(place, text) {
  const blocks = text.split(/^```.*$/m);
  blocks.forEach((block, index) => {
    const tag = index % 2 ? "PRE" : "P";
    let node = /** @type {HTMLElement | undefined} */ (place.children[index]);
    if (!node) { node = h(tag.toLowerCase(), tag === "PRE" ? { tabIndex: 0 } : {}); place.append(/** @type {Node} */ (node)); }
    setText(/** @type {Node} */ (node), block.replace(/^\n|\n$/g, ""));
  });
}
