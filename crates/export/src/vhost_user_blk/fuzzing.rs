//! Entry of the fuzz target and of tests: feeds a front end's bytes to a session and checks the
//! invariants. Rings are simulated: they start, stop and break, and have no content.

use std::{
    collections::{BTreeSet, VecDeque},
    os::{fd::OwnedFd, unix::net::UnixStream},
};

use rustix::{
    event::{EventfdFlags, eventfd},
    fs::{MemfdFlags, ftruncate, memfd_create},
};

use super::{
    features::{VhostUserOffer, protocol, virtio},
    message::{self, HEADER_BYTES, VhostUserHeader, VhostUserRequest, code},
    session::{Effect, SessionOutput, VhostUserSession},
};

/// Length of the file of every region, and of every well-formed region.
const REGION_BYTES: u64 = 64 << 10;
const USER_ADDRESS: u64 = 0x7f00_0000_0000;

/// Runs a conversation. The first byte selects the export; then each message begins with a byte
/// that selects whether the message follows byte by byte or is generated in a mostly valid form.
///
/// Every request that has a reply is answered once, and no other. A ring starts when it is stopped,
/// stops when it runs, and its settings are sound.
pub fn vhost_user_session(data: &[u8]) {
    let Some((&traits, rest)) = data.split_first() else { return };
    let offer = VhostUserOffer {
        size_bytes: 1 << 30,
        queues: u16::from(traits & 3) + 1,
        read_only: traits & 4 != 0,
        packed: traits & 8 != 0,
        write_cache: traits & 16 == 0,
        queue_size: 256,
        ..VhostUserOffer::default()
    };
    let Some(mut run) = SessionFuzzer::new(offer) else { return };
    let mut input = FuzzBytes(rest);
    let well_begun = traits & 32 == 0 || run.begin(&mut input);
    while well_begun && let Some(kind) = input.byte() {
        if !run.step(kind, &mut input) {
            break;
        }
    }
    // However the conversation ended, rings that are stopping are reported.
    let mut out = VecDeque::new();
    for ring in std::mem::take(&mut run.stopping) {
        run.session.ring_stopped(ring, 0, &mut out);
        run.running.remove(&ring);
    }
    run.execute_outputs(&mut out);
    let running: BTreeSet<u16> = run.session.running().collect();
    // The session and this model must agree, whatever the front end has sent.
    assert_eq!(running, run.running, "rings that run");
    run.check_transfer();
}

/// Quiesces a session whose rings stop at once.
fn quiesce(session: &mut VhostUserSession) {
    let mut out = VecDeque::new();
    session.quiesce(&mut out);
    for ring in session.running().collect::<Vec<_>>() {
        session.ring_stopped(ring, 7, &mut out);
    }
    assert!(session.is_quiesced());
}

struct FuzzBytes<'a>(&'a [u8]);

impl FuzzBytes<'_> {
    fn byte(&mut self) -> Option<u8> {
        let (first, rest) = self.0.split_first()?;
        self.0 = rest;
        Some(*first)
    }

    fn small(&mut self) -> u64 {
        u64::from(self.byte().unwrap_or(0))
    }

    fn take(&mut self, count: usize) -> &[u8] {
        let (taken, rest) = self.0.split_at(count.min(self.0.len()));
        self.0 = rest;
        taken
    }
}

struct SessionFuzzer {
    offer: VhostUserOffer,
    session: VhostUserSession,
    file: OwnedFd,
    event: OwnedFd,
    channel: OwnedFd,
    /// Rings that have been started and not stopped.
    running: BTreeSet<u16>,
    /// Those of `running` that were ordered to stop.
    stopping: Vec<u16>,
    reply_ack: bool,
}

impl SessionFuzzer {
    fn new(offer: VhostUserOffer) -> Option<Self> {
        let file = memfd_create("fuzz", MemfdFlags::CLOEXEC).ok()?;
        ftruncate(&file, REGION_BYTES).ok()?;
        let event = eventfd(0, EventfdFlags::CLOEXEC).ok()?;
        let channel = UnixStream::pair().ok()?.0.into();
        let session = VhostUserSession::new(offer.clone());
        let (running, stopping) = Default::default();
        Some(Self { offer, session, file, event, channel, running, stopping, reply_ack: false })
    }

    /// Checks that a session recreated from this one is in the same state.
    fn check_transfer(mut self) {
        // A ring that ran may be unable to start now, so the session resumes and quiesces first.
        for _ in 0..2 {
            self.session.resume(&mut VecDeque::new());
            quiesce(&mut self.session);
        }
        let messages_of = |session: &VhostUserSession| {
            let messages = session.to_messages().ok()?.into_iter();
            Some(
                messages
                    .map(|message| (message.code, message.payload, message.descriptors.len()))
                    .collect::<Vec<_>>(),
            )
        };
        let (Ok(messages), Some(expected)) = (self.session.to_messages(), messages_of(&self.session)) else {
            return;
        };
        let (mut other, _) =
            VhostUserSession::from_messages(self.offer, messages).expect("a front end could say all that");
        let running: Vec<u16> = other.running().collect();
        quiesce(&mut other);
        if let Some(transferred) = messages_of(&other) {
            assert_eq!(expected, transferred);
        }
        self.session.resume(&mut VecDeque::new());
        assert_eq!(self.session.running().collect::<Vec<_>>(), running, "rings that go on");
    }

    /// Processes one step; true if the conversation continues.
    fn step(&mut self, kind: u8, input: &mut FuzzBytes<'_>) -> bool {
        let mut out = VecDeque::new();
        match kind {
            0..4 => {
                // A ring breaks, or stops some time after it was ordered to.
                let chosen = self.running.iter().nth(input.small() as usize).copied();
                let Some(ring) = chosen else { return true };
                self.has_stopped(ring, input.small() as u32, &mut out);
                self.execute_outputs(&mut out);
                return true;
            }
            4 => {
                let _ = self.session.resize(input.small() << 9);
                return true;
            }
            _ => {}
        }
        let (code, need_reply, payload, count) = if kind < 48 {
            let Some(message) = raw_message(input) else { return false };
            message
        } else {
            let (code, payload, count) = mostly_valid_message(kind, self.offer.queues, input);
            (code, input.small() & 31 != 31, payload, count)
        };
        self.take(code, need_reply, &payload, count, input)
    }

    /// Sends the first messages of every front end: protocol features and memory.
    fn begin(&mut self, input: &mut FuzzBytes<'_>) -> bool {
        let (code, table, count) = mostly_valid_message(5, 1, &mut FuzzBytes(&[0, 8]));
        self.take(code::SET_PROTOCOL_FEATURES, false, &numbers(&[protocol::OFFERED]), 0, input)
            && self.take(code, true, &table, count, input)
    }

    /// Sends one message; true if the conversation continues.
    fn take(
        &mut self,
        code: u32,
        need_reply: bool,
        payload: &[u8],
        count: usize,
        input: &mut FuzzBytes<'_>,
    ) -> bool {
        let mut out = VecDeque::new();
        let passed = match code {
            code::SET_VRING_KICK | code::SET_VRING_CALL | code::SET_VRING_ERR => &self.event,
            code::SET_BACKEND_REQ_FD => &self.channel,
            _ => &self.file,
        };
        let Ok(descriptors) = (0..count).map(|_| passed.try_clone()).collect::<Result<_, _>>() else {
            return false;
        };
        let request = VhostUserRequest::parse(code, payload, descriptors);
        let due = message::has_answer(code) || need_reply && self.reply_ack;
        if let Ok(VhostUserRequest::SetProtocolFeatures(features)) = &request
            && features & !protocol::OFFERED == 0
        {
            self.reply_ack = features & protocol::REPLY_ACK != 0;
        }
        self.session.receive(code, need_reply, request, &mut out);
        let (mut replies, mut closed) = self.execute_outputs(&mut out);
        while self.session.is_waiting_for_rings() {
            assert!(!self.stopping.is_empty(), "it waits for nothing");
            // The reply to the request comes only after all rings have stopped.
            assert_eq!(replies, 0, "a reply too early");
            let index = input.small() as usize % self.stopping.len();
            self.has_stopped(self.stopping[index], input.small() as u32, &mut out);
            let more = self.execute_outputs(&mut out);
            (replies, closed) = (replies + more.0, closed || more.1);
        }
        // SET_LOG_BASE is answered if that was negotiated, whether a reply was requested or not.
        let may_be_more = usize::from(code == code::SET_LOG_BASE);
        let is_expected = closed || (usize::from(due)..=usize::from(due).max(may_be_more)).contains(&replies);
        assert!(is_expected, "{} replies to {}", replies, message::name(code));
        !closed
    }

    fn has_stopped(&mut self, ring: u16, base: u32, out: &mut VecDeque<SessionOutput>) {
        self.running.remove(&ring);
        self.stopping.retain(|stopping| *stopping != ring);
        self.session.ring_stopped(ring, base, out);
    }

    /// Executes outputs; returns the number of replies, and whether the connection is to be closed.
    fn execute_outputs(&mut self, out: &mut VecDeque<SessionOutput>) -> (usize, bool) {
        let (mut replies, mut closed) = (0, false);
        for output in out.drain(..) {
            assert!(!closed, "nothing comes after the end");
            match output {
                SessionOutput::Reply(reply) => {
                    let payload = u32::from_ne_bytes(reply.bytes[8..12].try_into().expect("four bytes"));
                    assert_eq!(reply.bytes.len(), HEADER_BYTES + payload as usize);
                    replies += 1;
                }
                SessionOutput::Rejected { why, .. } => assert!(why.to_string().len() < 200),
                SessionOutput::Close { .. } => closed = true,
                SessionOutput::ConfigChanged => assert!(self.session.channel().is_some()),
                SessionOutput::Effect(effect) => self.apply_effect(effect),
            }
        }
        (replies, closed)
    }

    fn apply_effect(&mut self, effect: Effect) {
        match effect {
            Effect::Start { ring, settings } => {
                assert!(ring < self.offer.queues && self.running.insert(ring), "ring {ring} starts twice");
                let (size, features) = (settings.size, settings.features);
                let packed = features & virtio::RING_PACKED != 0;
                assert_eq!(features & !self.offer.features(), 0);
                assert!((1..=self.offer.queue_size).contains(&size) && (packed || size.is_power_of_two()));
                let areas = settings.areas;
                assert_eq!(areas.descriptors.bytes(), 16 * usize::from(size));
                assert!(areas.descriptors.is_aligned(16) && areas.device.is_aligned(4));
                // The located memory must be accessible.
                let mut byte = [0];
                areas.device.read(areas.device.bytes() - 1, &mut byte);
            }
            Effect::Stop { ring } => {
                assert!(self.running.contains(&ring) && !self.stopping.contains(&ring));
                self.stopping.push(ring);
            }
            Effect::Memory { rings, .. } => {
                for (ring, _) in rings {
                    assert!(self.running.contains(&ring) && !self.stopping.contains(&ring));
                }
            }
            Effect::Event { ring, .. } => assert!(self.running.contains(&ring)),
            Effect::Fault { ring, .. } => assert!(ring < self.offer.queues),
            Effect::WriteCache(_) => {}
        }
    }
}

/// Reads a header, a byte for the number of descriptors, and a payload of the header's length.
fn raw_message(input: &mut FuzzBytes<'_>) -> Option<(u32, bool, Vec<u8>, usize)> {
    let header = *input.take(HEADER_BYTES).first_chunk()?;
    let header = VhostUserHeader::parse(&header).ok()?;
    let count = input.small() as usize % 4;
    Some((header.code, header.need_reply, input.take(header.payload_bytes).to_vec(), count))
}

/// A message of the right form with mostly valid values.
fn mostly_valid_message(kind: u8, queues: u16, input: &mut FuzzBytes<'_>) -> (u32, Vec<u8>, usize) {
    use code::*;
    let pair = |ring: u64, number: u64| [ring as u32, number as u32].map(u32::to_ne_bytes).concat();
    let region = |index: u64| {
        let begin = (index & 7) * REGION_BYTES;
        [begin, REGION_BYTES, USER_ADDRESS + begin, 0]
    };
    // Rarely a ring that does not exist.
    let ring = input.small();
    let ring = if ring & 31 == 31 { u64::from(queues) } else { ring % u64::from(queues) };
    let value = input.small();
    match kind % 32 {
        0 => (SET_FEATURES, numbers(&[features(value)]), 0),
        1 => (SET_PROTOCOL_FEATURES, numbers(&[protocol::OFFERED & !(value & 8)]), 0),
        2 | 3 => (ADD_MEM_REG, numbers(&[&[0], &region(value)[..]].concat()), 1),
        4 => (REM_MEM_REG, numbers(&[&[0], &region(value)[..]].concat()), (value & 1) as usize),
        5 => {
            let count = value % 9;
            let mut table = pair(count, 0);
            for index in 0..count {
                table.extend(numbers(&region(index)));
            }
            (SET_MEM_TABLE, table, count as usize)
        }
        6 | 7 => (SET_VRING_NUM, pair(ring, 1 << (value % 10)), 0),
        8 => (SET_VRING_NUM, pair(ring, value), 0),
        9..12 => {
            // Three pages of one region, and rarely of none.
            let begin = USER_ADDRESS + (value & 31) * 0x4000;
            let [descriptors, driver, device] = [0, 1, 2].map(|page| begin + page * 0x1000);
            (SET_VRING_ADDR, numbers(&[ring, descriptors, device, driver, 0]), 0)
        }
        12 => (SET_VRING_BASE, pair(ring, value), 0),
        13 | 14 => (GET_VRING_BASE, pair(ring, 0), 0),
        15..18 => (SET_VRING_KICK, numbers(&[ring]), 1),
        18 => (SET_VRING_KICK, numbers(&[ring | 1 << 8]), 0),
        19 => (SET_VRING_CALL, numbers(&[ring]), 1),
        20 => (SET_VRING_ERR, numbers(&[ring]), 1),
        21..24 => (SET_VRING_ENABLE, pair(ring, u64::from(value > 20)), 0),
        24 => (GET_CONFIG, [pair(value, ring), vec![0; 4 + ring as usize]].concat(), 0),
        25 => (SET_CONFIG, [pair(32, 1), pair(value & 1, 1)[..5].to_vec()].concat(), 0),
        26 => (GET_INFLIGHT_FD, numbers(&[0, 0, ring | value << 16]), 0),
        27 => (SET_INFLIGHT_FD, numbers(&[REGION_BYTES, 0, ring | value << 16]), 1),
        28 => (SET_LOG_BASE, numbers(&[value << 8, 0]), 1),
        29 => (SET_STATUS, numbers(&[value & 15]), 0),
        30 => (RESET_DEVICE, Vec::new(), 0),
        _ => ([GET_FEATURES, RESET_OWNER, GET_STATUS, SET_OWNER][(value & 3) as usize], Vec::new(), 0),
    }
}

fn numbers(numbers: &[u64]) -> Vec<u8> {
    numbers.iter().flat_map(|number| number.to_ne_bytes()).collect()
}

/// The features that change a session's behaviour, selected by the bits of `value`.
fn features(value: u64) -> u64 {
    let bits =
        [virtio::PROTOCOL_FEATURES, virtio::RING_PACKED, virtio::LOG_ALL, virtio::FLUSH, virtio::CONFIG_WCE];
    bits.iter().enumerate().filter(|(at, _)| value >> at & 1 == 1).map(|(_, bit)| bit).sum()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(4096))]

        #[test]
        fn any_front_end_is_answered(data in prop::collection::vec(any::<u8>(), 0..400)) {
            vhost_user_session(&data);
        }
    }

    /// The generated bytes reach the states that they are for.
    #[test]
    fn rings_start_and_stop_in_mostly_valid_sessions() {
        let (mut steps, mut started, mut stopped) = (0, 0, 0);
        fastrand::seed(7);
        for _ in 0..1000 {
            let data: Vec<u8> = (0..400).map(|_| fastrand::u8(48..)).collect();
            let mut run = SessionFuzzer::new(VhostUserOffer {
                queues: 2,
                queue_size: 256,
                ..VhostUserOffer::default()
            })
            .expect("a memfd");
            let mut input = FuzzBytes(&data);
            assert!(run.begin(&mut input));
            while let Some(kind) = input.byte() {
                let before = run.running.len();
                if !run.step(kind, &mut input) {
                    break;
                }
                steps += 1;
                started += usize::from(run.running.len() > before);
                stopped += usize::from(run.running.len() < before);
            }
        }
        assert!(steps > 10_000 && started > 100 && stopped > 100, "{steps} {started} {stopped}");
    }
}
