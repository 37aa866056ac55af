"""What a case showed, beside what it should have: checks, their verdicts, and how often a case is tried.

Why a case is tried again: the machine is emulated on processors that do other work too. One that is stopped for a while makes a
measurement miss; it does not make one pass. Nor does a kernel that the emulator has broken. Checks that neither can explain are
`exact`, and fail a case at once, or, where the machine stood still so long that a program may not have come to what it was started for, in
every try. Where it stood still in most of the tries, it was not weir that was measured: the short form says so and goes on, the full one
fails.

Never measures anything.
"""

import threading
import time
from dataclasses import dataclass, replace

from guest import GuestDied, GuestFailed, ScriptFailed

ATTEMPTS = 5
# A thread that wants to run again after so many seconds, how late a busy machine lets it be, and the part of a try in which it may be
# later, if the try is to say something.
WINK, STILL = 0.001, 0.02
MOST_STILL = 0.03


@dataclass(frozen=True)
class Check:
    """One figure or fact, and the verdict on it."""

    what: str
    holds: bool
    seen: str
    asked: str
    exact: bool = False

    def __str__(self):
        verdict = "ok  " if self.holds else "FAIL"
        return f"  {verdict} {self.what}: {self.seen} (asked: {self.asked})"


def near(what, value, wanted, tolerance, unit="MB/s", scale=1e6):
    """A figure that is to be this one, give or take a part of it."""
    asked = f"{wanted / scale:.2f} {unit}, {tolerance:.0%} off at most"
    return Check(what, abs(value - wanted) <= tolerance * wanted, f"{value / scale:.3f} {unit}, {value / wanted - 1:+.1%}", asked)


def least(what, value, wanted, unit="MB/s", scale=1e6):
    """A figure that is to be this one or more."""
    return Check(what, value >= wanted, f"{value / scale:.2f} {unit}", f"at least {wanted / scale:.2f} {unit}")


def most(what, value, wanted, unit="MB/s", scale=1.0):
    """A figure that is to be this one or less."""
    return Check(what, value <= wanted, f"{value / scale:.3g} {unit}", f"at most {wanted / scale:.3g} {unit}")


def fact(what, holds, seen, asked):
    """Something that is so or not, however slow the machine."""
    return Check(what, bool(holds), seen, asked, exact=True)


def contains(what, text, part):
    """A text in which another is found."""
    return fact(what, part in text, repr(text[-600:]) if part not in text else repr(part), f"{part!r} in it")


def by_now(what, text, part):
    """A text in which another is found after a while that is long enough, unless the machine was stopped in it."""
    return replace(contains(what, text, part), exact=False)


def checks_of(case, guest):
    """Its checks in a guest that is alive; one that fails, if it did not get so far."""
    try:
        guest.alive()
        return case()
    except (ScriptFailed, GuestDied) as error:
        return [Check("the case", False, str(error), "comes to its end")]
    except GuestFailed as error:
        return [fact("the case", False, str(error), "comes to its end")]


class Stillness:
    """While it is entered, sees in which part of the time the machine stood still: the time in which a thread could not run."""

    def __enter__(self):
        self.part = 0.0
        self.over = threading.Event()
        self.watch = threading.Thread(target=self._look, daemon=True)
        self.watch.start()
        return self

    def __exit__(self, *_):
        self.over.set()
        self.watch.join()

    def _look(self):
        begin, still, is_over = time.monotonic(), 0.0, False
        while not is_over:
            before = time.monotonic()
            is_over = self.over.wait(WINK)
            late = time.monotonic() - before - WINK
            still += late if late > STILL else 0.0
        self.part = still / (time.monotonic() - begin)


def attempt(case, guest, must_judge, print_line=print):
    """Runs a case, a function that returns its checks, until all hold or it was tried often enough. Whether they do, or need not be judged."""
    spoilt = 0
    for number in range(1, ATTEMPTS + 1):
        with Stillness() as stillness:
            checks = checks_of(case, guest)
        failed = [check for check in checks if not check.holds]
        is_wrong = any(check.exact for check in failed)
        is_spoilt = stillness.part > MOST_STILL
        spoilt += is_spoilt
        is_to_judge = must_judge or 2 * spoilt <= ATTEMPTS
        again = failed and number < ATTEMPTS and (is_spoilt if is_wrong else is_to_judge)
        for check in failed if again else checks:
            print_line(str(check))
        if not again:
            break
        print_line(f"  once more, after attempt {number}")
    if not failed or is_wrong or is_to_judge:
        return not failed
    print_line("  not judged: the machine stood still")
    return True
