//! The queue of future events, and the devices. Events of one instant are processed in the order
//! in which they were added.

use std::{cmp::Reverse, collections::BinaryHeap};

use policy::prefetch::{FetchId, WriteId};

use super::device::SimulatedDevices;

#[derive(Debug, Default)]
pub(super) struct EventQueue {
    events: BinaryHeap<Reverse<ScheduledEvent>>,
    // Sequence number of the last event: makes the order of events of one instant deterministic.
    last_number: u64,
    /// Number of events that keep the simulation running: all except for samples and steps of
    /// devices.
    pending: usize,
    pub(super) devices: SimulatedDevices,
}

#[derive(Debug)]
struct ScheduledEvent {
    at: u64,
    number: u64,
    event: SimulationEvent,
}

#[derive(Debug)]
pub(super) enum SimulationEvent {
    Timer(usize),
    Completed(u32, bool),
    Send(u32),
    Chunk(usize, FetchId),
    Written(usize, WriteId),
    Sample,
    ControlLatency,
}

impl SimulationEvent {
    /// True for samples and steps, which do not keep the simulation running.
    const fn is_periodic(&self) -> bool {
        matches!(self, Self::Sample | Self::ControlLatency)
    }
}

impl EventQueue {
    pub(super) fn schedule(&mut self, at: u64, event: SimulationEvent) {
        self.pending += usize::from(!event.is_periodic());
        self.last_number += 1;
        self.events.push(Reverse(ScheduledEvent { at, number: self.last_number, event }));
    }

    #[inline]
    pub(super) fn next_at(&self) -> Option<u64> {
        self.events.peek().map(|Reverse(event)| event.at)
    }

    #[inline]
    pub(super) fn pop(&mut self) -> Option<(u64, SimulationEvent)> {
        let Reverse(ScheduledEvent { at, event: what, .. }) = self.events.pop()?;
        self.pending -= usize::from(!what.is_periodic());
        Some((at, what))
    }

    #[inline]
    pub(super) fn is_idle(&self) -> bool {
        // Without this distinction samples would schedule each other forever.
        self.pending == 0
    }

    #[cfg(test)]
    pub(super) fn scheduled(&self) -> u64 {
        self.last_number
    }
}

impl Ord for ScheduledEvent {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        (self.at, self.number).cmp(&(other.at, other.number))
    }
}

impl PartialOrd for ScheduledEvent {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for ScheduledEvent {
    fn eq(&self, other: &Self) -> bool {
        self.number == other.number
    }
}

impl Eq for ScheduledEvent {}
