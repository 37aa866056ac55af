//! Format of io.stat, io.max and io.cost.qos: a device and its keys on every line.
//!
//! ```text
//!   8:16 rbytes=1459200 wbytes=314773504
//!   253:10 253:5 rbytes=0 wbytes=4096          Linux 5.15 to 5.18: a device without keys does not end its line
//!   (unknown) rbytes=0                         a device without a name: it was removed, or is one path of several to a disk
//!   11:2 rbytes=0 [NONE] dispatched=0          Android: counters of its scheduler, by class of request
//! ```
//!
//! Source: "Nested keyed" in cgroup-v2.rst; commits "stop using seq_get_buf" and "always terminate
//! io.stat lines" of block/blk-cgroup.c. Allocates only for an error: io.stat is read many times a
//! second.

use std::ops::ControlFlow;

use block::device::DeviceNumber;

use super::{UnknownFormat, number};

/// Placeholders for a device without a name: since Linux 5.7, and before.
pub(super) const NAMELESS: [&str; 2] = ["(unknown)", "(null)"];

/// Calls `show` for each device in order, until it breaks. `set` stores one key in the value and
/// returns `None` for an invalid value. Fails at the first unknown line, after showing the devices
/// before it.
pub(super) fn scan<V: Default>(
    file: &'static str,
    text: &str,
    set: impl Fn(&mut V, &str, &str) -> Option<()>,
    mut show: impl FnMut(DeviceNumber, V) -> ControlFlow<()>,
) -> Result<(), UnknownFormat> {
    for line in text.lines() {
        let unknown = || UnknownFormat::new(file, line);
        let mut current: Option<(Option<DeviceNumber>, V)> = None;
        for token in line.split_ascii_whitespace() {
            if let Some((key, value)) = token.split_once('=') {
                let (_, values) = current.as_mut().ok_or_else(unknown)?;
                set(values, key, value).ok_or_else(unknown)?;
                continue;
            }
            // Android's scheduler classes, such as `[NONE]`; their keys are unknown and skipped.
            if current.is_some() && token.starts_with('[') && token.ends_with(']') {
                continue;
            }
            let device =
                if NAMELESS.contains(&token) { None } else { Some(number(token).ok_or_else(unknown)?) };
            // A second device on the line: the device before it has no further keys.
            if let Some((Some(before), values)) = current.replace((device, V::default()))
                && show(before, values).is_break()
            {
                return Ok(());
            }
        }
        if let Some((Some(device), values)) = current
            && show(device, values).is_break()
        {
            return Ok(());
        }
    }
    Ok(())
}

pub(super) fn all<V: Default>(
    file: &'static str,
    text: &str,
    set: impl Fn(&mut V, &str, &str) -> Option<()>,
) -> Result<Vec<(DeviceNumber, V)>, UnknownFormat> {
    let mut found = Vec::new();
    scan(file, text, set, |device, values| {
        found.push((device, values));
        ControlFlow::Continue(())
    })?;
    Ok(found)
}
