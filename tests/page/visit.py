"""A browser that looks at the page, and does not let anything pass: what the console says, what the
content security policy refuses and what a script throws fails the scenario.

Debian's Chromium, driven by Playwright (`scripts/python-clients`). Nothing is judged by the clock:
what is awaited has a deadline, after which nobody would wait any longer.
"""

import re
from contextlib import contextmanager

from playwright.sync_api import expect, sync_playwright

DEADLINE_MS = 120_000
# A chart that has figures says so.
KNOWN = re.compile(" now, ")
DESK, PHONE = (1440, 900), (390, 844)
# Its sandbox needs what root in a container does not have, and the page is our own.
OPTIONS = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
expect.set_options(timeout=DEADLINE_MS)

# Before any script of the page.
WATCHED = """
window.refused = [];
document.addEventListener("securitypolicyviolation", (event) =>
    window.refused.push(`${event.violatedDirective}: ${event.blockedURI || event.sample}`));
"""


@contextmanager
def browser(scrollbars=False):
    """One that hides scrollbars, as pictures want it, or has them as wide as those of a desk."""
    left_out = ["--hide-scrollbars"] if scrollbars else []
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(
            executable_path="/usr/bin/chromium", args=OPTIONS, ignore_default_args=left_out
        )
        try:
            yield started
        finally:
            started.close()


class Visit:
    """One reader, in a context of its own. Use it in a `with` statement."""

    def __init__(self, browser, url, size=DESK, dark=False, prepare=None, allowed=()):
        self.context = browser.new_context(
            viewport={"width": size[0], "height": size[1]},
            color_scheme="dark" if dark else "light",
            timezone_id="UTC",
            reduced_motion="reduce",
        )
        self.context.set_default_timeout(DEADLINE_MS)
        self.url, self.said, self.allowed = url, [], allowed
        self.page = self.context.new_page()
        self.page.on("console", self._console)
        self.page.on("pageerror", lambda error: self.said.append(f"thrown: {error}"))
        self.context.add_init_script(WATCHED)
        if prepare:
            prepare(self.page)

    def __enter__(self):
        return self

    def __exit__(self, kind, *_):
        try:
            if kind is None:
                self.is_clean()
            elif self.said:
                print("the browser said:", *self.said, sep="\n  ")
        finally:
            self.context.close()

    def _console(self, message):
        # A daemon that keeps no events says so with 404, and the page leaves their part out. Previews
        # are made in spare time: a busy machine has none, says so with 503, and the page asks again.
        url = message.location.get("url", "")
        is_meant = url.endswith("/api/v1/events") and "404" in message.text or url.endswith("/preview") and "503" in message.text
        if message.type in ("error", "warning") and not is_meant:
            self.said.append(f"{message.type}: {message.text}")

    def is_clean(self):
        refused = self.page.evaluate("window.refused")
        assert refused == [], f"the content security policy refused {refused}"
        said = [line for line in self.said if not any(part in line for part in self.allowed)]
        assert said == [], f"the browser said {said}"

    def open(self, fragment=""):
        self.page.goto(self.url + fragment)
        self.is_live()
        return self.page

    def is_live(self):
        expect(self.page.locator("#live")).to_have_text("live")

    def row(self, name):
        """The row of the tree that has this name, letter by letter."""
        return self.page.locator(".rows [role=row]:visible").filter(has=self.page.locator(f".name:text-is({quoted(name)})"))

    def choose(self, name):
        self.row(name).click()
        expect(self.page.locator("#detail-title")).to_have_text(name)

    def presses(self, key, times=1):
        for _ in range(times):
            self.page.keyboard.press(key)

    def tabs_to(self, label, most=80):
        """Presses Tab until what has this label has the focus."""
        for _ in range(most):
            self.page.keyboard.press("Tab")
            if self.page.evaluate("document.activeElement.getAttribute('aria-label') ?? document.activeElement.textContent") == label:
                return
        raise AssertionError(f"{label} is not reached by {most} times Tab")


def quoted(text):
    """As a string of a selector."""
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
