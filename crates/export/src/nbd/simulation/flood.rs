//! Clients that send every command at full speed to a disk with limits. The storage's load stays
//! within the limits and their burst at every moment.

use std::{cell::RefCell, collections::BTreeMap, rc::Rc};

use policy::{
    throttle::{LimitKind, Limits, RateLimit},
    time::Duration,
};

use super::{
    super::{
        proto::{cmd, cmd_flag, reply_flag},
        session::ReplyStyle,
    },
    Arc, Disk, chance, connect, seeds, serve,
    wire::{NbdTestWire, StreamEnded, request, u16_at, u32_at, u64_at},
};
use block::layer::throttle::DiskSettings;
use image::{Image, RawImage};
use reactor::{now, sim, sleep_until, spawn_joinable};
use storage::{
    Storage,
    align::Align,
    simulated::{Behaviour, SimulatedStorage},
};

const BLOCK: u64 = 512;
const BLOCKS: u64 = 2048;
/// Longest request; a CACHE hint may cover the whole disk.
const LONGEST: u64 = 32 * BLOCK;
/// Largest I/O of a hint.
const LARGEST: u64 = BLOCKS * BLOCK;
const KINDS: [u16; 7] =
    [cmd::READ, cmd::WRITE, cmd::FLUSH, cmd::TRIM, cmd::CACHE, cmd::WRITE_ZEROES, cmd::BLOCK_STATUS];
/// Number of requests that a client leaves unanswered.
const DEPTH: usize = 64;

#[test]
fn every_command_is_limited() {
    let mut answered = BTreeMap::new();
    let seeds = seeds::for_each("--lib", 100, |seed| {
        for (kind, count) in sim::run(seed, flood()) {
            *answered.entry(kind).or_insert(0_u64) += count;
        }
    });
    let all = KINDS.iter().all(|kind| answered.get(kind).is_some_and(|&count| count > seeds));
    assert!(seeds < 10 || all, "too little was answered: {answered:?}");
}

/// One run; number of answered requests for each command.
async fn flood() -> BTreeMap<u16, u64> {
    let behaviour = Behaviour {
        block_bytes: BLOCK as usize,
        latency: Duration::from_micros(sim::random(|random| random.u64(..2000))),
        ..Behaviour::default()
    };
    let device = SimulatedStorage::new(vec![1; (BLOCK * BLOCKS) as usize], behaviour);
    let limits = draw_limits();
    let settings = DiskSettings { limits, ..DiskSettings::default() };
    let image = Image::Raw(RawImage::new(Storage::Simulated(Align::new(device.clone()))));
    let disk = Arc::new(Disk::new("disk", image, settings, None).expect("valid"));
    let server = serve(&disk);
    let answered = Rc::new(RefCell::new(BTreeMap::new()));
    let mut ends = Vec::new();
    for _ in 0..sim::random(|random| random.usize(1..4)) {
        let (pipe, served) = connect(&server);
        let wire = NbdTestWire::new(pipe);
        let client = spawn_joinable(FloodClient { wire: wire.clone(), answered: Rc::clone(&answered) }.run());
        ends.push((wire, client, served));
    }
    let began = now();
    // The number of requests grows with the time. A fifth of the runs is long.
    let longest_ns = if chance(20) { 1_000_000_000 } else { 200_000_000 };
    for _ in 0..sim::random(|random| random.u32(1..40)) {
        sleep_until(now() + Duration::from_nanos(sim::random(|random| random.u64(..longest_ns)))).await;
        let seconds = (now() - began).as_secs_f64();
        let traffic = device.traffic();
        let allowed = |kind, largest| {
            let rate = limits.limit(kind).rate as f64;
            // The leaky bucket's bound: the rate, a tenth of a second of burst, and one request
            // that is paid for afterwards.
            if rate == 0.0 { f64::MAX } else { rate * seconds + rate / 10.0 + largest as f64 }
        };
        let operations = (traffic.reads + traffic.writes) as f64;
        let bytes = (traffic.read_bytes + traffic.written_bytes) as f64;
        assert!(operations <= allowed(LimitKind::IopsTotal, 1), "{traffic:?} in {seconds} s, {limits:?}");
        assert!(bytes <= allowed(LimitKind::BpsTotal, LARGEST), "{traffic:?} in {seconds} s, {limits:?}");
        assert!(traffic.flushes <= traffic.writes + 1, "{traffic:?}: one for each change, and the first");
    }
    for (wire, client, served) in ends {
        wire.close();
        client.await;
        served.task.await;
    }
    answered.take()
}

fn draw_limits() -> Limits {
    let mut limits = Limits::default();
    if chance(80) {
        let rate = sim::random(|random| random.u64(10..2000));
        *limits.limit_mut(LimitKind::IopsTotal) = RateLimit { rate, ..RateLimit::NONE };
    }
    if limits.is_unlimited() || chance(50) {
        let rate = sim::random(|random| random.u64(10_000..10_000_000));
        *limits.limit_mut(LimitKind::BpsTotal) = RateLimit { rate, ..RateLimit::NONE };
    }
    limits
}

struct FloodClient {
    wire: NbdTestWire,
    answered: Rc<RefCell<BTreeMap<u16, u64>>>,
}

impl FloodClient {
    async fn run(mut self) {
        let _ = self.send_all().await;
    }

    async fn send_all(&mut self) -> Result<(), StreamEnded> {
        self.wire.handshake(ReplyStyle::Structured).await?;
        let mut pending = BTreeMap::new();
        for cookie in 0.. {
            let (kind, bytes) = any_request(cookie);
            self.wire.send(&bytes).await?;
            pending.insert(cookie, kind);
            while pending.len() >= DEPTH {
                let header = self.wire.take(20).await?;
                let _ = self.wire.take(u32_at(&header, 16) as usize).await?;
                if u16_at(&header, 4) & reply_flag::DONE != 0 {
                    let kind = pending.remove(&u64_at(&header, 8)).expect("answered once");
                    *self.answered.borrow_mut().entry(kind).or_insert(0) += 1;
                }
            }
        }
        Ok(())
    }
}

fn any_request(cookie: u64) -> (u16, Vec<u8>) {
    sim::random(|random| {
        let kind = KINDS[random.usize(..KINDS.len())];
        let first = random.u64(..BLOCKS - LONGEST / BLOCK);
        let length = BLOCK * random.u64(1..=LONGEST / BLOCK);
        let (offset, length) = match kind {
            cmd::FLUSH => (0, 0),
            cmd::CACHE if random.u8(..4) == 0 => (0, BLOCK * BLOCKS),
            _ => (first * BLOCK, length),
        };
        let flags = match kind {
            cmd::WRITE | cmd::TRIM | cmd::WRITE_ZEROES if random.bool() => cmd_flag::FUA,
            _ => 0,
        };
        let mut bytes = request(ReplyStyle::Structured, kind, flags, cookie, offset, length);
        if kind == cmd::WRITE {
            bytes.extend(vec![cookie as u8; length as usize]);
        }
        (kind, bytes)
    })
}
