// @ts-check
/** Requests to the daemon, with the key that this tab keeps. */

const KEY = "kvd-key";

/** An answer that is an error. */
export class Refused extends Error {
  /** @param {number} status @param {string} message @param {string} code */
  constructor(status, message, code) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

export const hasKey = () => sessionStorage.getItem(KEY) !== null;
/** @param {string} key */
export const setKey = (key) => sessionStorage.setItem(KEY, key);
export const forgetKey = () => sessionStorage.removeItem(KEY);

/**
 * Send JSON; throws `Refused` for an error answer, and TypeError if the daemon does not answer.
 * @param {string} path @param {unknown} body @param {AbortSignal} [signal]
 * @returns {Promise<Response>}
 */
export async function post(path, body, signal) {
  /** @type {Record<string, string>} */
  const headers = { "Content-Type": "application/json" };
  const key = sessionStorage.getItem(KEY);
  if (key !== null) headers.Authorization = `Bearer ${key}`;
  const answer = await fetch(path, {
    method: "POST", headers, body: JSON.stringify(body), signal, cache: "no-store",
  });
  if (answer.ok) return answer;
  const { error } = await answer.json().catch(() => ({ error: null }));
  throw new Refused(answer.status, error?.message ?? answer.statusText, error?.code ?? "");
}

/**
 * Operate on a model: `load`, `unload` or `policy`.
 * @param {string} op @param {string} model @param {Record<string, unknown>} [fields]
 */
export async function operate(op, model, fields = {}) {
  return (await post("/ui/operations", { op, model, ...fields })).json();
}

/**
 * Yield the data of server-sent events. EventSource cannot send a key, so this reads the stream.
 * @param {Response} answer
 * @returns {AsyncGenerator<{data?: string, comment?: string}>}
 */
export async function* events(answer) {
  if (!answer.body) return;
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const lines = (rest + value).split("\n");
      rest = lines.pop() ?? "";
      for (const line of lines) {
        if (line.startsWith("data: ")) yield { data: line.slice(6) };
        else if (line.startsWith(":")) yield { comment: line.slice(1).trim() };
      }
    }
  } finally {
    reader.cancel().catch(() => undefined);
  }
}
