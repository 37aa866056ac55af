//! The queue of future events, and the devices. Events of one instant are processed in the order
//! in which they were added.

use std::{cmp::Reverse, collections::BinaryHeap};

use policy::prefetch::{FetchId, WriteId};

use super::device::Devices;

#[derive(Debug, Default)]
pub(super) struct Flow {
    events: BinaryHeap<Reverse<Event>>,
    // Sequence number of the last event: makes the order of events of one instant deterministic.
    foreseen: u64,
    /// Number of events that keep the simulation running: all except for samples of devices.
    lively: usize,
    pub(super) devices: Devices,
}

#[derive(Debug)]
struct Event {
    at: u64,
    number: u64,
    what: What,
}

#[derive(Debug)]
pub(super) enum What {
    Timer(usize),
    Answer(u32, bool),
    Send(u32),
    Chunk(usize, FetchId),
    Written(usize, WriteId),
    Watch,
}

impl Flow {
    pub(super) fn foresee(&mut self, at: u64, what: What) {
        self.lively += usize::from(!matches!(what, What::Watch));
        self.foreseen += 1;
        self.events.push(Reverse(Event { at, number: self.foreseen, what }));
    }

    #[inline]
    pub(super) fn next_at(&self) -> Option<u64> {
        self.events.peek().map(|Reverse(event)| event.at)
    }

    #[inline]
    pub(super) fn pop(&mut self) -> Option<(u64, What)> {
        let Reverse(Event { at, what, .. }) = self.events.pop()?;
        self.lively -= usize::from(!matches!(what, What::Watch));
        Some((at, what))
    }

    #[inline]
    pub(super) fn is_idle(&self) -> bool {
        // Without this distinction samples would schedule each other forever.
        self.lively == 0
    }

    #[cfg(test)]
    pub(super) fn foreseen(&self) -> u64 {
        self.foreseen
    }
}

impl Ord for Event {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        (self.at, self.number).cmp(&(other.at, other.number))
    }
}

impl PartialOrd for Event {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Event {
    fn eq(&self, other: &Self) -> bool {
        self.number == other.number
    }
}

impl Eq for Event {}
