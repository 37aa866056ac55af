//! Conversations with front ends, with the outputs of each message.

mod known_front_ends_tests;

use std::os::fd::{AsFd as _, OwnedFd};

use reactor::guest::GuestBytes;
use rustix::{
    event::{EventfdFlags, eventfd},
    fs::{MemfdFlags, fstat, ftruncate, memfd_create},
};

use super::*;
use crate::vhost_user_blk::{
    message::HEADER_BYTES,
    vring::{RingAreas, RingSettings},
};
use ::virtio::block::SECTOR_BYTES;

const GUEST_BYTES: u64 = 1 << 20;
/// Address in the front end of guest address 0.
const USER: u64 = 0x7f12_3400_0000;
const NEED_REPLY: bool = true;
const PLAIN: bool = false;

fn memory() -> OwnedFd {
    let file = memfd_create("guest", MemfdFlags::CLOEXEC).expect("a memfd");
    ftruncate(&file, GUEST_BYTES).expect("its length");
    file
}

fn event() -> OwnedFd {
    eventfd(0, EventfdFlags::CLOEXEC).expect("an eventfd")
}

fn channel() -> OwnedFd {
    let (socket, _) = std::os::unix::net::UnixStream::pair().expect("sockets");
    socket.into()
}

fn number(number: u64) -> Vec<u8> {
    number.to_ne_bytes().to_vec()
}

fn pair(ring: u32, number: u32) -> Vec<u8> {
    [ring, number].map(u32::to_ne_bytes).concat()
}

fn numbers(numbers: &[u64]) -> Vec<u8> {
    numbers.iter().flat_map(|number| number.to_ne_bytes()).collect()
}

/// The first megabyte, as a single region and as a table.
fn region() -> Vec<u8> {
    numbers(&[0, 0, GUEST_BYTES, USER, 0])
}

fn table() -> Vec<u8> {
    [pair(1, 0), region()[8..].to_vec()].concat()
}

/// The parts of ring `ring`, each on its own pages.
fn addresses(ring: u32) -> Vec<u8> {
    let at = |part: u64| USER + u64::from(ring) * 0x10000 + part * 0x4000;
    numbers(&[u64::from(ring), at(0), at(1), at(2), 0])
}

fn config(offset: u32, bytes: u32) -> Vec<u8> {
    [[offset, bytes, 0].map(u32::to_ne_bytes).concat(), vec![0; bytes as usize]].concat()
}

struct SessionFrontEnd {
    session: VhostUserSession,
    out: VecDeque<SessionOutput>,
    /// Payload of the last reply.
    payload: Vec<u8>,
    descriptor: Option<OwnedFd>,
}

impl SessionFrontEnd {
    fn new(offer: VhostUserOffer) -> Self {
        let (out, payload, descriptor) = Default::default();
        Self { session: VhostUserSession::new(offer), out, payload, descriptor }
    }

    /// Sends a message; returns a short description of the outputs.
    fn send(&mut self, code: u32, need_reply: bool, payload: &[u8], descriptors: Vec<OwnedFd>) -> String {
        let request = VhostUserRequest::parse(code, payload, descriptors);
        self.session.receive(code, need_reply, request, &mut self.out);
        self.take_outputs()
    }

    fn plain(&mut self, code: u32, payload: &[u8]) -> String {
        self.send(code, PLAIN, payload, Vec::new())
    }

    fn stopped(&mut self, ring: u16, base: u32) -> String {
        self.session.ring_stopped(ring, base, &mut self.out);
        self.take_outputs()
    }

    fn take_outputs(&mut self) -> String {
        let outputs: Vec<String> =
            std::mem::take(&mut self.out).into_iter().map(|out| self.describe(out)).collect();
        outputs.join(", ")
    }

    fn describe(&mut self, output: SessionOutput) -> String {
        match output {
            SessionOutput::Reply(reply) => {
                self.payload = reply.bytes[HEADER_BYTES..].to_vec();
                self.descriptor = reply.descriptor;
                match self.payload.as_slice() {
                    &[a, b, c, d, e, f, g, h] => {
                        format!("reply {:#x}", u64::from_ne_bytes([a, b, c, d, e, f, g, h]))
                    }
                    other => format!("reply of {}", other.len()),
                }
            }
            SessionOutput::Effect(Effect::Start { ring, settings }) => {
                let RingSettings { size, base, .. } = *settings;
                format!("start {ring} of {size} at {base}")
            }
            SessionOutput::Effect(Effect::Stop { ring }) => format!("stop {ring}"),
            SessionOutput::Effect(Effect::Fault { ring, why, error }) => {
                format!("fault {ring}: {why}{}", if error.is_some() { " (notified)" } else { "" })
            }
            SessionOutput::Effect(Effect::Memory { rings, .. }) => {
                format!("memory {:?}", rings.iter().map(|(ring, _)| ring).collect::<Vec<_>>())
            }
            SessionOutput::Effect(Effect::Event { ring, kind, .. }) => format!("{kind:?} {ring}"),
            SessionOutput::Effect(Effect::WriteCache(on)) => format!("cache {on}"),
            SessionOutput::ConfigChanged => "config".to_owned(),
            SessionOutput::Rejected { request, why } => format!("refused {request}: {why}"),
            SessionOutput::Close { request, why } => format!("close {request}: {why}"),
        }
    }

    /// Sets up a ring except for enabling it.
    fn set_up(&mut self, ring: u32, base: u32) -> String {
        let outputs = [
            self.plain(code::SET_VRING_NUM, &pair(ring, 128)),
            self.plain(code::SET_VRING_BASE, &pair(ring, base)),
            self.plain(code::SET_VRING_ADDR, &addresses(ring)),
            self.send(code::SET_VRING_KICK, PLAIN, &number(u64::from(ring)), vec![event()]),
        ];
        outputs.concat()
    }

    /// A front end of two rings that has negotiated memory and features.
    fn negotiated(features: u64) -> Self {
        let mut front_end = Self::new(offer());
        front_end.plain(code::SET_PROTOCOL_FEATURES, &number(protocol::OFFERED));
        front_end.plain(code::SET_FEATURES, &number(features));
        front_end.send(code::SET_MEM_TABLE, PLAIN, &table(), vec![memory()]);
        front_end
    }

    fn running() -> Self {
        let mut front_end = Self::negotiated(FEATURES);
        assert_eq!(front_end.set_up(0, 0), "");
        assert_eq!(front_end.plain(code::SET_VRING_ENABLE, &pair(0, 1)), "start 0 of 128 at 0");
        front_end
    }
}

const FEATURES: u64 = virtio::PROTOCOL_FEATURES | virtio::VERSION_1 | virtio::FLUSH | virtio::CONFIG_WCE;

fn offer() -> VhostUserOffer {
    VhostUserOffer { size_bytes: 100 * SECTOR_BYTES, queues: 2, ..VhostUserOffer::default() }
}

#[test]
fn without_protocol_features_a_kick_starts_a_ring() {
    let mut front_end = SessionFrontEnd::negotiated(virtio::VERSION_1);
    assert_eq!(front_end.set_up(0, 3), "start 0 of 128 at 3");
    assert_eq!(front_end.plain(code::GET_VRING_BASE, &pair(0, 0)), "stop 0");
    assert_eq!(front_end.stopped(0, 9), format!("reply {:#x}", 9_u64 << 32));
    let kick = front_end.send(code::SET_VRING_KICK, PLAIN, &number(0x100), vec![]);
    assert_eq!(kick, "start 0 of 128 at 9", "polled, from where it stopped");
}

#[test]
fn a_ring_that_its_driver_breaks_needs_a_reset() {
    let mut front_end = SessionFrontEnd::running();
    let (channel, _events) = std::os::unix::net::UnixStream::pair().expect("sockets");
    front_end.send(code::SET_BACKEND_REQ_FD, PLAIN, &[], vec![channel.into()]);
    // Without DRIVER_OK, no driver is notified.
    assert_eq!(front_end.stopped(0, 3), "");
    assert_eq!(front_end.plain(code::GET_STATUS, &[]), "reply 0x0");
    assert_eq!(front_end.plain(code::SET_STATUS, &number(15)), "config");
    assert_eq!(front_end.plain(code::GET_STATUS, &[]), "reply 0x4f");
    assert_eq!(front_end.plain(code::SET_STATUS, &number(15)), "", "once");
    assert_eq!(front_end.plain(code::GET_STATUS, &[]), "reply 0x4f");
    front_end.plain(code::SET_STATUS, &number(0));
    assert_eq!(front_end.plain(code::GET_STATUS, &[]), "reply 0x0");

    let mut running = SessionFrontEnd::running();
    assert_eq!(running.plain(code::SET_STATUS, &number(15)), "");
    assert_eq!(running.stopped(0, 3), "", "without a channel the status tells it alone");
    assert_eq!(running.plain(code::GET_STATUS, &[]), "reply 0x4f");
    // A ring that was ordered to stop has not failed.
    let mut stopping = SessionFrontEnd::running();
    stopping.plain(code::SET_STATUS, &number(15));
    assert_eq!(stopping.plain(code::GET_VRING_BASE, &pair(0, 0)), "stop 0");
    stopping.stopped(0, 3);
    assert_eq!(stopping.plain(code::GET_STATUS, &[]), "reply 0xf");
}

#[test]
fn base_is_returned_after_the_ring_has_stopped() {
    let mut front_end = SessionFrontEnd::running();
    assert_eq!(front_end.plain(code::GET_VRING_BASE, &pair(0, 0)), "stop 0");
    assert!(front_end.session.is_waiting_for_rings());
    assert_eq!(front_end.session.running().collect::<Vec<_>>(), [0]);
    assert_eq!(front_end.stopped(0, 41), format!("reply {:#x}", 41_u64 << 32));
    // A second report of the same stop is ignored.
    assert_eq!(front_end.stopped(0, 42), "", "it has ended already");
    assert_eq!(front_end.plain(code::GET_VRING_BASE, &pair(0, 0)), format!("reply {:#x}", 41_u64 << 32));
}

#[test]
fn a_ring_that_breaks_waits_to_be_set_up_again() {
    let mut front_end = SessionFrontEnd::running();
    assert_eq!(front_end.stopped(0, 12), "");
    assert_eq!(front_end.plain(code::SET_VRING_ENABLE, &pair(0, 1)), "");
    assert_eq!(front_end.plain(code::GET_VRING_BASE, &pair(0, 0)), format!("reply {:#x}", 12_u64 << 32));
    assert_eq!(front_end.set_up(0, 12), "start 0 of 128 at 12");
}

#[test]
fn ring_outside_memory_faults_alone() {
    let mut front_end = SessionFrontEnd::running();
    assert_eq!(front_end.send(code::SET_VRING_ERR, PLAIN, &number(1), vec![event()]), "");
    let far = numbers(&[1, USER + GUEST_BYTES - 16, USER + 0x1000, USER + 0x2000, 0]);
    front_end.plain(code::SET_VRING_NUM, &pair(1, 128));
    front_end.plain(code::SET_VRING_ADDR, &far);
    front_end.send(code::SET_VRING_KICK, PLAIN, &number(1), vec![event()]);
    let why = "fault 1: no single region of the guest's memory contains its descriptors at \
               0x7f12340ffff0 (is that memory shared? share=on) (notified)";
    assert_eq!(front_end.plain(code::SET_VRING_ENABLE, &pair(1, 1)), why);
    assert_eq!(front_end.plain(code::SET_VRING_ENABLE, &pair(1, 1)), "", "said once");
    // Set up again, with a reply requested.
    front_end.plain(code::GET_VRING_BASE, &pair(1, 0));
    let repeated = front_end.send(code::SET_VRING_KICK, NEED_REPLY, &number(1), vec![event()]);
    let refused = why.replace("fault 1:", "refused SET_VRING_KICK: ring 1:").replace(" (notified)", "");
    assert_eq!(repeated, format!("{why}, {refused}, reply 0x1"));
    front_end.plain(code::GET_VRING_BASE, &pair(1, 0));
    front_end.plain(code::SET_VRING_ADDR, &numbers(&[1, USER + 8, USER + 0x1000, USER + 0x2000, 0]));
    let unaligned = "fault 1: its descriptors at 0x7f1234000008 must be aligned to 16 bytes (notified)";
    assert_eq!(front_end.send(code::SET_VRING_KICK, PLAIN, &number(1), vec![event()]), unaligned);
    assert_eq!(front_end.session.running().collect::<Vec<_>>(), [0], "the other one runs");
}

#[test]
fn the_sizes_of_rings_are_checked() {
    let mut front_end = SessionFrontEnd::negotiated(FEATURES);
    front_end.set_up(0, 0);
    let mut size = |size| front_end.send(code::SET_VRING_NUM, NEED_REPLY, &pair(0, size), vec![]);
    for wrong in [0, 1025, 65536, u32::MAX] {
        let output = size(wrong);
        assert!(
            output.starts_with("refused SET_VRING_NUM: a ring of") && output.ends_with("reply 0x1"),
            "{output}"
        );
    }
    assert_eq!(
        (size(100), size(1), size(1024)),
        ("reply 0x0".into(), "reply 0x0".into(), "reply 0x0".into())
    );
    size(100);
    let output = front_end.plain(code::SET_VRING_ENABLE, &pair(0, 1));
    assert_eq!(output, "fault 0: a split ring has 100 descriptors, which is no power of two");
    let mut packed = SessionFrontEnd::negotiated(FEATURES | virtio::RING_PACKED);
    packed.set_up(0, 0);
    packed.plain(code::SET_VRING_NUM, &pair(0, 100));
    assert_eq!(packed.plain(code::SET_VRING_ENABLE, &pair(0, 1)), "start 0 of 100 at 0");
}

#[test]
fn memory_changes_under_rings_that_run() {
    let mut front_end = SessionFrontEnd::running();
    let more = numbers(&[0, GUEST_BYTES, GUEST_BYTES, USER + GUEST_BYTES, 0]);
    assert_eq!(front_end.send(code::ADD_MEM_REG, PLAIN, &more, vec![memory()]), "memory [0]");
    assert_eq!(front_end.plain(code::REM_MEM_REG, &more), "memory [0]");
    // Some front ends pass the region's descriptor again.
    front_end.send(code::ADD_MEM_REG, PLAIN, &more, vec![memory()]);
    assert_eq!(front_end.send(code::REM_MEM_REG, PLAIN, &more, vec![memory()]), "memory [0]");
    assert_eq!(front_end.send(code::SET_MEM_TABLE, PLAIN, &table(), vec![memory()]), "memory [0]");
    let output = front_end.plain(code::REM_MEM_REG, &region());
    assert!(output.starts_with("fault 0: no single region of the guest's memory contains"), "{output}");
    assert!(output.ends_with(", stop 0"), "{output}");
    assert!(!front_end.session.is_waiting_for_rings());
    assert_eq!(front_end.send(code::SET_MEM_TABLE, PLAIN, &table(), vec![memory()]), "");
    assert_eq!(front_end.stopped(0, 3), "", "it waits to be set up again");
    assert_eq!(front_end.set_up(0, 3), "start 0 of 128 at 3");
}

#[test]
fn the_parts_of_a_ring_are_as_long_as_it_needs() {
    // Bytes of descriptors, of the driver's part and of the device's, for 256 (virtio 1.3 § 2.7 and
    // § 2.8).
    for (features, bytes) in [
        (FEATURES, [4096, 516, 2052]),
        (FEATURES | virtio::EVENT_IDX, [4096, 518, 2054]),
        (FEATURES | virtio::RING_PACKED | virtio::EVENT_IDX, [4096, 4, 4]),
    ] {
        let mut front_end = SessionFrontEnd::negotiated(features);
        front_end.set_up(0, 0);
        front_end.plain(code::SET_VRING_NUM, &pair(0, 256));
        let settings = front_end.session.settings(0).expect("it is set up");
        let RingAreas { descriptors, driver, device } = settings.areas;
        assert_eq!([&descriptors, &driver, &device].map(GuestBytes::bytes), bytes);
        let at = [&descriptors, &driver, &device].map(GuestBytes::guest_address);
        assert_eq!(at, [0, 0x8000, 0x4000], "the used ring is said before the available one");
    }
}

#[test]
fn wrong_memory_is_refused() {
    let mut front_end = SessionFrontEnd::negotiated(FEATURES);
    let output = front_end.send(code::ADD_MEM_REG, NEED_REPLY, &region(), vec![memory()]);
    assert_eq!(output, "refused ADD_MEM_REG: a region at 0x0 overlaps another, reply 0x1");
    for wrong in [
        [0, GUEST_BYTES, 0, USER, 0],
        [0, GUEST_BYTES, GUEST_BYTES + 1, USER, 0],
        [0, GUEST_BYTES, 4096, USER, GUEST_BYTES],
        [0, u64::MAX - 4095, 8192, USER, 0],
        [0, GUEST_BYTES, 4096, u64::MAX - 15, 0],
        [0, GUEST_BYTES, u64::MAX, USER, u64::MAX],
    ] {
        let output = front_end.send(code::ADD_MEM_REG, NEED_REPLY, &numbers(&wrong), vec![memory()]);
        assert!(output.starts_with("refused ADD_MEM_REG: ") && output.ends_with("reply 0x1"), "{output}");
        let output = front_end.send(code::ADD_MEM_REG, NEED_REPLY, &numbers(&wrong), vec![event()]);
        assert!(output.starts_with("refused ADD_MEM_REG: "), "{output}");
    }
    let output = front_end.send(code::ADD_MEM_REG, PLAIN, &region(), vec![memory()]);
    assert!(output.starts_with("close ADD_MEM_REG: "), "the error is reported: {output}");
}

#[test]
fn memory_mapped_by_a_front_end_is_bounded() {
    let mut front_end = SessionFrontEnd::negotiated(FEATURES);
    let more = numbers(&[0, GUEST_BYTES, 4096, USER + GUEST_BYTES, 0]);
    let mut mappings = Vec::new();
    let output = loop {
        let output = front_end.send(code::ADD_MEM_REG, NEED_REPLY, &more, vec![memory()]);
        if output != "reply 0x0" {
            break output;
        }
        // As a request holds it that waits for limits.
        mappings.push(front_end.session.memory.clone());
        assert_eq!(front_end.send(code::REM_MEM_REG, NEED_REPLY, &more, vec![]), "reply 0x0");
    };
    assert!(output.starts_with("refused ADD_MEM_REG: 1018 mappings of this front end"), "{output}");
    assert_eq!(mappings.len(), 1017, "beside the one that it has");
    mappings.pop();
    assert_eq!(front_end.send(code::ADD_MEM_REG, NEED_REPLY, &more, vec![memory()]), "reply 0x0");

    let file = memory();
    ftruncate(&file, 1 << 45).expect("a file of holes");
    let mut add = |bytes: u64| {
        let huge = numbers(&[0, 1 << 50, bytes, 1 << 50, 0]);
        let file = file.try_clone().expect("a descriptor");
        let output = front_end.send(code::ADD_MEM_REG, NEED_REPLY, &huge, vec![file]);
        front_end.send(code::REM_MEM_REG, NEED_REPLY, &huge, vec![]);
        output
    };
    drop(mappings);
    let output = add(1 << 44);
    assert!(output.ends_with("16 TiB at most), reply 0x1"), "{output}");
    let available =
        output.split_once("more than ").and_then(|(_, rest)| rest.split(' ').next()?.parse().ok());
    let available: u64 = available.expect("a number of bytes");
    assert_ne!(add(available), "reply 0x0", "it has some already");
    assert_eq!(add(available - (1 << 30)), "reply 0x0");
}

#[test]
fn malformed_messages_are_rejected_or_end_the_session() {
    let mut front_end = SessionFrontEnd::negotiated(FEATURES);
    let output = front_end.send(code::SET_VRING_NUM, NEED_REPLY, &[0; 7], vec![]);
    assert_eq!(output, "refused SET_VRING_NUM: a payload of 7 bytes instead of 8, reply 0x1");
    let output = front_end.send(code::SET_OWNER, NEED_REPLY, &[], vec![event()]);
    assert_eq!(output, "refused SET_OWNER: 1 descriptors instead of 0, reply 0x1");
    let output = front_end.send(99, NEED_REPLY, &[], vec![]);
    assert_eq!(output, "refused unknown request: request 99 is not supported, reply 0x1");
    assert_eq!(
        front_end.plain(code::GET_CONFIG, &config(0, 5)[..16]),
        "refused GET_CONFIG: a payload of 16 bytes instead of 17, reply of 0"
    );
    let output = front_end.plain(code::SET_VRING_ENABLE, &pair(2, 1));
    assert_eq!(output, "close SET_VRING_ENABLE: no ring 2: 2 were offered");
    let output = front_end.send(code::GET_VRING_BASE, NEED_REPLY, &pair(7, 0), vec![]);
    assert_eq!(output, "close GET_VRING_BASE: no ring 7: 2 were offered", "it awaits another reply");
    let output = front_end.plain(code::SET_FEATURES, &number(1 << 35));
    assert_eq!(output, "close SET_FEATURES: features 0x800000000 were not offered");
    let output = front_end.plain(code::SET_PROTOCOL_FEATURES, &number(1 << 8));
    assert_eq!(output, "close SET_PROTOCOL_FEATURES: protocol features 0x100 were not offered");
}

#[test]
fn settings_of_a_running_ring_cannot_change() {
    let mut front_end = SessionFrontEnd::running();
    for (code, payload) in [
        (code::SET_VRING_NUM, pair(0, 64)),
        (code::SET_VRING_BASE, pair(0, 64)),
        (code::SET_FEATURES, number(FEATURES | virtio::RING_PACKED)),
    ] {
        let output = front_end.send(code, NEED_REPLY, &payload, vec![]);
        assert!(output.starts_with("refused") && output.contains("ring 0 runs"), "{output}");
    }
    assert_eq!(front_end.plain(code::SET_VRING_ADDR, &addresses(0)), "", "the same once more");
    assert_eq!(
        front_end.plain(code::SET_VRING_ADDR, &numbers(&[0, USER, USER + 4096, USER + 8192, 0])),
        "memory [0]"
    );
    assert_eq!(front_end.send(code::SET_VRING_CALL, PLAIN, &number(0), vec![event()]), "Call 0");
    assert_eq!(front_end.send(code::SET_VRING_KICK, PLAIN, &number(0), vec![event()]), "Kick 0");
    assert_eq!(front_end.send(code::SET_VRING_ERR, PLAIN, &number(0x100), vec![]), "Error 0");
}

#[test]
fn writes_are_logged_while_the_log_feature_is_set() {
    let mut front_end = SessionFrontEnd::running();
    let log = memory();
    let file = log.try_clone().expect("a copy");
    // Answered in any case, but once.
    let area = numbers(&[4096, 0]);
    assert_eq!(front_end.send(code::SET_LOG_BASE, PLAIN, &area, vec![file]), "memory [0], reply 0x0");
    let file = log.try_clone().expect("a copy");
    assert_eq!(front_end.send(code::SET_LOG_BASE, NEED_REPLY, &area, vec![file]), "memory [0], reply 0x0");
    assert_eq!(front_end.plain(code::SET_FEATURES, &number(FEATURES | virtio::LOG_ALL)), "");
    let buffer = front_end.session.memory.range(0x5000, 1).expect("it is there");
    buffer.write(0, &[1]);
    let mut recorded = [0; 2];
    rustix::io::pread(log.as_fd(), &mut recorded, 0).expect("read");
    assert_eq!(recorded, [1 << 5, 0], "page 5");
    assert_eq!(front_end.plain(code::SET_FEATURES, &number(FEATURES)), "memory [0]");
    front_end.session.memory.range(0x6000, 1).expect("it is there").write(0, &[1]);
    rustix::io::pread(log.as_fd(), &mut recorded, 0).expect("read");
    assert_eq!(recorded, [1 << 5, 0], "page 6 is not");
    let output = front_end.send(code::SET_LOG_BASE, NEED_REPLY, &number(0), vec![]);
    assert!(output.contains("the address of a log"), "{output}");
    assert_eq!(front_end.send(code::SET_LOG_FD, PLAIN, &[], vec![event()]), "");
}

#[test]
fn the_write_cache_follows_features_and_configuration() {
    let write = |writeback: u8| [config(32, 0)[..4].to_vec(), pair(1, 0), vec![writeback]].concat();
    let mut front_end = SessionFrontEnd::new(offer());
    assert_eq!(front_end.plain(code::SET_FEATURES, &number(FEATURES)), "cache true");
    assert_eq!(front_end.plain(code::SET_CONFIG, &write(0)), "cache false");
    assert_eq!(front_end.plain(code::SET_CONFIG, &write(0)), "");
    assert_eq!(front_end.plain(code::SET_CONFIG, &write(1)), "cache true");
    front_end.plain(code::SET_CONFIG, &write(0));
    // The front end keeps the guest's choice, and does not send it again.
    assert_eq!(front_end.plain(code::RESET_DEVICE, &[]), "");
    assert_eq!(front_end.plain(code::SET_FEATURES, &number(FEATURES)), "");
    assert_eq!(front_end.plain(code::SET_CONFIG, &write(1)), "cache true");
    // A driver without FLUSH.
    assert_eq!(front_end.plain(code::SET_FEATURES, &number(virtio::PROTOCOL_FEATURES)), "cache false");
    let output = front_end.plain(code::SET_CONFIG, &config(0, 8));
    assert_eq!(output, "close SET_CONFIG: 8 bytes of the configuration at 0 cannot be written");

    let mut read_only = SessionFrontEnd::new(VhostUserOffer { read_only: true, ..offer() });
    let output = read_only.plain(code::SET_CONFIG, &write(0));
    assert!(output.starts_with("close SET_CONFIG"), "{output}");
    let mut through = SessionFrontEnd::new(VhostUserOffer { write_cache: false, ..offer() });
    assert_eq!(through.plain(code::SET_FEATURES, &number(FEATURES)), "cache false");
    assert_eq!(through.plain(code::SET_CONFIG, &write(1)), "cache true", "the guest may say so");
}

#[test]
fn the_choice_of_a_write_cache_outlasts_the_back_end() {
    let write = |writeback: u8| [config(32, 0)[..4].to_vec(), pair(1, 0), vec![writeback]].concat();
    let shape = [0, 0].map(u64::to_ne_bytes).concat();
    let shape = [shape, vec![2, 0, 128, 0, 0, 0, 0, 0]].concat();
    let mut before = SessionFrontEnd::negotiated(FEATURES);
    before.plain(code::SET_CONFIG, &write(0));
    assert_eq!(before.plain(code::GET_INFLIGHT_FD, &shape), "reply of 24");
    let (shape, area) = (before.payload.clone(), before.descriptor.take().expect("an area"));
    let duplicate = || vec![area.try_clone().expect("a descriptor")];
    assert_eq!(before.send(code::SET_INFLIGHT_FD, PLAIN, &shape, duplicate()), "");

    // Another process, which offers a cache.
    let restarted = || {
        let mut after = SessionFrontEnd::negotiated(FEATURES);
        let output = after.send(code::SET_INFLIGHT_FD, PLAIN, &shape, duplicate());
        assert_eq!(after.plain(code::GET_CONFIG, &config(32, 1)), "reply of 13");
        (after.payload[12], output)
    };
    assert_eq!(restarted(), (0, "cache false".to_owned()));
    assert_eq!(before.plain(code::SET_CONFIG, &write(1)), "cache true");
    assert_eq!(restarted(), (1, String::new()));
}

#[test]
fn a_guest_that_knows_smaller_blocks_is_rejected() {
    let shape = [[0, 0].map(u64::to_ne_bytes).concat(), vec![2, 0, 128, 0, 0, 0, 0, 0]].concat();
    let front_end = |block_bytes, reads: bool| {
        let mut front_end = SessionFrontEnd::new(VhostUserOffer { block_bytes, ..offer() });
        front_end.plain(code::SET_FEATURES, &number(FEATURES));
        if reads {
            front_end.plain(code::GET_CONFIG, &config(0, 60));
        }
        front_end
    };
    // The first connection: the front end uses the area that it is given.
    let first = |mut front_end: SessionFrontEnd| {
        front_end.plain(code::GET_INFLIGHT_FD, &shape);
        let (shape, area) = (front_end.payload.clone(), front_end.descriptor.take().expect("an area"));
        let duplicate = move || (shape.clone(), vec![area.try_clone().expect("a descriptor")]);
        let (shape, file) = duplicate();
        assert_eq!(front_end.send(code::SET_INFLIGHT_FD, PLAIN, &shape, file), "");
        (front_end, duplicate)
    };
    let reconnect = |block_bytes, reads, duplicate: &dyn Fn() -> (Vec<u8>, Vec<OwnedFd>)| {
        let (shape, file) = duplicate();
        front_end(block_bytes, reads).send(code::SET_INFLIGHT_FD, PLAIN, &shape, file)
    };
    let refused = "close SET_INFLIGHT_FD: the export has blocks of 4096 bytes, but the guest uses \
                   blocks of 512 bytes (restore this export's logical-block-size, or stop and start \
                   the machine)";
    let (reader_of_512, area) = first(front_end(512, true));
    assert_eq!([512, 4096].map(|bytes| reconnect(bytes, false, &area)), ["", refused]);
    assert_eq!(
        reconnect(4096, true, &area),
        refused,
        "a front end that reads the config again does not notify its guest"
    );
    let (_, area) = first(front_end(4096, true));
    assert_eq!([512, 1024, 4096].map(|bytes| reconnect(bytes, false, &area)), [""; 3], "they fit");

    // After a reconnect without an area, the guest's block size is unknown: later reads of the
    // front end do not reach its guest.
    let (mut unknown, area) = first(front_end(512, false));
    assert_eq!(reconnect(4096, false, &area), "");
    unknown.send(code::SET_BACKEND_REQ_FD, PLAIN, &[], vec![channel()]);
    unknown.plain(code::SET_PROTOCOL_FEATURES, &number(protocol::OFFERED));
    assert!(unknown.session.resize(1 << 20).is_some(), "it is to look again");
    unknown.plain(code::GET_CONFIG, &config(0, 60));
    let (_, area) = first(unknown);
    assert_eq!(reconnect(4096, false, &area), "");

    // A process that takes the session over has the same knowledge, with and without an area.
    let transfer = |mut front_end: SessionFrontEnd, block_bytes| {
        front_end.session.quiesce(&mut front_end.out);
        let messages = front_end.session.to_messages().expect("descriptors");
        let received = VhostUserSession::from_messages(VhostUserOffer { block_bytes, ..offer() }, messages);
        received
            .map(|(session, _)| SessionFrontEnd { session, ..SessionFrontEnd::new(offer()) })
            .map_err(|why| why.to_string())
    };
    assert!(transfer(reader_of_512, 4096).is_err_and(|why| refused.ends_with(&why)));
    let (_, area) = first(transfer(front_end(512, true), 512).expect("the same"));
    assert_eq!(reconnect(4096, false, &area), refused);
}

#[test]
fn a_reconnected_front_end_is_asked_to_read_the_size() {
    let start = |reads: bool| {
        let mut front_end = SessionFrontEnd::negotiated(FEATURES);
        front_end.plain(code::SET_PROTOCOL_FEATURES, &number(protocol::OFFERED));
        front_end.send(code::SET_BACKEND_REQ_FD, PLAIN, &[], vec![channel()]);
        if reads {
            front_end.plain(code::GET_CONFIG, &config(0, 60));
        }
        front_end.set_up(0, 0);
        front_end.set_up(1, 0);
        let first = front_end.plain(code::SET_VRING_ENABLE, &pair(0, 1));
        (first, front_end.plain(code::SET_VRING_ENABLE, &pair(1, 1)))
    };
    let owned = |first: &str, second: &str| (first.to_owned(), second.to_owned());
    assert_eq!(start(true), owned("start 0 of 128 at 0", "start 1 of 128 at 0"));
    assert_eq!(start(false), owned("start 0 of 128 at 0, config", "start 1 of 128 at 0"), "once");
}

#[test]
fn a_reset_stops_everything_first_and_keeps_memory() {
    for (code, payload, base) in [(code::RESET_DEVICE, vec![], 0_u64), (code::SET_STATUS, number(0), 7)] {
        let mut front_end = SessionFrontEnd::running();
        front_end.set_up(1, 0);
        front_end.plain(code::SET_VRING_ENABLE, &pair(1, 1));
        front_end.plain(code::SET_STATUS, &number(15));
        assert_eq!(front_end.plain(code::GET_STATUS, &[]), "reply 0xf");
        assert_eq!(front_end.send(code, NEED_REPLY, &payload, vec![]), "stop 0, stop 1");
        assert_eq!(front_end.stopped(1, 7), "");
        assert!(front_end.session.is_waiting_for_rings());
        assert_eq!(front_end.stopped(0, 7), "reply 0x0");
        let reply = front_end.plain(code::GET_VRING_BASE, &pair(0, 0));
        assert_eq!(reply, format!("reply {:#x}", base << 32), "a machine that was paused goes on there");
        assert_eq!(front_end.plain(code::GET_STATUS, &[]), "reply 0x0");
        assert_eq!(front_end.plain(code::SET_VRING_ENABLE, &pair(0, 1)), "", "it is not set up");
        assert_eq!(front_end.set_up(0, 0), "start 0 of 128 at 0", "in the memory that was there");
        let output = front_end.send(code::SET_STATUS, NEED_REPLY, &number(256), vec![]);
        assert_eq!(output, "refused SET_STATUS: 0x100 is not a device status, reply 0x1");
    }
}

#[test]
fn an_in_flight_area_that_is_wrong_is_refused() {
    let mut front_end = SessionFrontEnd::negotiated(FEATURES);
    let area = |bytes: u64, queues: u8, size: u8| {
        [numbers(&[bytes, 0]), vec![queues, 0, size, 0, 0, 0, 0, 0]].concat()
    };
    let output = front_end.plain(code::GET_INFLIGHT_FD, &area(0, 0, 128));
    assert!(output.starts_with("refused GET_INFLIGHT_FD") && output.ends_with("reply of 24"), "{output}");
    assert_eq!(front_end.payload[..8], [0; 8]);
    assert!(front_end.descriptor.is_none());
    let too_small = front_end.send(code::SET_INFLIGHT_FD, NEED_REPLY, &area(100, 2, 128), vec![memory()]);
    assert_eq!(
        too_small,
        "refused SET_INFLIGHT_FD: an in-flight area of 100 bytes, its rings need 4224, reply 0x1"
    );
    // The area has room for one ring, and the second one is started.
    assert_eq!(front_end.send(code::SET_INFLIGHT_FD, PLAIN, &area(4224, 1, 128), vec![memory()]), "");
    front_end.set_up(0, 0);
    front_end.set_up(1, 0);
    assert_eq!(front_end.plain(code::SET_VRING_ENABLE, &pair(0, 1)), "start 0 of 128 at 0");
    let output = front_end.plain(code::SET_VRING_ENABLE, &pair(1, 1));
    assert_eq!(output, "fault 1: the in-flight area has no room for the ring");
}
