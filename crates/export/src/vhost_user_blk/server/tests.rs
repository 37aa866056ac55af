//! A server and its front ends, over real sockets, with real events and memory that both sides map.

mod front_end;
mod happenings;
mod losses;
mod memory;
mod rings;
mod takeover;

use std::{
    fs::File,
    io::Read as _,
    os::{
        fd::{AsFd as _, OwnedFd},
        unix::net::{UnixListener, UnixStream},
    },
    pin::pin,
    task::{Context, Poll, Waker},
};

use block::{
    disk::{Disk, ErrorPolicies, OnError},
    layer::throttle::DiskSettings,
};
use front_end::{GuestRing, SocketFrontEnd, send_with, wait_for_signal};
use image::{Image, RawImage};
use policy::{
    throttle::{LimitKind, Limits, RateLimit},
    time::Duration,
};
use reactor::{
    JoinHandle, PollingMode,
    guest::{GuestMemory, MappingQuota, Region},
    spawn_joinable, timeout,
};
use rustix::{
    event::{EventfdFlags, eventfd},
    fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create},
};
use storage::Storage;

use super::*;
use crate::vhost_user_blk::{
    features::{VhostUserOffer, virtio},
    message::{code, numbers},
    session::EventKind,
    vring::RingAreas,
};
use ::virtio::ring::driver::DriverBuffer as Piece;

/// Timeout of a test: longer than any of them takes.
const TEST_TIMEOUT: Duration = Duration::from_secs(60);
const MEMORY_BYTES: u64 = 1 << 17;
/// Address of the guest's memory in the front end.
const USER: u64 = 0x7f00_0000_0000;
/// Guest-physical addresses: rings, one page a part and four pages a ring, then a page for each
/// request.
const REQUESTS: u64 = 0x8000;
const SIZE: u16 = 32;
const GUARD: u8 = 0xa5;
const FEATURES: u64 =
    virtio::VERSION_1 | virtio::PROTOCOL_FEATURES | virtio::FLUSH | virtio::CONFIG_WCE | virtio::SEG_MAX;

fn real<T: 'static>(future: impl Future<Output = T> + 'static) -> T {
    reactor::run(PollingMode::Off, async {
        timeout(TEST_TIMEOUT, future).await.expect("it is over before a minute")
    })
    .expect("io_uring works on a test machine")
}

fn server(limits: Limits) -> Arc<VhostUserServer> {
    server_over(Storage::memory(1 << 20), limits)
}

fn server_over(storage: Storage, limits: Limits) -> Arc<VhostUserServer> {
    server_of(storage, limits, VhostUserOffer::default())
}

fn server_of(storage: Storage, limits: Limits, offer: VhostUserOffer) -> Arc<VhostUserServer> {
    VhostUserServer::new(export_of(storage, limits, offer))
}

fn export_of(storage: Storage, limits: Limits, offer: VhostUserOffer) -> VhostUserExport {
    let settings = DiskSettings { limits, ..DiskSettings::default() };
    let disk = Disk::new("disk", Image::Raw(RawImage::new(storage)), settings, None);
    let offer = VhostUserOffer { queues: 2, queue_size: SIZE, ..offer };
    VhostUserExport {
        id: "vm1".into(),
        disk: Arc::new(disk.expect("valid limits")),
        offer,
        serial: "disk".into(),
    }
}

/// A limit of one request a second.
fn one_request_per_second(kind: LimitKind) -> Limits {
    let mut limits = Limits::default();
    *limits.limit_mut(kind) = RateLimit { rate: 1, ..RateLimit::NONE };
    limits
}

/// Serves a front end that has connected.
fn attend(server: &Arc<VhostUserServer>, socket: Fd) -> JoinHandle<()> {
    let server = Arc::clone(server);
    spawn_joinable(async move { server.serve_front_end(socket, Threads::Here).await })
}

/// File of a guest's memory.
fn memory_file(bytes: u64) -> OwnedFd {
    let file = memfd_create("guest", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).expect("a memfd");
    ftruncate(&file, bytes).expect("its length");
    file
}

fn event(count: u32) -> OwnedFd {
    eventfd(count, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).expect("an eventfd")
}

#[test]
fn a_front_end_is_served_from_its_first_message_to_its_last() {
    real(async {
        let server = server(Limits::default());
        let mut front_end = SocketFrontEnd::connect(&server).await;
        let (channel, mut events) = UnixStream::pair().expect("sockets");
        front_end.request_acknowledged(code::SET_BACKEND_REQ_FD, &[], &[channel.as_fd()]).await;
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
        let statistics = server.statistics();
        assert_eq!((statistics.queues, statistics.requests, statistics.in_flight), (1, 4, 0));
        assert!(statistics.calls >= 4, "{statistics:?}");

        server.device.disk().resize(2 << 20).await.expect("memory takes any size");
        server.refresh_size();
        let notification = reactor::run_blocking(move || {
            let mut notification = [0; 12];
            events.read_exact(&mut notification).expect("the front end is notified");
            notification
        });
        assert_eq!(notification.await[..4], code::CONFIG_CHANGE_MSG.to_ne_bytes());
        assert_eq!(front_end.capacity().await, (2 << 20) / 512);
        let at = front_end.request(&mut ring, 1, 2048, &[3; 512]);
        ring.kick_and_wait().await;
        assert_eq!(front_end.data(at).1, 0, "where there was no disk before");

        assert_eq!(front_end.stop(0).await, 5);
        assert_eq!(server.statistics().queues, 0);
        front_end.leave().await;
        assert_eq!(server.connections(), 0);
    });
}

#[test]
fn unaligned_request_is_rejected_and_logged() {
    real(async {
        let has_warned = |server: &VhostUserServer| server.device.has_warned_of_block_size.load(Relaxed);
        let offer = VhostUserOffer { block_bytes: 4096, ..VhostUserOffer::default() };
        let server = server_of(Storage::memory((1 << 20) + 512), Limits::default(), offer);
        let mut front_end = SocketFrontEnd::connect(&server).await;
        assert_eq!(front_end.capacity().await, (1 << 20) / 512, "what lies behind is no block");
        let mut ring = front_end.start(0, event(0), event(0)).await;
        for kind in [1, 0] {
            let at = front_end.request(&mut ring, kind, 0, &[GUARD; 512]);
            ring.kick_and_wait().await;
            assert_eq!(front_end.data(at), ([GUARD; 512], 1), "an error, and nothing was read");
            assert!(has_warned(&server));
        }
        front_end.leave().await;
        assert!(!has_warned(&server), "the next one is another machine");
    });
}

#[test]
fn short_ring_is_logged() {
    real(async {
        for (queue_size, is_short) in [(SIZE, false), (2 * SIZE, true)] {
            let mut export =
                export_of(Storage::memory(1 << 20), Limits::default(), VhostUserOffer::default());
            export.offer.queue_size = queue_size;
            let server = VhostUserServer::new(export);
            let mut front_end = SocketFrontEnd::connect(&server).await;
            let mut ring = front_end.start(0, event(0), event(0)).await;
            let at = front_end.request(&mut ring, 0, 0, &[GUARD; 512]);
            ring.kick_and_wait().await;
            assert_eq!(front_end.data(at), ([0; 512], 0), "it is served");
            assert_eq!(server.device.has_warned_of_short_ring.load(Relaxed), is_short, "{queue_size}");
            front_end.leave().await;
        }
    });
}

fn settings_of_no_ring() -> RingSettings {
    let memory = GuestMemory::new(vec![Region::on_heap(0, 0, 4096)]).expect("one region");
    let area = memory.range(0, 4096).expect("all of it");
    RingSettings {
        // No split ring has this size.
        size: 3,
        areas: RingAreas { descriptors: area.clone(), driver: area.clone(), device: area },
        memory,
        features: 0,
        base: 7,
        inflight: None,
        loss: None,
        kick: None,
        call: None,
        error: None,
    }
}

/// Result of a future that completes at the first poll.
fn poll_once<T>(future: impl Future<Output = T>) -> Option<T> {
    match pin!(future).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(value) => Some(value),
        Poll::Pending => None,
    }
}

#[test]
fn full_order_channel_blocks_until_disconnect() {
    real(async {
        let server = server(Limits::default());
        let (front_end, back_end) = UnixStream::pair().expect("sockets");
        let mut served_front_end = ServedFrontEnd {
            server: &server,
            connection: VhostUserConnection::new(
                "vm1".into(),
                back_end.into(),
                VhostUserSession::new(server.device.offer()),
            ),
            process: None,
            began: None,
            threads: Threads::Here,
            next_worker: 0,
            queues: HashMap::new(),
            stopped: async_channel::unbounded(),
            resizes: 0,
            is_published: false,
        };
        let call = || Effect::Event { ring: 0, kind: EventKind::Call, event: Some(Fd::from(event(0))) };
        // A queue that processes no orders.
        let (orders, received) = async_channel::bounded(MAX_QUEUED_ORDERS);
        served_front_end.queues.insert(0, orders);
        for _ in 0..MAX_QUEUED_ORDERS {
            poll_once(served_front_end.execute(call())).expect("there is room");
        }
        assert!(poll_once(served_front_end.execute(call())).is_none(), "orders pile up");
        received.try_recv().expect("an order");
        served_front_end.execute_unless_disconnected(call()).await.expect("there is room again");
        drop(front_end);
        let result = served_front_end.execute_unless_disconnected(call()).await;
        assert!(matches!(result, Err(FrontEndEnd::Disconnected)), "{result:?}");
    });
}

#[test]
fn late_orders_do_not_block() {
    real(async {
        let settings = settings_of_no_ring();
        let (memory, areas) = (settings.memory.clone(), settings.areas.clone());
        let (orders, received) = async_channel::unbounded();
        let (in_use, is_in_use) = async_channel::bounded(1);
        orders.try_send(QueueOrder::Memory(memory, areas, in_use)).expect("there is room");
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
fn guests_write_cache_choice_survives_reconnects() {
    real(async {
        let server = server(Limits::default());
        for (write_cache, chosen) in [(true, None), (false, Some(0)), (true, Some(1))] {
            let front_end = SocketFrontEnd::connect(&server).await;
            if let Some(chosen) = chosen {
                // The field `writeback` of the configuration.
                let payload = [[32, 1, 0].map(u32::to_ne_bytes).as_flattened(), &[chosen]].concat();
                front_end.request_acknowledged(code::SET_CONFIG, &payload, &[]).await;
            }
            assert_eq!(server.device.durability() == storage::Durability::Cached, write_cache);
            // Firmware that cannot flush.
            let firmware = virtio::VERSION_1 | virtio::PROTOCOL_FEATURES;
            front_end.request_acknowledged(code::SET_FEATURES, &firmware.to_ne_bytes(), &[]).await;
            assert_eq!(server.device.durability(), storage::Durability::Synchronous);
            front_end.leave().await;
            assert_eq!(server.device.offer().write_cache, write_cache);
        }
    });
}

#[test]
fn failed_accept_leaves_no_front_end_connected() {
    real(async {
        let server = server(Limits::default());
        let (_front_end, back_end) = UnixStream::pair().expect("sockets");
        // The socket does not listen, and its other end is closed.
        let (broken, _) = UnixStream::pair().expect("sockets");
        let mut front_ends = FrontEnds::listen("vm1", broken.into());
        front_ends.set_first(back_end.into());
        let result = Arc::clone(&server).serve(front_ends, Threads::Here).await;
        assert_eq!(result.unwrap_err().raw_os_error(), Some(libc::EINVAL));
        assert!(server.has_served());
        assert_eq!((server.connections(), server.statistics().front_end), (0, None));
    });
}

#[test]
fn passing_its_own_connection_does_not_keep_it_open() {
    real(async {
        let path = std::env::temp_dir().join(format!("weir-own-end-{}", std::process::id()));
        let listener = UnixListener::bind(&path).expect("a socket");
        for code in
            [code::SET_BACKEND_REQ_FD, code::SET_VRING_KICK, code::SET_VRING_CALL, code::SET_VRING_ERR]
        {
            // Directly, and inside a socket that may be passed.
            for is_nested in [false, true] {
                let server = server(Limits::default());
                let front_end = UnixStream::connect(&path).expect("a listener exists");
                let (back_end, _) = listener.accept().expect("a client is connected");
                let served = attend(&server, OwnedFd::from(back_end).into());
                let (passed, holder) = UnixStream::pair().expect("sockets");
                let passed = if is_nested {
                    send_with(&holder, b".", &[front_end.as_fd()]);
                    OwnedFd::from(passed)
                } else {
                    front_end.try_clone().expect("a descriptor").into()
                };
                let payload = if code == code::SET_BACKEND_REQ_FD { vec![] } else { vec![0; 8] };
                let mut bytes = [code, 1, payload.len() as u32].map(u32::to_ne_bytes).concat();
                bytes.extend(payload);
                send_with(&front_end, &bytes, &[passed.as_fd()]);
                drop((front_end, passed, holder));
                served.await;
                assert_eq!(server.connections(), 0);
            }
        }
        std::fs::remove_file(&path).expect("it is there");
    });
}
