//! Decides which rings of a session run: those that are set up, enabled, and not found broken; and
//! what follows after rings have stopped. Never reads a ring.

use std::{collections::VecDeque, os::fd::OwnedFd};

use reactor::operation::Fd;

use super::{
    DRIVER_OK, Effect, EventKind, NEEDS_RESET, RequestRejection, SessionOutput, VhostUserSession,
    acknowledgement,
};
use crate::vhost_user_blk::{
    features::virtio,
    inflight::InflightArea,
    message::{self, VhostUserReply, VringAddresses, code},
    vring::{Kick, RingSettings, Vring, VringFault, VringState},
    vring_event::is_eventfd,
};

/// Action after rings have stopped. An acknowledgement carries the number of its request.
#[derive(Clone, Copy, Debug)]
pub(super) enum AfterStop {
    VringBase(u16),
    Acknowledge(Option<u32>),
    Reset(BasesAfterReset, Option<u32>),
}

/// Treatment of the indices at which the rings stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum BasesAfterReset {
    Kept,
    Forgotten,
}

impl VhostUserSession {
    /// Records that a ring has stopped, by order or by a violation: none of its requests is in
    /// flight, and it continues at `base`.
    pub fn ring_stopped(&mut self, ring: u16, base: u32, out: &mut VecDeque<SessionOutput>) {
        let Some(vring) = self.rings.get_mut(usize::from(ring)) else { return };
        match vring.state {
            VringState::Stopped => return,
            // Stopped without an order: the queue found the ring broken by its driver.
            VringState::Running => (vring.broken, vring.broken_by_driver) = (true, true),
            VringState::Stopping => {}
        }
        (vring.state, vring.base) = (VringState::Stopped, base);
        self.set_needs_reset(out);
        self.continue_after_stop(out);
    }

    /// Sets NEEDS_RESET and notifies the driver by a configuration change if the driver has broken
    /// a ring (virtio 1.3 § 2.1.2). Such a ring is served again only after a reset.
    pub(super) fn set_needs_reset(&mut self, out: &mut VecDeque<SessionOutput>) {
        let is_notified = self.status & (DRIVER_OK | NEEDS_RESET) != DRIVER_OK;
        if is_notified || !self.rings.iter().any(|vring| vring.broken_by_driver) {
            return;
        }
        self.status |= NEEDS_RESET;
        if self.channel().is_some() {
            out.push_back(SessionOutput::ConfigChanged);
        }
    }

    /// Rings that run or have yet to stop.
    pub fn running(&self) -> impl Iterator<Item = u16> {
        let running = self.rings.iter().zip(0..).filter(|(vring, _)| vring.state != VringState::Stopped);
        running.map(|(_, ring)| ring)
    }

    /// Stores an event of a ring; `None` means that there is none.
    pub(super) fn set_event(
        &mut self,
        ring: u32,
        kind: EventKind,
        event: Option<OwnedFd>,
        out: &mut VecDeque<SessionOutput>,
    ) -> Result<(), RequestRejection> {
        let event = checked_event(event, kind, out);
        let number = self.number(ring)?;
        let vring = &mut self.rings[usize::from(number)];
        match kind {
            EventKind::Kick => {
                vring.kick = event.clone().map_or(Kick::Polled, Kick::Event);
                // SET_VRING_KICK is the last message of a ring's setup, so it ends an earlier
                // failure.
                (vring.broken, vring.broken_by_driver) = (false, false);
            }
            EventKind::Call => vring.call.clone_from(&event),
            EventKind::Error => vring.error.clone_from(&event),
        }
        if vring.state != VringState::Stopped {
            out.push_back(SessionOutput::Effect(Effect::Event { ring: number, kind, event }));
        }
        Ok(())
    }

    /// Locates the parts of running rings in the current memory.
    pub(super) fn emit_memory(&mut self, out: &mut VecDeque<SessionOutput>) {
        self.emit_memory_of(|_| true, out);
    }

    fn emit_memory_of(&mut self, selects: impl Fn(u16) -> bool, out: &mut VecDeque<SessionOutput>) {
        let memory = self.memory.clone();
        let mut rings = Vec::new();
        let mut faults = Vec::new();
        for (vring, ring) in self.rings.iter_mut().zip(0..) {
            if vring.state != VringState::Running || !selects(ring) {
                continue;
            }
            match vring.areas(&memory, self.features) {
                Ok(areas) => rings.push((ring, areas)),
                Err(why) => faults.push((ring, why)),
            }
        }
        if !rings.is_empty() {
            out.push_back(SessionOutput::Effect(Effect::Memory { memory, rings }));
        }
        for (ring, why) in faults {
            self.fault(ring, why, out);
        }
    }

    pub(super) fn set_addresses(
        &mut self,
        ring: u32,
        addresses: VringAddresses,
        out: &mut VecDeque<SessionOutput>,
    ) -> Result<(), RequestRejection> {
        let vring = self.ring(ring)?;
        let previous = vring.addresses.replace(addresses);
        // A front end repeats the addresses when logging begins or ends.
        if vring.state == VringState::Running && previous != Some(addresses) {
            self.emit_memory_of(|other| u32::from(other) == ring, out);
        }
        self.start_or_stop_number(ring, out)
    }

    /// Stops all rings until their kicks are set again.
    pub(super) fn unset_kicks(&mut self, out: &mut VecDeque<SessionOutput>) {
        for vring in &mut self.rings {
            vring.kick = Kick::Unset;
        }
        self.start_or_stop_all(out);
    }

    /// Resets the device once no ring runs. Keeps state that the front end sends only once: see
    /// [`VhostUserSession`]'s module.
    fn reset_device(&mut self, bases: BasesAfterReset) {
        for vring in &mut self.rings {
            let (call, error) = (vring.call.take(), vring.error.take());
            let base = if bases == BasesAfterReset::Kept { vring.base } else { 0 };
            *vring = Vring { call, error, base, ..Vring::default() };
        }
        self.inflight = None;
        self.status = 0;
    }

    /// If no ring is stopping, sends the reply that waited for that, and starts rings that may run.
    pub(super) fn continue_after_stop(&mut self, out: &mut VecDeque<SessionOutput>) {
        if self.rings.iter().any(|vring| vring.state == VringState::Stopping) {
            return;
        }
        match self.waiting.take() {
            Some(AfterStop::VringBase(ring)) => {
                let base = self.rings[usize::from(ring)].base;
                out.push_back(SessionOutput::Reply(VhostUserReply::vring_base(u32::from(ring), base)));
            }
            Some(AfterStop::Acknowledge(acknowledge)) => out.extend(acknowledgement(acknowledge, 0)),
            Some(AfterStop::Reset(bases, acknowledge)) => {
                self.reset_device(bases);
                out.extend(acknowledgement(acknowledge, 0));
            }
            None => {}
        }
        self.start_or_stop_all(out);
    }

    pub(super) fn start_or_stop_all(&mut self, out: &mut VecDeque<SessionOutput>) {
        for ring in 0..self.offer.queues {
            // The failure was already reported.
            let _ = self.start_or_stop(ring, out);
        }
    }

    pub(super) fn start_or_stop_number(
        &mut self,
        ring: u32,
        out: &mut VecDeque<SessionOutput>,
    ) -> Result<(), RequestRejection> {
        let ring = self.number(ring)?;
        self.start_or_stop(ring, out).map_err(|why| RequestRejection::Fault { ring, why })
    }

    /// Starts or stops a ring according to the current settings.
    fn start_or_stop(&mut self, ring: u16, out: &mut VecDeque<SessionOutput>) -> Result<(), VringFault> {
        let vring = &mut self.rings[usize::from(ring)];
        match (vring.state, vring.should_run(self.features) && !self.quiescing) {
            (VringState::Stopped, true) => match self.settings(ring) {
                Ok(settings) => {
                    // Set before the outputs, because `emit_size` and later messages depend on it.
                    self.rings[usize::from(ring)].state = VringState::Running;
                    self.emit_write_cache(out);
                    let settings = Box::new(settings);
                    out.push_back(SessionOutput::Effect(Effect::Start { ring, settings }));
                    self.emit_size(out);
                }
                Err(why) => {
                    self.fault(ring, why, out);
                    return Err(why);
                }
            },
            (VringState::Running, false) => {
                vring.state = VringState::Stopping;
                out.push_back(SessionOutput::Effect(Effect::Stop { ring }));
            }
            _ => {}
        }
        Ok(())
    }

    /// Asks a front end to read the configuration, once. A front end that reconnects does not read
    /// it, and the disk may have grown meanwhile. QEMU handles the channel once it has started the
    /// device.
    fn emit_size(&mut self, out: &mut VecDeque<SessionOutput>) {
        if self.announced_size.is_none() && self.channel().is_some() {
            self.announced_size = Some(self.offer.size_bytes);
            out.push_back(SessionOutput::ConfigChanged);
        }
    }

    pub(super) fn settings(&self, ring: u16) -> Result<RingSettings, VringFault> {
        let vring = &self.rings[usize::from(ring)];
        let memory = self.memory.clone();
        let areas = vring.areas(&memory, self.features)?;
        let size = vring.size.unwrap_or_default();
        let packed = self.features & virtio::RING_PACKED != 0;
        let part = |area: &InflightArea| area.part(ring, size, packed).ok_or(VringFault::NoInflight);
        Ok(RingSettings {
            size,
            areas,
            memory,
            features: self.features,
            base: vring.base,
            inflight: self.inflight.as_ref().map(part).transpose()?,
            loss: self.inflight.as_ref().and_then(InflightArea::loss).cloned(),
            kick: match &vring.kick {
                Kick::Event(event) => Some(event.clone()),
                Kick::Unset | Kick::Polled => None,
            },
            call: vring.call.clone(),
            error: vring.error.clone(),
        })
    }

    /// Marks a ring broken: it stops if it runs, and waits to be set up again.
    fn fault(&mut self, ring: u16, why: VringFault, out: &mut VecDeque<SessionOutput>) {
        let vring = &mut self.rings[usize::from(ring)];
        vring.broken = true;
        let error = vring.error.clone();
        out.push_back(SessionOutput::Effect(Effect::Fault { ring, why, error }));
        if vring.state == VringState::Running {
            vring.state = VringState::Stopping;
            out.push_back(SessionOutput::Effect(Effect::Stop { ring }));
        }
    }

    pub(super) fn number(&self, ring: u32) -> Result<u16, RequestRejection> {
        let queues = self.offer.queues;
        let number = u16::try_from(ring).ok().filter(|number| *number < queues);
        number.ok_or(RequestRejection::NoSuchRing { ring, queues })
    }

    pub(super) fn ring(&mut self, ring: u32) -> Result<&mut Vring, RequestRejection> {
        let number = self.number(ring)?;
        Ok(&mut self.rings[usize::from(number)])
    }

    pub(super) fn stopped_ring(&mut self, ring: u32) -> Result<&mut Vring, RequestRejection> {
        let number = self.number(ring)?;
        let vring = &mut self.rings[usize::from(number)];
        if vring.state == VringState::Stopped { Ok(vring) } else { Err(RequestRejection::Running(number)) }
    }
}

/// Accepts an event only if it is an eventfd. A ring is served without it; another file could keep
/// its front end connected forever, see `back_end_channel.rs`.
fn checked_event(event: Option<OwnedFd>, kind: EventKind, out: &mut VecDeque<SessionOutput>) -> Option<Fd> {
    let event = event?;
    if is_eventfd(&event) {
        return Some(event.into());
    }
    let code = match kind {
        EventKind::Kick => code::SET_VRING_KICK,
        EventKind::Call => code::SET_VRING_CALL,
        EventKind::Error => code::SET_VRING_ERR,
    };
    out.push_back(SessionOutput::Rejected { request: message::name(code), why: RequestRejection::NoEvent });
    None
}
