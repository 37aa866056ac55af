"""What a case showed, beside what it should have: checks and their verdicts.

A case is tried once. Its figures are of a clock that no other program of the machine slows
(guest.py), or are bounds that a slow machine cannot break.

Never measures anything.
"""

from dataclasses import dataclass

from guest import GuestFailed, ScriptFailed


@dataclass(frozen=True)
class Check:
    """One figure or fact, and the verdict on it."""

    what: str
    holds: bool
    seen: str
    asked: str

    def __str__(self):
        verdict = "ok  " if self.holds else "FAIL"
        return f"  {verdict} {self.what}: {self.seen} (asked: {self.asked})"


def near(what, value, wanted, tolerance, unit="MB/s", scale=1e6):
    """A figure that is to be this one, give or take a part of it."""
    asked = f"{wanted / scale:.2f} {unit}, {tolerance:.0%} off at most"
    seen = f"{value / scale:.3f} {unit}, {value / wanted - 1:+.1%}"
    return Check(what, abs(value - wanted) <= tolerance * wanted, seen, asked)


def least(what, value, wanted, unit="MB/s", scale=1e6):
    """A figure that is to be this one or more."""
    return Check(
        what, value >= wanted, f"{value / scale:.2f} {unit}", f"at least {wanted / scale:.2f} {unit}"
    )


def most(what, value, wanted, unit="MB/s", scale=1.0):
    """A figure that is to be this one or less."""
    return Check(what, value <= wanted, f"{value / scale:.3g} {unit}", f"at most {wanted / scale:.3g} {unit}")


def fact(what, holds, seen, asked):
    """Something that is so or not."""
    return Check(what, bool(holds), seen, asked)


def contains(what, text, part):
    """A text in which another is found."""
    return fact(what, part in text, repr(text[-600:]) if part not in text else repr(part), f"{part!r} in it")


def judge(case):
    """The checks of a case, a function that returns them. A script that fails is a check that does."""
    try:
        return case()
    except ScriptFailed as error:
        return [fact("the case", False, str(error), "comes to its end")]
    except GuestFailed as error:
        raise GuestFailed(f"the machine is lost: {error}") from error
