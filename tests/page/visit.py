"""A browser on the page. Messages on the console, violations of the content security policy and
exceptions of scripts fail the scenario.

Debian's Chromium, driven by Playwright (`scripts/python-clients`). Never asserts a duration; every
wait has a generous deadline.
"""

import re
from contextlib import contextmanager

from playwright.sync_api import expect, sync_playwright

DEADLINE_MS = 120_000
# A chart with figures has this in its label.
KNOWN = re.compile(" now, ")
DESK, PHONE = (1440, 900), (390, 844)
# Chromium's sandbox needs privileges that root in a container lacks; the page is trusted.
OPTIONS = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
expect.set_options(timeout=DEADLINE_MS)

# Runs before any script of the page.
WATCHED = """
window.violations = [];
document.addEventListener("securitypolicyviolation", (event) =>
    window.violations.push(`${event.violatedDirective}: ${event.blockedURI || event.sample}`));
"""


@contextmanager
def browser(scrollbars=False):
    """A browser with hidden scrollbars, as for pictures, or with those of a desktop."""
    omitted = ["--hide-scrollbars"] if scrollbars else []
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(
            executable_path="/usr/bin/chromium", args=OPTIONS, ignore_default_args=omitted
        )
        try:
            yield started
        finally:
            started.close()


class Visit:
    """One visit in its own browser context. Use it in a `with` statement."""

    def __init__(self, browser, url, size=DESK, dark=False, prepare=None, allowed=()):
        self.context = browser.new_context(
            viewport={"width": size[0], "height": size[1]},
            color_scheme="dark" if dark else "light",
            timezone_id="UTC",
            reduced_motion="reduce",
        )
        self.context.set_default_timeout(DEADLINE_MS)
        self.url, self.messages, self.allowed = url, [], allowed
        self.page = self.context.new_page()
        self.page.on("console", self._console)
        self.page.on("pageerror", lambda error: self.messages.append(f"thrown: {error}"))
        self.context.add_init_script(WATCHED)
        if prepare:
            prepare(self.page)

    def __enter__(self):
        return self

    def __exit__(self, kind, *_):
        try:
            if kind is None:
                self.is_clean()
            elif self.messages:
                print("messages of the browser:", *self.messages, sep="\n  ")
        finally:
            self.context.close()

    def _console(self, message):
        # A daemon without an event store answers 404, and the page omits that part. Previews use
        # spare CPU time: a busy machine answers 503, and the page retries.
        url = message.location.get("url", "")
        is_expected = (
            url.endswith("/api/v1/events")
            and "404" in message.text
            or url.endswith("/preview")
            and "503" in message.text
        )
        if message.type in ("error", "warning") and not is_expected:
            self.messages.append(f"{message.type}: {message.text}")

    def is_clean(self):
        violations = self.page.evaluate("window.violations")
        assert violations == [], f"violations of the content security policy: {violations}"
        messages = [
            line for line in self.messages if not any(part in line for part in self.allowed)
        ]
        assert messages == [], f"messages of the browser: {messages}"

    def open(self, fragment=""):
        self.page.goto(self.url + fragment)
        self.is_live()
        return self.page

    def is_live(self):
        expect(self.page.locator("#live")).to_have_text("live")

    def row(self, name):
        """The row of the tree with exactly this name."""
        return self.page.locator(".rows [role=row]:visible").filter(has=self.page.locator(f".name:text-is({quoted(name)})"))

    def choose(self, name):
        self.row(name).click()
        expect(self.page.locator("#detail-title")).to_have_text(name)

    def presses(self, key, times=1):
        for _ in range(times):
            self.page.keyboard.press(key)

    def tabs_to(self, label, most=80):
        """Presses Tab until the element with this label has the focus."""
        for _ in range(most):
            self.page.keyboard.press("Tab")
            if self.page.evaluate("document.activeElement.getAttribute('aria-label') ?? document.activeElement.textContent") == label:
                return
        raise AssertionError(f"{label} is not reached by pressing Tab {most} times")


def quoted(text):
    """A string in the syntax of selectors."""
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
