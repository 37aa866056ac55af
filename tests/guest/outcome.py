"""Results of a case: checks and their verdicts.

A case runs once. Its figures use a clock that is independent of the host's load (guest.py), or are
bounds that a slow host cannot break.

Never measures anything.
"""

from dataclasses import dataclass

from guest import GuestFailed, ScriptFailed


@dataclass(frozen=True)
class Check:
    """One figure or fact, and its verdict."""

    what: str
    holds: bool
    seen: str
    asked: str

    def __str__(self):
        verdict = "ok  " if self.holds else "FAIL"
        return f"  {verdict} {self.what}: {self.seen} (asked: {self.asked})"


def near(what, value, wanted, tolerance, unit="MB/s", scale=1e6):
    """Check that a figure is this one within a relative tolerance."""
    asked = f"{wanted / scale:.2f} {unit}, {tolerance:.0%} off at most"
    seen = f"{value / scale:.3f} {unit}, {value / wanted - 1:+.1%}"
    return Check(what, abs(value - wanted) <= tolerance * wanted, seen, asked)


def least(what, value, wanted, unit="MB/s", scale=1e6):
    """Check that a figure is at least this one."""
    return Check(
        what, value >= wanted, f"{value / scale:.2f} {unit}", f"at least {wanted / scale:.2f} {unit}"
    )


def most(what, value, wanted, unit="MB/s", scale=1.0):
    """Check that a figure is at most this one."""
    return Check(what, value <= wanted, f"{value / scale:.3g} {unit}", f"at most {wanted / scale:.3g} {unit}")


def fact(what, holds, seen, asked):
    """Check of a fact."""
    return Check(what, bool(holds), seen, asked)


def contains(what, text, part):
    """Check that a text contains this part."""
    return fact(what, part in text, repr(text[-600:]) if part not in text else repr(part), f"{part!r} in it")


def judge(case):
    """Runs a case, a function that returns its checks. A script that fails becomes a failed check.
    """
    try:
        return case()
    except ScriptFailed as error:
        return [fact("the case", False, str(error), "comes to its end")]
    except GuestFailed as error:
        raise GuestFailed(f"the machine is lost: {error}") from error
