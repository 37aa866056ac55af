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
