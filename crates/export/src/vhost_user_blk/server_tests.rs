//! Front ends over real sockets, with real events and memory that both sides map.

use std::{
    fs::File,
    io::{IoSlice, Read as _},
    mem::MaybeUninit,
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::net::{UnixListener, UnixStream},
    },
    pin::pin,
    task::{Context, Poll, Waker},
};

use policy::{
    throttle::{Limit, LimitKind, Limits},
    time::Duration,
};
use rustix::{
    event::{EventfdFlags, eventfd},
    fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create},
    net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg},
};

use super::*;
use crate::{
    vhost_user_blk::{
        features::{Offer, protocol, virtio},
        message::{code, numbers},
        session::EventKind,
        vring::RingPlaces,
    },
    virtio::ring::{
        Layout, Parts,
        driver::{Buffer as Piece, Driver},
    },
};
use block::{
    buffer::Buffer,
    disk::{Disk, ErrorPolicies, OnError},
    guest::{Memory, Quota, Region},
    image::{Image, Raw},
    layer::throttle::DiskSettings,
    reactor::{JoinHandle, Polling, op, spawn_joinable, timeout},
    storage::Storage,
};

#[path = "happening_tests.rs"]
mod happenings;

/// Longer than anything here takes.
const PATIENCE: Duration = Duration::from_secs(60);
const MEMORY_BYTES: u64 = 1 << 17;
/// Where the front end has the guest's memory.
const USER: u64 = 0x7f00_0000_0000;
/// Guest-physical: rings, a page a part and four pages a ring, then a page for each request.
const REQUESTS: u64 = 0x8000;
const SIZE: u16 = 32;
const GUARD: u8 = 0xa5;
const FEATURES: u64 = virtio::VERSION_1 | virtio::PROTOCOL_FEATURES | virtio::FLUSH | virtio::CONFIG_WCE;

fn real<T: 'static>(future: impl Future<Output = T> + 'static) -> T {
    reactor::run(Polling::Off, async { timeout(PATIENCE, future).await.expect("it is over before a minute") })
        .expect("io_uring works on a test machine")
}

fn server(limits: Limits) -> Arc<Server> {
    server_over(Storage::memory(1 << 20), limits)
}

fn server_over(storage: Storage, limits: Limits) -> Arc<Server> {
    server_of(storage, limits, Offer::default())
}

fn server_of(storage: Storage, limits: Limits, offer: Offer) -> Arc<Server> {
    Server::new(export_of(storage, limits, offer))
}

fn export_of(storage: Storage, limits: Limits, offer: Offer) -> Export {
    let settings = DiskSettings { limits, ..DiskSettings::default() };
    let disk = Disk::new("disk", Image::Raw(Raw::new(storage)), settings, None);
    let offer = Offer { queues: 2, queue_size: SIZE, ..offer };
    Export { id: "vm1".into(), disk: Arc::new(disk.expect("valid limits")), offer, serial: "disk".into() }
}

fn event(count: u32) -> OwnedFd {
    eventfd(count, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).expect("an eventfd")
}

/// A ring of the guest, and the front end's events for it.
struct GuestRing {
    driver: Driver,
    available: block::guest::Place,
    kick: OwnedFd,
    call: Fd,
    error: Fd,
}

/// A front end with its guest.
struct FrontEnd {
    socket: Fd,
    file: OwnedFd,
    memory: Memory,
    served: JoinHandle<()>,
    requests: u64,
}

impl FrontEnd {
    /// Connects and negotiates.
    async fn connect(server: &Arc<Server>) -> Self {
        let (ours, theirs) = UnixStream::pair().expect("sockets");
        let server = Arc::clone(server);
        let served = spawn_joinable(async move { server.attend(theirs.into(), Threads::Here).await });
        let file = memfd_create("guest", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).expect("a memfd");
        ftruncate(&file, MEMORY_BYTES).expect("its length");
        let copy = file.try_clone().expect("a descriptor");
        let region =
            Region::map(copy, 0, USER, MEMORY_BYTES, 0, &Quota::new(1, MEMORY_BYTES)).expect("a good region");
        let memory = Memory::new(vec![region]).expect("one region");
        let front_end = Self { socket: ours.into(), file, memory, served, requests: 0 };
        let number = |number: u64| number.to_ne_bytes();
        front_end.send(code::SET_PROTOCOL_FEATURES, 1, &number(protocol::OFFERED), &[]);
        front_end.ask(code::SET_FEATURES, &number(FEATURES), &[]).await;
        let mut table = 1_u64.to_ne_bytes().to_vec();
        table.extend([0, MEMORY_BYTES, USER, 0].map(u64::to_ne_bytes).concat());
        front_end.ask(code::SET_MEM_TABLE, &table, &[front_end.file.as_fd()]).await;
        front_end
    }

    fn send(&self, code: u32, flags: u32, payload: &[u8], descriptors: &[BorrowedFd<'_>]) {
        let mut bytes = [code, flags, payload.len() as u32].map(u32::to_ne_bytes).concat();
        bytes.extend(payload);
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !descriptors.is_empty() {
            assert!(control.push(SendAncillaryMessage::ScmRights(descriptors)));
        }
        let sent = sendmsg(&self.socket, &[IoSlice::new(&bytes)], &mut control, SendFlags::empty());
        assert_eq!(sent, Ok(bytes.len()));
    }

    async fn receive(&self, count: usize) -> Vec<u8> {
        let (mut buffer, mut filled) = (Buffer::new(count), 0);
        while filled < count {
            let (result, back) = op::receive(&self.socket, buffer, filled).await;
            let more = result.expect("connected");
            assert_ne!(more, 0, "the connection has ended");
            (filled, buffer) = (filled + more, back);
        }
        buffer.to_vec()
    }

    /// The payload of the answer.
    async fn answer(&self, code: u32) -> Vec<u8> {
        let header = self.receive(12).await;
        assert_eq!(header[..8], [code, 5].map(u32::to_ne_bytes).concat());
        let length = u32::from_ne_bytes(header[8..].try_into().expect("four bytes"));
        self.receive(length as usize).await
    }

    /// Sends a request, and waits until it has been done.
    async fn ask(&self, code: u32, payload: &[u8], descriptors: &[BorrowedFd<'_>]) {
        self.send(code, 9, payload, descriptors);
        assert_eq!(self.answer(code).await, [0; 8], "request {code}");
    }

    async fn ask_state(&self, code: u32, ring: u32, number: u32) {
        self.ask(code, &[ring, number].map(u32::to_ne_bytes).concat(), &[]).await;
    }

    /// Sets a ring up and starts it.
    async fn start(&self, ring: u32, kick: OwnedFd, call: OwnedFd) -> GuestRing {
        let part = |part: u64| u64::from(ring) * 0x4000 + part * 0x1000;
        let parts = Parts::of(SIZE, false, false);
        let place = |number, (bytes, _)| self.memory.place(part(number), bytes).expect("inside");
        let layout = Layout {
            size: SIZE,
            descriptors: place(0, parts.descriptors),
            driver: place(1, parts.driver),
            device: place(2, parts.device),
            packed: false,
            event_idx: false,
            indirect: false,
        };
        let error = event(0);
        self.ask_state(code::SET_VRING_NUM, ring, u32::from(SIZE)).await;
        self.ask_state(code::SET_VRING_BASE, ring, 0).await;
        let addresses = [u64::from(ring), USER + part(0), USER + part(2), USER + part(1), 0];
        self.ask(code::SET_VRING_ADDR, &addresses.map(u64::to_ne_bytes).concat(), &[]).await;
        self.set_event(code::SET_VRING_CALL, ring, &call).await;
        self.set_event(code::SET_VRING_ERR, ring, &error).await;
        self.set_event(code::SET_VRING_KICK, ring, &kick).await;
        self.ask_state(code::SET_VRING_ENABLE, ring, 1).await;
        let available = layout.driver.clone();
        GuestRing { driver: Driver::new(&layout), available, kick, call: call.into(), error: error.into() }
    }

    async fn set_event(&self, code: u32, ring: u32, event: &OwnedFd) {
        self.ask(code, &u64::from(ring).to_ne_bytes(), &[event.as_fd()]).await;
    }

    /// Makes a request of 512 bytes available; where its data and its status are.
    fn request(&mut self, ring: &mut GuestRing, kind: u32, sector: u64, data: &[u8; 512]) -> u64 {
        let at = REQUESTS + self.requests % 16 * 0x1000;
        self.requests += 1;
        let place = self.memory.place(at, 0x1000).expect("inside");
        place.write(0, &kind.to_le_bytes());
        place.write(8, &sector.to_le_bytes());
        place.write(512, data);
        place.write(1024, &[GUARD]);
        let piece = |offset, bytes, writable| Piece { address: at + offset, bytes, writable };
        let data = piece(512, 512, kind != 1);
        ring.driver.add(&[piece(0, 16, false), data, piece(1024, 1, true)]).expect("there is room");
        at
    }

    fn data(&self, at: u64) -> ([u8; 512], u8) {
        let (mut data, mut status) = ([0; 512], [0]);
        self.memory.place(at + 512, 512).expect("inside").read(0, &mut data);
        self.memory.place(at + 1024, 1).expect("inside").read(0, &mut status);
        (data, status[0])
    }

    async fn capacity(&self) -> u64 {
        let ask = [[0, 8, 0].map(u32::to_ne_bytes).as_flattened(), &[0; 8]].concat();
        self.send(code::GET_CONFIG, 1, &ask, &[]);
        let answer = self.answer(code::GET_CONFIG).await;
        u64::from_le_bytes(answer[12..].try_into().expect("eight bytes"))
    }

    async fn leave(self) {
        drop(self.socket);
        self.served.await;
    }
}

impl GuestRing {
    /// Kicks, if that is asked for, and waits for a call until something is back.
    async fn kick_and_wait(&mut self) {
        self.kick();
        while self.driver.next_used().expect("a good device").is_none() {
            rung(&self.call).await;
        }
    }

    fn kick(&mut self) {
        if self.driver.wants_kick() {
            rustix::io::write(&self.kick, &1_u64.to_ne_bytes()).expect("there is room");
        }
    }

    /// Looks until something is back.
    async fn look(&mut self) {
        while self.driver.next_used().expect("a good device").is_none() {
            reactor::yield_now().await;
        }
    }
}

async fn rung(event: &Fd) {
    op::readable(event).await.expect("an eventfd");
    rustix::io::read(event, &mut [0; 8]).expect("it was rung");
}

#[test]
fn a_front_end_is_served_from_its_first_message_to_its_last() {
    real(async {
        let server = server(Limits::default());
        let mut front_end = FrontEnd::connect(&server).await;
        let (channel, mut events) = UnixStream::pair().expect("sockets");
        front_end.ask(code::SET_BACKEND_REQ_FD, &[], &[channel.as_fd()]).await;
        assert_eq!(front_end.capacity().await, (1 << 20) / 512);
        let mut ring = front_end.start(0, event(0), event(0)).await;
        for sector in [0, 7] {
            let data = [sector as u8 + 1; 512];
            let at = front_end.request(&mut ring, 1, sector, &data);
            ring.kick_and_wait().await;
            assert_eq!(front_end.data(at), (data, 0));
            let at = front_end.request(&mut ring, 0, sector, &[GUARD; 512]);
            ring.kick_and_wait().await;
            assert_eq!(front_end.data(at), (data, 0));
        }
        let seen = server.statistics();
        assert_eq!((seen.queues, seen.requests, seen.in_flight), (1, 4, 0));
        assert!(seen.calls >= 4, "{seen:?}");

        server.device.disk().resize(2 << 20).await.expect("memory takes any size");
        server.look_at_size();
        let told = reactor::blocking(move || {
            let mut told = [0; 12];
            events.read_exact(&mut told).expect("it is told");
            told
        });
        assert_eq!(told.await[..4], code::CONFIG_CHANGE_MSG.to_ne_bytes());
        assert_eq!(front_end.capacity().await, (2 << 20) / 512);
        let at = front_end.request(&mut ring, 1, 2048, &[3; 512]);
        ring.kick_and_wait().await;
        assert_eq!(front_end.data(at).1, 0, "where there was no disk before");

        front_end.send(code::GET_VRING_BASE, 1, &[0; 8], &[]);
        let base = front_end.answer(code::GET_VRING_BASE).await;
        assert_eq!(base, [0, 5].map(u32::to_ne_bytes).concat());
        assert_eq!(server.statistics().queues, 0);
        front_end.leave().await;
        assert_eq!(server.connections(), 0);
    });
}

#[test]
fn a_request_of_less_than_a_block_is_refused_and_told_of() {
    real(async {
        let is_told = |server: &Server| server.device.is_out_of_step.load(Relaxed);
        let offer = Offer { block_bytes: 4096, ..Offer::default() };
        let server = server_of(Storage::memory((1 << 20) + 512), Limits::default(), offer);
        let mut front_end = FrontEnd::connect(&server).await;
        assert_eq!(front_end.capacity().await, (1 << 20) / 512, "what lies behind is no block");
        let mut ring = front_end.start(0, event(0), event(0)).await;
        for kind in [1, 0] {
            let at = front_end.request(&mut ring, kind, 0, &[GUARD; 512]);
            ring.kick_and_wait().await;
            assert_eq!(front_end.data(at), ([GUARD; 512], 1), "an error, and nothing was read");
            assert!(is_told(&server));
        }
        front_end.leave().await;
        assert!(!is_told(&server), "the next one is another machine");
    });
}

#[test]
fn a_large_request_that_the_end_cuts_short_is_left_unanswered() {
    real(async {
        let mut limits = Limits::default();
        *limits.limit_mut(LimitKind::BpsTotal) = Limit { rate: 1, burst_rate: 6000, burst_length_s: 1 };
        let server = server(limits);
        let front_end = FrontEnd::connect(&server).await;
        let mut ring = front_end.start(0, event(0), event(0)).await;
        let memory = front_end.memory.clone();
        let place = memory.place(REQUESTS, 0x1000).expect("inside");
        place.write(0, &1_u32.to_le_bytes());
        place.write(8, &[0; 8]);
        place.write(1024, &[GUARD]);
        let piece = |at, bytes, writable| Piece { address: REQUESTS + at, bytes, writable };
        let pieces = [piece(0, 16, false), piece(0x1000, 0x4000, false), piece(1024, 1, true)];
        ring.driver.add(&pieces).expect("there is room");
        ring.kick();
        // Some parts pass, and the rest would wait for hours.
        while server.device.disk().totals().written_bytes == 0 {
            reactor::yield_now().await;
        }
        server.close();
        front_end.served.await;
        // Neither done nor failed: it is in the in-flight area of a front end that has one.
        let mut status = [0];
        place.read(1024, &mut status);
        assert_eq!(status, [GUARD]);
        assert!(ring.driver.next_used().expect("a good device").is_none(), "nothing came back");
        let seen = server.statistics();
        assert_eq!((seen.queues, seen.in_flight, seen.requests), (0, 0, 1));
    });
}

#[test]
fn what_a_stopped_disk_holds_goes_back_into_the_ring() {
    real(async {
        let failing = "kind=write,error=ENOSPC,count=3".parse().expect("a rule");
        let server = server_over(Storage::memory(1 << 20).with_faults(vec![failing]), Limits::default());
        let disk = server.device.disk();
        disk.failures().set_policies(ErrorPolicies { write: OnError::Stop, ..ErrorPolicies::default() });
        let mut front_end = FrontEnd::connect(&server).await;
        let mut ring = front_end.start(0, event(0), event(0)).await;
        let mut requests = Vec::new();
        for number in 0..3 {
            requests.push(front_end.request(&mut ring, 1, number * 100, &[number as u8 + 1; 512]));
            ring.kick();
        }
        while disk.failures().stopped_by().is_none() || server.statistics().requests < 3 {
            reactor::yield_now().await;
        }
        // A machine that is paused, or moved, asks where its ring stopped, and waits for that.
        front_end.send(code::GET_VRING_BASE, 1, &[0; 8], &[]);
        let base = front_end.answer(code::GET_VRING_BASE).await;
        assert_eq!(base, [0, 0].map(u32::to_ne_bytes).concat(), "all went back");
        assert_eq!(server.statistics().in_flight, 0);
        assert!(requests.iter().all(|at| front_end.data(*at).1 == GUARD), "none was answered");
        // The machine goes on, and the disk does.
        front_end.set_event(code::SET_VRING_KICK, 0, &event(1)).await;
        while server.statistics().requests < 6 {
            reactor::yield_now().await;
        }
        while requests.iter().any(|at| front_end.data(*at).1 == GUARD) {
            disk.failures().resume();
            reactor::yield_now().await;
        }
        assert!(requests.iter().all(|at| front_end.data(*at).1 == 0), "each was done");
        front_end.leave().await;
    });
}

#[test]
fn what_cannot_go_back_waits_for_the_disk_and_never_fails() {
    real(async {
        let failing = "kind=write,error=ENOSPC,count=1".parse().expect("a rule");
        let server = server_over(Storage::memory(1 << 20).with_faults(vec![failing]), Limits::default());
        let disk = server.device.disk();
        disk.failures().set_policies(ErrorPolicies { write: OnError::Stop, ..ErrorPolicies::default() });
        let mut front_end = FrontEnd::connect(&server).await;
        let mut ring = front_end.start(0, event(0), event(0)).await;
        let write = front_end.request(&mut ring, 1, 0, &[1; 512]);
        ring.kick();
        while disk.failures().stopped_by().is_none() {
            reactor::yield_now().await;
        }
        // It needs no disk, and is done before what came before it.
        let id = front_end.request(&mut ring, 8, 0, &[0; 512]);
        ring.kick();
        while front_end.data(id).1 == GUARD {
            reactor::yield_now().await;
        }
        front_end.send(code::GET_VRING_BASE, 1, &[0; 8], &[]);
        let early = timeout(Duration::from_millis(50), front_end.receive(1)).await;
        assert!(early.is_err() && front_end.data(write).1 == GUARD, "it is neither done nor failed");
        disk.failures().resume();
        let base = front_end.answer(code::GET_VRING_BASE).await;
        assert_eq!(base, [0, 2].map(u32::to_ne_bytes).concat());
        assert_eq!(front_end.data(write).1, 0, "it was done");
        front_end.leave().await;
    });
}

#[test]
fn a_front_end_that_leaves_waits_for_no_limits() {
    real(async {
        let mut limits = Limits::default();
        *limits.limit_mut(LimitKind::IopsTotal) = Limit { rate: 1, ..Limit::NONE };
        let server = server(limits);
        let mut front_end = FrontEnd::connect(&server).await;
        let mut ring = front_end.start(0, event(0), event(0)).await;
        // Apart from each other, so that each waits for itself.
        let requests: Vec<_> =
            (0..10).map(|number| front_end.request(&mut ring, 1, number * 100, &[1; 512])).collect();
        ring.kick_and_wait().await;
        assert_eq!(front_end.data(requests[0]).1, 0);
        assert_eq!(server.statistics().requests, 10, "all were taken");
        let memory = front_end.memory.clone();
        front_end.leave().await;
        let waiting = requests.iter().filter(|at| {
            let mut status = [0];
            memory.place(**at + 1024, 1).expect("inside").read(0, &mut status);
            status == [GUARD]
        });
        assert!(waiting.count() > 5, "they were carried out though nobody is there");
        let seen = server.statistics();
        assert_eq!((seen.queues, seen.in_flight), (0, 0));
    });
}

#[test]
fn a_ring_whose_kick_is_no_event_is_served_all_the_same() {
    real(async {
        let server = server(Limits::default());
        let mut front_end = FrontEnd::connect(&server).await;
        let zeroes = OwnedFd::from(File::open("/dev/zero").expect("it is there"));
        let mut ring = front_end.start(0, zeroes, event(0)).await;
        front_end.request(&mut ring, 1, 0, &[1; 512]);
        ring.look().await;
        assert_eq!(server.statistics().kicks, 0, "they are without end");
        let kick = event(0);
        front_end.set_event(code::SET_VRING_KICK, 0, &kick).await;
        ring.kick = kick;
        // Once there is nothing left to look for.
        while server.statistics().kicks == 0 {
            front_end.request(&mut ring, 1, 0, &[1; 512]);
            ring.kick();
            ring.look().await;
            reactor::sleep_until(reactor::now() + Duration::from_millis(1)).await;
        }
        front_end.leave().await;
    });
}

#[test]
fn a_call_that_would_block_holds_nobody() {
    real(async {
        let server = server(Limits::default());
        let mut front_end = FrontEnd::connect(&server).await;
        let full = eventfd(0, EventfdFlags::CLOEXEC).expect("an eventfd");
        rustix::io::write(&full, &(u64::MAX - 1).to_ne_bytes()).expect("so much fits");
        let mut ring = front_end.start(0, event(0), full).await;
        for _ in 0..3 {
            front_end.request(&mut ring, 1, 0, &[1; 512]);
            ring.kick();
            ring.look().await;
        }
        assert!(server.statistics().calls > 0);
        front_end.leave().await;
    });
}

#[test]
fn a_ring_that_breaks_says_so_and_others_go_on() {
    real(async {
        let server = server(Limits::default());
        let mut front_end = FrontEnd::connect(&server).await;
        let mut bad = front_end.start(0, event(0), event(0)).await;
        let mut good = front_end.start(1, event(0), event(0)).await;
        front_end.request(&mut bad, 1, 0, &[1; 512]);
        bad.kick_and_wait().await;
        bad.available.store_u16(2, 1000, std::sync::atomic::Ordering::Release);
        rustix::io::write(&bad.kick, &1_u64.to_ne_bytes()).expect("there is room");
        rung(&bad.error).await;
        while server.statistics().queues > 1 {
            reactor::yield_now().await;
        }
        let at = front_end.request(&mut good, 0, 0, &[GUARD; 512]);
        good.kick_and_wait().await;
        assert_eq!(front_end.data(at), ([1; 512], 0));
        // The guest sets it up again.
        front_end.send(code::GET_VRING_BASE, 1, &[0; 8], &[]);
        assert_eq!(front_end.answer(code::GET_VRING_BASE).await, [0, 1].map(u32::to_ne_bytes).concat());
        front_end.memory.place(0, 0x3000).expect("inside").fill(0, 0x3000, 0);
        let mut again = front_end.start(0, event(0), event(0)).await;
        front_end.request(&mut again, 1, 0, &[2; 512]);
        again.kick_and_wait().await;
        front_end.leave().await;
        assert_eq!(server.statistics().queues, 0);
    });
}

#[test]
fn memory_comes_and_goes_and_is_recorded_under_a_ring_that_runs() {
    const MORE: u64 = 1 << 20;
    real(async {
        let server = server(Limits::default());
        let mut front_end = FrontEnd::connect(&server).await;
        let mut ring = front_end.start(0, event(0), event(0)).await;
        let log = memfd_create("log", MemfdFlags::CLOEXEC).expect("a memfd");
        ftruncate(&log, 4096).expect("its length");
        let bits = Region::map(log.try_clone().expect("a descriptor"), 0, 0, 4096, 0, &Quota::new(1, 4096));
        let bits =
            Memory::new(vec![bits.expect("mapped")]).expect("one region").place(0, 64).expect("inside");
        let marked = || {
            let mut bytes = [0; 64];
            bits.read(0, &mut bytes);
            bits.fill(0, 64, 0);
            (0..512_u64).filter(|page| bytes[*page as usize / 8] & 1 << (page % 8) != 0).collect::<Vec<_>>()
        };
        let at = front_end.request(&mut ring, 0, 0, &[GUARD; 512]);
        ring.kick_and_wait().await;
        assert_eq!(front_end.data(at).1, 0);
        let area = [4096_u64, 0].map(u64::to_ne_bytes).concat();
        front_end.ask(code::SET_LOG_BASE, &area, &[log.as_fd()]).await;
        let _written_without_a_request = marked();
        let at = front_end.request(&mut ring, 0, 0, &[GUARD; 512]);
        ring.kick_and_wait().await;
        assert_eq!(marked(), [2, at / 4096], "the used ring, and the request's page");

        let region = [0, MORE, MEMORY_BYTES, USER + MORE, 0].map(u64::to_ne_bytes).concat();
        let file = front_end.file.try_clone().expect("a descriptor");
        let piece = |address, bytes, writable| Piece { address, bytes, writable };
        // Its data is in the same file, by another address.
        let statuses = [(true, 0, vec![2, 8, (MORE + 0x9000) / 4096]), (false, 1, vec![2, 8])];
        for (is_there, status, pages) in statuses {
            match is_there {
                true => front_end.ask(code::ADD_MEM_REG, &region, &[file.as_fd()]).await,
                false => front_end.ask(code::REM_MEM_REG, &region, &[]).await,
            }
            let place = front_end.memory.place(REQUESTS, 0x1000).expect("inside");
            place.fill(0, 16, 0);
            let data = piece(MORE + 0x9000, 512, true);
            let pieces = [piece(REQUESTS, 16, false), data, piece(REQUESTS + 1024, 1, true)];
            let _written_without_a_request = marked();
            ring.driver.add(&pieces).expect("there is room");
            ring.kick_and_wait().await;
            assert_eq!(front_end.data(REQUESTS).1, status);
            assert_eq!(marked(), pages);
        }
        front_end.leave().await;
    });
}

#[test]
fn nothing_is_served_into_memory_that_has_gone() {
    const MORE: u64 = 1 << 20;
    real(async {
        let mut limits = Limits::default();
        *limits.limit_mut(LimitKind::IopsTotal) = Limit { rate: 1, ..Limit::NONE };
        let server = server(limits);
        let front_end = FrontEnd::connect(&server).await;
        let mut ring = front_end.start(0, event(0), event(0)).await;
        let file = memfd_create("more", MemfdFlags::CLOEXEC).expect("a memfd");
        ftruncate(&file, MEMORY_BYTES).expect("its length");
        let region = [0, MORE, MEMORY_BYTES, USER + MORE, 0].map(u64::to_ne_bytes).concat();
        front_end.ask(code::ADD_MEM_REG, &region, &[file.as_fd()]).await;
        ftruncate(&file, 0).expect("its length");
        // The ring is in the other region. Most of these wait for their limits.
        let piece = |address, bytes, writable| Piece { address, bytes, writable };
        for number in 0..10 {
            let at = REQUESTS + number * 0x1000;
            let place = front_end.memory.place(at, 0x1000).expect("inside");
            place.write(8, &(number * 100).to_le_bytes());
            place.write(1024, &[GUARD]);
            let data = piece(MORE + number * 0x1000, 512, true);
            ring.driver.add(&[piece(at, 16, false), data, piece(at + 1024, 1, true)]).expect("there is room");
        }
        ring.kick();
        rung(&ring.error).await;
        while server.statistics().queues > 0 {
            reactor::yield_now().await;
        }
        for number in 0..10 {
            let (_, status) = front_end.data(REQUESTS + number * 0x1000);
            assert!([1, GUARD].contains(&status), "request {number}: {status}");
        }
        assert_eq!(front_end.data(REQUESTS).1, 1, "it has met it");
        assert_eq!(server.statistics().in_flight, 0);
        front_end.leave().await;
    });
}

#[test]
fn rings_that_break_by_the_thousand_are_one_line() {
    real(async {
        let device = Arc::clone(&server(Limits::default()).device);
        (0..1000).for_each(|ring| cannot_serve(&device, ring, &"it is broken", None));
        let later = reactor::now() + PATIENCE;
        assert!(device.broken_rings.line(later).is_some_and(|left_out| left_out > 900));
    });
}

fn settings_of_no_ring() -> RingSettings {
    let memory = Memory::new(vec![Region::on_heap(0, 0, 4096)]).expect("one region");
    let place = memory.place(0, 4096).expect("all of it");
    RingSettings {
        // No split ring has this size.
        size: 3,
        places: RingPlaces { descriptors: place.clone(), driver: place.clone(), device: place },
        memory,
        features: 0,
        base: 7,
        inflight: None,
        kick: None,
        call: None,
        error: None,
    }
}

/// What a future ends with that does not wait.
fn at_once<T>(future: impl Future<Output = T>) -> Option<T> {
    match pin!(future).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(value) => Some(value),
        Poll::Pending => None,
    }
}

#[test]
fn a_front_end_waits_for_a_queue_that_is_behind_and_may_leave() {
    real(async {
        let server = server(Limits::default());
        let (ours, theirs) = UnixStream::pair().expect("sockets");
        let mut attendance = Attendance {
            server: &server,
            connection: Connection::new("vm1".into(), theirs.into(), Session::new(server.device.offer())),
            process: None,
            began: None,
            threads: Threads::Here,
            turn: 0,
            queues: HashMap::new(),
            stopped: async_channel::unbounded(),
            resizes: 0,
            told: false,
        };
        let call = || Effect::Event { ring: 0, kind: EventKind::Call, event: Some(Fd::from(event(0))) };
        // A queue that takes nothing.
        let (orders, received) = async_channel::bounded(MOST_ORDERS);
        attendance.queues.insert(0, orders);
        for _ in 0..MOST_ORDERS {
            at_once(attendance.carry_out(call())).expect("there is room");
        }
        assert!(at_once(attendance.carry_out(call())).is_none(), "orders pile up");
        received.try_recv().expect("an order");
        attendance.carry_out_unless_left(call()).await.expect("there is room again");
        drop(ours);
        let left = attendance.carry_out_unless_left(call()).await;
        assert!(matches!(left, Err(Ended::Left)), "{left:?}");
    });
}

#[test]
fn nobody_waits_for_orders_that_come_too_late() {
    real(async {
        let settings = settings_of_no_ring();
        let (memory, places) = (settings.memory.clone(), settings.places.clone());
        let (orders, received) = async_channel::unbounded();
        let (in_use, is_in_use) = async_channel::bounded(1);
        orders.try_send(Order::Memory(memory, places, in_use)).expect("there is room");
        let (reports, reported) = async_channel::unbounded();
        let server = server(Limits::default());
        server.queues.fetch_add(1, Relaxed);
        serve_ring(Arc::clone(&server), 0, settings, received, reports).await;
        assert!(is_in_use.recv().await.is_err());
        assert_eq!(reported.recv().await, Ok((0, 7)));
        drop(orders);
    });
}

#[test]
fn what_a_guest_chose_outlasts_its_front_end_and_what_firmware_lacks_does_not() {
    real(async {
        let server = server(Limits::default());
        for (write_cache, chosen) in [(true, None), (false, Some(0)), (true, Some(1))] {
            let front_end = FrontEnd::connect(&server).await;
            if let Some(chosen) = chosen {
                // The field `writeback` of the configuration.
                let payload = [[32, 1, 0].map(u32::to_ne_bytes).as_flattened(), &[chosen]].concat();
                front_end.ask(code::SET_CONFIG, &payload, &[]).await;
            }
            assert_eq!(server.device.durability() == block::storage::Durability::Cached, write_cache);
            // Firmware, which does not flush.
            let firmware = virtio::VERSION_1 | virtio::PROTOCOL_FEATURES;
            front_end.ask(code::SET_FEATURES, &firmware.to_ne_bytes(), &[]).await;
            assert_eq!(server.device.durability(), block::storage::Durability::Synchronous);
            front_end.leave().await;
            assert_eq!(server.device.offer().write_cache, write_cache);
        }
    });
}

#[test]
fn a_front_end_goes_on_at_another_server_and_hears_nothing_of_it() {
    real(async {
        let mut limits = Limits::default();
        *limits.limit_mut(LimitKind::IopsTotal) = Limit { rate: 1, ..Limit::NONE };
        let (first, second) = (server(limits), server(Limits::default()));
        let mut front_end = FrontEnd::connect(&first).await;
        let (channel, mut told) = UnixStream::pair().expect("sockets");
        front_end.ask(code::SET_BACKEND_REQ_FD, &[], &[channel.as_fd()]).await;
        assert_eq!(front_end.capacity().await, (1 << 20) / 512);
        let (area, bytes) = crate::vhost_user_blk::inflight::create(2, SIZE, false).expect("made");
        let info = [numbers(&[bytes, 0]), [2, SIZE].map(u16::to_ne_bytes).concat()].concat();
        front_end.ask(code::SET_INFLIGHT_FD, &info, &[area.as_fd()]).await;
        front_end
            .ask(code::SET_CONFIG, &[&[32, 1, 0].map(u32::to_ne_bytes).concat()[..], &[0]].concat(), &[])
            .await;
        let mut ring = front_end.start(1, event(0), event(0)).await;
        let requests: Vec<_> =
            (0..10).map(|number| front_end.request(&mut ring, 1, number * 100, &[1; 512])).collect();
        ring.kick_and_wait().await;

        assert!(first.come_to_rest(PATIENCE).await);
        assert_eq!((first.statistics().queues, first.connections()), (0, 1));
        let waiting =
            |front_end: &FrontEnd| requests.iter().filter(|at| front_end.data(**at).1 == GUARD).count();
        assert!(waiting(&front_end) > 0, "some wait for the limit, and go back");
        // What comes meanwhile is found there.
        let late = front_end.request(&mut ring, 1, 1, &[7; 512]);
        ring.kick();
        second.take_over(first.take_rested().expect("it is at rest")).expect("the same export");
        assert!(first.take_rested().is_none(), "it goes once");
        let socket = front_end.socket.clone();
        let goes_on = Arc::clone(&second);
        let served = spawn_joinable(async move { goes_on.attend(socket, Threads::Here).await });
        while waiting(&front_end) > 0 || front_end.data(late).1 == GUARD {
            reactor::yield_now().await;
        }
        assert_eq!(second.device.durability(), block::storage::Durability::Synchronous, "as the guest chose");
        told.set_nonblocking(true).expect("a socket");
        assert!(told.read(&mut [0; 12]).is_err(), "it knows the disk's length");
        drop((front_end.socket, served));
    });
}

#[test]
fn a_front_end_that_rests_is_not_served_and_goes_on() {
    real(async {
        let server = server(Limits::default());
        let mut front_end = FrontEnd::connect(&server).await;
        let mut ring = front_end.start(0, event(0), event(0)).await;
        let message = [code::GET_FEATURES, 1, 0].map(u32::to_ne_bytes).concat();
        let (half, rest) = message.split_at(5);
        let send = |bytes: &[u8]| rustix::io::write(&front_end.socket, bytes).expect("there is room");
        send(half);
        assert!(server.come_to_rest(PATIENCE).await, "whatever it is about to say");
        server.go_on();
        send(rest);
        front_end.answer(code::GET_FEATURES).await;
        assert!(server.come_to_rest(PATIENCE).await);
        let at = front_end.request(&mut ring, 1, 0, &[1; 512]);
        ring.kick();
        assert!(server.come_to_rest(PATIENCE).await && front_end.data(at).1 == GUARD);
        server.go_on();
        ring.look().await;
        assert_eq!(front_end.data(at).1, 0);
        assert!(server.take_rested().is_none());
        front_end.leave().await;
    });
}

#[test]
fn what_cannot_go_back_waits_for_no_limits_where_another_process_waits() {
    real(async {
        let mut limits = Limits::default();
        *limits.limit_mut(LimitKind::IopsWrite) = Limit { rate: 1, ..Limit::NONE };
        // At rest at once, or when the front end has told it to stop already.
        for is_told in [false, true] {
            let server = server(limits);
            let mut front_end = FrontEnd::connect(&server).await;
            let mut ring = front_end.start(0, event(0), event(0)).await;
            // With the read, as many as the ring has room for.
            let writes: Vec<_> =
                (0..9).map(|number| front_end.request(&mut ring, 1, number * 100, &[1; 512])).collect();
            // It has no limit: what is before it in the ring can no more go back.
            let read = front_end.request(&mut ring, 0, 1, &[0; 512]);
            ring.kick();
            while front_end.data(read).1 == GUARD {
                reactor::yield_now().await;
            }
            let waiting =
                |front_end: &FrontEnd| writes.iter().filter(|at| front_end.data(**at).1 == GUARD).count();
            assert!(waiting(&front_end) > 5);
            if is_told {
                front_end.send(code::GET_VRING_BASE, 1, &[0_u32, 0].map(u32::to_ne_bytes).concat(), &[]);
                // It is read before what comes from the server.
                reactor::sleep_until(reactor::now() + Duration::from_millis(1)).await;
            }
            assert!(server.come_to_rest(PATIENCE).await);
            assert_eq!(waiting(&front_end), 0, "they are carried out");
            assert_eq!(server.device.disk().throttle().stats().writes.requests, 9, "and are charged");
            drop((front_end.socket, front_end.served));
        }
    });
}

#[test]
fn where_nobody_can_be_let_in_any_more_nobody_is_connected() {
    real(async {
        let server = server(Limits::default());
        let (_ours, theirs) = UnixStream::pair().expect("sockets");
        // It listens to nobody, and its other end has gone.
        let (broken, _) = UnixStream::pair().expect("sockets");
        let mut front_ends = FrontEnds::listen("vm1", broken.into());
        front_ends.begin_with(theirs.into());
        let ended = Arc::clone(&server).serve(front_ends, Threads::Here).await;
        assert_eq!(ended.unwrap_err().raw_os_error(), Some(libc::EINVAL));
        assert!(server.has_served());
        assert_eq!((server.connections(), server.statistics().front_end), (0, None));
    });
}

#[test]
fn a_message_that_is_half_there_goes_on_at_another_server() {
    real(async {
        let other = memfd_create("more", MemfdFlags::CLOEXEC).expect("a memfd");
        ftruncate(&other, MEMORY_BYTES).expect("its length");
        let region = [0, 1 << 32, MEMORY_BYTES, 1 << 40, 0].map(u64::to_ne_bytes).concat();
        let message = [[code::ADD_MEM_REG, 9, 40].map(u32::to_ne_bytes).concat(), region].concat();
        for half in [1, 11, 12, 13, message.len() - 1] {
            let (first, second) = (server(Limits::default()), server(Limits::default()));
            let front_end = FrontEnd::connect(&first).await;
            send_descriptor(&front_end.socket, &message[..half], other.as_fd());
            // It is read before what comes from the server.
            reactor::sleep_until(reactor::now() + Duration::from_millis(1)).await;
            assert!(first.come_to_rest(PATIENCE).await);
            let rested = first.take_rested().expect("it is at rest");
            second.take_over(rested).expect("the same export");
            let socket = front_end.socket.clone();
            let served = spawn_joinable(async move { second.attend(socket, Threads::Here).await });
            rustix::io::write(&front_end.socket, &message[half..]).expect("there is room");
            assert_eq!(front_end.answer(code::ADD_MEM_REG).await, [0; 8], "with its descriptor");
            drop((front_end.socket, served));
        }
    });
}

#[test]
fn what_a_front_end_does_to_its_files_is_told_from_what_an_export_lacks() {
    real(async {
        type Spoil = fn(&OwnedFd);
        let spoils: [(Spoil, Offer, bool); 4] = [
            (|file| ftruncate(file, 0).expect("it may"), Offer { queues: 2, ..Offer::default() }, true),
            (|file| ftruncate(file, MEMORY_BYTES - 1).expect("it may"), Offer::default(), true),
            (|file| fcntl_add_seals(file, SealFlags::FUTURE_WRITE).expect("it may"), Offer::default(), true),
            (|_| {}, Offer { queue_size: 16, ..Offer::default() }, false),
        ];
        for (spoil, offer, is_of_its_files) in spoils {
            let first = server(Limits::default());
            let front_end = FrontEnd::connect(&first).await;
            front_end.start(0, event(0), event(0)).await;
            assert!(first.come_to_rest(PATIENCE).await);
            spoil(&front_end.file);
            let said = first.take_rested().expect("it is at rest").said;
            let why = Session::heard(offer, said).expect_err("it cannot be");
            assert_eq!(why.is_of_its_files(), is_of_its_files, "{why}");
            drop((front_end.socket, front_end.served));
        }
    });
}

#[test]
fn a_front_end_that_passes_its_own_connection_hangs_up_all_the_same() {
    real(async {
        let path = std::env::temp_dir().join(format!("weir-own-end-{}", std::process::id()));
        let listener = UnixListener::bind(&path).expect("a socket");
        for code in
            [code::SET_BACKEND_REQ_FD, code::SET_VRING_KICK, code::SET_VRING_CALL, code::SET_VRING_ERR]
        {
            // By itself, and within a socket that may be passed.
            for is_nested in [false, true] {
                let server = server(Limits::default());
                let ours = UnixStream::connect(&path).expect("somebody listens");
                let (theirs, _) = listener.accept().expect("somebody has connected");
                let served = Arc::clone(&server);
                let served = spawn_joinable(async move {
                    served.attend(OwnedFd::from(theirs).into(), Threads::Here).await;
                });
                let (passed, holder) = UnixStream::pair().expect("sockets");
                let passed = if is_nested {
                    send_descriptor(&holder, b".", ours.as_fd());
                    OwnedFd::from(passed)
                } else {
                    ours.try_clone().expect("a descriptor").into()
                };
                let payload = if code == code::SET_BACKEND_REQ_FD { vec![] } else { vec![0; 8] };
                let mut bytes = [code, 1, payload.len() as u32].map(u32::to_ne_bytes).concat();
                bytes.extend(payload);
                send_descriptor(&ours, &bytes, passed.as_fd());
                drop((ours, passed, holder));
                served.await;
                assert_eq!(server.connections(), 0);
            }
        }
        std::fs::remove_file(&path).expect("it is there");
    });
}

/// Sends bytes with a descriptor.
fn send_descriptor(socket: impl AsFd, bytes: &[u8], descriptor: BorrowedFd<'_>) {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let descriptors = [descriptor];
    assert!(control.push(SendAncillaryMessage::ScmRights(&descriptors)));
    let sent = sendmsg(socket, &[IoSlice::new(bytes)], &mut control, SendFlags::empty());
    assert_eq!(sent, Ok(bytes.len()));
}
