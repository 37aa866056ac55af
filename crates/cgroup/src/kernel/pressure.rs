//! Time that processes waited for I/O: io.pressure of a cgroup, and /proc/pressure/io.
//!
//! ```text
//!   some avg10=0.00 avg60=0.31 avg300=1.20 total=11182186648
//!   full avg10=0.00 avg60=0.10 avg300=0.90 total=4346621964
//! ```
//!
//! Since Linux 4.20. With `psi=0` reading io.pressure fails with EOPNOTSUPP, and newer kernels have
//! no /proc/pressure. The file for the CPU has the same format, before 5.13 without `full`. Source:
//! Documentation/accounting/psi.rst.

use serde::{Serialize, Serializer};

use super::{UnknownFormat, count};

const FILE: &str = "io.pressure";

#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub(crate) struct PressureStall {
    /// Percent of the last 10 s; the next fields of the last 60 s and 300 s.
    #[serde(rename = "avg10-percent")]
    pub(crate) avg10: f64,
    #[serde(rename = "avg60-percent")]
    pub(crate) avg60: f64,
    #[serde(rename = "avg300-percent")]
    pub(crate) avg300: f64,
    #[serde(rename = "total-ns", serialize_with = "serialize_us_in_ns")]
    pub(crate) total_us: u64,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes fields by reference")]
fn serialize_us_in_ns<S: Serializer>(us: &u64, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_u64(us.saturating_mul(1000))
}

#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub(crate) struct IoPressure {
    /// At least one task waited.
    pub(crate) some: PressureStall,
    /// All non-idle tasks waited at the same time.
    pub(crate) full: Option<PressureStall>,
}

pub(crate) fn parse(text: &str) -> Result<IoPressure, UnknownFormat> {
    let (mut some, mut full) = (None, None);
    for line in text.lines() {
        let unknown = || UnknownFormat::new(FILE, line);
        let (kind, keys) = line.split_once(' ').ok_or_else(unknown)?;
        let stall = match kind {
            "some" => &mut some,
            "full" => &mut full,
            // Kernels may add lines and keys.
            _ => continue,
        };
        *stall = Some(parse_stall(keys).ok_or_else(unknown)?);
    }
    let some = some.ok_or_else(|| UnknownFormat::new(FILE, text.lines().next().unwrap_or_default()))?;
    Ok(IoPressure { some, full })
}

/// Parses one line; all four keys are required.
fn parse_stall(keys: &str) -> Option<PressureStall> {
    let (mut averages, mut total_us) = ([None; 3], None);
    for token in keys.split_ascii_whitespace() {
        let (key, value) = token.split_once('=')?;
        match key {
            "avg10" => averages[0] = Some(percent(value)?),
            "avg60" => averages[1] = Some(percent(value)?),
            "avg300" => averages[2] = Some(percent(value)?),
            "total" => total_us = Some(count(value)?),
            _ => {}
        }
    }
    let [avg10, avg60, avg300] = averages;
    Some(PressureStall { avg10: avg10?, avg60: avg60?, avg300: avg300?, total_us: total_us? })
}

/// Parses digits and a point: `f64` would also accept `inf`, `nan` and signs.
fn percent(text: &str) -> Option<f64> {
    let plain = text.bytes().all(|byte| byte.is_ascii_digit() || byte == b'.');
    text.parse().ok().filter(|value: &f64| plain && value.is_finite())
}
