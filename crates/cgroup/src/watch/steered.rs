//! One pool of limits at work: its control groups are looked at when due, and told their rates.
//!
//! A control group that is gone, or whose disk is, leaves its part to the others; one whose files
//! cannot be read has no burst. Both are tried again every second, and each problem is logged once,
//! as is its end. Never tells a disk what was meant for another that had its number.

use std::path::PathBuf;

use block::device::{Number, Roots};
use policy::{
    steering::{Passed, Pool, Rates},
    throttle::{Counters, Enforcement, Limits},
    time::{Duration, Instant},
    watermark::{Taken, Watermark},
};

use super::{
    lending::Doing,
    levels,
    reading::{self, Reading},
};
use crate::{
    control_group::ControlGroup,
    hierarchy::Hierarchy,
    limit::{kept::Entry, pools::Sharing, settling, tell},
};

/// How often what is in trouble is tried again.
const AGAIN: Duration = Duration::from_secs(1);
/// Looks at such an interval are made a little sooner, at a multiple of [`TOGETHER`].
const UNHURRIED: Duration = Duration::from_millis(500);
const TOGETHER: Duration = Duration::from_millis(100);

/// What holds for a control group in trouble, and where the kernel refuses that.
const WITHOUT_BURSTS: &str = "it has its limits without bursts meanwhile, others carry on";
const AS_BEFORE: &str = "what it was told before, if anything, still holds; others carry on";

#[derive(Debug)]
pub(super) struct Steered {
    pub(super) sharing: Sharing,
    roots: Roots,
    pool: Pool,
    members: Vec<Controlled>,
    /// Several, or both directions, share a limit: then it matters who waits.
    divided: bool,
    /// Total of all members at the last look, and the rate since the one before, for the watermark.
    taken: Option<(Instant, [Counters; 2])>,
    rate: Option<Taken>,
    /// When the next member is due; cached, because all pools are asked at every round.
    due: Instant,
    /// When a burst can be over at the earliest, by the last decision.
    bursts_end: Option<Instant>,
    /// Something has changed that rates depend on.
    undecided: bool,
    /// The buckets when they were last kept.
    kept: [u64; 6],
}

#[derive(Debug)]
struct Controlled {
    group: ControlGroup,
    device: Number,
    entry: Entry,
    reading: Option<Reading>,
    /// It was told a limit, and that was taken.
    in_force: bool,
    due: Option<Instant>,
    /// What is wrong with it, logged already.
    trouble: Option<String>,
}

#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Round {
    pub(super) looks: usize,
    pub(super) told: usize,
}

/// Whether two factors differ by less than is worth a decision.
fn nearly_same(one: Enforcement, other: Enforcement) -> bool {
    match (one, other) {
        (Enforcement::Scaled(one), Enforcement::Scaled(other)) => {
            let (one, other) = (one.thousandths(), other.thousandths());
            one.abs_diff(other) * 50 < one.max(other)
        }
        _ => one == other,
    }
}

impl Steered {
    pub(super) fn new(
        hierarchy: &Hierarchy,
        sharing: &Sharing,
        left: Option<&levels::Left>,
        now: Instant,
    ) -> anyhow::Result<Self> {
        let mut members = Vec::new();
        for entry in &sharing.members {
            let group = hierarchy.group(&entry.cgroup)?;
            members.push(Controlled {
                group,
                device: entry.device()?,
                entry: entry.clone(),
                reading: None,
                in_force: false,
                due: Some(now),
                trouble: None,
            });
        }
        let pool = match left {
            None => sharing.pool(now),
            Some(left) => {
                let mut pool = sharing.pool(left.at());
                let passed: Vec<_> = sharing
                    .members
                    .iter()
                    .map(|entry| left.passed(&entry.cgroup, entry.device().ok()?))
                    .collect();
                pool.resume(left.at(), left.levels, &passed);
                pool
            }
        };
        let divided = sharing.limits_are_divided();
        Ok(Self {
            sharing: sharing.clone(),
            roots: hierarchy.roots.of_devices(),
            pool,
            members,
            divided,
            taken: None,
            rate: None,
            due: now,
            bursts_end: None,
            undecided: true,
            kept: [0; 6],
        })
    }

    pub(super) fn members(&self) -> impl Iterator<Item = (&ControlGroup, Number)> {
        self.members.iter().map(|member| (&member.group, member.device))
    }

    /// With repetitions.
    pub(super) fn devices(&self) -> impl Iterator<Item = Number> {
        self.members.iter().map(|member| member.device)
    }

    /// At once if something has changed since the last decision; [`Instant::MAX`] if never.
    pub(super) fn due(&self) -> Instant {
        if self.undecided { Instant::ZERO } else { self.due }
    }

    pub(super) fn is_urgent(&self, now: Instant) -> bool {
        self.undecided || self.is_burst_over(now)
    }

    fn is_burst_over(&self, now: Instant) -> bool {
        self.bursts_end.is_some_and(|end| end <= now)
    }

    /// Whether buckets have changed since [`Steered::kept`].
    pub(super) fn has_spent(&self) -> bool {
        self.pool.levels() != self.kept
    }

    pub(super) fn kept(&mut self) {
        self.kept = self.pool.levels();
    }

    pub(super) fn enforcement(&self) -> Enforcement {
        self.pool.enforcement()
    }

    pub(super) fn enforce(&mut self, enforcement: Enforcement, now: Instant, buffer: &mut Vec<u8>) {
        if !nearly_same(self.pool.enforcement(), enforcement) {
            if self.pool.enforcement() == Enforcement::Lifted {
                // What passed until now is not charged to limits that hold from now on.
                (0..self.members.len()).for_each(|index| self.look(index, now, buffer));
            }
            self.pool.enforce(enforcement);
            self.undecided = true;
        }
    }

    /// Other limits, of a cluster's group.
    pub(super) fn put(&mut self, limits: &Limits, now: Instant) {
        if self.pool.limits() != limits {
            self.pool.put(limits, now);
            self.undecided = true;
        }
    }

    /// Whether the kernel has taken what was decided for every control group that is there.
    pub(super) fn is_in_force(&self) -> bool {
        let are_told = |(member, of_pool): (&Controlled, &policy::steering::Member)| {
            member.in_force || of_pool.told() == Some(Rates::NONE) || !member.group.exists()
        };
        !self.undecided && self.members.iter().zip(self.pool.members()).all(are_told)
    }

    pub(super) fn doing(&self, now: Instant) -> Doing {
        Doing { stats: self.pool.stats(), weight: self.pool.weight(now) }
    }

    /// All members are due, those first that were before.
    pub(super) fn look_now(&mut self, now: Instant) {
        let sooner = |due: Option<Instant>| Some(due.map_or(now, |due| due.min(now)));
        self.members.iter_mut().for_each(|member| member.due = sooner(member.due));
        self.due = self.due.min(now);
    }

    /// Looks at due members, at most so many unless a burst may be over, and tells what has
    /// changed.
    pub(super) fn round(&mut self, now: Instant, most: usize, buffer: &mut Vec<u8>) -> Round {
        let mut round = Round::default();
        let most = if self.is_burst_over(now) { usize::MAX } else { most };
        let due =
            |(index, member): (usize, &Controlled)| Some((member.due.filter(|due| *due <= now)?, index));
        let mut order: Vec<(Instant, usize)> = self.members.iter().enumerate().filter_map(due).collect();
        // Who has waited longest comes first, or of many the last would never be looked at.
        order.sort_unstable();
        for (_, index) in order.into_iter().take(most) {
            self.look(index, now, buffer);
            self.members[index].due = None;
            round.looks += 1;
        }
        if round.looks == 0 && !self.undecided {
            return round;
        }
        if round.looks > 0 {
            self.take(now);
        }
        self.undecided = false;
        for (index, rates) in self.pool.decide(now) {
            if self.members[index].reading.is_none() {
                self.pool.not_told(index);
                continue;
            }
            round.told += usize::from(self.tell(index, rates, now));
        }
        self.bursts_end = self.pool.bursts_end(now);
        for index in 0..self.members.len() {
            // Who was due and could not be looked at still is.
            if self.members[index].due.is_none_or(|due| due > now) {
                self.members[index].due = self.next_look(index, now);
            }
        }
        self.due = self.members.iter().filter_map(|member| member.due).min().unwrap_or(Instant::MAX);
        round
    }

    fn next_look(&self, index: usize, now: Instant) -> Option<Instant> {
        if self.members[index].reading.is_none() || self.members[index].trouble.is_some() {
            return Some(now + AGAIN);
        }
        let due = match self.sharing.watermark {
            // Of a cluster's group somebody asks what passes.
            Watermark::ALWAYS if !self.sharing.cluster => self.pool.due(index, now)?,
            _ => self.pool.next_look(index, now),
        };
        // Idle members are looked at together: a wake-up for each of a thousand costs as much
        // again.
        if due.nanos_since(now) < UNHURRIED.as_nanos() as u64 {
            return Some(due);
        }
        Some(Instant::from_nanos(due.as_nanos() - due.as_nanos() % TOGETHER.as_nanos() as u64))
    }

    fn look(&mut self, index: usize, now: Instant, buffer: &mut Vec<u8>) {
        let member = &mut self.members[index];
        if member.reading.is_none()
            && let Err(error) = settling::same_disk(&member.group, &member.entry, &self.roots)
        {
            member.in_force = false;
            self.pool.gone(index);
            self.complain(index, &error, "others carry on");
            self.undecided = true;
            return;
        }
        let (device, was_open) = (member.device, member.reading.is_some());
        let mut seen = self.read(index, buffer);
        if was_open && seen.as_ref().is_err_and(reading::is_removed) {
            // One of that name may have been made since, which was told nothing.
            self.members[index].reading = None;
            self.pool.not_told(index);
            seen = self.read(index, buffer);
        }
        let member = &mut self.members[index];
        match seen {
            Ok((passed, waited)) => {
                self.pool.observe(index, now, passed, waited);
                if member.trouble.is_some() {
                    self.pool.not_told(index);
                }
            }
            Err(mut error) => {
                member.reading = None;
                let mut meanwhile = WITHOUT_BURSTS;
                if member.group.exists() {
                    // Nobody knows what it does: no burst, then.
                    self.pool.unseen(index);
                    let settled = self.pool.settled()[index];
                    let told = settling::tell_if_different(&member.group, device, settled);
                    member.in_force = told.is_ok();
                    if let Err(refused) = told {
                        error = error.context(format!("{refused:#}"));
                        meanwhile = AS_BEFORE;
                    }
                } else {
                    self.pool.gone(index);
                }
                self.complain(index, &error, meanwhile);
                self.undecided = true;
            }
        }
    }

    fn read(&mut self, index: usize, buffer: &mut Vec<u8>) -> anyhow::Result<(Passed, Option<bool>)> {
        let member = &mut self.members[index];
        let reading = match &mut member.reading {
            Some(reading) => reading,
            none => {
                // The controller is missing after the machine's start, or if the parent was made
                // again.
                if member.group.exists() {
                    settling::hand_down(&member.group)?;
                }
                none.insert(Reading::open(&member.group, self.divided)?)
            }
        };
        reading.read(member.device, buffer)
    }

    /// Whether it was told what was decided `now`.
    fn tell(&mut self, index: usize, rates: Rates, now: Instant) -> bool {
        let member = &mut self.members[index];
        // The kernel forgets limits with their disk: without any in force, this may be another.
        let told = tell::told(&member.group, member.device).ok();
        let lost = member.in_force && told == Some(Rates::NONE);
        let disk = if lost { member.entry.disk(&self.roots).map(drop) } else { Ok(()) };
        match disk.and_then(|()| settling::tell_after(&member.group, member.device, told, rates)) {
            Ok(()) => {
                member.in_force = rates != Rates::NONE;
                let cgroup = member.group.name.display();
                tracing::debug!(
                    %cgroup,
                    device = %member.device,
                    bps = ?rates.bps,
                    iops = ?rates.iops,
                    after_us = super::now().nanos_since(now) / 1000,
                    "told"
                );
                if member.reading.is_some() && member.trouble.take().is_some() {
                    tracing::info!(%cgroup, "is there again");
                }
                true
            }
            Err(error) => {
                self.pool.not_told(index);
                // Perhaps its disk is gone: looked for again.
                (self.members[index].reading, self.members[index].in_force) = (None, false);
                self.complain(index, &error, AS_BEFORE);
                false
            }
        }
    }

    /// Tells anew where somebody else has written.
    pub(super) fn verify(&mut self) {
        for index in 0..self.members.len() {
            let member = &self.members[index];
            let expected = self.pool.members()[index].told();
            let Some(expected) = expected.filter(|_| member.trouble.is_none()) else { continue };
            if tell::told(&member.group, member.device).is_ok_and(|told| told != tell::as_kept(expected)) {
                tracing::info!(cgroup = %member.group.name.display(), device = %member.device, "somebody else has changed its limits; they are told again");
                self.pool.not_told(index);
                // The kernel forgets limits with their disk: it may be another by now.
                self.members[index].reading = None;
                self.members[index].due = Some(Instant::ZERO);
                self.undecided = true;
            }
        }
    }

    fn complain(&mut self, index: usize, error: &anyhow::Error, meanwhile: &str) {
        let member = &mut self.members[index];
        let gone = !member.group.exists();
        let trouble = if gone { "it was removed".to_owned() } else { format!("{error:#}") };
        if member.trouble.as_ref() != Some(&trouble) {
            let cgroup = member.group.name.display();
            if gone {
                tracing::info!(%cgroup, "was removed; its limits wait for one of that name (forget them with `weir cgroup limit --remove`)");
            } else {
                tracing::warn!(%cgroup, "{trouble}; {meanwhile}");
            }
            member.trouble = Some(trouble);
        }
    }

    pub(super) fn taken(&self) -> Option<Taken> {
        self.rate
    }

    fn take(&mut self, now: Instant) {
        let passed = *self.pool.passed();
        if let Some((at, before)) = self.taken.replace((now, passed)).filter(|(at, _)| *at < now) {
            self.rate = Taken::since(&before, &passed, now - at, *self.pool.limits());
        }
    }

    /// How full the buckets are, for the next watch; `None` if they are empty, as at the beginning.
    pub(super) fn left(&self, at: Instant) -> Option<levels::Left> {
        if self.pool.levels() == [0; 6] {
            return None;
        }
        let members = self.members.iter().zip(self.pool.members());
        let passed = members.filter_map(|(controlled, member)| {
            Some((PathBuf::from(&controlled.group.name), controlled.device, member.passed()?))
        });
        Some(levels::Left::new(at, self.pool.levels(), passed))
    }

    #[cfg(test)]
    pub(super) fn forget_files(&mut self) {
        self.members.iter_mut().for_each(|member| member.reading = None);
    }
}
