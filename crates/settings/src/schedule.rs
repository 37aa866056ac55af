//! Schedules of limits in a config, and the time zones that they refer to.
//!
//! `policy::schedule` decides which entry holds. Here are its keys, and the rules of time zones,
//! which are read from the host's database (`/usr/share/zoneinfo`, `/etc/localtime`).

use std::{
    collections::HashMap,
    sync::{LazyLock, Mutex, MutexGuard, PoisonError},
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use jiff::{Timestamp, tz::TimeZone};
use policy::{
    schedule::{CalendarError, CalendarRange, LimitSchedule, MAX_ENTRIES, ScheduleEntry, ScheduleState},
    throttle::{LimitPart, LimitSetting, Limits},
    time_zone::ZoneRules,
};

use crate::{
    RuleError, ThrottleConfig,
    diagnostics::{Diagnostics, Origin},
    key::{ConfigKey, ConfigValue, KeyField, KeyInput, KeyLiteral, KeyType, one, table},
    origins::{ConfigWithOrigins, KeyTable},
    throttle,
};

/// Heading of the rows. They have no options: a schedule is a table of the config file.
pub const HEADING: &str = "Schedule";
/// Key of the entries.
pub(crate) const ENTRIES: &str = "schedule";
const TIME_ZONE: &str = "time-zone";

type Config = ScheduleEntry;

impl KeyTable for ScheduleEntry {
    fn keys() -> &'static [ConfigKey<Self>] {
        static KEYS: LazyLock<Vec<ConfigKey<ScheduleEntry>>> = LazyLock::new(entry_keys);
        &KEYS
    }
}

impl RuleError for CalendarError {
    fn rule(self) -> String {
        self.to_string()
    }
}

impl ConfigValue for CalendarRange {
    fn read(given: KeyInput<'_>) -> Result<Self, String> {
        crate::parse(given.text)
    }

    fn write(&self) -> KeyLiteral {
        KeyLiteral::Text(self.to_string())
    }
}

/// The table of an entry.
fn entry_keys() -> Vec<ConfigKey<ScheduleEntry>> {
    let mut keys = table! {
        "Times" {
            "when", KeyType::Text, "TIMES", one!(when), "required", Apply, Transferred,
                "Days and times at which the limits hold, such as \"Mon..Fri 22:00-06:00\", \
                 \"Sat,Sun\" or \"12:00-13:00\"; a range that crosses midnight begins on the day named";
        }
    };
    keys.extend(
        LimitSetting::of_disk().map(|setting| throttle::limit_key("Limits", setting, limit(setting))),
    );
    keys
}

fn limit(setting: LimitSetting) -> KeyField<ScheduleEntry> {
    let read = move |entry: &mut ScheduleEntry, given: KeyInput<'_>| {
        Limits::default().set(setting, given.number).map_err(|invalid| invalid.rule.to_string())?;
        entry.limits.retain(|(known, _)| *known != setting);
        entry.limits.push((setting, given.number));
        Ok(())
    };
    KeyField::new(read, move |entry| {
        let given = entry.limits.iter().find(|(known, _)| *known == setting);
        given.map(|(_, value)| KeyLiteral::Number(*value))
    })
}

/// Rows of a schedule, for a config with one.
pub(crate) fn schedule_keys<T: 'static>(
    schedule: fn(&T) -> &LimitSchedule,
    schedule_mut: fn(&mut T) -> &mut LimitSchedule,
) -> Vec<ConfigKey<T>> {
    let time_zone = KeyField::new(
        move |config: &mut T, given: KeyInput<'_>| {
            zone(Some(given.text))
                .ok_or("is no time zone of this host (write it as in Europe/Berlin, or install tzdata)")?;
            schedule_mut(config).time_zone = Some(given.text.to_owned());
            Ok(())
        },
        move |config| schedule(config).time_zone.clone().map(KeyLiteral::Text),
    );
    let entries = KeyField::new(
        |_: &mut T, _| Err("is not a table; write its settings as KEY = VALUE lines below it".to_owned()),
        move |config| {
            let entries = &schedule(config).entries;
            (!entries.is_empty()).then(|| KeyLiteral::List(entries.iter().map(literal).collect()))
        },
    );
    table! {
        "Schedule" {
            "time-zone", KeyType::Text, "ZONE", time_zone, "that of the host", Apply, Transferred,
                "Time zone of the schedule and of the quotas, such as Europe/Berlin";
            "schedule", KeyType::Table, "TABLE", entries.list(), "", Apply, Transferred,
                "Limits that hold at times, in place of the same settings: a table with `when` and \
                 limits. The first entry that contains the present time holds";
        }
    }
}

fn literal(entry: &ScheduleEntry) -> KeyLiteral {
    let keys = ScheduleEntry::keys().iter();
    KeyLiteral::Table(keys.filter_map(|key| Some((key.name, key.write(entry)?))).collect())
}

/// Origin of an entry.
pub(crate) fn entry_origin<T>(placed: &ConfigWithOrigins<T>, index: usize) -> &Origin {
    placed.item_origin(ENTRIES, index, "").unwrap_or(placed.own_origin())
}

/// Reports the rules that a schedule breaks, by itself and with the configured limits.
pub(crate) fn check<T>(
    placed: &ConfigWithOrigins<T>,
    schedule: &LimitSchedule,
    settings: &ThrottleConfig,
    is_group: bool,
    diagnostics: &Diagnostics,
) {
    let LimitSchedule { time_zone, entries } = schedule;
    let configured = &settings.limits;
    let at = |index| entry_origin(placed, index);
    if time_zone.is_some() && entries.is_empty() && settings.quota.is_none() {
        let rule = "is not used, because there is no schedule and no quota (remove it)";
        diagnostics.report(placed.error(TIME_ZONE, rule));
    }
    if entries.len() > MAX_ENTRIES {
        let rule = format!("is one of {} entries; there may be {MAX_ENTRIES}", entries.len());
        diagnostics.report(at(MAX_ENTRIES).error(rule));
        return;
    }
    if let Some(index) = entries.iter().position(|entry| entry.limits.is_empty()) {
        diagnostics.report(at(index).error("sets no limit (add one, such as bps-total = \"50M\")"));
    }
    if let Some(index) = schedule.unreachable_entry() {
        let rule = "never holds, because earlier entries contain all its times (move it before them, or \
                    remove it)";
        diagnostics.report(at(index).error(rule));
    }
    if !entries.is_empty() || !settings.quota.is_none() {
        // Read here, where waiting for a file system is possible.
        let _ = zone(time_zone.as_deref());
    }
    for (index, entry) in entries.iter().enumerate() {
        if let Some(rule) = entry_without_effect(entry, configured) {
            diagnostics.report(at(index).error(rule));
        }
    }
    // A contradiction of the limits themselves is reported already.
    if configured.validate_for(is_group).is_ok()
        && let Some((index, invalid)) = schedule.contradiction(configured, is_group)
    {
        diagnostics.report(at(index).error(format!("contradicts the other limits: {invalid}")));
    }
}

/// The rule that an entry breaks if it removes a rate, but the same limit stays in force for each
/// GiB.
fn entry_without_effect(entry: &ScheduleEntry, configured: &Limits) -> Option<String> {
    entry.limits.iter().find_map(|&(setting, value)| {
        let LimitSetting::Limit(kind, LimitPart::Rate) = setting else { return None };
        let per_gib = LimitSetting::Limit(kind, LimitPart::PerGib);
        let given = entry.limits.iter().find(|(given, _)| *given == per_gib).map(|(_, value)| *value);
        let remaining = given.unwrap_or(configured.get(per_gib));
        (value == 0 && remaining > 0)
            .then(|| format!("{setting} = 0 leaves {per_gib} ({remaining}) in force (add {per_gib} = 0)"))
    })
}

/// State of a schedule at the present time of the host; `None` if its time zone cannot be read.
pub fn state_now(schedule: &LimitSchedule) -> Option<ScheduleState> {
    let zone = zone(schedule.time_zone.as_deref())?;
    Some(schedule.state(i64::try_from(now().as_secs()).unwrap_or(i64::MAX), &Zone(zone)))
}

/// Rules of the time zone of a schedule; `None` if it cannot be read.
pub fn zone_rules(schedule: &LimitSchedule) -> Option<impl ZoneRules + use<>> {
    zone(schedule.time_zone.as_deref()).map(Zone)
}

/// Present time of the host, since 1970.
pub fn now() -> Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
}

/// An instant as the clock of a schedule's zone shows it, with its offset:
/// `2026-11-30T22:00:00+01:00`.
pub fn local_time(schedule: &LimitSchedule, at_s: i64) -> Option<String> {
    let zone = zone(schedule.time_zone.as_deref())?;
    let at = Timestamp::from_second(at_s).ok()?.to_zoned_datetime(zone);
    Some(at.strftime("%Y-%m-%dT%H:%M:%S%:z").to_string())
}

/// Zones that were read. The thread that serves the control socket uses them, and must not wait for
/// a file system.
static ZONES: LazyLock<Mutex<HashMap<Option<String>, TimeZone>>> = LazyLock::new(Mutex::default);

fn zones() -> MutexGuard<'static, HashMap<Option<String>, TimeZone>> {
    ZONES.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Reads all zones again. One that cannot be read stays as it was. Waits for a file system.
pub fn refresh_zones() {
    // `jiff` keeps what it has read for 5 minutes.
    jiff::tz::db().reset();
    jiff::tz::reset_system_time_zone_cache();
    let names: Vec<_> = zones().keys().cloned().collect();
    for name in names {
        if let Some(zone) = read_zone(name.as_deref()) {
            zones().insert(name, zone);
        }
    }
}

/// Zone of this name, or that of the host.
fn zone(name: Option<&str>) -> Option<TimeZone> {
    let key = name.map(str::to_owned);
    let known = zones().get(&key).cloned();
    if known.is_some() {
        return known;
    }
    // Without the lock, which the main thread may need.
    let zone = match name {
        Some(_) => read_zone(name)?,
        // Without a file, a host is in UTC (localtime(5)).
        None => read_zone(None).unwrap_or(TimeZone::UTC),
    };
    zones().insert(key, zone.clone());
    Some(zone)
}

fn read_zone(name: Option<&str>) -> Option<TimeZone> {
    name.map_or_else(TimeZone::try_system, TimeZone::get).ok()
}

struct Zone(TimeZone);

impl ZoneRules for Zone {
    fn offset_s(&self, at_s: i64) -> i64 {
        Timestamp::from_second(at_s).map_or(0, |at| self.0.to_offset(at).seconds().into())
    }

    fn next_transition(&self, after_s: i64) -> Option<i64> {
        let after = Timestamp::from_second(after_s).ok()?;
        self.0.following(after).next().map(|transition| transition.timestamp().as_second())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn zones_have_the_rules_of_the_host() {
        let berlin = Zone(zone(Some("Europe/Berlin")).expect("tzdata is installed"));
        // 2026-10-25 01:00 UTC, and the hour before.
        assert_eq!(berlin.next_transition(1_792_800_000), Some(1_792_890_000));
        assert_eq!([1_792_886_400, 1_792_890_000].map(|at_s| berlin.offset_s(at_s)), [7200, 3600]);
        let kolkata = Zone(zone(Some("Asia/Kolkata")).expect("tzdata is installed"));
        assert_eq!((kolkata.offset_s(1_792_890_000), kolkata.next_transition(1_792_890_000)), (19_800, None));
        assert!(zone(Some("Europe/Berlni")).is_none() && zone(Some("../../etc/passwd")).is_none());
        let schedule =
            LimitSchedule { time_zone: Some("Asia/Kolkata".to_owned()), ..LimitSchedule::default() };
        assert_eq!(local_time(&schedule, 1_792_890_000).as_deref(), Some("2026-10-25T06:30:00+05:30"));
    }

    #[test]
    fn entries_round_trip() {
        let text = "[group.g]\nbps-total = 1\ntime-zone = \"Asia/Kolkata\"\n\
                    [[group.g.schedule]]\nwhen = \"Mon..Fri 22:00-06:00\"\nbps-total = \"5M\"\n\
                    [[group.g.schedule]]\nwhen = \"Sun\"\nbps-total = 0\n";
        let parsed = crate::config::parse("", text, std::path::Path::new("")).expect("valid");
        let schedule = &parsed.groups[0].schedule;
        let setting = LimitSetting::from_name("bps-total").expect("a setting");
        assert_eq!(schedule.entries.len(), 2);
        assert_eq!(schedule.entries[0].limits, [(setting, 5 << 20)]);
        assert_eq!(schedule.entries[1].limits, [(setting, 0)]);
        let key = crate::GroupConfig::key(ENTRIES).expect("a row");
        let written = key.write(&parsed.groups[0]).expect("entries");
        let keys = [("schedule".to_owned(), serde_json::Value::from(&written))].into_iter().collect();
        let again = crate::config::group_from_json("g", &keys, &Diagnostics::default()).expect("valid");
        assert_eq!(again.schedule.entries, schedule.entries);
    }

    #[test]
    fn zones_are_read_again() {
        let key = Some("Asia/Tokyo".to_owned());
        let unreadable = Some("No/Zone".to_owned());
        zones().insert(key.clone(), TimeZone::UTC);
        zones().insert(unreadable.clone(), TimeZone::UTC);
        refresh_zones();
        assert_eq!(zones().get(&key), TimeZone::get("Asia/Tokyo").ok().as_ref());
        assert_eq!(zones().remove(&unreadable), Some(TimeZone::UTC), "kept");
    }

    #[test]
    fn rate_of_zero_removes_no_limit_for_each_gib() {
        let check = |entry: &str| {
            let text = format!(
                "[disk.d]\nimage = \"null:1M\"\niops-total-per-gib = 3\n[[disk.d.schedule]]\n\
                 when = \"Sun\"\niops-total = 0\n{entry}"
            );
            let parsed = crate::config::parse("", &text, std::path::Path::new("")).expect("valid");
            crate::DesiredState::new(parsed, 0).map(drop).map_err(|error| error.to_string())
        };
        let error = check("").expect_err("no effect");
        let rule = "disk.d.schedule[0]: iops-total = 0 leaves iops-total-per-gib (3) in force (add \
                    iops-total-per-gib = 0)";
        assert!(error.contains(rule), "{error}");
        assert_eq!(check("iops-total-per-gib = 0\n"), Ok(()));
    }

    #[test]
    fn reservations_fit_into_the_limits_of_each_entry() {
        let plan = |night: &str, week_end: &str| {
            let text = format!(
                "[group.g]\nbps-total = 900\n\
                 [[group.g.schedule]]\nwhen = \"22:00-06:00\"\nbps-total = {night}\n\
                 [disk.d]\nimage = \"null:1M\"\ngroup = \"g\"\nbps-reservation = 600\n\
                 [[disk.d.schedule]]\nwhen = \"Sun\"\nbps-total = {week_end}\n"
            );
            let parsed = crate::config::parse("", &text, std::path::Path::new("")).expect("valid");
            crate::DesiredState::new(parsed, 0).map(drop).map_err(|error| error.to_string())
        };
        assert_eq!(plan("600", "600"), Ok(()));
        for (night, week_end, place) in [("599", "600", "group.g"), ("600", "599", "disk.d")] {
            let expect = format!(
                "{place}.schedule[0]: bps-reservation: 600 bytes per second would be reserved, 1 more than \
                 the limit of 599 (lower a reservation, or raise the limit)"
            );
            let error = plan(night, week_end).expect_err("overbooked");
            assert!(error.contains(&expect), "{error}");
        }
    }

    #[test]
    fn mistakes_are_named_with_their_entry() {
        for (lines, rule) in [
            (
                "when = \"Mo 1:00-2:00\"\nbps-total = 1",
                "schedule[0].when = \"Mo 1:00-2:00\": has no day \"Mo\"",
            ),
            ("when = \"1:00-1:00\"\nbps-total = 1", "begins and ends at the same time"),
            ("bps-total = 1", "group.g.schedule[0]: no when"),
            ("when = \"Sun\"", "group.g.schedule[0]: sets no limit"),
            (
                "when = \"Sun\"\nbps-totl = 1",
                "schedule[0].bps-totl: unknown key (did you mean \"bps-total\"?)",
            ),
            ("when = \"Sun\"\nbps-read = 1", "schedule[0]: contradicts the other limits: bps-total (9)"),
            ("when = \"Sun\"\nbps-total-per-gib = 1", "schedule[0]: contradicts the other limits"),
            (
                "when = \"Sat,Sun\"\nbps-total = 1\n[[group.g.schedule]]\nwhen = \"Sun 1:00-2:00\"\nbps-total = 2",
                "group.g.schedule[1]: never holds, because earlier entries contain all its times",
            ),
        ] {
            let text = format!(
                "[group.g]\nbps-total = 9\n[[group.g.schedule]]\n{lines}\n[disk.d]\nimage = \"null:1M\"\ngroup = \"g\"\n"
            );
            let parsed = crate::config::parse("", &text, std::path::Path::new(""));
            let error = parsed.and_then(|parsed| crate::DesiredState::new(parsed, 0)).expect_err(lines);
            assert!(error.to_string().contains(rule), "{error}");
        }
        let zone = "[disk.d]\nimage = \"null:1M\"\ntime-zone = \"Mars\"\n";
        let error = crate::config::parse("f", zone, std::path::Path::new("")).expect_err("no such zone");
        assert!(
            error.to_string().contains("disk.d.time-zone = \"Mars\": is no time zone of this host"),
            "{error}"
        );
    }
}
