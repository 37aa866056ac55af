//! How long processes waited: io.pressure of a cgroup, and /proc/pressure/io.
//!
//! ```text
//!   some avg10=0.00 avg60=0.31 avg300=1.20 total=11182186648
//!   full avg10=0.00 avg60=0.10 avg300=0.90 total=4346621964
//! ```
//!
//! There since Linux 4.20, if built in and not switched off by `psi=0`, when reading fails with
//! "Operation not supported". The processor's has no line of `full` before 5.13. Source:
//! Documentation/accounting/psi.rst.

use super::{Unknown, count};

const FILE: &str = "io.pressure";

/// How long something stood still for want of I/O.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(crate) struct Stall {
    /// Share of the last 10 seconds, in percent.
    pub(crate) avg10: f64,
    /// Share of the last 60 seconds, in percent.
    pub(crate) avg60: f64,
    /// Share of the last 300 seconds, in percent.
    pub(crate) avg300: f64,
    pub(crate) total_us: u64,
}

/// The pressure in a cgroup, or on the machine.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Pressure {
    /// Time during which at least one task waited.
    pub(crate) some: Stall,
    /// Time during which all that could have run waited.
    pub(crate) full: Option<Stall>,
}

/// The whole file.
///
/// # Errors
/// If a line is of no known form, or none says `some`.
pub(crate) fn parse(text: &str) -> Result<Pressure, Unknown> {
    let (mut some, mut full) = (None, None);
    for line in text.lines() {
        let unknown = || Unknown::new(FILE, line);
        let (kind, keys) = line.split_once(' ').ok_or_else(unknown)?;
        let stall = match kind {
            "some" => &mut some,
            "full" => &mut full,
            _ => continue,
        };
        *stall = Some(parse_stall(keys).ok_or_else(unknown)?);
    }
    let some = some.ok_or_else(|| Unknown::new(FILE, text.lines().next().unwrap_or_default()))?;
    Ok(Pressure { some, full })
}

/// The keys of a line, all four of which there must be.
fn parse_stall(keys: &str) -> Option<Stall> {
    let (mut averages, mut total_us) = ([None; 3], None);
    for word in keys.split_ascii_whitespace() {
        let (key, value) = word.split_once('=')?;
        match key {
            "avg10" => averages[0] = Some(percent(value)?),
            "avg60" => averages[1] = Some(percent(value)?),
            "avg300" => averages[2] = Some(percent(value)?),
            "total" => total_us = Some(count(value)?),
            _ => {}
        }
    }
    let [avg10, avg60, avg300] = averages;
    Some(Stall { avg10: avg10?, avg60: avg60?, avg300: avg300?, total_us: total_us? })
}

/// Digits and a point: `f64` would also take `inf`, `nan` and signs.
fn percent(text: &str) -> Option<f64> {
    let plain = text.bytes().all(|byte| byte.is_ascii_digit() || byte == b'.');
    text.parse().ok().filter(|value: &f64| plain && value.is_finite())
}
