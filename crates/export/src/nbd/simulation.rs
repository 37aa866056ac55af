//! Simulated connections: well-behaved and hostile clients on one disk, over pipes that split data
//! at random places.
//!
//! - Every request of a well-behaved client is answered exactly once, correctly, before its
//!   connection ends (`client`).
//! - Hostile clients (`hostile`) never affect another client, even while the disk is resized in
//!   the middle of their region.
//! - Every connection ends, with no request in flight and no task left.
//! - The requests and bytes in flight of one client are bounded.
//!
//! `WEIR_SEED=n` runs one seed, `WEIR_SEEDS=n` the first n. A failure prints the command that
//! repeats it.

mod client;
mod flood;
mod hostile;
mod wire;

use std::{cell::Cell, rc::Rc, sync::Arc};

use policy::{
    access::AccessRules,
    throttle::{LimitKind, Limits, RateLimit},
    time::Duration,
};

use self::{client::SimulatedNbdClient, hostile::HostileClient, wire::NbdTestWire};
use super::{
    exports::NbdServerExport,
    outbox::{MAX_BYTES, MAX_REQUESTS},
    pipe::Pipe,
    proto::{self, cmd},
    quiesce::QuiesceStage,
    server::{NbdServer, NbdServerTerms},
    session::ReplyStyle,
    stop_signal::StopSignal,
    stream::NbdStream,
};
use crate::seeds;
use block::{
    disk::{Disk, DiskTotals, ErrorPolicies, OnError},
    layer::throttle::DiskSettings,
};
use image::{Image, RawImage};
use reactor::{JoinHandle, error::Error, now, sim, sleep_until, spawn_joinable, timeout};
use storage::{Storage, delay::DelayOptions, fault::FaultRule};

/// Length of a client's region of the disk, in bytes. No multiple of a memory page, so that
/// neighbours share pages.
const REGION: u64 = 40_000;
/// Largest number of well-behaved clients; behind their regions is one for the hostile clients.
const MAX_CLIENTS: u64 = 4;
const SIZE: u64 = (MAX_CLIENTS + 1) * REGION;
const FOREVER: Duration = Duration::from_secs(24 * 3600);

#[test]
fn clients_are_answered_whatever_others_do() {
    let (mut totals, mut answered) = (DiskTotals::default(), 0);
    let seeds = seeds::for_each("--lib", 600, |seed| {
        let (of_seed, answered_of_seed) = sim::run(seed, serve_a_crowd());
        totals.reads += of_seed.reads;
        totals.writes += of_seed.writes;
        totals.merged_requests += of_seed.merged_requests;
        answered += answered_of_seed;
    });
    let happened = [totals.reads, totals.writes, totals.merged_requests, answered];
    assert!(
        seeds < 100 || happened.iter().all(|&count| count > 2 * seeds),
        "too little happened: {totals:?}"
    );
}

fn chance(percent: u32) -> bool {
    sim::random(|random| random.u32(..100)) < percent
}

/// Random time up to a second, distributed evenly over its logarithm.
fn some_time() -> Duration {
    Duration::from_nanos(sim::random(|random| 10_f64.powf(3.0 + 6.0 * random.f64())) as u64)
}

/// One run. Returns the disk's totals and the number of answered requests of well-behaved clients.
async fn serve_a_crowd() -> (DiskTotals, u64) {
    let faults = chance(25);
    let disk = Arc::new(disk(draw_storage(faults), draw_limits()));
    let server = serve(&disk);
    let crowd = Crowd::new(&server);
    let stopped = Rc::new(Cell::new(false));
    let answered = Rc::new(Cell::new(0));
    let (mut ends, mut clients, mut connections) = (Vec::new(), Vec::new(), Vec::new());
    for number in 0..sim::random(|random| random.u64(1..=MAX_CLIENTS)) {
        let (pipe, connection) = crowd.connect();
        let client = SimulatedNbdClient {
            wire: NbdTestWire::new(pipe),
            start: number * REGION,
            faults,
            stopped: Rc::clone(&stopped),
            answered: Rc::clone(&answered),
        };
        clients.push(spawn_joinable(client.run()));
        ends.push((connection.end.clone(), Arc::clone(&connection.stop)));
        connections.push(connection.task);
    }
    for _ in 0..sim::random(|random| random.usize(..=3)) {
        let (pipe, connection) = crowd.connect();
        clients.push(spawn_joinable(HostileClient::draw(MAX_CLIENTS * REGION).run(pipe)));
        ends.push((connection.end.clone(), Arc::clone(&connection.stop)));
        connections.push(connection.task);
    }
    let stopping = spawn_joinable(async move {
        sleep_until(now() + some_time()).await;
        stopped.set(true);
        // The same as `NbdServer::stop` does to sockets.
        for (end, stop) in ends {
            stop.raise();
            end.end_receiving();
        }
    });
    if chance(75) {
        stopping.cancel().await;
    }
    if chance(25) {
        crowd.quiesce_repeatedly().await;
    }
    if chance(25) {
        resize_repeatedly(&disk).await;
    }
    for task in clients.into_iter().chain(connections) {
        timeout(FOREVER, task).await.expect("every client and every connection comes to an end");
    }
    (disk.totals(), answered.get())
}

/// Connections of one server, and the number of those past their handshake.
struct Crowd {
    server: Arc<NbdServer>,
    numbers: Cell<u64>,
    served: Rc<Cell<usize>>,
}

impl Crowd {
    fn new(server: &Arc<NbdServer>) -> Self {
        Self { server: Arc::clone(server), numbers: Cell::new(0), served: Rc::default() }
    }

    /// The client's end of a pipe, and the connection at its other end.
    fn connect(&self) -> (Pipe, SimulatedNbdConnection) {
        let (client_end, server_end) = Pipe::pair();
        let stop = Arc::<StopSignal>::default();
        let in_flight = Rc::new(Cell::new((0, 0)));
        let number = self.numbers.replace(self.numbers.get() + 1);
        let task = serve_connection(
            Arc::clone(&self.server),
            number,
            server_end.clone(),
            Arc::clone(&stop),
            Rc::clone(&in_flight),
            Rc::clone(&self.served),
        );
        (client_end, SimulatedNbdConnection { task: spawn_joinable(task), end: server_end, stop, in_flight })
    }

    /// Quiesces and resumes all connections several times: sometimes before all are quiesced,
    /// sometimes with a second quiesce right behind the first.
    async fn quiesce_repeatedly(&self) {
        for _ in 0..sim::random(|random| random.usize(1..12)) {
            sleep_until(now() + some_time() / 10).await;
            self.server.quiesce_state.set(QuiesceStage::Quiescing);
            let until = now() + some_time();
            while now() < until && self.server.quiesce_state.lock_quiesced_states().len() < self.served.get()
            {
                sleep_until(now() + Duration::from_micros(10)).await;
            }
            if chance(30) {
                self.server.quiesce_state.set(QuiesceStage::Quiescing);
                sleep_until(now() + some_time() / 1000).await;
            }
            self.server.resume();
        }
    }
}

/// Resizes the disk at random places of the hostile clients' region, several times.
async fn resize_repeatedly(disk: &Disk) {
    for _ in 0..sim::random(|random| random.usize(1..6)) {
        sleep_until(now() + some_time() / 10).await;
        // Never below the regions of well-behaved clients, whose requests must not fail.
        let sectors = (MAX_CLIENTS * REGION).div_ceil(512)..=SIZE / 512;
        let size_bytes = sim::random(|random| random.u64(sectors)) * 512;
        disk.resize(size_bytes).await.expect("memory takes any size");
        assert_eq!(disk.size_bytes(), size_bytes);
    }
}

fn draw_storage(faults: bool) -> Storage {
    let mut storage = Storage::memory(SIZE);
    if faults {
        let rule = FaultRule {
            kind: None,
            range: None,
            error: Error::IO,
            count: None,
            probability: 0.1,
            seed: sim::random(|random| random.u64(..)),
        };
        storage = storage.with_faults(vec![rule]);
    }
    if chance(80) {
        let micros = || Duration::from_micros(sim::random(|random| random.u64(..3000)));
        let parallel = chance(50).then(|| sim::random(|random| random.usize(1..=8)));
        let options =
            DelayOptions { read: micros(), write: micros(), zero: micros(), flush: micros(), parallel };
        storage = storage.delayed(options);
    }
    storage
}

fn disk(storage: Storage, limits: Limits) -> Disk {
    let settings = DiskSettings { limits, ..DiskSettings::default() };
    Disk::new("disk", Image::Raw(RawImage::new(storage)), settings, None).expect("valid")
}

fn draw_limits() -> Limits {
    let mut limits = Limits::default();
    if chance(40) {
        let rate = sim::random(|random| random.u64(50..5000));
        *limits.limit_mut(LimitKind::IopsTotal) = RateLimit { rate, ..RateLimit::NONE };
    }
    if chance(20) {
        let rate = sim::random(|random| random.u64(100_000..5_000_000));
        *limits.limit_mut(LimitKind::BpsWrite) = RateLimit { rate, ..RateLimit::NONE };
    }
    limits
}

fn serve(disk: &Arc<Disk>) -> Arc<NbdServer> {
    let export = NbdServerExport {
        name: "disk".into(),
        description: "".into(),
        disk: Arc::clone(disk),
        read_only: false,
        bitmaps: Arc::default(),
        access: AccessRules::default(),
    };
    let server = NbdServer::new(None, NbdServerTerms::default());
    server.add(export).expect("the first of its name");
    server
}

struct SimulatedNbdConnection {
    task: JoinHandle<()>,
    end: Pipe,
    stop: Arc<StopSignal>,
    in_flight: Rc<Cell<(usize, usize)>>,
}

fn connect(server: &Arc<NbdServer>) -> (Pipe, SimulatedNbdConnection) {
    Crowd::new(server).connect()
}

/// Serves one connection as [`NbdServer`] does, and checks the bounds on requests in flight.
async fn serve_connection(
    server: Arc<NbdServer>,
    number: u64,
    pipe: Pipe,
    stop: Arc<StopSignal>,
    in_flight: Rc<Cell<(usize, usize)>>,
    served: Rc<Cell<usize>>,
) {
    if let Ok(Some((connection, inbox))) =
        server.open(NbdStream::Simulated(pipe.clone()), &stop, number).await
    {
        served.set(served.get() + 1);
        let watched = Rc::clone(&connection);
        let watching = spawn_joinable(async move {
            loop {
                let (requests, bytes) = watched.outbox.in_flight();
                assert!(
                    requests <= MAX_REQUESTS && (bytes <= MAX_BYTES || requests == 1),
                    "{requests}, {bytes}"
                );
                in_flight.set((requests, bytes));
                sleep_until(now() + Duration::from_millis(5)).await;
            }
        });
        let watched = Rc::clone(&connection);
        let _ = timeout(FOREVER, connection.serve(inbox)).await.expect("a connection does not hang");
        watching.cancel().await;
        served.set(served.get() - 1);
        assert_eq!(watched.outbox.in_flight(), (0, 0), "a connection ended with requests in flight");
        // Every task of a connection holds a reference.
        assert_eq!(Rc::strong_count(&watched), 1, "a connection ended with tasks left");
    }
    pipe.close();
}

fn connect_alone(size_bytes: u64) -> (Pipe, SimulatedNbdConnection) {
    let storage = Storage::memory(size_bytes);
    connect(&serve(&Arc::new(disk(storage, Limits::default()))))
}

/// Sends `count` reads of `length` without reading replies for a second. Returns the requests and
/// bytes in flight then.
async fn neglect_replies(count: u64, length: u32) -> (usize, usize) {
    let (pipe, served) = connect_alone(1 << 30);
    let mut wire = NbdTestWire::new(pipe);
    wire.handshake(ReplyStyle::Simple).await.expect("a handshake");
    let mut requests = Vec::new();
    for cookie in 0..count {
        requests.extend(wire::request(ReplyStyle::Simple, cmd::READ, 0, cookie, 0, u64::from(length)));
    }
    // The pipe is too short for all of them.
    let _ = timeout(Duration::from_secs(1), wire.send(&requests)).await;
    sleep_until(now() + Duration::from_secs(1)).await;
    let in_flight = served.in_flight.get();
    wire.close();
    timeout(Duration::from_secs(1), served.task).await.expect("it ends when the client goes");
    in_flight
}

#[test]
fn a_client_that_reads_no_replies_is_not_read_from() {
    let seeds = seeds::for_each("--lib", 50, |seed| {
        let (requests, _) = sim::run(seed, neglect_replies(5000, 100));
        assert_eq!(requests, MAX_REQUESTS);
    });
    assert!(seeds > 0);
}

#[test]
fn a_client_that_reads_no_replies_costs_a_bounded_amount_of_memory() {
    let (requests, bytes) = sim::run(1, neglect_replies(10, proto::DEFAULT_MAX_PAYLOAD));
    assert_eq!((requests, bytes), (2, MAX_BYTES));
}

#[test]
fn requests_held_by_a_stopped_disk_end_with_their_connection() {
    for ended_by_server in [false, true] {
        sim::run(1, async move {
            let full = "kind=write,error=ENOSPC".parse().expect("valid");
            let disk = Arc::new(disk(Storage::memory(1 << 20).with_faults(vec![full]), Limits::default()));
            disk.failures()
                .set_policies(ErrorPolicies { write: OnError::Enospc, ..ErrorPolicies::default() });
            let (pipe, served) = connect(&serve(&disk));
            let mut wire = NbdTestWire::new(pipe);
            wire.handshake(ReplyStyle::Simple).await.expect("a handshake");
            for cookie in 0..8 {
                let mut request = wire::request(ReplyStyle::Simple, cmd::WRITE, 0, cookie, 0, 512);
                request.extend([1; 512]);
                wire.send(&request).await.expect("it is received");
            }
            disk.failures().next(true).await;
            sleep_until(now() + Duration::from_secs(100)).await;
            // The disk is stopped: the writes are held, and neither answered nor dropped.
            assert!(!served.task.is_finished() && wire.left_over() == 0);
            if ended_by_server {
                served.stop.raise();
                served.end.end_receiving();
                let replies = wire.take(8 * 16).await.expect("each is answered with the error");
                assert!(replies.chunks(16).all(|reply| reply[4..8] == 28_u32.to_be_bytes()), "{replies:?}");
            } else {
                wire.close();
            }
            timeout(Duration::from_secs(5), served.task).await.expect("it ends though the disk is stopped");
            assert_eq!(disk.failures().stopped_by(), Some(Error::NO_SPACE), "others are held as before");
        });
    }
}

#[test]
fn a_client_without_a_handshake_is_disconnected() {
    sim::run(1, async {
        let (pipe, served) = connect_alone(1 << 20);
        served.task.await;
        assert_eq!(now().as_nanos(), NbdServerTerms::default().handshake_timeout.as_nanos() as u64);
        pipe.close();
    });
}
