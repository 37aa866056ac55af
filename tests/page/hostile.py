"""Names that could be interpreted as markup, scripts, paths or addresses are shown as names."""

import tempfile

import daemon
import visit
from visit import expect

NAMES = [
    "<img src=x onerror=window.hit=1>",
    "\"><script>window.hit=1</script>",
    "javascript:window.hit=1",
    "a/../b?c=d#e&f%2e;g",
    "__proto__",
    "{{7*7}} ${7*7} `x`",
    "left\u202eright \u00fc\u4e16",
    "long " + "W" * 200,
]
GROUP = "<b onmouseover=window.hit=1>gold</b>"


def run(weir):
    group = f'[group."{GROUP}"]\niops-total = 5000\n'
    config = group + "".join(daemon.disk(name, f"group = '{GROUP}'") for name in NAMES)
    with visit.browser() as browser, tempfile.TemporaryDirectory() as directory:
        with daemon.Daemon(weir, directory, config) as running, visit.Visit(browser, running.url) as reader:
            page = reader.open()
            elements = page.evaluate("[document.scripts.length, document.images.length]")
            page.evaluate(f"sessionStorage.setItem('weir-token', {visit.quoted(running.token)})")
            for number, name in enumerate(NAMES):
                reader.choose(name)
                expect(page.locator(".above button")).to_have_text(GROUP)
                rate = page.get_by_label("iops-total", exact=True)
                rate.fill(str(100 + number))
                expect(page.locator(".preview")).to_contain_text(f"iops-total none → {100 + number}")
                page.get_by_role("button", name="Apply").click()
                expect(page.locator(".result")).to_have_text(f"In force: iops-total none → {100 + number}")
                assert running.limits(name) == {"iops-total": 100 + number}, name
                assert page.locator("#detail > .wrong").inner_text() == "", (
                    f"{name}: the page shows an error"
                )
                # A link with the name leads to it.
                page.reload()
                reader.is_live()
                expect(page.locator("#detail-title")).to_have_text(name)
            assert page.evaluate("[document.scripts.length, document.images.length]") == elements, (
                "a name became markup"
            )
            assert page.evaluate("window.hit") is None, "a name was executed as a script"
            assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), (
                "a long name makes the page scroll sideways"
            )
