//! Decides which rings of a session run: those that are set up, enabled, and not found broken; and
//! what follows after rings have stopped. Never reads a ring.

use std::{collections::VecDeque, os::fd::OwnedFd};

use reactor::op::Fd;

use super::{DRIVER_OK, Effect, EventKind, NEEDS_RESET, Output, Refusal, Session, acknowledgement};
use crate::vhost_user_blk::{
    bell::is_event,
    features::virtio,
    inflight::Area,
    message::{self, Reply, VringAddresses, code},
    vring::{Fault, Kick, RingSettings, State, Vring},
};

/// Action after rings have stopped. An acknowledgement carries the number of its request.
#[derive(Clone, Copy, Debug)]
pub(super) enum After {
    VringBase(u16),
    Acknowledge(Option<u32>),
    Reset(Bases, Option<u32>),
}

/// Treatment of the indices at which the rings stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Bases {
    Kept,
    Forgotten,
}

impl Session {
    /// Records that a ring has stopped, by order or by a violation: none of its requests is in
    /// flight, and it continues at `base`.
    pub fn stopped(&mut self, ring: u16, base: u32, out: &mut VecDeque<Output>) {
        let Some(vring) = self.rings.get_mut(usize::from(ring)) else { return };
        match vring.state {
            State::Stopped => return,
            // Stopped without an order: the queue found the ring broken by its driver.
            State::Running => (vring.broken, vring.spoilt) = (true, true),
            State::Stopping => {}
        }
        (vring.state, vring.base) = (State::Stopped, base);
        self.tell_broken(out);
        self.go_on(out);
    }

    /// Sets NEEDS_RESET and notifies the driver by a configuration change if the driver has broken
    /// a ring (virtio 1.3 § 2.1.2). Such a ring is served again only after a reset.
    pub(super) fn tell_broken(&mut self, out: &mut VecDeque<Output>) {
        let is_told = self.status & (DRIVER_OK | NEEDS_RESET) != DRIVER_OK;
        if is_told || !self.rings.iter().any(|vring| vring.spoilt) {
            return;
        }
        self.status |= NEEDS_RESET;
        if self.channel().is_some() {
            out.push_back(Output::ConfigChanged);
        }
    }

    /// Rings that run or have yet to stop.
    pub fn running(&self) -> impl Iterator<Item = u16> {
        let running = self.rings.iter().zip(0..).filter(|(vring, _)| vring.state != State::Stopped);
        running.map(|(_, ring)| ring)
    }

    /// Stores an event of a ring; `None` means that there is none.
    pub(super) fn set_event(
        &mut self,
        ring: u32,
        kind: EventKind,
        event: Option<OwnedFd>,
        out: &mut VecDeque<Output>,
    ) -> Result<(), Refusal> {
        let event = kept(event, kind, out);
        let number = self.number(ring)?;
        let vring = &mut self.rings[usize::from(number)];
        match kind {
            EventKind::Kick => {
                vring.kick = event.clone().map_or(Kick::Polled, Kick::Event);
                // SET_VRING_KICK is the last message of a ring's setup, so it ends an earlier
                // failure.
                (vring.broken, vring.spoilt) = (false, false);
            }
            EventKind::Call => vring.call.clone_from(&event),
            EventKind::Error => vring.error.clone_from(&event),
        }
        if vring.state != State::Stopped {
            out.push_back(Output::Act(Effect::Event { ring: number, kind, event }));
        }
        Ok(())
    }

    /// Locates the parts of running rings in the current memory.
    pub(super) fn tell_memory(&mut self, out: &mut VecDeque<Output>) {
        self.tell_memory_to(|_| true, out);
    }

    fn tell_memory_to(&mut self, whom: impl Fn(u16) -> bool, out: &mut VecDeque<Output>) {
        let memory = self.memory.clone();
        let mut rings = Vec::new();
        let mut faults = Vec::new();
        for (vring, ring) in self.rings.iter_mut().zip(0..) {
            if vring.state != State::Running || !whom(ring) {
                continue;
            }
            match vring.places(&memory, self.features) {
                Ok(places) => rings.push((ring, places)),
                Err(why) => faults.push((ring, why)),
            }
        }
        if !rings.is_empty() {
            out.push_back(Output::Act(Effect::Memory { memory, rings }));
        }
        for (ring, why) in faults {
            self.fault(ring, why, out);
        }
    }

    pub(super) fn set_addresses(
        &mut self,
        ring: u32,
        addresses: VringAddresses,
        out: &mut VecDeque<Output>,
    ) -> Result<(), Refusal> {
        let vring = self.ring(ring)?;
        let before = vring.addresses.replace(addresses);
        // A front end repeats the addresses when logging begins or ends.
        if vring.state == State::Running && before != Some(addresses) {
            self.tell_memory_to(|other| u32::from(other) == ring, out);
        }
        self.settle_number(ring, out)
    }

    /// Stops all rings until their kicks are set again.
    pub(super) fn forget_kicks(&mut self, out: &mut VecDeque<Output>) {
        for vring in &mut self.rings {
            vring.kick = Kick::Unset;
        }
        self.settle_all(out);
    }

    /// Resets the device once no ring runs. Keeps state that the front end sends only once: see
    /// [`Session`]'s module.
    fn forget(&mut self, bases: Bases) {
        for vring in &mut self.rings {
            let (call, error) = (vring.call.take(), vring.error.take());
            let base = if bases == Bases::Kept { vring.base } else { 0 };
            *vring = Vring { call, error, base, ..Vring::default() };
        }
        self.inflight = None;
        self.status = 0;
    }

    /// If no ring is stopping, sends the reply that waited for that, and starts rings that may run.
    pub(super) fn go_on(&mut self, out: &mut VecDeque<Output>) {
        if self.rings.iter().any(|vring| vring.state == State::Stopping) {
            return;
        }
        match self.waiting.take() {
            Some(After::VringBase(ring)) => {
                let base = self.rings[usize::from(ring)].base;
                out.push_back(Output::Reply(Reply::vring_base(u32::from(ring), base)));
            }
            Some(After::Acknowledge(acknowledge)) => out.extend(acknowledgement(acknowledge, 0)),
            Some(After::Reset(bases, acknowledge)) => {
                self.forget(bases);
                out.extend(acknowledgement(acknowledge, 0));
            }
            None => {}
        }
        self.settle_all(out);
    }

    pub(super) fn settle_all(&mut self, out: &mut VecDeque<Output>) {
        for ring in 0..self.offer.queues {
            // The failure was already reported.
            let _ = self.settle(ring, out);
        }
    }

    pub(super) fn settle_number(&mut self, ring: u32, out: &mut VecDeque<Output>) -> Result<(), Refusal> {
        let ring = self.number(ring)?;
        self.settle(ring, out).map_err(|why| Refusal::Fault { ring, why })
    }

    /// Starts or stops a ring according to the current settings.
    fn settle(&mut self, ring: u16, out: &mut VecDeque<Output>) -> Result<(), Fault> {
        let vring = &mut self.rings[usize::from(ring)];
        match (vring.state, vring.is_wanted(self.features) && !self.resting) {
            (State::Stopped, true) => match self.settings(ring) {
                Ok(settings) => {
                    // Set before the outputs, because `tell_size` and later messages depend on it.
                    self.rings[usize::from(ring)].state = State::Running;
                    self.tell_write_cache(out);
                    let settings = Box::new(settings);
                    out.push_back(Output::Act(Effect::Start { ring, settings }));
                    self.tell_size(out);
                }
                Err(why) => {
                    self.fault(ring, why, out);
                    return Err(why);
                }
            },
            (State::Running, false) => {
                vring.state = State::Stopping;
                out.push_back(Output::Act(Effect::Stop { ring }));
            }
            _ => {}
        }
        Ok(())
    }

    /// Asks a front end to read the configuration, once. A front end that reconnects does not read
    /// it, and the disk may have grown meanwhile. QEMU handles the channel once it has started the
    /// device.
    fn tell_size(&mut self, out: &mut VecDeque<Output>) {
        if self.told_size.is_none() && self.channel().is_some() {
            self.told_size = Some(self.offer.size_bytes);
            out.push_back(Output::ConfigChanged);
        }
    }

    pub(super) fn settings(&self, ring: u16) -> Result<RingSettings, Fault> {
        let vring = &self.rings[usize::from(ring)];
        let memory = self.memory.clone();
        let places = vring.places(&memory, self.features)?;
        let size = vring.size.unwrap_or_default();
        let packed = self.features & virtio::RING_PACKED != 0;
        let part = |area: &Area| area.part(ring, size, packed).ok_or(Fault::NoInflight);
        Ok(RingSettings {
            size,
            places,
            memory,
            features: self.features,
            base: vring.base,
            inflight: self.inflight.as_ref().map(part).transpose()?,
            loss: self.inflight.as_ref().and_then(Area::loss).cloned(),
            kick: match &vring.kick {
                Kick::Event(event) => Some(event.clone()),
                Kick::Unset | Kick::Polled => None,
            },
            call: vring.call.clone(),
            error: vring.error.clone(),
        })
    }

    /// Marks a ring broken: it stops if it runs, and waits to be set up again.
    fn fault(&mut self, ring: u16, why: Fault, out: &mut VecDeque<Output>) {
        let vring = &mut self.rings[usize::from(ring)];
        vring.broken = true;
        let error = vring.error.clone();
        out.push_back(Output::Act(Effect::Fault { ring, why, error }));
        if vring.state == State::Running {
            vring.state = State::Stopping;
            out.push_back(Output::Act(Effect::Stop { ring }));
        }
    }

    pub(super) fn number(&self, ring: u32) -> Result<u16, Refusal> {
        let queues = self.offer.queues;
        let number = u16::try_from(ring).ok().filter(|number| *number < queues);
        number.ok_or(Refusal::NoSuchRing { ring, queues })
    }

    pub(super) fn ring(&mut self, ring: u32) -> Result<&mut Vring, Refusal> {
        let number = self.number(ring)?;
        Ok(&mut self.rings[usize::from(number)])
    }

    pub(super) fn stopped_ring(&mut self, ring: u32) -> Result<&mut Vring, Refusal> {
        let number = self.number(ring)?;
        let vring = &mut self.rings[usize::from(number)];
        if vring.state == State::Stopped { Ok(vring) } else { Err(Refusal::Running(number)) }
    }
}

/// Accepts an event only if it is an eventfd. A ring is served without it; another file could keep
/// its front end connected forever, see `channel.rs`.
fn kept(event: Option<OwnedFd>, kind: EventKind, out: &mut VecDeque<Output>) -> Option<Fd> {
    let event = event?;
    if is_event(&event) {
        return Some(event.into());
    }
    let code = match kind {
        EventKind::Kick => code::SET_VRING_KICK,
        EventKind::Call => code::SET_VRING_CALL,
        EventKind::Error => code::SET_VRING_ERR,
    };
    out.push_back(Output::Refused { request: message::name(code), why: Refusal::NoEvent });
    None
}
