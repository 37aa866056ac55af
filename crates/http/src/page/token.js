// Dialog for the token, shown when a change needs it; reports a wrong token.

import { Refused, ask, keepToken, place, token } from "./api.js";
import { part, say } from "./element.js";

export class Token {
    constructor(store) {
        this.store = store;
        /// Called once the daemon accepted a token, whichever caller asked for it.
        this.entered = null;
        [this.dialog, this.field, this.wrong, this.button] = ["token-dialog", "token", "token-wrong", "token-button"].map(part);
        this.button.addEventListener("click", () => this.pressed());
        part("token-cancel").addEventListener("click", () => this.dialog.close());
        this.dialog.querySelector("form").addEventListener("submit", (event) => {
            event.preventDefault();
            this.used?.(this.field.value.trim());
        });
        this.dialog.addEventListener("close", () => {
            this.field.value = "";
            this.used = null;
            this.ended?.();
        });
    }

    /// Label of the button, which is present if a token is of use.
    update() {
        this.button.hidden = this.store.access !== "change";
        say(this.button, token() ? "Forget token" : "Enter token");
    }

    pressed() {
        if (token()) {
            keepToken(null);
            this.update();
            return;
        }
        const [any] = this.store.nodes.values();
        if (any) this.right(any);
    }

    /// Asks until the token is right or the dialog is cancelled. An empty change checks the token.
    async right(node) {
        try {
            await this.with((using) => ask("PATCH", `${place(node)}/limits`, { body: {}, using }));
        } catch {
            // The daemon accepted the token and rejected the empty change.
        }
    }

    /// Result of `act` with an accepted token; undefined if the dialog is cancelled.
    async with(act) {
        const kept = token();
        if (kept) {
            try {
                return await act(kept);
            } catch (error) {
                if (!(error instanceof Refused && error.isAboutToken)) throw error;
                keepToken(null);
                this.update();
                return this.question(act, `The token is wrong now: ${error.message}`);
            }
        }
        return this.question(act, "");
    }

    question(act, message) {
        say(this.wrong, message);
        return new Promise((done, failed) => {
            this.ended = () => done(undefined);
            this.used = async (typed) => {
                say(this.wrong, "");
                try {
                    const result = await act(typed);
                    keepToken(typed);
                    this.update();
                    done(result);
                    this.dialog.close();
                    this.entered?.();
                } catch (error) {
                    if (error instanceof Refused && (error.isAboutToken || error.status === 429)) {
                        say(this.wrong, error.status === 429 ? error.message : `Wrong token: ${error.message}`);
                        this.field.select();
                        return;
                    }
                    // The token was accepted, the change was not.
                    if (error instanceof Refused) keepToken(typed);
                    this.update();
                    failed(error);
                    this.dialog.close();
                }
            };
            this.dialog.showModal();
            this.field.focus();
        });
    }
}
