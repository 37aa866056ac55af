//! Event types, and the form of an event in JSON.
//!
//! Names are the same in the log, over QMP, over HTTP and for `on-event`; `docs/events.md`
//! documents each type, and a test compares both.

use std::{
    sync::Arc,
    time::{SystemTime, UNIX_EPOCH},
};

use api::EventObject;
use serde::Deserialize as _;
use serde_json::{Map, Value};

/// Maximum length in bytes of a message and of a value of the data; both may quote client input.
const MAX_TEXT_BYTES: usize = 512;

/// Severity of an event type.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum EventSeverity {
    Info,
    Warning,
    Error,
}

impl EventSeverity {
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Info => "info",
            Self::Warning => "warning",
            Self::Error => "error",
        }
    }
}

macro_rules! kinds {
    ($($kind:ident $name:literal $severity:ident)+) => {
        /// Event type.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum Kind {
            $(#[doc = $name] $kind,)+
        }

        impl Kind {
            pub(crate) const ALL: &[Self] = &[$(Self::$kind,)+];

            /// Name in messages and in JSON.
            pub const fn name(self) -> &'static str {
                match self {
                    $(Self::$kind => $name,)+
                }
            }

            pub(crate) fn named(name: &str) -> Option<Self> {
                let renamed = OLD_NAMES.iter().find(|(old, _)| *old == name);
                let name = renamed.map_or(name, |(_, new)| *new);
                Self::ALL.iter().copied().find(|kind| kind.name() == name)
            }

            pub(crate) const fn severity(self) -> EventSeverity {
                match self {
                    $(Self::$kind => EventSeverity::$severity,)+
                }
            }
        }
    };
}

kinds! {
    LimitHit "limit_hit" Info
    LimitReleased "limit_released" Info
    ReservationMissed "reservation_missed" Warning
    ReservationMet "reservation_met" Info
    WatermarkReached "watermark_reached" Info
    WatermarkLeft "watermark_left" Info
    LatencyTargetMissed "latency_target_missed" Warning
    LatencyTargetMet "latency_target_met" Info
    QuotaUsedUp "quota_used_up" Warning
    QuotaRenewed "quota_renewed" Info
    ImageError "image_error" Error
    DiskStopped "disk_stopped" Error
    DiskResumed "disk_resumed" Info
    BackingFileChanged "backing_file_changed" Error
    StorageUnresponsive "storage_unresponsive" Warning
    StorageRecovered "storage_recovered" Info
    DeviceSlow "device_slow" Warning
    DeviceRecovered "device_recovered" Info
    SessionStarted "session_started" Info
    SessionEnded "session_ended" Info
    ClientRejected "client_rejected" Warning
    ClientDisconnected "client_disconnected" Warning
    RingBroken "ring_broken" Warning
    RingServed "ring_served" Info
    ConfigChanged "config_changed" Info
    DiskAdded "disk_added" Info
    DiskUnavailable "disk_unavailable" Warning
    DiskRemoved "disk_removed" Info
    GroupAdded "group_added" Info
    GroupRemoved "group_removed" Info
    JobStarted "job_started" Info
    JobEnded "job_ended" Info
    JobFailed "job_failed" Error
    SnapshotTaken "snapshot_taken" Info
    TakenOver "taken_over" Info
    ClusterJoined "cluster_joined" Info
    ClusterPartitioned "cluster_partitioned" Warning
    ClusterAgreed "cluster_agreed" Info
    ClusterFallback "cluster_fallback" Warning
    ClusterHostUnreachable "cluster_host_unreachable" Warning
    ClusterHostReachable "cluster_host_reachable" Info
    ClusterOvercommitted "cluster_overcommitted" Warning
    ReservationUnmet "reservation_unmet" Warning
    ReservationInForce "reservation_in_force" Info
}

/// Event type names of weir 0.1.0, with their current names: in an upgrade, an old process sends
/// events and counts under its own names.
const OLD_NAMES: [(&str, &str); 12] = [
    ("disk_unopened", "disk_unavailable"),
    ("client_in", "session_started"),
    ("client_out", "session_ended"),
    ("client_turned_away", "client_rejected"),
    ("storage_silent", "storage_unresponsive"),
    ("storage_answers", "storage_recovered"),
    ("cluster_apart", "cluster_partitioned"),
    ("cluster_host_silent", "cluster_host_unreachable"),
    ("cluster_host_heard", "cluster_host_reachable"),
    ("cluster_overpromised", "cluster_overcommitted"),
    ("promise_left_out", "reservation_unmet"),
    ("promise_made", "reservation_in_force"),
];

/// Event without number and time; the event log adds them.
#[derive(Clone, Debug)]
pub struct NewEvent {
    pub(super) kind: Kind,
    pub(super) disk: Option<Arc<str>>,
    group: Option<Arc<str>>,
    message: String,
    data: Map<String, Value>,
    dropped: u64,
}

impl NewEvent {
    /// Event with a message for people: one self-contained sentence without a full stop.
    pub fn new(kind: Kind, message: impl Into<String>) -> Self {
        Self {
            kind,
            disk: None,
            group: None,
            message: truncated(message.into()),
            data: Map::new(),
            dropped: 0,
        }
    }

    pub(crate) fn of_disk(self, name: &str) -> Self {
        Self { disk: Some(name.into()), ..self }
    }

    pub(crate) fn of_group(self, name: &str) -> Self {
        Self { group: Some(name.into()), ..self }
    }

    /// Adds a value to the data; null is ignored.
    pub fn with(mut self, key: &'static str, value: impl Into<Value>) -> Self {
        match value.into() {
            Value::Null => {}
            Value::String(text) => drop(self.data.insert(key.to_owned(), truncated(text).into())),
            value => drop(self.data.insert(key.to_owned(), value)),
        }
        self
    }

    /// Adds the number of similar events that the producer dropped since the last one.
    pub(crate) fn with_dropped(self, count: u64) -> Self {
        Self { dropped: count, ..self }
    }

    pub(super) fn recorded_at(self, id: u64, time: SystemTime, dropped: u64) -> RecordedEvent {
        let dropped = dropped.saturating_add(self.dropped);
        let Self { kind, disk, group, message, mut data, .. } = self;
        if dropped > 0 {
            data.insert("suppressed".to_owned(), dropped.into());
        }
        let since = time.duration_since(UNIX_EPOCH).unwrap_or_default();
        let time_ms = u64::try_from(since.as_millis()).unwrap_or(u64::MAX);
        RecordedEvent { id, time_ms, kind, disk, group, message, data }
    }
}

fn truncated(mut text: String) -> String {
    if text.len() > MAX_TEXT_BYTES {
        let end = (0..=MAX_TEXT_BYTES).rev().find(|end| text.is_char_boundary(*end));
        text.truncate(end.unwrap_or(0));
        text.push('…');
    }
    text
}

/// Recorded event.
#[derive(Clone, Debug, PartialEq)]
pub struct RecordedEvent {
    /// Sequence number; rises within and across processes, unless the clock was set back.
    pub id: u64,
    /// Milliseconds since the Epoch.
    pub(crate) time_ms: u64,
    pub(crate) kind: Kind,
    pub(crate) disk: Option<Arc<str>>,
    pub(crate) group: Option<Arc<str>>,
    /// Text for people.
    pub(crate) message: String,
    /// Values for programs; `suppressed` is the number of events of this type that were dropped
    /// before this one.
    pub(crate) data: Map<String, Value>,
}

impl RecordedEvent {
    /// JSON form in QMP, the log and HTTP.
    pub fn to_json(&self) -> Value {
        let event = EventObject {
            id: self.id,
            time_ms: self.time_ms,
            kind: self.kind.name().into(),
            severity: self.kind.severity().name().into(),
            disk: self.disk.as_deref().map(str::to_owned),
            group: self.group.as_deref().map(str::to_owned),
            message: self.message.clone(),
            data: self.data.clone(),
        };
        serde_json::to_value(event).expect("all keys are strings")
    }

    /// Parses [`RecordedEvent::to_json`]; `None` if the event type is unknown.
    pub(crate) fn from_json(value: &Value) -> Option<Self> {
        let event = EventObject::deserialize(value).ok()?;
        Some(Self {
            id: event.id,
            time_ms: event.time_ms,
            kind: Kind::named(&event.kind)?,
            disk: event.disk.map(Arc::from),
            group: event.group.map(Arc::from),
            message: event.message,
            data: event.data,
        })
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use serde_json::json;

    use super::*;

    #[test]
    fn event_json_has_the_documented_form() {
        let new_event = NewEvent::new(Kind::LimitHit, "disk vm1 is held by iops-total").of_disk("vm1");
        let new_event = new_event.with("limit", "iops-total").with("nothing", Value::Null);
        let event = new_event.with_dropped(1).recorded_at(
            7,
            UNIX_EPOCH + Duration::from_millis(1_795_229_965_574),
            2,
        );
        assert_eq!(
            event.to_json(),
            json!({
                "id": 7, "time-ms": 1_795_229_965_574_u64, "kind": "limit_hit", "severity": "info", "disk": "vm1",
                "message": "disk vm1 is held by iops-total", "data": {"limit": "iops-total", "suppressed": 3},
            })
        );
    }

    #[test]
    fn client_text_is_truncated_in_events() {
        let long = "é".repeat(100_000);
        let event = NewEvent::new(Kind::SessionStarted, long.as_str()).with("name", long);
        assert!(event.recorded_at(1, UNIX_EPOCH, 0).to_json().to_string().len() < 3 * MAX_TEXT_BYTES);
    }

    #[test]
    fn documentation_lists_all_event_types() {
        let document = include_str!("../../../../docs/events.md");
        let row = |line: &str| {
            let mut cells = line.strip_prefix("| `")?.split('|').map(str::trim);
            let (kind, severity) = (cells.next()?.trim_end_matches('`').to_owned(), cells.next()?.to_owned());
            ["info", "warning", "error"].contains(&&*severity).then_some((kind, severity))
        };
        let documented: Vec<_> = document.lines().filter_map(row).collect();
        let all = Kind::ALL.iter().map(|kind| (kind.name().to_owned(), kind.severity().name().to_owned()));
        assert_eq!(documented, all.collect::<Vec<_>>());
    }

    #[test]
    fn old_names_are_read_as_the_new_ones() {
        for (old, new) in OLD_NAMES {
            assert_eq!(Kind::named(old).map(Kind::name), Some(new));
        }
    }
}
