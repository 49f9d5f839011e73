// @ts-check
/** Elements without HTML text: everything that a model or a client wrote stays text. */

/** @param {string} id @returns {any} the element; the page's own HTML has it */
export function byId(id) {
  const found = document.getElementById(id);
  if (!found) throw new Error(`the page has no element ${id}`);
  return found;
}

/**
 * Make an element.
 * @param {string} name tag, with classes such as `td.num.right`
 * @param {Record<string, any>} [attributes] properties such as `onclick`, or attributes
 * @param {...(Node | string | null)} children
 * @returns {any}
 */
export function h(name, attributes = {}, ...children) {
  const [tag, ...classes] = name.split(".");
  const made = document.createElement(tag);
  if (classes.length) made.className = classes.join(" ");
  for (const [key, value] of Object.entries(attributes)) {
    if (key in made) /** @type {any} */ (made)[key] = value;
    else if (value !== null && value !== undefined) made.setAttribute(key, value);
  }
  made.append(...children.filter((child) => child !== null));
  return made;
}

/** Set a text only if it changed: a selection in it stays. @param {Node} node @param {string} text */
export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

/** @param {HTMLElement} node @param {boolean} shown */
export function show(node, shown) {
  if (node.hidden === shown) node.hidden = !shown;
}

/**
 * Bring a parent's children into the order of keys: makes missing ones and removes others. Elements
 * that stay keep focus and state.
 * @template T
 * @param {Element} parent
 * @param {T[]} items
 * @param {(item: T) => string} keyOf
 * @param {(item: T) => any} make
 * @param {(node: any, item: T) => void} update
 */
export function reconcile(parent, items, keyOf, make, update) {
  const old = new Map([...parent.children].map((node) => [/** @type {any} */ (node).dataset.key, node]));
  let place = parent.firstElementChild;
  for (const item of items) {
    const key = keyOf(item);
    let node = old.get(key);
    if (node) old.delete(key);
    else { node = make(item); /** @type {any} */ (node).dataset.key = key; }
    update(node, item);
    if (node === place) place = place?.nextElementSibling ?? null;
    else parent.insertBefore(/** @type {Node} */ (node), place);
  }
  for (const node of old.values()) node.remove();
}
