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
    expected: str

    def __str__(self):
        verdict = "ok  " if self.holds else "FAIL"
        return f"  {verdict} {self.what}: {self.seen} (expected: {self.expected})"


def near(what, value, bound, tolerance, unit="MB/s", scale=1e6):
    """Check that a figure is this one within a relative tolerance."""
    expected = f"{bound / scale:.2f} {unit}, {tolerance:.0%} off at most"
    seen = f"{value / scale:.3f} {unit}, {value / bound - 1:+.1%}"
    return Check(what, abs(value - bound) <= tolerance * bound, seen, expected)


def least(what, value, bound, unit="MB/s", scale=1e6):
    """Check that a figure is at least this one."""
    return Check(
        what, value >= bound, f"{value / scale:.2f} {unit}", f"at least {bound / scale:.2f} {unit}"
    )


def most(what, value, bound, unit="MB/s", scale=1.0):
    """Check that a figure is at most this one."""
    return Check(
        what, value <= bound, f"{value / scale:.3g} {unit}", f"at most {bound / scale:.3g} {unit}"
    )


def fact(what, holds, seen, expected):
    """Check of a fact."""
    return Check(what, bool(holds), seen, expected)


def contains(what, text, part):
    """Check that a text contains this part."""
    return fact(what, part in text, repr(text[-600:]) if part not in text else repr(part), f"{part!r} in it")


def judge(case):
    """Runs a case, a function that returns its checks. A script that fails becomes a failed check.
    """
    try:
        return case()
    except ScriptFailed as error:
        return [fact("the case", False, str(error), "ends without an error")]
    except GuestFailed as error:
        raise GuestFailed(f"the machine is lost: {error}") from error
