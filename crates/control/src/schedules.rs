//! Puts the entries of schedules and the limits of used-up quotas in force as time passes: the only
//! place that follows the clock.
//!
//! ```text
//!   next change of a schedule, a minute, a changed setting ──► state of each schedule ──► throttle node
//!   a second, if there is a quota ──► `quotas`: used up or not ───────────────────────────────┘
//! ```
//!
//! The clock of the host may step, so no wait is longer than a minute: an entry holds at most that
//! much too long. Nothing runs while there is neither a schedule nor a quota.

use std::{
    collections::HashMap,
    convert::Infallible,
    rc::{Rc, Weak},
    sync::Arc,
};

use api::ScheduleStatus;
use event_listener::Event;
use policy::{
    schedule::{LimitSchedule, ScheduledLimits},
    throttle::ThrottleError,
    time::Duration,
};
use reactor::JoinHandle;
use settings::schedule;

use super::{change::RegistryChange, quotas::SAMPLE_INTERVAL, registry::Registry};

/// Longest time until a step of the host's clock is noticed.
const MAX_WAIT: Duration = Duration::from_secs(60);
/// Shortest wait: the clock of the host may be behind that of the timer.
const MIN_WAIT: Duration = Duration::from_millis(10);

/// Failures of the last pass by the name of the disk or group: the entry that holds, and the error.
type KnownFailures = HashMap<String, (Option<usize>, String)>;

/// Puts the state of a schedule in force for a disk or a group.
type SetScheduled<'a> = &'a dyn Fn(ScheduledLimits) -> Result<(), ThrottleError>;

/// A schedule with the entry that holds now, and the state of the quota.
pub(crate) fn scheduled_now(schedule: &LimitSchedule, is_quota_used_up: bool) -> ScheduledLimits {
    let state = schedule::state_now(schedule).unwrap_or_default();
    ScheduledLimits { schedule: Arc::new(schedule.clone()), state, is_quota_used_up }
}

/// State of a schedule for clients; `None` without entries.
pub fn schedule_status(scheduled: &ScheduledLimits) -> Option<ScheduleStatus> {
    let ScheduledLimits { schedule, state, .. } = scheduled;
    let entry = state.entry.and_then(|entry| schedule.entries.get(entry));
    let status = || ScheduleStatus {
        when: entry.map(|entry| entry.when.to_string()),
        until: state.until_s.and_then(|until_s| schedule::local_time(schedule, until_s)),
    };
    (!schedule.entries.is_empty()).then(status)
}

/// Follows all schedules until the handle or the registry is dropped.
pub fn follow_schedules(registry: &Rc<Registry>) -> JoinHandle<()> {
    let changed = Rc::new(Event::new());
    let (notified, listening) = (Rc::clone(&changed), Rc::downgrade(registry));
    registry.listen(move |change| {
        let (RegistryChange::Listed { name } | RegistryChange::SettingsChanged { name }) = change else {
            return;
        };
        if listening.upgrade().is_some_and(|registry| follows_clock(&registry, name)) {
            notified.notify(usize::MAX);
        }
    });
    let registry = Rc::downgrade(registry);
    reactor::spawn_joinable(async move {
        let _gone: Option<Infallible> = follow(registry, &changed).await;
    })
}

/// True if the disk or group of this name has a schedule or a quota.
fn follows_clock(registry: &Registry, name: &str) -> bool {
    let both = match registry.disks.get(name) {
        Ok(running) => {
            let throttle = running.disk.throttle();
            Some((throttle.scheduled(), throttle.settings().quota))
        }
        Err(_) => registry.groups.get(name).ok().map(|group| (group.scheduled(), group.settings().quota)),
    };
    both.is_some_and(|(scheduled, quota)| !scheduled.schedule.entries.is_empty() || !quota.is_none())
}

async fn follow(registry: Weak<Registry>, changed: &Event) -> Option<Infallible> {
    let mut failures = KnownFailures::new();
    loop {
        // Created before the states are computed: otherwise a change meanwhile would be missed.
        let change = changed.listen();
        // A statement of its own: the registry must not be kept during the wait.
        let wait = apply(&*registry.upgrade()?, &mut failures);
        match wait {
            Some(wait) => {
                // Both outcomes lead to the next pass.
                let _ = reactor::timeout(wait, change).await;
            }
            None => change.await,
        }
    }
}

/// Puts the present entries and the limits of used-up quotas in force; returns the time until the
/// next pass, `None` without a schedule and a quota. A failure is logged only if it is not in
/// `failures`, which then has those of this pass.
fn apply(registry: &Registry, failures: &mut KnownFailures) -> Option<Duration> {
    let mut wait = registry.sample_quotas().then_some(SAMPLE_INTERVAL);
    if wait.is_some() {
        registry.quotas.save_if_due();
    }
    let mut remaining = KnownFailures::new();
    let now = schedule::now();
    let mut update = |scheduled: ScheduledLimits, name: &str, set: SetScheduled<'_>| {
        let is_quota_used_up = registry.quotas.is_used_up(name);
        if scheduled.schedule.entries.is_empty() && is_quota_used_up == scheduled.is_quota_used_up {
            return;
        }
        let Some(state) = schedule::state_now(&scheduled.schedule) else {
            wait = Some(wait.unwrap_or(MAX_WAIT));
            let failure = (None, "the time zone cannot be read".to_owned());
            if failures.get(name) != Some(&failure) {
                let zone = scheduled.schedule.time_zone.as_deref();
                tracing::warn!(
                    name,
                    zone,
                    "the schedule and the quota are not followed, because their time zone cannot be read \
                     (install tzdata)"
                );
            }
            remaining.insert(name.to_owned(), failure);
            return;
        };
        let until = state.until_s.map_or(MAX_WAIT, |until_s| {
            let until = Duration::from_secs(u64::try_from(until_s).unwrap_or(0));
            until.saturating_sub(now).max(MIN_WAIT)
        });
        if !scheduled.schedule.entries.is_empty() {
            wait = Some(wait.unwrap_or(MAX_WAIT).min(until));
        }
        if state == scheduled.state && is_quota_used_up == scheduled.is_quota_used_up {
            return;
        }
        let has_other_entry = state.entry != scheduled.state.entry;
        let has_changed = has_other_entry || is_quota_used_up != scheduled.is_quota_used_up;
        let updated = ScheduledLimits { state, is_quota_used_up, ..scheduled };
        match set(updated.clone()) {
            Ok(()) if has_changed => {
                // An event reports the quota.
                if has_other_entry {
                    log_entry(name, &updated);
                }
                let change = RegistryChange::SettingsChanged { name: name.to_owned() };
                registry.recordings.handle_change(&change);
            }
            Ok(()) => {}
            Err(error) => {
                let failure = (state.entry, error.to_string());
                if failures.get(name) != Some(&failure) {
                    tracing::error!(
                        name,
                        "the limits of the schedule and of the quota are not in force: {error}"
                    );
                }
                remaining.insert(name.to_owned(), failure);
            }
        }
    };
    for running in registry.disks.all() {
        let throttle = running.disk.throttle();
        update(throttle.scheduled(), running.disk.name(), &|updated| throttle.set_scheduled(updated));
    }
    for group in registry.groups.all() {
        update(group.scheduled(), group.name(), &|updated| group.set_scheduled(updated));
    }
    *failures = remaining;
    wait
}

fn log_entry(name: &str, scheduled: &ScheduledLimits) {
    let ScheduleStatus { when, until } = schedule_status(scheduled).unwrap_or_default();
    let until = until.as_deref();
    match when {
        Some(when) => tracing::info!(name, %when, until, "limits of the schedule are in force"),
        None => tracing::info!(name, until, "the configured limits are in force"),
    }
}
