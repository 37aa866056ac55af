//! Rules of time zones, for decisions that follow a clock on the wall.
//!
//! The caller reads the zones of the host, so that tests have zones of their own. Never reads a
//! clock or a file.

/// Rules of a time zone.
pub trait ZoneRules {
    /// Seconds by which the clock of the zone is ahead of UTC at an instant, in seconds since 1970.
    fn offset_s(&self, at_s: i64) -> i64;

    /// First instant after `after_s` at which the offset may change.
    fn next_transition(&self, after_s: i64) -> Option<i64>;
}

/// Time zones of tests.
#[cfg(test)]
pub(crate) mod test_zones {
    use super::ZoneRules;

    /// Offsets from instants on; the first applies before, too.
    pub(crate) struct Zone(pub(crate) &'static [(i64, i64)]);

    impl ZoneRules for Zone {
        fn offset_s(&self, at_s: i64) -> i64 {
            self.0.iter().rev().find(|(from_s, _)| *from_s <= at_s).unwrap_or(&self.0[0]).1
        }

        fn next_transition(&self, after_s: i64) -> Option<i64> {
            self.0.iter().map(|(from_s, _)| *from_s).find(|from_s| *from_s > after_s)
        }
    }

    pub(crate) const UTC: Zone = Zone(&[(i64::MIN, 0)]);
    /// Sundays in Berlin: 2026-03-29 01:00 UTC and 2026-10-25 01:00 UTC.
    pub(crate) const SPRING_S: i64 = 1_774_746_000;
    pub(crate) const AUTUMN_S: i64 = 1_792_890_000;
    pub(crate) const BERLIN: Zone = Zone(&[(i64::MIN, 3600), (SPRING_S, 2 * 3600), (AUTUMN_S, 3600)]);
    /// Monday, 2026-11-30 00:00 UTC.
    pub(crate) const MONDAY_S: i64 = 1_795_996_800;
}
