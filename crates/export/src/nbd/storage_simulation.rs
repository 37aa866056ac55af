//! Disks at an NBD server, against the server of this crate, on simulated time: connections that
//! break anywhere, and servers that lose power and restart.
//!
//! - Every request of a client ends exactly once, and correctly: reads return the last answered
//!   write, even after the server has lost it.
//! - Flushed data is on the server's disk.
//! - Without a reconnect delay, possible losses are reported: requests fail, and so does every
//!   later flush.
//! - A server that restarts with fewer features receives only requests that it supports, and none
//!   if the disk cannot be continued there.
//!
//! A new connection is accepted after the requests of the old one have ended, as the documentation
//! requires of servers. `WEIR_SEED=n` runs one seed.

mod changing;

use std::sync::{
    Arc, Mutex, MutexGuard, PoisonError,
    atomic::{AtomicUsize, Ordering},
};

use policy::{access::AccessRules, time::Duration};

use self::changing::{ChangingServer, EVERYTHING, ServerProperties};
use super::{
    exports::NbdServerExport,
    pipe::Pipe,
    proto::export_flag,
    server::{NbdServer, NbdServerTerms},
    stop_signal::StopSignal,
    stream::NbdStream,
};
use crate::seeds;
use block::{disk::Disk, layer::throttle::DiskSettings};
use image::{Image, RawImage};
use reactor::{JoinHandle, buffer::IoBuffer, now, sim, sleep_until, spawn, spawn_joinable, timeout};
use storage::{
    Durability, Storage, ZeroOptions,
    align::Align,
    nbd::{NbdOptions, simulated},
    simulated::{Behaviour, SimulatedStorage},
};

const CLIENTS: usize = 3;
/// Length of a client's region of the disk, in bytes.
const REGION: usize = 32 << 10;
const SIZE: usize = CLIENTS * REGION;
const BEHAVIOUR: Behaviour =
    Behaviour { block_bytes: 512, latency: Duration::from_micros(300), error_probability: 0.0 };

/// The server's host.
struct SimulatedNbdHost {
    disk: SimulatedStorage,
    server: Arc<NbdServer>,
    /// The server's ends of connections, and the number of connections that have not ended.
    pipes: Vec<Pipe>,
    open: Arc<AtomicUsize>,
    is_up: bool,
    connections: u64,
}

type SharedNbdHost = Arc<Mutex<SimulatedNbdHost>>;

fn lock(world: &SharedNbdHost) -> MutexGuard<'_, SimulatedNbdHost> {
    world.lock().unwrap_or_else(PoisonError::into_inner)
}

impl SimulatedNbdHost {
    fn with(content: Vec<u8>) -> Self {
        let disk = SimulatedStorage::new(content, BEHAVIOUR);
        let storage = Storage::Simulated(Align::new(disk.clone()));
        let raw = Image::Raw(RawImage::new(storage));
        let served = Disk::new("disk", raw, DiskSettings::default(), None).expect("no limits");
        let server = NbdServer::new(None, NbdServerTerms::default());
        let export = NbdServerExport {
            name: "disk".into(),
            description: "".into(),
            disk: Arc::new(served),
            read_only: false,
            bitmaps: Arc::default(),
            access: AccessRules::default(),
        };
        server.add(export).expect("the first of its name");
        Self { disk, server, pipes: Vec::new(), open: Arc::default(), is_up: true, connections: 0 }
    }

    /// Ends all connections; the server keeps running.
    fn cut(&mut self) {
        self.pipes.drain(..).for_each(|pipe| pipe.close());
    }

    /// Loses power, and restarts with the durable content of the disk.
    fn lose_power(&mut self) {
        self.cut();
        let connections = self.connections;
        *self = Self { is_up: false, connections, ..Self::with(self.disk.crash()) };
    }
}

fn dial(world: &SharedNbdHost) -> std::io::Result<NbdStream> {
    let mut host = lock(world);
    // A server must not accept a new connection while requests of the old one may still write.
    if !host.is_up || host.open.load(Ordering::Relaxed) > 0 {
        return Err(std::io::ErrorKind::ConnectionRefused.into());
    }
    let (client_end, server_end) = Pipe::pair();
    host.pipes.push(server_end.clone());
    host.connections += 1;
    host.open.fetch_add(1, Ordering::Relaxed);
    let (server, open, number) = (Arc::clone(&host.server), Arc::clone(&host.open), host.connections);
    spawn(async move {
        let stop = Arc::<StopSignal>::default();
        let stream = NbdStream::Simulated(server_end.clone());
        if let Ok(Some((connection, inbox))) = server.open(stream, &stop, number).await {
            let _ = connection.serve(inbox).await;
        }
        server_end.close();
        open.fetch_sub(1, Ordering::Relaxed);
    });
    Ok(NbdStream::Simulated(client_end))
}

async fn open(world: &SharedNbdHost, delay: Duration) -> Arc<Storage> {
    let options = NbdOptions { is_format_known: true, reconnect_delay: delay, ..NbdOptions::default() };
    let host = Arc::clone(world);
    let opened = simulated(Box::new(move || dial(&host)), "disk", &options).await;
    Arc::new(opened.expect("the server is there"))
}

/// Writes, reads and flushes its region, and compares reads with its own copy.
async fn client(storage: Arc<Storage>, number: usize, requests: usize) -> Vec<u8> {
    let mut known = vec![0; REGION];
    for _ in 0..requests {
        let (at, length, byte, choice) = sim::random(|random| {
            let at = random.usize(..REGION - 1);
            (at, random.usize(1..=(REGION - at).min(6000)), random.u8(1..), random.u32(..100))
        });
        let offset = (number * REGION + at) as u64;
        let durability = if choice % 7 == 0 { Durability::Synchronous } else { Durability::Cached };
        match choice {
            0..45 => {
                let data = IoBuffer::copy_of(&vec![byte; length]);
                storage.write(offset, data.into(), durability).await.expect("it waits for the server");
                known[at..at + length].fill(byte);
            }
            45..55 => {
                let options = ZeroOptions { may_unmap: byte % 2 == 0, only_if_fast: false, durability };
                storage.write_zeroes(offset, length as u64, options).await.expect("it waits");
                known[at..at + length].fill(0);
            }
            55..65 => storage.flush().await.expect("it waits for the server"),
            65..70 => {
                let extents = storage.block_status(offset, length as u64).await.expect("it waits");
                assert!(extents.iter().map(|extent| extent.length).sum::<u64>() <= length as u64);
            }
            _ => {
                let read = storage.read(offset, IoBuffer::new(length)).await.expect("it waits");
                assert!(read[..] == known[at..at + length], "client {number}, {length} bytes at {at}");
            }
        }
    }
    known
}

async fn pause(longest_ms: u64) {
    let micros = sim::random(|random| random.u64(..longest_ms * 1000));
    sleep_until(now() + Duration::from_micros(micros)).await;
}

/// Breaks connections and cuts power; returns the number of each.
fn inject_faults(world: &SharedNbdHost) -> JoinHandle<[u64; 2]> {
    let world = Arc::clone(world);
    spawn_joinable(async move {
        let mut happened = [0, 0];
        for _ in 0..sim::random(|random| random.usize(..6)) {
            pause(20).await;
            if sim::random(fastrand::Rng::bool) {
                lock(&world).cut();
                happened[0] += 1;
            } else {
                lock(&world).lose_power();
                happened[1] += 1;
                pause(2000).await;
                lock(&world).is_up = true;
            }
        }
        happened
    })
}

#[test]
fn nothing_that_was_answered_is_lost_whatever_happens_to_the_server() {
    let mut happened = [0, 0];
    let seeds = seeds::for_each("--lib", 300, |seed| {
        let of_seed = sim::run(seed, async {
            let world: SharedNbdHost = Arc::new(Mutex::new(SimulatedNbdHost::with(vec![0; SIZE])));
            let storage = open(&world, Duration::from_secs(3600)).await;
            let fault_injector = inject_faults(&world);
            let clients = (0..CLIENTS).map(|number| spawn_joinable(client(Arc::clone(&storage), number, 40)));
            let mut known = Vec::new();
            for client in clients.collect::<Vec<_>>() {
                known.extend(timeout(Duration::from_secs(3600), client).await.expect("it ends"));
            }
            let happened = timeout(Duration::from_secs(3600), fault_injector).await.expect("it ends");
            storage.flush().await.expect("the server is there");
            assert_eq!(storage.remote_status().expect("it is at a server").unflushed_bytes, 0);
            let content = lock(&world).disk.crash();
            assert!(content == known, "what was flushed is not there");
            happened
        });
        happened.iter_mut().zip(of_seed).for_each(|(sum, count)| *sum += count);
    });
    assert!(seeds < 100 || happened.iter().all(|&count| count > seeds / 2), "too little: {happened:?}");
}

#[test]
fn without_reconnect_delay_possible_loss_is_reported_permanently() {
    for seed in 0..100 {
        sim::run(seed, async move {
            let world: SharedNbdHost = Arc::new(Mutex::new(SimulatedNbdHost::with(vec![0; SIZE])));
            let storage = open(&world, Duration::ZERO).await;
            let write = |byte: u8| {
                let storage = Arc::clone(&storage);
                async move {
                    let data = IoBuffer::copy_of(&[byte; 512]);
                    storage.write(0, data.into(), Durability::Cached).await
                }
            };
            write(1).await.expect("the server is there");
            storage.flush().await.expect("the server is there");
            lock(&world).cut();
            // Everything was flushed, so nothing is lost with the connection.
            let reconnected = async {
                while write(2).await.is_err() {
                    pause(50).await;
                }
            };
            timeout(Duration::from_secs(60), reconnected).await.expect("it connects again by itself");
            assert!(storage.remote_status().expect("it is at a server").reconnections > 0);
            lock(&world).lose_power();
            lock(&world).is_up = true;
            let reconnected = async {
                while storage.read(0, IoBuffer::new(512)).await.is_err() {
                    pause(50).await;
                }
            };
            timeout(Duration::from_secs(60), reconnected).await.expect("it connects again by itself");
            assert!(storage.flush().await.is_err(), "seed {seed}: the second write may be lost");
            write(3).await.expect("the server is there");
            assert!(storage.flush().await.is_err(), "seed {seed}: and it stays so");
        });
    }
}

#[test]
fn after_the_delay_requests_fail_and_a_server_that_shrank_is_not_taken() {
    sim::run(7, async {
        let world: SharedNbdHost = Arc::new(Mutex::new(SimulatedNbdHost::with(vec![0; SIZE])));
        let storage = open(&world, Duration::from_secs(30)).await;
        lock(&world).is_up = false;
        lock(&world).cut();
        let began = now();
        let read = storage.read(0, IoBuffer::new(512)).await;
        let waited = now() - began;
        assert!(
            read.is_err() && waited >= Duration::from_secs(29) && waited < Duration::from_secs(32),
            "{waited:?}"
        );
        *lock(&world) = SimulatedNbdHost::with(vec![0; SIZE / 2]);
        sleep_until(now() + Duration::from_secs(60)).await;
        assert!(storage.read(0, IoBuffer::new(512)).await.is_err());
        *lock(&world) = SimulatedNbdHost::with(vec![7; SIZE]);
        sleep_until(now() + Duration::from_secs(60)).await;
        assert_eq!(storage.read(0, IoBuffer::new(512)).await.expect("it is back")[0], 7);
    });
}

#[test]
fn open_timeout_waits_for_a_late_server() {
    sim::run(11, async {
        let world: SharedNbdHost = Arc::new(Mutex::new(SimulatedNbdHost::with(vec![0; SIZE])));
        lock(&world).is_up = false;
        let opened = |seconds| {
            let options = NbdOptions {
                is_format_known: true,
                open_timeout: Duration::from_secs(seconds),
                ..NbdOptions::default()
            };
            let host = Arc::clone(&world);
            async move {
                let began = now();
                let opened = simulated(Box::new(move || dial(&host)), "disk", &options).await;
                (opened.is_ok(), now() - began)
            }
        };
        assert_eq!(opened(0).await, (false, Duration::ZERO));
        assert_eq!(opened(30).await, (false, Duration::from_secs(30)));
        let host = Arc::clone(&world);
        let starting = spawn_joinable(async move {
            sleep_until(now() + Duration::from_secs(20)).await;
            lock(&host).is_up = true;
        });
        let (is_open, waited) = opened(60).await;
        starting.await;
        assert!(
            is_open && waited >= Duration::from_secs(20) && waited < Duration::from_secs(26),
            "{waited:?}"
        );
        // A pipe whose ends were dropped does not end by itself, as a cable does not.
        lock(&world).cut();
        // A server that answers but lacks the export is not tried again.
        let host = Arc::clone(&world);
        let options = NbdOptions { open_timeout: Duration::from_secs(60), ..NbdOptions::default() };
        let began = now();
        assert!(simulated(Box::new(move || dial(&host)), "other", &options).await.is_err());
        assert!(now() - began < Duration::from_secs(1));
    });
}

/// Properties of the server at first; a third of the seeds has no cache, so no flush.
fn first_ways(seed: u64) -> ServerProperties {
    let without = if seed.is_multiple_of(3) { export_flag::SEND_FLUSH } else { 0 };
    let maximum_payload = sim::random(|random| [4096, 8192, 32 << 20][random.usize(..3)]);
    ServerProperties {
        size: SIZE,
        flags: EVERYTHING & !without,
        minimum_block: 512,
        maximum_payload,
        structured: true,
        refuses: 0,
        is_unfit: false,
    }
}

/// Properties of the server after a restart: fewer or more features, or unfit to continue the disk.
fn later_ways(first: ServerProperties) -> ServerProperties {
    let mut properties = first;
    sim::random(|random| {
        for flag in [
            export_flag::SEND_FUA,
            export_flag::SEND_TRIM,
            export_flag::SEND_WRITE_ZEROES,
            export_flag::SEND_FAST_ZERO,
        ] {
            properties.flags &= if random.bool() { !flag } else { !0 };
        }
        properties.flags |= if random.bool() { export_flag::SEND_FLUSH } else { 0 };
        properties.flags |= if random.bool() { export_flag::CAN_MULTI_CONN } else { 0 };
        properties.minimum_block = [1, 512][random.usize(..2)];
        properties.maximum_payload = [4096, 16 << 10, 32 << 20][random.usize(..3)];
        properties.structured = random.bool();
        properties.refuses = [0, 0, 20][random.usize(..3)];
        properties.size += if random.bool() { 4096 } else { 0 };
        let is_durable = |flags: u16| flags & (export_flag::SEND_FLUSH | export_flag::SEND_FUA) != 0;
        match random.u32(..6) {
            0 => (properties.size, properties.is_unfit) = (SIZE - 512, true),
            1 => (properties.minimum_block, properties.is_unfit) = (1024, true),
            2 => (properties.flags, properties.is_unfit) = (properties.flags | export_flag::READ_ONLY, true),
            3 => properties.flags &= !export_flag::SEND_FLUSH,
            _ => {}
        }
        // Unfit too: a server whose cache can no longer be flushed, or that cannot make data
        // durable at all.
        properties.is_unfit |=
            first.flags & !properties.flags & export_flag::SEND_FLUSH != 0 || !is_durable(properties.flags);
    });
    properties
}

/// Writes, zeroes, reads and flushes its region of a server that may refuse. Returns the expected
/// content; `None` where it is unknown.
async fn client_of_failing_server(
    storage: Arc<Storage>,
    server: changing::Shared,
    number: usize,
    requests: usize,
) -> Vec<Option<u8>> {
    let mut known = vec![Some(0); REGION];
    let base = number * REGION;
    let agrees = |known: &[Option<u8>], found: &[u8]| {
        known.iter().zip(found).all(|(known, found)| known.is_none_or(|known| known == *found))
    };
    for _ in 0..requests {
        let (at, length, byte, choice) = sim::random(|random| {
            let at = random.usize(..REGION - 1);
            (at, random.usize(1..=(REGION - at).min(9000)), random.u8(1..), random.u32(..100))
        });
        let offset = (base + at) as u64;
        let is_durable = choice % 7 == 0;
        let durability = if is_durable { Durability::Synchronous } else { Durability::Cached };
        let changed = match choice {
            0..40 => {
                let data = IoBuffer::copy_of(&vec![byte; length]);
                Some((storage.write(offset, data.into(), durability).await, byte))
            }
            40..58 => {
                let only_if_fast = byte % 3 == 0;
                let options = ZeroOptions { may_unmap: byte % 2 == 0, only_if_fast, durability };
                Some((storage.write_zeroes(offset, length as u64, options).await, 0))
            }
            58..66 => {
                storage.flush().await.expect("it waits for the server");
                let on_disk = lock_disk(&server, base..base + REGION);
                assert!(agrees(&known, &on_disk), "client {number}: not all that was flushed is on the disk");
                None
            }
            66..72 => {
                let extents = storage.block_status(offset, length as u64).await.expect("it waits");
                assert!(extents.iter().map(|extent| extent.length).sum::<u64>() <= length as u64);
                None
            }
            _ => {
                let read = storage.read(offset, IoBuffer::new(length)).await.expect("it waits");
                assert!(agrees(&known[at..at + length], &read), "client {number}, {length} bytes at {at}");
                None
            }
        };
        if let Some((result, byte)) = changed {
            // After a failure the range may hold the old or the new bytes.
            known[at..at + length].fill(result.is_ok().then_some(byte));
            let on_disk = lock_disk(&server, base + at..base + at + length);
            let is_on_disk = agrees(&known[at..at + length], &on_disk);
            assert!(result.is_err() || !is_durable || is_on_disk, "client {number}: it is not durable");
        }
    }
    known
}

fn lock_disk(server: &changing::Shared, range: std::ops::Range<usize>) -> Vec<u8> {
    changing::lock(server).disk[range].to_vec()
}

#[test]
fn a_server_that_comes_back_as_another_is_asked_for_what_it_can_or_for_nothing() {
    let mut refused = 0;
    let seeds = seeds::for_each("--lib", 300, |seed| {
        refused += sim::run(seed, async move {
            let first = first_ways(seed);
            let server = ChangingServer::new(first);
            let options = NbdOptions {
                is_format_known: true,
                reconnect_delay: Duration::from_secs(3600),
                ..NbdOptions::default()
            };
            let shared = Arc::clone(&server);
            let connect = Box::new(move || changing::dial(&shared));
            let storage = Arc::new(simulated(connect, "disk", &options).await.expect("the server is there"));
            let shared = Arc::clone(&server);
            let fault_injector = spawn_joinable(async move {
                for _ in 0..sim::random(|random| random.usize(..8)) {
                    pause(20).await;
                    if sim::random(fastrand::Rng::bool) {
                        changing::lock(&shared).lose_power();
                        pause(500).await;
                    }
                    changing::lock(&shared).restart(later_ways(first));
                    pause(2000).await;
                    if changing::lock(&shared).ways.is_unfit {
                        changing::lock(&shared).restart(first);
                    }
                }
                changing::lock(&shared).restart(first);
            });
            let clients = (0..CLIENTS).map(|number| {
                let (storage, server) = (Arc::clone(&storage), Arc::clone(&server));
                spawn_joinable(client_of_failing_server(storage, server, number, 60))
            });
            let mut known = Vec::new();
            for client in clients.collect::<Vec<_>>() {
                known.extend(timeout(Duration::from_secs(3600), client).await.expect("it ends"));
            }
            timeout(Duration::from_secs(3600), fault_injector).await.expect("it ends");
            storage.flush().await.expect("the server is there");
            assert_eq!(storage.remote_status().expect("it is at a server").unflushed_bytes, 0);
            let state = changing::lock(&server);
            assert!(state.faults.is_empty(), "{:#?}", state.faults);
            let is_on_disk =
                known.iter().zip(&state.disk).all(|(known, found)| known.is_none_or(|k| k == *found));
            assert!(is_on_disk, "what was flushed is not there");
            state.refused
        });
    });
    assert!(seeds < 100 || refused > seeds, "too little was refused: {refused}");
}
