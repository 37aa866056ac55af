//! Transfer of a session to another process: the quiesced session is encoded as the messages that a
//! new front end would send to reach this state.
//!
//! ```text
//!   quiesce ─► no ring runs ─► to_messages ─► … new process … ─► from_messages ─► resume ─► rings start
//!                        └─► resume ─► rings start
//! ```
//!
//! So the same code validates state from another process and messages from a front end.

use std::{
    collections::VecDeque,
    io,
    os::fd::{AsFd as _, OwnedFd},
};

use reactor::guest::DirtyLog;

use super::{CONFIG_MIGRATION, RequestRejection, SessionOutput, VhostUserSession};
use crate::vhost_user_blk::{
    config_space,
    features::VhostUserOffer,
    inflight::InflightArea,
    message::{self, RegionInfo, VhostUserRequest, code},
    vring::{Kick, Vring, VringState},
};

/// A message of a front end, without its header.
#[derive(Debug)]
pub struct SessionMessage {
    /// Number of the request.
    pub code: u32,
    /// Payload behind the header.
    pub payload: Vec<u8>,
    /// Descriptors passed with it.
    pub descriptors: Vec<OwnedFd>,
}

impl SessionMessage {
    fn new(code: u32, payload: Vec<u8>) -> Self {
        Self { code, payload, descriptors: Vec::new() }
    }

    fn with(self, descriptor: OwnedFd) -> Self {
        Self { descriptors: vec![descriptor], ..self }
    }
}

impl VhostUserSession {
    /// Stops all rings, until [`VhostUserSession::resume`]. Messages may arrive meanwhile.
    pub fn quiesce(&mut self, out: &mut VecDeque<SessionOutput>) {
        self.quiescing = true;
        self.start_or_stop_all(out);
    }

    /// True if the session is quiescing or quiesced.
    pub fn is_quiescing(&self) -> bool {
        self.quiescing
    }

    /// True if the session is quiesced, no ring runs, and no reply is due.
    pub fn is_quiesced(&self) -> bool {
        self.quiescing && !self.is_waiting_for_rings() && self.running().next().is_none()
    }

    /// Resumes: starts the rings that may run.
    pub fn resume(&mut self, out: &mut VecDeque<SessionOutput>) {
        self.quiescing = false;
        self.start_or_stop_all(out);
    }

    /// Messages that recreate this session.
    ///
    /// # Errors
    /// Fails if no file descriptor is available for a copy.
    ///
    /// # Panics
    /// If it is not quiesced.
    pub fn to_messages(&self) -> io::Result<Vec<SessionMessage>> {
        assert!(self.is_quiesced(), "a ring runs");
        // Features first: they decide how later messages are parsed and how rings are laid out.
        let mut messages = vec![
            SessionMessage::new(code::SET_PROTOCOL_FEATURES, message::number(self.protocol_features)),
            SessionMessage::new(code::SET_FEATURES, message::number(self.features)),
        ];
        if let Some(channel) = &self.back_end {
            let channel = channel.as_fd().try_clone_to_owned()?;
            messages.push(SessionMessage::new(code::SET_BACKEND_REQ_FD, Vec::new()).with(channel));
        }
        for region in self.memory.regions() {
            // Only tests have regions without a file.
            let Some((file, file_offset)) = region.file() else { continue };
            let info = RegionInfo {
                guest_address: region.guest_address(),
                bytes: region.bytes(),
                user_address: region.user_address(),
                file_offset,
            };
            let region = SessionMessage::new(code::ADD_MEM_REG, message::region_of(&info));
            messages.push(region.with(file.try_clone_to_owned()?));
        }
        if let Some((file, offset, bytes)) = self.memory.log().and_then(DirtyLog::file) {
            let log = SessionMessage::new(code::SET_LOG_BASE, message::numbers(&[bytes, offset]));
            messages.push(log.with(file.try_clone_to_owned()?));
        }
        if let Some((info, file)) = self.inflight.as_ref().and_then(InflightArea::description) {
            let area = SessionMessage::new(code::SET_INFLIGHT_FD, message::area_of(&info));
            messages.push(area.with(file.try_clone_to_owned()?));
        }
        let (offset, choice) = config_space::writeback(self.writeback);
        // After the in-flight area: its recorded choice would otherwise override this one.
        messages.push(SessionMessage::new(
            code::SET_CONFIG,
            message::config_of(offset, CONFIG_MIGRATION, &choice),
        ));
        if self.announced_size.is_some() {
            let bytes = if self.guest_block_bytes.is_some() {
                config_space::TO_BLOCK_BYTES
            } else {
                size_of::<u64>()
            };
            messages.push(SessionMessage::new(code::GET_CONFIG, message::config_of(0, 0, &vec![0; bytes])));
        }
        if self.status != 0 {
            messages.push(SessionMessage::new(code::SET_STATUS, message::number(self.status.into())));
        }
        for (vring, ring) in self.rings.iter().zip(0..) {
            vring.append_messages(ring, &mut messages)?;
        }
        Ok(messages)
    }

    /// Recreates a session from these messages, with the outputs to execute when it resumes.
    ///
    /// # Errors
    /// Fails on messages that a front end could not have sent here: made for another offer, or
    /// malformed.
    pub fn from_messages(
        offer: VhostUserOffer,
        messages: Vec<SessionMessage>,
    ) -> Result<(Self, VecDeque<SessionOutput>), RequestRejection> {
        let (mut session, mut outputs) = (Self { is_replaying: true, ..Self::new(offer) }, VecDeque::new());
        for SessionMessage { code, payload, descriptors } in messages {
            let mut out = VecDeque::new();
            session.receive(code, false, VhostUserRequest::parse(code, &payload, descriptors), &mut out);
            for output in out {
                match output {
                    SessionOutput::Rejected { why, .. } | SessionOutput::Close { why, .. } => {
                        return Err(why);
                    }
                    // The front end has already received the replies.
                    SessionOutput::Reply(_) => {}
                    effect @ (SessionOutput::Effect(_) | SessionOutput::ConfigChanged) => {
                        outputs.push_back(effect);
                    }
                }
            }
            // None of the encoded messages stops a ring.
            if let Some(ring) = session.running().next().filter(|_| session.is_waiting_for_rings()) {
                return Err(RequestRejection::Running(ring));
            }
        }
        session.is_replaying = false;
        Ok((session, outputs))
    }
}

impl Vring {
    /// Appends the messages of one ring; the last one starts the ring.
    fn append_messages(&self, ring: u32, messages: &mut Vec<SessionMessage>) -> io::Result<()> {
        debug_assert_eq!(self.state, VringState::Stopped);
        let mut number =
            |code, value: u32| messages.push(SessionMessage::new(code, message::state(ring, value)));
        if let Some(size) = self.size {
            number(code::SET_VRING_NUM, size.into());
        }
        number(code::SET_VRING_BASE, self.base);
        if let Some(enabled) = self.enabled {
            number(code::SET_VRING_ENABLE, enabled.into());
        }
        if let Some(addresses) = &self.addresses {
            messages.push(SessionMessage::new(code::SET_VRING_ADDR, message::addresses_of(ring, addresses)));
        }
        for (code, event) in [(code::SET_VRING_CALL, &self.call), (code::SET_VRING_ERR, &self.error)] {
            if let Some(event) = event {
                let event = event.as_fd().try_clone_to_owned()?;
                messages.push(SessionMessage::new(code, message::event(ring, true)).with(event));
            }
        }
        // A broken ring waits until the front end itself sends SET_VRING_KICK again.
        match &self.kick {
            _ if self.broken => {}
            Kick::Unset => {}
            Kick::Polled => {
                messages.push(SessionMessage::new(code::SET_VRING_KICK, message::event(ring, false)));
            }
            Kick::Event(kick) => {
                let kick = kick.as_fd().try_clone_to_owned()?;
                messages
                    .push(SessionMessage::new(code::SET_VRING_KICK, message::event(ring, true)).with(kick));
            }
        }
        Ok(())
    }
}
