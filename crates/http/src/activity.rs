//! Periodic collection of all figures, and the stream of their changes, computed once for all
//! listeners.
//!
//! ```text
//!   main_thread ─► figures ─► objects ─► changes ─► stream, to all
//!   once a second; up to ten times with listeners, less often if much is sent
//! ```
//!
//! A new listener receives the state of some moment and all changes since then. Both are serialized
//! once, also for thousands of simultaneous listeners.

use std::{
    collections::{BTreeMap, HashMap, VecDeque},
    sync::Arc,
    time::{Duration, Instant, SystemTime},
};

use api::{ActivityObject, DaemonIdentity, Delta, Overview, RemovedNames};
use axum::body::Bytes;
use control::events::EventLog;
use nix::time::{ClockId, clock_gettime};
use serde_json::Value;
use tokio::{
    sync::{Mutex, MutexGuard, Notify},
    time::{sleep, timeout},
};

use super::{
    history::ObjectHistory,
    limit_lines::drawn_limits,
    main_thread::{MainThread, NoAnswer, ObjectKind},
    objects::{ActivityObjects, PreviousReadings, milliseconds, sample},
    peer::HttpPeer,
    stream::{self, EventStream, StreamListeners, StreamRejection},
};

/// Shortest interval between two collections.
pub(super) const MIN_INTERVAL: Duration = Duration::from_millis(100);
/// Interval without listeners, and of the history.
const SECOND: Duration = Duration::from_secs(1);
/// Longest interval, however much is sent.
pub(super) const MAX_INTERVAL: Duration = Duration::from_secs(5);
/// Maximum number of bytes per second to all listeners together: this thread serializes them, and
/// has to leave the processor to the workers.
const MAX_SENT_BYTES_PER_SECOND: f64 = (16 << 20) as f64;
/// Inverse of the largest share of time that collections take, here and on the main thread.
const INVERSE_LOAD: u32 = 10;
/// Changes that are stored for new listeners before the state is serialized again.
const MAX_CHANGES: usize = 10;
/// Interval of empty messages, by which the page detects a lost connection.
const HEARTBEAT: Duration = Duration::from_secs(2);

/// Description of the daemon for its clients.
#[derive(Clone, Debug)]
pub(super) struct DaemonDescription {
    pub(super) name: String,
    /// True if changes are possible at all.
    pub(super) has_token: bool,
}

pub(super) struct ActivityWatch {
    main_thread: Arc<MainThread>,
    daemon: DaemonDescription,
    events: EventLog,
    /// Begin of the count of seconds, since the Epoch. Independent of later changes of the clock.
    began_ms: u64,
    began: Duration,
    state: Mutex<WatchState>,
    /// Notified when a listener is added.
    listened: Notify,
}

#[derive(Default)]
pub(super) struct WatchState {
    before: PreviousReadings,
    pub(super) objects: ActivityObjects,
    /// Histories of disks, by name.
    pub(super) disks: HashMap<Arc<str>, ObjectHistory>,
    pub(super) groups: HashMap<Arc<str>, ObjectHistory>,
    looked: Option<Instant>,
    /// Last second added to the histories, counted from [`ActivityWatch::began_ms`] on.
    second: u64,
    /// Seconds by which the wall clock was set forward since then; negative if back.
    pub(super) clock_step_s: i64,
    listeners: StreamListeners,
    /// Messages for a new listener: the state at some moment, and the changes since.
    base_state: Option<Bytes>,
    changes: VecDeque<Bytes>,
    /// Number of the last message.
    id: u64,
    /// Number of the last event that was sent.
    event: u64,
    last_message_at: Option<Instant>,
    pause: Duration,
    /// Maximum age of an overview.
    age: Duration,
    /// Serialized overview, shared by all requests until the next collection.
    overview: Option<Bytes>,
}

impl ActivityWatch {
    pub(super) fn new(
        main_thread: Arc<MainThread>,
        daemon: DaemonDescription,
        events: EventLog,
    ) -> Arc<Self> {
        let began_ms = milliseconds(SystemTime::now());
        let (began, listened) = (boot_time(), Notify::new());
        // Events from before the start of the page are not sent.
        let state = Mutex::new(WatchState { event: events.last(), ..WatchState::default() });
        Arc::new(Self { main_thread, daemon, events, began_ms, began, state, listened })
    }

    /// Runs until the runtime ends.
    pub(super) async fn run(self: Arc<Self>) {
        loop {
            let pause = {
                let looked = self.refresh(MIN_INTERVAL).await;
                looked.ok().filter(|state| !state.listeners.is_empty()).map(|state| state.pause)
            };
            match pause {
                Some(pause) => sleep(pause).await,
                // A new listener ends the wait.
                None => {
                    let part = self.monotonic_time().subsec_nanos();
                    let rest = SECOND.saturating_sub(Duration::from_nanos(part.into()));
                    let _ = timeout(rest, self.listened.notified()).await;
                }
            }
        }
    }

    fn monotonic_time(&self) -> Duration {
        boot_time().saturating_sub(self.began)
    }

    /// Collects the figures, unless they are younger than `age`.
    pub(super) async fn refresh(&self, age: Duration) -> Result<MutexGuard<'_, WatchState>, NoAnswer> {
        let mut state = self.state.lock().await;
        if state.looked.is_none_or(|looked| looked.elapsed() >= age) {
            let began = Instant::now();
            let snapshot = self.main_thread.figures(MIN_INTERVAL.min(age)).await?;
            let counted = self.monotonic_time();
            let second = self.began_ms / 1000 + counted.as_secs();
            let counted_ms =
                self.began_ms.saturating_add(u64::try_from(counted.as_millis()).unwrap_or(u64::MAX));
            // Detects a step of the wall clock, by comparison with the monotonic one.
            state.clock_step_s = clock_step(state.clock_step_s, milliseconds(SystemTime::now()), counted_ms);
            // The history has one sample for each second, whatever the interval of collections.
            let is_new_second = std::mem::replace(&mut state.second, second) != second;
            let objects = state.before.objects(&snapshot, is_new_second);
            if is_new_second {
                state.add_to_histories(&objects);
            }
            let bytes = state.send_changes(objects) + state.send_events(&self.events);
            state.looked = Some(began);
            // The interval grows with the bytes sent, so that the rate stays below
            // `MAX_SENT_BYTES_PER_SECOND`.
            let sent = bytes as f64 * state.listeners.len() as f64;
            let rest = began.elapsed() * INVERSE_LOAD;
            state.pause = Duration::from_secs_f64(sent / MAX_SENT_BYTES_PER_SECOND)
                .max(rest)
                .clamp(MIN_INTERVAL, MAX_INTERVAL);
            state.age = rest.clamp(MIN_INTERVAL, SECOND);
        }
        Ok(state)
    }

    /// Collects the figures in a tenth of the time at most, for any number of requests.
    ///
    /// # Errors
    /// Fails if the main thread does not answer.
    pub(super) async fn refresh_by_load(&self) -> Result<MutexGuard<'_, WatchState>, NoAnswer> {
        let age = self.state.lock().await.age;
        self.refresh(age).await
    }

    /// Serialized overview.
    ///
    /// # Errors
    /// Fails if the main thread does not answer.
    pub(super) async fn overview_json(&self) -> Result<Bytes, NoAnswer> {
        let mut state = self.refresh_by_load().await?;
        if let Some(body) = &state.overview {
            return Ok(body.clone());
        }
        let body = stream::json(&self.overview(&state.objects));
        Ok(state.overview.insert(body).clone())
    }

    /// Overview of the daemon with the activity of these objects.
    fn overview<'a>(&'a self, objects: &'a ActivityObjects) -> Overview<'a> {
        Overview {
            time_ms: objects.time_ms,
            daemon: DaemonIdentity {
                version: env!("CARGO_PKG_VERSION"),
                started_ms: objects.started_ms,
                name: &self.daemon.name,
            },
            access: if self.daemon.has_token { "change" } else { "read" },
            disks: objects.disks.values().collect(),
            groups: objects.groups.values().collect(),
            devices: objects.devices.values().collect(),
            jobs: objects.jobs.values().collect(),
        }
    }

    /// Adds a listener, which receives the state and then its changes.
    ///
    /// # Errors
    /// Fails if the main thread does not answer, or if there are too many listeners.
    pub(super) async fn listen(
        &self,
        peer: HttpPeer,
    ) -> Result<Result<EventStream, StreamRejection>, NoAnswer> {
        let mut state = self.refresh(MAX_INTERVAL).await?;
        if state.base_state.is_none() {
            let id = state.id;
            state.base_state = Some(stream::message("overview", id, &self.overview(&state.objects)));
        }
        // The state may be up to ten messages old, so the changes since then follow it.
        let before: Vec<_> = state.base_state.iter().chain(&state.changes).cloned().collect();
        let streamed = state.listeners.add(peer, before);
        self.listened.notify_one();
        Ok(streamed)
    }
}

impl WatchState {
    /// Adds a second to all histories. Histories of removed objects are dropped.
    fn add_to_histories(&mut self, objects: &ActivityObjects) {
        let Self { before, disks, groups, second, .. } = self;
        for (kind, all, histories) in
            [(ObjectKind::Disk, &objects.disks, disks), (ObjectKind::Group, &objects.groups, groups)]
        {
            histories.retain(|name, _| all.contains_key(name));
            for (name, object) in all {
                let latencies = before.latencies(kind, name);
                let history = histories.entry(Arc::clone(name)).or_insert_with(ObjectHistory::new);
                history.add(*second, &sample(object), latencies, drawn_limits(object, &objects.groups));
            }
        }
    }

    /// Sends the changes to all listeners; returns the number of bytes for each.
    fn send_changes(&mut self, objects: ActivityObjects) -> usize {
        let now = Instant::now();
        let is_time = self.last_message_at.is_none_or(|last| now.duration_since(last) >= HEARTBEAT);
        let delta = self.delta(&objects);
        let is_empty = delta.is_empty();
        // Replaced also if nothing is sent: the times in it changed.
        (self.objects, self.overview) = (objects, None);
        if is_empty && !is_time {
            return 0;
        }
        self.id += 1;
        let message = stream::message("delta", self.id, &delta);
        // Serialized again for the next listener only.
        if self.changes.len() >= MAX_CHANGES {
            (self.base_state, self.changes) = (None, VecDeque::new());
        }
        if self.base_state.is_some() {
            self.changes.push_back(message.clone());
        }
        self.last_message_at = Some(now);
        let bytes = message.len();
        self.listeners.send(&message);
        bytes
    }

    /// Sends new events to all listeners; returns the number of bytes for each.
    fn send_events(&mut self, events: &EventLog) -> usize {
        // One message for all events, so that a burst does not overflow a listener's queue.
        let mut all = Vec::new();
        for event in events.since(self.event) {
            self.event = event.id;
            self.id += 1;
            all.extend_from_slice(&stream::message("event", self.id, &event.to_json()));
        }
        let bytes = all.len();
        if bytes > 0 {
            self.listeners.send(&Bytes::from(all));
        }
        bytes
    }

    fn delta(&self, objects: &ActivityObjects) -> Delta {
        let (disks, gone_disks) = changes(&self.objects.disks, &objects.disks);
        let (groups, gone_groups) = changes(&self.objects.groups, &objects.groups);
        let (devices, gone_devices) = changes(&self.objects.devices, &objects.devices);
        let (jobs, gone_jobs) = changed_jobs(&self.objects.jobs, &objects.jobs);
        let removed =
            RemovedNames { disks: gone_disks, groups: gone_groups, devices: gone_devices, jobs: gone_jobs };
        Delta { time_ms: objects.time_ms, disks, groups, devices, jobs, removed }
    }
}

/// Time since the boot, including suspend, which shows as a gap in the history.
fn boot_time() -> Duration {
    // CLOCK_BOOTTIME always exists (clock_gettime(2)).
    clock_gettime(ClockId::CLOCK_BOOTTIME).map(Duration::from).unwrap_or_default()
}

/// Seconds by which `clock_ms` is ahead of `counted_ms`. Returns `before_s` if the difference may
/// be rounding, so that reported times do not jitter.
fn clock_step(before_s: i64, clock_ms: u64, counted_ms: u64) -> i64 {
    let forward_ms = clock_ms.saturating_sub(counted_ms).cast_signed();
    let forward_ms = forward_ms - counted_ms.saturating_sub(clock_ms).cast_signed();
    let has_moved = (forward_ms - before_s.saturating_mul(1000)).unsigned_abs() > 750;
    if has_moved { (forward_ms + 500).div_euclid(1000) } else { before_s }
}

/// Changed objects, with their names and changed members; and names of removed objects.
fn changes(
    before: &BTreeMap<Arc<str>, ActivityObject>,
    after: &BTreeMap<Arc<str>, ActivityObject>,
) -> (Vec<ActivityObject>, Vec<String>) {
    let changed = after.iter().filter_map(|(name, object)| {
        // A new object is sent with all its members.
        let Some(before) = before.get(name) else { return Some(object.clone()) };
        let differs = |(key, value): &(&String, &Value)| before.get(*key) != Some(*value);
        let mut changed: ActivityObject =
            object.iter().filter(differs).map(|(key, value)| (key.clone(), value.clone())).collect();
        if changed.is_empty() {
            return None;
        }
        changed.insert("name".to_owned(), name.as_ref().into());
        Some(changed)
    });
    let removed = before.keys().filter(|name| !after.contains_key(*name)).map(ToString::to_string);
    (changed.collect(), removed.collect())
}

/// Changed jobs, complete, since members that do not apply are absent; and ids of jobs that are not
/// listed any more.
fn changed_jobs(
    before: &BTreeMap<Arc<str>, ActivityObject>,
    after: &BTreeMap<Arc<str>, ActivityObject>,
) -> (Vec<ActivityObject>, Vec<String>) {
    let changed = after.iter().filter(|(id, job)| before.get(*id) != Some(*job));
    let removed = before.keys().filter(|id| !after.contains_key(*id)).map(ToString::to_string);
    (changed.map(|(_, job)| job.clone()).collect(), removed.collect())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::{
        super::{limit_lines::LimitLines, objects::MAX_BYTES_PER_DISK},
        *,
    };

    fn objects(disks: &[(&str, Value)]) -> ActivityObjects {
        let disk = |(name, value): &(&str, Value)| {
            let Value::Object(object) = value.clone() else { panic!("an object") };
            ((*name).into(), object)
        };
        ActivityObjects { disks: disks.iter().map(disk).collect(), ..ActivityObjects::default() }
    }

    #[test]
    fn deltas_have_changes_and_removals() {
        let mut state = WatchState::default();
        state.send_changes(objects(&[
            ("a", json!({"name": "a", "x": 1, "y": 2})),
            ("b", json!({"name": "b"})),
        ]));
        let same = objects(&[("a", json!({"name": "a", "x": 1, "y": 2})), ("b", json!({"name": "b"}))]);
        assert!(state.delta(&same).is_empty());
        let after =
            objects(&[("a", json!({"name": "a", "x": 1, "y": null})), ("c", json!({"name": "c", "x": 0}))]);
        let delta = serde_json::to_value(state.delta(&after)).unwrap();
        assert_eq!(delta["disks"], json!([{"name": "a", "y": null}, {"name": "c", "x": 0}]));
        assert_eq!(delta["removed"], json!({"disks": ["b"], "groups": [], "devices": [], "jobs": []}));
    }

    #[test]
    fn changed_jobs_are_sent_with_all_members() {
        let jobs =
            |jobs: &[(&str, Value)]| ActivityObjects { jobs: objects(jobs).disks, ..Default::default() };
        let running = json!({"id": "a", "state": "running", "remaining-s": 1});
        let mut state = WatchState::default();
        state.send_changes(jobs(&[("a", running.clone()), ("b", json!({"id": "b"}))]));
        assert!(state.delta(&jobs(&[("a", running), ("b", json!({"id": "b"}))])).is_empty());
        let ended = json!({"id": "a", "state": "concluded"});
        let delta = serde_json::to_value(state.delta(&jobs(&[("a", ended.clone())]))).unwrap();
        assert_eq!((&delta["jobs"], &delta["removed"]["jobs"]), (&json!([ended]), &json!(["b"])));
    }

    #[test]
    fn clock_steps_are_followed_and_drift_is_not() {
        let mut set_s = 0;
        for (clock_ms, expected) in [
            (1_000_000, 0),
            (1_000_700, 0),
            (1_000_800, 1),
            (1_000_300, 1),
            (999_300, -1),
            (11_800_000, 10_800),
            (0, -1_000),
            (1_000_000, 0),
        ] {
            set_s = clock_step(set_s, clock_ms, 1_000_000);
            assert_eq!(set_s, expected, "{clock_ms}");
        }
    }

    #[test]
    fn messages_for_new_listeners_are_bounded() {
        let mut state = WatchState { base_state: Some(Bytes::new()), ..WatchState::default() };
        for step in 0..100 {
            state.send_changes(objects(&[("a", json!({"name": "a", "x": step}))]));
            assert!(state.changes.len() <= MAX_CHANGES);
            // Changes without the state before them are useless.
            assert!(state.base_state.is_some() || state.changes.is_empty());
        }
    }

    #[test]
    fn a_hundred_disks_take_less_than_4_and_a_half_mib() {
        // Includes all lines of limits, and the readings of the previous second.
        let all = 100 * (ObjectHistory::new().size_bytes() + LimitLines::MAX_BYTES + MAX_BYTES_PER_DISK);
        assert!(all <= 9 << 19, "{all} bytes");
    }
}
