"""Results of a row and its targets: medians, paired ratios, verdicts. Pure arithmetic.

Ratios by pairs, because the host's speed drifts by tens of percent within minutes. The contenders
of a row run one after another, round by round; a ratio is taken inside each round, and the median
of the rounds counts.

Never measures, never prints.
"""

from dataclasses import dataclass
from statistics import median


class Results:
    """The samples of one row: one sample per round for each contender, in the order of the rounds.
    """

    def __init__(self, samples):
        self.samples = samples

    def of(self, contender=None):
        """The samples of one contender; by default of the only one."""
        if contender is None:
            (samples,) = self.samples.values()
            return samples
        return self.samples[contender]

    def median(self, contender, key):
        """The median of one figure of one contender."""
        return median(sample[key] for sample in self.samples[contender])

    def spread(self, contender, key):
        """Largest minus smallest sample, relative to the median: the noise of the figure."""
        values = [sample[key] for sample in self.samples[contender]]
        return (max(values) - min(values)) / (median(values) or 1.0)

    def ratio(self, contender, other, key):
        """The median over the rounds of one contender's figure divided by that of its peer in the
        same round.
        """
        pairs = zip(self.samples[contender], self.samples[other], strict=True)
        return median(mine[key] / (theirs[key] or float("nan")) for mine, theirs in pairs)

    def best(self, contenders, key, largest):
        """The contender with the best median."""
        choose = max if largest else min
        return choose(contenders, key=lambda name: self.median(name, key))


@dataclass(frozen=True)
class Verdict:
    """One target, the measured value, and True if the target is met."""

    target: str
    measured: str
    passed: bool


@dataclass(frozen=True)
class Faster:
    """Target: a contender reaches `factor` times the best of `peers`, or `cap` times a bound if
    that is less.

    A bound is the throughput of the disk or a socket alone: if the peers are close to it, no factor
    over them is possible. Of several bounds the lowest counts.
    """

    contender: str
    factor: float
    peers: tuple
    key: str = "iops"
    cap: tuple = None  # (factor, contender, ...)

    def judge(self, results):
        peer = results.best(self.peers, self.key, largest=True)
        ratio = results.ratio(self.contender, peer, self.key)
        target, measured, passed = (
            f"≥ {self.factor:.2f} × {peer}",
            f"{ratio:.2f} ×",
            ratio >= self.factor,
        )
        if self.cap:
            cap_factor, *limits = self.cap
            limit = min(limits, key=lambda name: results.median(name, self.key))
            of_limit = results.ratio(self.contender, limit, self.key)
            target += f" or ≥ {cap_factor:.2f} × {limit}"
            measured += f", {of_limit:.2f} ×"
            passed = passed or of_limit >= cap_factor
        return Verdict(target, measured, passed)


@dataclass(frozen=True)
class Lower:
    """Target: a contender's figure is at most `factor` times the best peer's, the lowest one."""

    contender: str
    factor: float
    peers: tuple
    key: str

    @property
    def figure(self):
        """The figure's name in the text of the target."""
        return self.key

    def judge(self, results):
        peer = results.best(self.peers, self.key, largest=False)
        ratio = results.ratio(self.contender, peer, self.key)
        target = f"{self.figure} ≤ {self.factor:.2f} × {peer}"
        return Verdict(target, f"{ratio:.2f} ×", ratio <= self.factor)


@dataclass(frozen=True)
class Cheaper(Lower):
    """Target: a contender's CPU time per request is at most `factor` times the best peer's."""

    key: str = "cpu_us"

    @property
    def figure(self):
        return "CPU/request"


@dataclass(frozen=True)
class Within:
    """Target: a rate is `expected` within `tolerance` (relative) in every round; a limit has no
    median.
    """

    expected: float
    tolerance: float
    key: str = "rate"

    def judge(self, results):
        errors = [sample[self.key] / self.expected - 1 for sample in results.of()]
        worst = max(errors, key=abs)
        return Verdict(
            f"{self.expected:,.0f}/s within {self.tolerance:.1%}",
            f"{worst:+.2%}",
            abs(worst) <= self.tolerance,
        )


@dataclass(frozen=True)
class AtMost:
    """Target: a figure is at most a bound in every round; `show` formats a value.
    `contender` is needed if there are several.
    """

    bound: float
    key: str
    show: object
    contender: str = None

    def judge(self, results):
        samples = results.of(self.contender)
        worst = max(sample[self.key] for sample in samples)
        target = f"{self.key} ≤ {self.show(self.bound)}"
        return Verdict(
            f"{self.contender}: {target}" if self.contender else target,
            self.show(worst),
            worst <= self.bound,
        )


@dataclass(frozen=True)
class MedianAtMost:
    """Target: the median of a figure of the only contender is at most a bound."""

    bound: float
    key: str
    show: object

    def judge(self, results):
        middle = median(sample[self.key] for sample in results.of())
        return Verdict(f"{self.key} ≤ {self.show(self.bound)}", self.show(middle), middle <= self.bound)


@dataclass(frozen=True)
class AtLeast:
    """Target: the median of a contender's figure is at least a bound."""

    contender: str
    bound: float
    key: str
    show: object

    def judge(self, results):
        middle = results.median(self.contender, self.key)
        target = f"{self.contender}: {self.key} ≥ {self.show(self.bound)}"
        return Verdict(target, self.show(middle), middle >= self.bound)


@dataclass(frozen=True)
class About:
    """Target: the median of a contender's figure is `expected` within a relative `tolerance`."""

    contender: str
    expected: float
    tolerance: float
    key: str
    show: object

    def judge(self, results):
        error = results.median(self.contender, self.key) / self.expected - 1
        target = (
            f"{self.contender}: {self.key} = {self.show(self.expected)} within {self.tolerance:.0%}"
        )
        return Verdict(target, f"{error:+.2%}", abs(error) <= self.tolerance)


@dataclass(frozen=True)
class AtMostMore:
    """Target: a contender's figure exceeds its peer's by at most this amount, in the median of the
    rounds.
    """

    contender: str
    other: str
    bound: float
    key: str

    def judge(self, results):
        pairs = zip(results.of(self.contender), results.of(self.other), strict=True)
        more = median(mine[self.key] - theirs[self.key] for mine, theirs in pairs)
        target = f"{self.contender}: at most {self.bound:.0f} {self.key} more than {self.other}"
        return Verdict(target, f"{more:+.0f} {self.key}", more <= self.bound)
