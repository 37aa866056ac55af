//! A front end with its guest, connected to a server over a real socket.

use std::{
    io::IoSlice,
    mem::MaybeUninit,
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::net::UnixStream,
    },
    sync::Arc,
};

use reactor::{
    JoinHandle,
    buffer::IoBuffer,
    guest::{GuestBytes, GuestMemory, MappingQuota, Region},
    operation,
    operation::Fd,
};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};

use super::{
    FEATURES, GUARD, MEMORY_BYTES, REQUESTS, SIZE, USER, VhostUserServer, attend, event, memory_file,
};
use crate::vhost_user_blk::{features::protocol, message::code};
use ::virtio::ring::{
    RingLayout, RingParts,
    driver::{DriverBuffer as Piece, RingDriver},
};

/// A ring of the guest, and the front end's events for it.
pub(super) struct GuestRing {
    pub(super) driver: RingDriver,
    pub(super) available: GuestBytes,
    pub(super) kick: OwnedFd,
    pub(super) call: Fd,
    pub(super) error: Fd,
}

/// A front end with its guest.
pub(super) struct SocketFrontEnd {
    pub(super) socket: Fd,
    pub(super) file: OwnedFd,
    pub(super) memory: GuestMemory,
    pub(super) served: JoinHandle<()>,
    requests: u64,
}

impl SocketFrontEnd {
    /// Connects and negotiates.
    pub(super) async fn connect(server: &Arc<VhostUserServer>) -> Self {
        let (ours, peer) = UnixStream::pair().expect("sockets");
        let served = attend(server, peer.into());
        let file = memory_file(MEMORY_BYTES);
        let copy = file.try_clone().expect("a descriptor");
        let region = Region::map(copy, 0, USER, MEMORY_BYTES, 0, &MappingQuota::new(1, MEMORY_BYTES))
            .expect("a good region");
        let memory = GuestMemory::new(vec![region]).expect("one region");
        let front_end = Self { socket: ours.into(), file, memory, served, requests: 0 };
        let number = |number: u64| number.to_ne_bytes();
        // Not acknowledged: REPLY_ACK is only negotiated by this message.
        front_end.send(code::SET_PROTOCOL_FEATURES, 1, &number(protocol::OFFERED), &[]);
        front_end.request_acknowledged(code::SET_FEATURES, &number(FEATURES), &[]).await;
        let mut table = 1_u64.to_ne_bytes().to_vec();
        table.extend([0, MEMORY_BYTES, USER, 0].map(u64::to_ne_bytes).concat());
        front_end.request_acknowledged(code::SET_MEM_TABLE, &table, &[front_end.file.as_fd()]).await;
        front_end
    }

    pub(super) fn send(&self, code: u32, flags: u32, payload: &[u8], descriptors: &[BorrowedFd<'_>]) {
        let mut bytes = [code, flags, payload.len() as u32].map(u32::to_ne_bytes).concat();
        bytes.extend(payload);
        send_with(&self.socket, &bytes, descriptors);
    }

    pub(super) async fn receive(&self, count: usize) -> Vec<u8> {
        let (mut buffer, mut filled) = (IoBuffer::new(count), 0);
        while filled < count {
            let (result, returned) = operation::receive(&self.socket, buffer, filled).await;
            let more = result.expect("connected");
            assert_ne!(more, 0, "the connection has ended");
            (filled, buffer) = (filled + more, returned);
        }
        buffer.to_vec()
    }

    /// Payload of the reply.
    pub(super) async fn receive_reply(&self, code: u32) -> Vec<u8> {
        let header = self.receive(12).await;
        assert_eq!(header[..8], [code, 5].map(u32::to_ne_bytes).concat());
        let length = u32::from_ne_bytes(header[8..].try_into().expect("four bytes"));
        self.receive(length as usize).await
    }

    /// Sends a request and waits for its acknowledgement.
    pub(super) async fn request_acknowledged(
        &self,
        code: u32,
        payload: &[u8],
        descriptors: &[BorrowedFd<'_>],
    ) {
        self.send(code, 9, payload, descriptors);
        assert_eq!(self.receive_reply(code).await, [0; 8], "request {code}");
    }

    async fn ask_state(&self, code: u32, ring: u32, number: u32) {
        self.request_acknowledged(code, &[ring, number].map(u32::to_ne_bytes).concat(), &[]).await;
    }

    /// Sets a ring up and starts it.
    pub(super) async fn start(&self, ring: u32, kick: OwnedFd, call: OwnedFd) -> GuestRing {
        let part = |part: u64| u64::from(ring) * 0x4000 + part * 0x1000;
        let parts = RingParts::of(SIZE, false, false);
        let ring_area = |number, (bytes, _)| self.memory.range(part(number), bytes).expect("inside");
        let layout = RingLayout {
            size: SIZE,
            descriptors: ring_area(0, parts.descriptors),
            driver: ring_area(1, parts.driver),
            device: ring_area(2, parts.device),
            packed: false,
            event_idx: false,
            indirect: false,
        };
        let error = event(0);
        self.ask_state(code::SET_VRING_NUM, ring, u32::from(SIZE)).await;
        self.ask_state(code::SET_VRING_BASE, ring, 0).await;
        let addresses = [u64::from(ring), USER + part(0), USER + part(2), USER + part(1), 0];
        self.request_acknowledged(code::SET_VRING_ADDR, &addresses.map(u64::to_ne_bytes).concat(), &[]).await;
        self.set_event(code::SET_VRING_CALL, ring, &call).await;
        self.set_event(code::SET_VRING_ERR, ring, &error).await;
        self.set_event(code::SET_VRING_KICK, ring, &kick).await;
        self.ask_state(code::SET_VRING_ENABLE, ring, 1).await;
        let available = layout.driver.clone();
        GuestRing {
            driver: RingDriver::new(&layout),
            available,
            kick,
            call: call.into(),
            error: error.into(),
        }
    }

    pub(super) async fn set_event(&self, code: u32, ring: u32, event: &OwnedFd) {
        self.request_acknowledged(code, &u64::from(ring).to_ne_bytes(), &[event.as_fd()]).await;
    }

    /// Makes a request of 512 bytes available; returns the address of its data and status.
    pub(super) fn request(&mut self, ring: &mut GuestRing, kind: u32, sector: u64, data: &[u8; 512]) -> u64 {
        let at = REQUESTS + self.requests % 16 * 0x1000;
        self.requests += 1;
        let buffer = self.memory.range(at, 0x1000).expect("inside");
        buffer.write(0, &kind.to_le_bytes());
        buffer.write(8, &sector.to_le_bytes());
        buffer.write(512, data);
        buffer.write(1024, &[GUARD]);
        let piece = |offset, bytes, writable| Piece { address: at + offset, bytes, writable };
        let data = piece(512, 512, kind != 1);
        ring.driver.add(&[piece(0, 16, false), data, piece(1024, 1, true)]).expect("there is room");
        at
    }

    pub(super) fn data(&self, at: u64) -> ([u8; 512], u8) {
        let (mut data, mut status) = ([0; 512], [0]);
        self.memory.range(at + 512, 512).expect("inside").read(0, &mut data);
        self.memory.range(at + 1024, 1).expect("inside").read(0, &mut status);
        (data, status[0])
    }

    /// Stops a ring; returns the index at which it continues.
    pub(super) async fn stop(&self, ring: u32) -> u32 {
        self.send(code::GET_VRING_BASE, 1, &[ring, 0].map(u32::to_ne_bytes).concat(), &[]);
        let reply = self.receive_reply(code::GET_VRING_BASE).await;
        assert_eq!(reply[..4], ring.to_ne_bytes());
        u32::from_ne_bytes(reply[4..].try_into().expect("four bytes"))
    }

    pub(super) async fn capacity(&self) -> u64 {
        let request = [[0, 8, 0].map(u32::to_ne_bytes).as_flattened(), &[0; 8]].concat();
        self.send(code::GET_CONFIG, 1, &request, &[]);
        let reply = self.receive_reply(code::GET_CONFIG).await;
        u64::from_le_bytes(reply[12..].try_into().expect("eight bytes"))
    }

    pub(super) async fn leave(self) {
        drop(self.socket);
        self.served.await;
    }
}

impl GuestRing {
    /// Kicks, if the device requested that, and waits for a call until a request was completed.
    pub(super) async fn kick_and_wait(&mut self) {
        self.kick();
        while self.driver.next_used().expect("a good device").is_none() {
            wait_for_signal(&self.call).await;
        }
    }

    pub(super) fn kick(&mut self) {
        // The device suppresses kicks while it polls.
        if self.driver.wants_kick() {
            rustix::io::write(&self.kick, &1_u64.to_ne_bytes()).expect("there is room");
        }
    }

    /// Polls until a request was completed.
    pub(super) async fn look(&mut self) {
        while self.driver.next_used().expect("a good device").is_none() {
            reactor::yield_now().await;
        }
    }
}

pub(super) async fn wait_for_signal(event: &Fd) {
    operation::readable(event).await.expect("an eventfd");
    rustix::io::read(event, &mut [0; 8]).expect("it was rung");
}

/// Sends bytes with at most one descriptor.
pub(super) fn send_with(socket: impl AsFd, bytes: &[u8], descriptors: &[BorrowedFd<'_>]) {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !descriptors.is_empty() {
        assert!(control.push(SendAncillaryMessage::ScmRights(descriptors)));
    }
    let sent = sendmsg(socket, &[IoSlice::new(bytes)], &mut control, SendFlags::empty());
    assert_eq!(sent, Ok(bytes.len()));
}
