//! Limits in a recording: those of each disk and group at its start, and every change.
//!
//! ```text
//!   block     number of changes, changes
//!   change    nanoseconds since time 0; 0 disk, 1 group; name; 0, or 1 and the name of its group;
//!             watermark in percent; iops-size; rate, burst rate and burst length of six limits; a
//!             length above the maximum is `burst-for`, plus the maximum
//! ```
//!
//! Decoding terminates for arbitrary bytes, and its memory is bounded by [`MAX_CHANGES`].

use policy::{
    throttle::{LimitKind, Limits, MAX_BURST_LENGTH_S, RateLimit},
    watermark::Watermark,
};

use super::block::{part, push_column, take_column};

/// Limit of changes in a block.
pub(super) const MAX_CHANGES: usize = 1 << 16;
// Length limit of a name, as for the disks of all traces.
const MAX_NAME_BYTES: usize = 4096;

/// Kind of the owner of limits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum LimitOwner {
    /// A disk.
    Disk,
    /// A group of disks or groups.
    Group,
}

/// Limits of a disk or group that are in force from some time on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LimitChange {
    /// Nanoseconds since time 0 of the recording.
    pub at_ns: u64,
    /// Kind of the owner.
    pub owner: LimitOwner,
    /// Name of the owner.
    pub name: String,
    /// Group that the owner belongs to. Its limits apply to the owner as well.
    pub group: Option<String>,
    /// The owner's own limits; none if the owner was removed.
    pub limits: Limits,
    /// Utilization of the device below which the limits are not enforced.
    pub watermark: Watermark,
}

/// Upper bound of the encoded size of a change: 25 numbers of 10 bytes, and its names.
pub(super) fn max_encoded_bytes(change: &LimitChange) -> usize {
    250 + change.name.len() + change.group.as_ref().map_or(0, String::len)
}

/// Appends an encoded block of changes.
pub(super) fn encode(changes: &[LimitChange], bytes: &mut Vec<u8>) {
    push_column(bytes, changes.len() as u64);
    for change in changes {
        push_column(bytes, change.at_ns);
        push_column(bytes, u64::from(change.owner == LimitOwner::Group));
        push_name(bytes, &change.name);
        push_column(bytes, u64::from(change.group.is_some()));
        if let Some(group) = &change.group {
            push_name(bytes, group);
        }
        push_column(bytes, change.watermark.percent().into());
        push_column(bytes, change.limits.iops_size);
        for kind in LimitKind::ALL {
            let RateLimit { rate, burst_rate, burst_length_s, burst_for_s } = change.limits.limit(kind);
            // A limit has one of both; recordings without `burst-for` keep their form.
            let time_s = if burst_for_s > 0 { MAX_BURST_LENGTH_S + burst_for_s } else { burst_length_s };
            [rate, burst_rate, time_s].into_iter().for_each(|number| push_column(bytes, number));
        }
    }
}

/// Decodes a block of changes; `None` if the bytes are invalid or a limit violates a rule.
pub(super) fn decode(bytes: &[u8]) -> Option<Vec<LimitChange>> {
    let mut rest = bytes;
    // No capacity is reserved for `count`: it may be damaged, and a change takes many bytes.
    let count = usize::try_from(take_column(&mut rest)?).ok().filter(|count| *count <= MAX_CHANGES)?;
    let changes = (0..count).map(|_| decode_change(&mut rest)).collect::<Option<Vec<_>>>()?;
    rest.is_empty().then_some(changes)
}

fn decode_change(rest: &mut &[u8]) -> Option<LimitChange> {
    let at_ns = take_column(rest)?;
    let owner = if take_flag(rest)? { LimitOwner::Group } else { LimitOwner::Disk };
    let name = take_name(rest)?;
    let group = if take_flag(rest)? { Some(take_name(rest)?) } else { None };
    let watermark = Watermark::new(u8::try_from(take_column(rest)?).ok()?)?;
    let mut limits = Limits::default();
    limits.iops_size = take_column(rest)?;
    for kind in LimitKind::ALL {
        let [rate, burst_rate, time_s] = [take_column(rest)?, take_column(rest)?, take_column(rest)?];
        let burst_for_s = time_s.saturating_sub(MAX_BURST_LENGTH_S);
        let burst_length_s = if burst_for_s > 0 { 1 } else { time_s };
        *limits.limit_mut(kind) = RateLimit { rate, burst_rate, burst_length_s, burst_for_s };
    }
    // The limits of a damaged recording must not reach the simulation.
    limits.validate().ok()?;
    Some(LimitChange { at_ns, owner, name, group, limits, watermark })
}

fn push_name(bytes: &mut Vec<u8>, name: &str) {
    push_column(bytes, name.len() as u64);
    bytes.extend_from_slice(name.as_bytes());
}

fn take_name(rest: &mut &[u8]) -> Option<String> {
    let name = String::from_utf8(part(rest)?.to_vec()).ok()?;
    let is_name = (1..=MAX_NAME_BYTES).contains(&name.len()) && !name.contains(char::is_control);
    is_name.then_some(name)
}

fn take_flag(rest: &mut &[u8]) -> Option<bool> {
    match take_column(rest)? {
        0 => Some(false),
        1 => Some(true),
        _ => None,
    }
}
