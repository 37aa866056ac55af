//! State of a front end as a value: a message goes in; replies and effects on rings and disk come
//! out. No sockets, no disk, no clock.
//!
//! ```text
//!   message ──► VhostUserSession::receive ──► SessionOutput::Reply     to the front end
//!                 ▲    │                      SessionOutput::Effect    to the owner of rings and disk
//!                 │    │                      SessionOutput::Rejected  to the log
//!                 │    └────────────────────► SessionOutput::Close     the connection cannot continue
//!   a ring ended ─┘ ring_stopped
//! ```
//!
//! The calling protocol:
//! - Outputs take effect in their order. A reply confirms that earlier outputs have been executed.
//! - Each [`Effect::Start`] is answered by exactly one [`VhostUserSession::ring_stopped`]: after
//!   [`Effect::Stop`], or because the ring could not be served any longer.
//! - While [`VhostUserSession::is_waiting_for_rings`], a reply depends on rings that are stopping.
//!   No further message is received until they have stopped.
//!
//! A front end may negotiate any number of times: first the firmware, then the operating system,
//! each with its own features. The guest's memory, the channel to the front end, the protocol
//! features and the guest's choice of a write cache survive every reset: front ends only send what
//! has changed.
//!
//! A violation by a guest costs its ring ([`Effect::Fault`]). A violation that only a front end can
//! cause is rejected: with a reply if the front end requested one, otherwise by closing the
//! connection, because the front end would continue as if the request had succeeded.

mod outcome;
mod rings;
mod transfer;

use std::{collections::VecDeque, os::fd::OwnedFd, sync::Arc};

pub use outcome::{Effect, EventKind, RequestRejection, SessionOutput};
use reactor::{
    guest::{DirtyLog, GuestMemory, MappingQuota, Region, RegionError},
    operation::Fd,
};
use rings::{AfterStop, BasesAfterReset};
pub use transfer::SessionMessage;

use super::{
    back_end_channel::channel,
    config_space,
    features::{VhostUserOffer, protocol, virtio},
    inflight::{self, InflightArea, UnflushedWrites},
    message::{
        self, InflightInfo, MalformedVhostUserMessage, RegionInfo, VhostUserReply, VhostUserRequest, code,
    },
    vring::{Kick, Vring},
};

/// Largest number of regions of a guest's memory: the most that QEMU gives a guest.
pub const MAX_MEM_SLOTS: usize = 509;

/// Largest number of mappings of one front end: its regions, and the same number that it has
/// removed while requests still use them. A process has 65,530 (`vm.max_map_count`).
const MAX_MAPPINGS: usize = 2 * MAX_MEM_SLOTS;

/// Flag of SET_CONFIG: the front end migrates the configuration of another back end.
const CONFIG_MIGRATION: u32 = 1;
/// Bits of a device's status (virtio 1.3 § 2.1).
const MAX_STATUS: u64 = 0xff;
const DRIVER_OK: u8 = 4;
const NEEDS_RESET: u8 = 64;

/// The state of one front end.
#[derive(Debug)]
pub struct VhostUserSession {
    offer: VhostUserOffer,
    /// As acknowledged last.
    features: u64,
    protocol_features: u64,
    memory: GuestMemory,
    quota: MappingQuota,
    inflight: Option<InflightArea>,
    /// Loss record of the most recent area: a device that was reset has no area, but the guest may
    /// not have reset it.
    loss: Option<Arc<UnflushedWrites>>,
    /// Channel for the back end's own messages.
    back_end: Option<Fd>,
    status: u8,
    /// Field `writeback` of the configuration space: true for write-back.
    writeback: bool,
    /// Length of the disk as the front end has read it, or was notified to read it, since it
    /// connected.
    announced_size: Option<u64>,
    /// Block size that the guest has read, in bytes; `None` if unknown.
    guest_block_bytes: Option<u32>,
    /// Last value sent to the owner.
    write_cache: Option<bool>,
    rings: Vec<Vring>,
    /// True while the session is recreated from another process's messages: see
    /// [`VhostUserSession::from_messages`].
    is_replaying: bool,
    /// True while the session is quiesced: no ring runs, whatever the front end requests.
    quiescing: bool,
    /// Action after all rings that are stopping have stopped.
    waiting: Option<AfterStop>,
    /// The most recent request.
    last_code: Option<u32>,
}

/// Reply to a request.
enum VhostUserOutcome {
    Done,
    Reply(VhostUserReply),
    /// Rejected with a reply of the request's own type.
    RejectedWithReply(VhostUserReply, RequestRejection),
    /// Replied to when the rings have stopped.
    AfterRingsStop(AfterStop),
}

impl VhostUserSession {
    /// Creates the session of a front end that has sent nothing yet.
    ///
    /// # Panics
    /// If the offer has no ring, or more than a message can name.
    pub fn new(offer: VhostUserOffer) -> Self {
        assert!((1..=super::features::MAX_QUEUES).contains(&offer.queues), "{} rings", offer.queues);
        assert!((1..=super::features::MAX_QUEUE_SIZE).contains(&offer.queue_size));
        Self {
            features: 0,
            protocol_features: 0,
            memory: GuestMemory::default(),
            quota: MappingQuota::of_front_end(MAX_MAPPINGS),
            inflight: None,
            loss: None,
            back_end: None,
            status: 0,
            writeback: offer.write_cache,
            announced_size: None,
            guest_block_bytes: None,
            write_cache: None,
            rings: (0..offer.queues).map(|_| Vring::default()).collect(),
            is_replaying: false,
            quiescing: false,
            waiting: None,
            last_code: None,
            offer,
        }
    }

    /// Loss record of the most recent in-flight area; `None` before the first.
    pub fn loss(&self) -> Option<&Arc<UnflushedWrites>> {
        self.loss.as_ref()
    }

    /// True if a reply waits for rings to stop.
    pub fn is_waiting_for_rings(&self) -> bool {
        self.waiting.is_some()
    }

    /// Processes a message.
    ///
    /// # Panics
    /// While [`VhostUserSession::is_waiting_for_rings`].
    pub fn receive(
        &mut self,
        code: u32,
        need_reply: bool,
        request: Result<VhostUserRequest, MalformedVhostUserMessage>,
        out: &mut VecDeque<SessionOutput>,
    ) {
        assert!(!self.is_waiting_for_rings(), "a message while another waits for its reply");
        self.last_code = Some(code);
        // Evaluated before the request, which may itself negotiate REPLY_ACK.
        let acknowledge = need_reply && self.has(protocol::REPLY_ACK) && !message::has_answer(code);
        let acknowledge = acknowledge.then_some(code);
        let outcome = request
            .map_err(RequestRejection::from)
            .and_then(|request| self.execute(request, acknowledge, out));
        let request = message::name(code);
        match outcome {
            Ok(VhostUserOutcome::Done) => out.extend(acknowledgement(acknowledge, 0)),
            Ok(VhostUserOutcome::Reply(reply)) => out.push_back(SessionOutput::Reply(reply)),
            Ok(VhostUserOutcome::RejectedWithReply(reply, why)) => {
                out.extend([SessionOutput::Rejected { request, why }, SessionOutput::Reply(reply)]);
            }
            Ok(VhostUserOutcome::AfterRingsStop(after)) => {
                self.waiting = Some(after);
                self.continue_after_stop(out);
            }
            Err(why) if acknowledge.is_some() => {
                out.push_back(SessionOutput::Rejected { request, why });
                out.extend(acknowledgement(acknowledge, 1));
            }
            Err(why @ RequestRejection::Malformed(MalformedVhostUserMessage::Size { .. }))
                if code == code::GET_CONFIG =>
            {
                out.extend([
                    SessionOutput::Rejected { request, why },
                    SessionOutput::Reply(VhostUserReply::no_config()),
                ]);
            }
            // Caused by the guest; `VhostUserSession::start_or_stop` has already reported it to the
            // owner.
            Err(RequestRejection::Fault { .. }) => {}
            Err(why) => out.push_back(SessionOutput::Close { request, why }),
        }
    }

    /// Number of rings, if the front end has just queried it. If it disconnects then, it probably
    /// has more queues; the protocol has no message for that.
    pub fn queried_queue_count(&self) -> Option<u16> {
        (self.last_code == Some(code::GET_QUEUE_NUM)).then_some(self.offer.queues)
    }

    /// The guest's choice of a write cache, for the next front end.
    pub fn write_cache(&self) -> bool {
        self.writeback
    }

    /// Updates the length of the disk. Returns the channel for [`message::config_change`] if the
    /// front end is to be notified.
    pub fn resize(&mut self, size_bytes: u64) -> Option<&Fd> {
        if self.offer.size_bytes == size_bytes {
            return None;
        }
        self.offer.size_bytes = size_bytes;
        self.announced_size = Some(size_bytes);
        self.channel()
    }

    /// Channel for the back end's own messages.
    pub fn channel(&self) -> Option<&Fd> {
        self.back_end.as_ref().filter(|_| self.has(protocol::CONFIG))
    }

    fn has(&self, protocol_features: u64) -> bool {
        self.protocol_features & protocol_features == protocol_features
    }

    fn execute(
        &mut self,
        request: VhostUserRequest,
        acknowledge: Option<u32>,
        out: &mut VecDeque<SessionOutput>,
    ) -> Result<VhostUserOutcome, RequestRejection> {
        let number = |code, number| Ok(VhostUserOutcome::Reply(VhostUserReply::number(code, number)));
        match request {
            VhostUserRequest::GetFeatures => return number(code::GET_FEATURES, self.offer.features()),
            VhostUserRequest::SetFeatures(features) => self.set_features(features, out)?,
            VhostUserRequest::SetOwner => {}
            VhostUserRequest::GetProtocolFeatures => {
                return number(code::GET_PROTOCOL_FEATURES, protocol::OFFERED);
            }
            VhostUserRequest::SetProtocolFeatures(features) => match features & !protocol::OFFERED {
                0 => self.protocol_features = features,
                unknown => return Err(RequestRejection::ProtocolFeatures(unknown)),
            },
            VhostUserRequest::GetQueueNum => {
                return number(code::GET_QUEUE_NUM, u64::from(self.offer.queues));
            }
            VhostUserRequest::GetMaxMemSlots => return number(code::GET_MAX_MEM_SLOTS, MAX_MEM_SLOTS as u64),
            VhostUserRequest::GetStatus => return number(code::GET_STATUS, u64::from(self.status)),
            // QEMU resets the status of a paused machine before it requests the bases, so bases are
            // kept.
            VhostUserRequest::SetStatus(0) => {
                self.unset_kicks(out);
                return Ok(VhostUserOutcome::AfterRingsStop(AfterStop::Reset(
                    BasesAfterReset::Kept,
                    acknowledge,
                )));
            }
            VhostUserRequest::ResetDevice => {
                self.unset_kicks(out);
                return Ok(VhostUserOutcome::AfterRingsStop(AfterStop::Reset(
                    BasesAfterReset::Forgotten,
                    acknowledge,
                )));
            }
            VhostUserRequest::SetStatus(status) if status > MAX_STATUS => {
                return Err(RequestRejection::Status(status));
            }
            VhostUserRequest::SetStatus(status) => {
                // NEEDS_RESET is cleared only by a reset, not by the driver's write.
                self.status = status as u8 | self.status & NEEDS_RESET;
                self.set_needs_reset(out);
            }
            VhostUserRequest::ResetOwner => {
                self.unset_kicks(out);
                return Ok(VhostUserOutcome::AfterRingsStop(AfterStop::Acknowledge(acknowledge)));
            }

            VhostUserRequest::SetMemTable(regions) => {
                let map = |(info, file)| self.map(&info, file);
                let regions = regions.into_iter().map(map).collect::<Result<_, _>>()?;
                self.set_memory(GuestMemory::new(regions)?.with_log(self.memory.log().cloned()), out);
            }
            VhostUserRequest::AddMemReg(info, file) => {
                // The bound that GET_MAX_MEM_SLOTS reports.
                if self.memory.regions().len() >= MAX_MEM_SLOTS {
                    return Err(RequestRejection::TooManyRegions);
                }
                self.set_memory(self.memory.with(self.map(&info, file)?)?, out);
            }
            VhostUserRequest::RemMemReg(RegionInfo { guest_address, user_address, bytes, .. }) => {
                let without = self.memory.without(guest_address, user_address, bytes);
                self.set_memory(without.ok_or(RequestRejection::NoSuchRegion { guest_address, bytes })?, out);
            }
            VhostUserRequest::SetLogBase { bytes, file_offset, file } => {
                let log =
                    DirtyLog::map(file, bytes, file_offset, &self.quota).map_err(RequestRejection::Log)?;
                // Running rings get the log before the reply, so that no write is missing from the
                // log.
                self.memory = self.memory.with_log(Some(log));
                self.emit_memory(out);
                // Acknowledged in any case if the log was passed as a descriptor (LOG_SHMFD).
                if self.has(protocol::LOG_SHMFD) && acknowledge.is_none() {
                    return number(code::SET_LOG_BASE, 0);
                }
            }
            // An eventfd for a front end that sleeps until the log changes. No known front end
            // does; the descriptor is closed.
            VhostUserRequest::SetLogFd(_) => {}

            VhostUserRequest::SetVringNum { ring, descriptors } => {
                let max_size = self.offer.queue_size;
                let size = u16::try_from(descriptors).ok().filter(|size| (1..=max_size).contains(size));
                let size = size.ok_or(RequestRejection::RingSize { is: descriptors, most: max_size })?;
                self.stopped_ring(ring)?.size = Some(size);
                self.start_or_stop_number(ring, out)?;
            }
            VhostUserRequest::SetVringAddr { ring, addresses } => self.set_addresses(ring, addresses, out)?,
            VhostUserRequest::SetVringBase { ring, base } => self.stopped_ring(ring)?.base = base,
            VhostUserRequest::GetVringBase { ring } => {
                let number = self.number(ring)?;
                let vring = self.ring(ring)?;
                (vring.kick, vring.broken, vring.broken_by_driver) = (Kick::Unset, false, false);
                self.start_or_stop_number(ring, out)?;
                return Ok(VhostUserOutcome::AfterRingsStop(AfterStop::VringBase(number)));
            }
            VhostUserRequest::SetVringEnable { ring, enable } => {
                self.ring(ring)?.enabled = Some(enable);
                self.start_or_stop_number(ring, out)?;
                if !enable {
                    return Ok(VhostUserOutcome::AfterRingsStop(AfterStop::Acknowledge(acknowledge)));
                }
            }
            VhostUserRequest::SetVringKick { ring, event } => {
                self.set_event(ring, EventKind::Kick, event, out)?;
                self.start_or_stop_number(ring, out)?;
            }
            VhostUserRequest::SetVringCall { ring, event } => {
                self.set_event(ring, EventKind::Call, event, out)?;
            }
            VhostUserRequest::SetVringErr { ring, event } => {
                self.set_event(ring, EventKind::Error, event, out)?;
            }

            VhostUserRequest::SetBackendReqFd(socket) => self.back_end = Some(channel(socket)?),
            VhostUserRequest::GetConfig { offset, flags, bytes } => {
                // A read after a resize does not change the block size that the guest uses.
                if self.announced_size.is_none() && config_space::covers_block_size(offset, bytes) {
                    self.guest_block_bytes.get_or_insert(self.offer.block_bytes);
                }
                if config_space::covers_capacity(offset, bytes) {
                    self.announced_size = Some(self.offer.size_bytes);
                }
                let content = config_space::read(&self.offer, self.writeback, offset, bytes);
                return Ok(VhostUserOutcome::Reply(VhostUserReply::config(offset, flags, &content)));
            }
            VhostUserRequest::SetConfig { offset, flags, content } => {
                self.set_config(offset, flags, &content)?;
                self.inflight.iter().for_each(|area| area.store_write_cache(self.writeback));
                self.emit_write_cache(out);
            }
            VhostUserRequest::GetInflightFd(info) => return Ok(self.create_inflight(info)),
            VhostUserRequest::SetInflightFd(info, file) => {
                let area = InflightArea::map(&info, file, &self.quota, self.offer.opened)?;
                self.check_block_size(&area)?;
                if let Some(loss) = area.loss().filter(|_| !self.is_replaying) {
                    loss.evaluate();
                    self.loss.iter().for_each(|previous| loss.inherit(previous));
                }
                self.loss = area.loss().cloned();
                match area.write_cache() {
                    Some(chosen) => {
                        self.writeback = chosen;
                        self.emit_write_cache(out);
                    }
                    None => area.store_write_cache(self.writeback),
                }
                self.inflight = Some(area);
            }
        }
        Ok(VhostUserOutcome::Done)
    }

    fn set_features(
        &mut self,
        features: u64,
        out: &mut VecDeque<SessionOutput>,
    ) -> Result<(), RequestRejection> {
        let unknown = features & !self.offer.features();
        if unknown != 0 {
            return Err(RequestRejection::Features(unknown));
        }
        // LOG_ALL may change while rings run: migration switches it. Other features define the
        // layout.
        let previous = self.features;
        if (features ^ previous) & !virtio::LOG_ALL != 0
            && let Some(ring) = self.running().next()
        {
            return Err(RequestRejection::FeaturesInUse(ring));
        }
        self.features = features;
        // Logging starts with SET_LOG_BASE and ends when the feature is withdrawn.
        if previous & !features & virtio::LOG_ALL != 0 && self.memory.log().is_some() {
            self.memory = self.memory.with_log(None);
            self.emit_memory(out);
        }
        self.emit_write_cache(out);
        self.start_or_stop_all(out);
        Ok(())
    }

    fn set_config(&mut self, offset: u32, flags: u32, content: &[u8]) -> Result<(), RequestRejection> {
        if flags == CONFIG_MIGRATION {
            // This back end determines all fields but `writeback`.
            let migrated = config_space::migrated_writeback(offset, content);
            self.writeback = migrated.unwrap_or(self.writeback);
            return Ok(());
        }
        let offered = self.offer.features() & virtio::CONFIG_WCE != 0;
        let written = config_space::written_writeback(offset, content).filter(|_| offered);
        self.writeback = written.ok_or(RequestRejection::Config { offset, bytes: content.len() })?;
        Ok(())
    }

    /// Sets the write cache: as the guest has chosen if it can choose, otherwise on if it can flush
    /// (virtio 1.3 § 5.2.6.2).
    fn emit_write_cache(&mut self, out: &mut VecDeque<SessionOutput>) {
        let may_cache = match self.features {
            features if features & virtio::CONFIG_WCE != 0 => self.writeback,
            features => features & virtio::FLUSH != 0 && self.offer.write_cache,
        };
        if self.write_cache.replace(may_cache) != Some(may_cache) {
            out.push_back(SessionOutput::Effect(Effect::WriteCache(may_cache)));
        }
    }

    fn create_inflight(&self, mut info: InflightInfo) -> VhostUserOutcome {
        let packed = self.features & virtio::RING_PACKED != 0;
        info.file_offset = 0;
        // Sized for the largest possible ring: QEMU 7.2 passes the device's configured size, and
        // with virtio-mmio the driver's rings are larger.
        let queue_size = info.queue_size.max(self.offer.queue_size);
        match inflight::create(info.queues, queue_size, packed) {
            Ok((file, bytes)) => {
                info.bytes = bytes;
                VhostUserOutcome::Reply(VhostUserReply::inflight(&info, Some(file)))
            }
            Err(why) => {
                info.bytes = 0;
                VhostUserOutcome::RejectedWithReply(VhostUserReply::inflight(&info, None), why.into())
            }
        }
    }

    /// Compares block sizes with those that the guest read when its machine started. Smaller
    /// blocks than these are possible; larger ones would fail its requests.
    fn check_block_size(&mut self, area: &InflightArea) -> Result<(), RequestRejection> {
        let Some(stored) = area.block_bytes() else {
            self.guest_block_bytes.iter().for_each(|bytes| area.store_block_bytes(*bytes));
            return Ok(());
        };
        let offered = self.offer.block_bytes;
        if !stored.is_multiple_of(offered.into()) {
            return Err(RequestRejection::Blocks { offered, stored });
        }
        self.guest_block_bytes = u32::try_from(stored).ok();
        Ok(())
    }

    fn map(&self, info: &RegionInfo, file: OwnedFd) -> Result<Region, RegionError> {
        let &RegionInfo { guest_address, user_address, bytes, file_offset } = info;
        Region::map(file, guest_address, user_address, bytes, file_offset, &self.quota)
    }

    fn set_memory(&mut self, memory: GuestMemory, out: &mut VecDeque<SessionOutput>) {
        self.memory = memory;
        self.emit_memory(out);
        self.start_or_stop_all(out);
    }
}

fn acknowledgement(code: Option<u32>, number: u64) -> Option<SessionOutput> {
    code.map(|code| SessionOutput::Reply(VhostUserReply::number(code, number)))
}

#[cfg(test)]
#[path = "session_tests.rs"]
mod tests;
