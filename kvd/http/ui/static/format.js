// @ts-check
/** Texts of numbers, as `kvctl` writes them. */

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];

/** @param {number} bytes @returns {string} such as `1.5 GiB` */
export function bytes(bytes) {
  let value = bytes, unit = 0;
  while (Math.abs(value) >= 1024 && unit < UNITS.length - 1) { value /= 1024; unit += 1; }
  return `${unit === 0 || value >= 100 ? Math.round(value) : value.toFixed(1)} ${UNITS[unit]}`;
}

/** @param {number} value @returns {string} with separators of thousands */
export const count = (value) => value.toLocaleString("en-US");

/** @param {number | null | undefined} seconds @returns {string} such as `38 ms`, `1.2 s`, `3 min` */
export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "";
  if (seconds < 1) return `${Math.max(1, Math.round(seconds * 1000))} ms`;
  if (seconds < 60) return `${seconds.toFixed(1)} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min ${Math.floor(seconds % 60)} s`;
  if (seconds < 86400) return `${Math.floor(seconds / 3600)} h ${Math.floor((seconds % 3600) / 60)} min`;
  return `${Math.floor(seconds / 86400)} d ${Math.floor((seconds % 86400) / 3600)} h`;
}

/** @param {number} at seconds since 1970 @returns {string} time of day */
export const clock = (at) => new Date(at * 1000).toTimeString().slice(0, 8);

/** @param {number[]} values @returns {number | null} the median; null without values */
export function median(values) {
  if (values.length === 0) return null;
  const sorted = [...values].sort((a, b) => a - b);
  return sorted[Math.floor(sorted.length / 2)];
}

/** Rounded down: 100% means all. @param {number} part @param {number} whole */
export const percent = (part, whole) => (whole > 0 ? `${Math.floor((100 * part) / whole)}%` : "");
