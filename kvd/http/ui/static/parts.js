// @ts-check
/** The parts of a model's grant. They add up to the grant, whatever a worker has reported. */

/**
 * @typedef {object} Part
 * @property {string} key `weights`, `runtime`, `kv0`, `kv1`, …, `reserved`, `prefixes` or `spare`
 * @property {string} name
 * @property {number} bytes
 */

/** @param {any} model a `ModelStatus` @returns {string[]} KV schemes by precision level */
export function schemes(model) {
  if (model.info?.kv_schemes?.length) return model.info.kv_schemes;
  return [model.info?.kv_scheme ?? "KV"];
}

/**
 * Split a model's grant: its base, what rows hold and may need, prefixes, and what is spare.
 * @param {any} model a `ModelStatus` @returns {Part[]}
 */
export function partsOf(model) {
  const { memory, reclaimable } = model.stats;
  let left = model.granted_bytes;
  /** @param {number} bytes */
  const take = (bytes) => { const taken = Math.max(0, Math.min(left, bytes)); left -= taken; return taken; };
  const base = reclaimable.base || 0;
  if (!base) return left ? [{ key: "runtime", name: "loading", bytes: left }] : [];
  const weights = take(Math.min(base, memory.weights));
  const runtime = take(base - weights);
  const spare = take(reclaimable.spare);
  const prefixes = take(reclaimable.prefixes);
  const levels = memory.kv_levels;
  const used = levels.reduce((/** @type {number} */ a, /** @type {number} */ b) => a + b, 0);
  const scale = used > 0 ? Math.min(1, Math.max(0, used - prefixes) / used) : 0;
  const kv = levels.map((/** @type {number} */ bytes, /** @type {number} */ level) => ({
    key: `kv${Math.min(level, 3)}`, name: `KV ${schemes(model)[level] ?? level}`, bytes: take(bytes * scale),
  }));
  return [
    { key: "weights", name: "weights", bytes: weights },
    { key: "runtime", name: "runtime", bytes: runtime },
    ...kv,
    { key: "reserved", name: "reserved for rows", bytes: left },
    { key: "prefixes", name: "prefixes", bytes: prefixes },
    { key: "spare", name: "spare", bytes: spare },
  ].filter((part) => part.bytes > 0);
}

/** @param {any} model @returns {string} such as `k8v8 70% k8v4 30%` */
export function levelText(model) {
  const levels = model.stats.memory.kv_levels;
  const total = levels.reduce((/** @type {number} */ a, /** @type {number} */ b) => a + b, 0);
  const names = schemes(model);
  if (!total) return model.info?.kv_scheme ?? "";
  return levels
    .map((/** @type {number} */ bytes, /** @type {number} */ level) => ({ name: names[level] ?? String(level), bytes }))
    .filter((/** @type {{bytes: number}} */ part) => part.bytes > 0)
    .map((/** @type {{name: string, bytes: number}} */ { name, bytes }) => (bytes === total ? name : `${name} ${Math.round((100 * bytes) / total)}%`))
    .join(" ");
}
