// @ts-check
/** The snapshots of the daemon: one a second while the tab is visible, again after a loss. */

import { Refused, events, post } from "/ui/api.js";

const LONGEST_PAUSE_S = 8;
const SILENCE_S = 6;

/**
 * @typedef {object} Handlers
 * @property {() => void} begins a new stream: its first snapshot has everything
 * @property {(snapshot: any) => void} snapshot
 * @property {(error: Refused) => void} refused the daemon asks for a key, or refuses this page
 * @property {(seconds: number) => void} lost the daemon does not answer; tried again after seconds
 */

export class Stream {
  /** @param {Handlers} handlers */
  constructor(handlers) {
    this.handlers = handlers;
    /** @type {AbortController | null} */
    this.open = null;
    this.pause = 1;
    this.timer = 0;
    document.addEventListener("visibilitychange", () => this.restart());
  }

  /** Open the stream, or open it again with another key. */
  restart() {
    clearTimeout(this.timer);
    this.open?.abort();
    this.open = null;
    if (!document.hidden) this.run(new AbortController());
  }

  /** @param {AbortController} own */
  async run(own) {
    this.open = own;
    let watchdog = 0;
    const alive = () => { clearTimeout(watchdog); watchdog = setTimeout(() => own.abort("silent"), SILENCE_S * 1000); };
    try {
      alive();
      const answer = await post("/ui/stream", {}, own.signal);
      this.handlers.begins();
      for await (const { data } of events(answer)) {
        alive();
        this.pause = 1;
        if (data) this.handlers.snapshot(JSON.parse(data));
      }
      throw new TypeError("the daemon ended the stream");
    } catch (error) {
      if (this.open === own) this.failed(error);
    } finally {
      clearTimeout(watchdog);
    }
  }

  /** @param {unknown} error */
  failed(error) {
    this.open = null;
    if (error instanceof Refused && error.status !== 429 && error.status < 500) {
      this.handlers.refused(error);
      return;
    }
    this.handlers.lost(this.pause);
    this.timer = setTimeout(() => this.restart(), this.pause * 1000);
    this.pause = Math.min(LONGEST_PAUSE_S, this.pause * 2);
  }
}
