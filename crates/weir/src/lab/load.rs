//! A number of requests against a disk, so many in flight, with flushes in between: what `qemu-img bench` sends.
//!
//! ```text
//!   task 1 ─► take ─► request ─► finished ─┐      a flush that drains: who takes next waits, until the request that was the last
//!   task 2 ─► take ─► …                    │      in flight is finished; whoever finished it takes the flush, and wakes the others
//!      …  ◄────────────────────────────────┘
//! ```
//!
//! As many tasks as requests may be in flight, each with one request at a time: nothing is allocated for a request but what the data path
//! itself allocates. Several readers have each a place of their own, and as many tasks.
//!
//! Never retries: the first request that fails ends the load.

use std::{
    cell::{Cell, RefCell},
    future::poll_fn,
    rc::Rc,
    sync::Arc,
    task::{Poll, Waker},
};

use block::{
    buffer::{ALIGNMENT, Buffer},
    disk::Disk,
    error::Result,
    reactor::{now, spawn_joinable},
    storage::Durability,
};
use policy::{request::Direction, throttle::Cost, time::Duration};

/// What is sent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Load {
    /// Requests in all; not 0.
    pub(super) count: u64,
    /// Requests in flight of each reader; not 0.
    pub(super) depth: u32,
    /// How many go each their own way, beginning at equal distances; not 0.
    pub(super) readers: u32,
    /// Bytes of a request; not 0, and at most the image's.
    pub(super) block_bytes: usize,
    /// Where requests begin.
    pub(super) places: Places,
    /// Write this byte; `None` reads.
    pub(super) write: Option<u8>,
    /// Flush after so many writes.
    pub(super) flush: Option<Flush>,
}

/// When to flush.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Flush {
    /// After so many writes; not 0.
    pub(super) interval: u64,
    /// Let what is in flight finish first, and send nothing until the flush is done.
    pub(super) drain: bool,
}

/// Where requests begin: at first `offset`, then `step_bytes` further each time, as if the image's beginning came behind its end; at its beginning
/// where one would reach across the end. Backward, it is all the other way round.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Places {
    /// In bytes; a request fits there.
    pub(super) offset: u64,
    /// In bytes; not 0.
    pub(super) step_bytes: u64,
    /// The last place where a request fits.
    pub(super) last: u64,
    /// From the end to the beginning.
    pub(super) backward: bool,
    /// At any number of steps behind `offset` instead, drawn from this seed.
    pub(super) random: Option<u64>,
    /// So many one behind the other at each of these places; not 0.
    pub(super) run: u64,
}

/// What became of a load.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Outcome {
    /// From the first request to the last answer.
    pub(super) elapsed: Duration,
    /// How many answers the reader had who had the fewest.
    pub(super) slowest: u64,
}

/// Where a reader is.
struct Reader {
    next_offset: Cell<u64>,
    /// Until the next random place.
    left_of_run: Cell<u64>,
    answered: Cell<u64>,
}

/// What a task is to do next.
enum Next {
    Request { offset: u64 },
    Flush,
    Wait,
    Done,
}

/// What the tasks share.
struct Run {
    load: Load,
    disk: Arc<Disk>,
    /// What a write writes, from [`Run::first`] on, where memory is aligned for any device; empty if none does.
    content: Arc<[u8]>,
    first: usize,
    sent: Cell<u64>,
    in_flight: Cell<u32>,
    flush: Cell<FlushState>,
    readers: Vec<Reader>,
    random: RefCell<fastrand::Rng>,
    failed: Cell<Option<block::error::Error>>,
    waiting: RefCell<Vec<Waker>>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum FlushState {
    NotDue,
    Due,
    UnderWay,
}

/// Puts the load on the disk.
///
/// # Errors
/// That of the first request that failed.
pub(super) async fn put(load: Load, disk: Arc<Disk>) -> Result<Outcome> {
    let content: Arc<[u8]> =
        load.write.map_or_else(Vec::new, |byte| vec![byte; load.block_bytes + ALIGNMENT]).into();
    let run = Rc::new(Run {
        disk,
        first: content.as_ptr().align_offset(ALIGNMENT),
        content,
        sent: Cell::new(0),
        in_flight: Cell::new(0),
        flush: Cell::new(FlushState::NotDue),
        readers: readers(&load),
        random: RefCell::new(fastrand::Rng::with_seed(load.places.random.unwrap_or_default())),
        failed: Cell::new(None),
        waiting: RefCell::default(),
        load,
    });
    let began = now();
    let tasks: Vec<_> = (0..run.load.depth)
        .flat_map(|_| 0..run.readers.len())
        .map(|reader| spawn_joinable(Rc::clone(&run).task(reader)))
        .collect();
    for task in tasks {
        task.await;
    }
    match run.failed.get() {
        Some(error) => Err(error),
        None => {
            let slowest = run.readers.iter().map(|reader| reader.answered.get()).min();
            Ok(Outcome { elapsed: now() - began, slowest: slowest.unwrap_or_default() })
        }
    }
}

/// The readers, each where it begins.
fn readers(load: &Load) -> Vec<Reader> {
    let Places { offset, step_bytes, last, .. } = load.places;
    let distance = (last - offset) / step_bytes / u64::from(load.readers) * step_bytes;
    let reader = |number| Reader {
        next_offset: Cell::new(offset + u64::from(number) * distance),
        left_of_run: Cell::new(0),
        answered: Cell::new(0),
    };
    (0..load.readers).map(reader).collect()
}

impl Run {
    async fn task(self: Rc<Self>, reader: usize) {
        let reader = &self.readers[reader];
        loop {
            match self.take(reader) {
                Next::Request { offset } => {
                    let result = self.request(offset).await;
                    self.in_flight.set(self.in_flight.get() - 1);
                    reader.answered.set(reader.answered.get() + 1);
                    self.note(result);
                }
                Next::Flush => {
                    let result = self.disk.flush().await;
                    if self.flush.get() == FlushState::UnderWay {
                        self.flush.set(FlushState::NotDue);
                    }
                    self.note(result);
                    self.wake();
                }
                Next::Wait => self.wait().await,
                Next::Done => break,
            }
        }
        // Who waits for a flush that now never comes.
        self.wake();
    }

    fn take(&self, reader: &Reader) -> Next {
        if self.failed.get().is_some() {
            return Next::Done;
        }
        let drain = self.load.flush.is_some_and(|flush| flush.drain);
        match self.flush.get() {
            FlushState::NotDue => {}
            FlushState::Due if drain && self.in_flight.get() > 0 => return Next::Wait,
            FlushState::Due => {
                self.flush.set(if drain { FlushState::UnderWay } else { FlushState::NotDue });
                return Next::Flush;
            }
            FlushState::UnderWay => return Next::Wait,
        }
        let sent = self.sent.get();
        if sent == self.load.count {
            return Next::Done;
        }
        self.sent.set(sent + 1);
        self.in_flight.set(self.in_flight.get() + 1);
        if self.load.flush.is_some_and(|flush| (sent + 1).is_multiple_of(flush.interval)) {
            self.flush.set(FlushState::Due);
        }
        Next::Request { offset: self.next_place(reader) }
    }

    fn next_place(&self, reader: &Reader) -> u64 {
        let Places { offset, step_bytes, last, backward, random, run } = self.load.places;
        let mut place = reader.next_offset.get();
        if random.is_some() {
            if reader.left_of_run.get() == 0 {
                let steps = (last - offset) / step_bytes;
                place = offset + self.random.borrow_mut().u64(0..=steps) * step_bytes;
                reader.left_of_run.set(run);
            }
            reader.left_of_run.set(reader.left_of_run.get() - 1);
        }
        let size = last + self.load.block_bytes as u64;
        let next = if backward {
            place.checked_sub(step_bytes).unwrap_or(last - (last - offset) % step_bytes)
        } else {
            let next = (u128::from(place) + u128::from(step_bytes)) % u128::from(size);
            u64::try_from(next).ok().filter(|&next| next <= last).unwrap_or(0)
        };
        reader.next_offset.set(next);
        place
    }

    async fn request(&self, offset: u64) -> Result<()> {
        let cost = Cost::one(self.load.block_bytes as u64);
        if self.load.write.is_none() {
            let pass = self.disk.admit(Direction::Read, cost).await;
            return self.disk.read(pass, offset, self.load.block_bytes).await.map(drop);
        }
        let pass = self.disk.admit(Direction::Write, cost).await;
        let data = Buffer::lent(&self.content, self.first..self.first + self.load.block_bytes);
        self.disk.write(pass, offset, data.into(), Durability::Cached).await
    }

    fn note(&self, result: Result<()>) {
        if let (Err(error), None) = (result, self.failed.get()) {
            self.failed.set(Some(error));
            self.wake();
        }
    }

    /// Until something has changed.
    async fn wait(&self) {
        let mut waited = false;
        poll_fn(|context| {
            if waited {
                return Poll::Ready(());
            }
            waited = true;
            self.waiting.borrow_mut().push(context.waker().clone());
            Poll::Pending
        })
        .await;
    }

    fn wake(&self) {
        for waker in self.waiting.take() {
            waker.wake();
        }
    }
}

#[cfg(test)]
mod tests {
    use block::{
        layer::throttle::DiskSettings,
        reactor::sim,
        storage::{OpenOptions, open},
    };

    use super::*;

    /// One behind the other, on the whole of 1 MiB.
    fn places() -> Places {
        Places { offset: 0, step_bytes: 4096, last: (1 << 20) - 4096, backward: false, random: None, run: 1 }
    }

    fn load(count: u64, depth: u32) -> Load {
        Load { count, depth, readers: 1, block_bytes: 4096, places: places(), write: None, flush: None }
    }

    fn disk(spec: &str, rules: &[&str]) -> Arc<Disk> {
        let faults = rules.iter().map(|rule| rule.parse().unwrap()).collect();
        let delay = Some("read=1ms,write=1ms,flush=10ms".parse().unwrap());
        let image = open(spec, OpenOptions { faults, delay, ..OpenOptions::default() }).unwrap();
        Arc::new(Disk::new("load", image, DiskSettings::default(), None).unwrap())
    }

    fn put_on(load: Load, rules: &'static [&str]) -> Result<Outcome> {
        sim::run(1, async move { put(load, disk("memory:1M", rules)).await })
    }

    #[test]
    fn as_many_requests_are_in_flight_as_were_asked_for() {
        for depth in [1, 8, 64] {
            let outcome = put_on(load(640, depth), &[]).unwrap();
            assert_eq!(outcome.elapsed, Duration::from_millis(640 / u64::from(depth)), "depth {depth}");
        }
    }

    #[test]
    fn a_flush_comes_after_every_so_many_writes_and_nothing_is_in_flight_with_it() {
        let flush = Some(Flush { interval: 64, drain: true });
        let outcome = put_on(Load { write: Some(7), flush, ..load(640, 32) }, &[]).unwrap();
        assert_eq!(outcome.elapsed, Duration::from_millis(10 * (2 + 10)));
    }

    #[test]
    fn without_draining_writes_go_on_during_a_flush() {
        let flush = Some(Flush { interval: 64, drain: false });
        let outcome = put_on(Load { write: Some(7), flush, ..load(640, 32) }, &[]).unwrap();
        assert!(outcome.elapsed < Duration::from_millis(50), "{:?}", outcome.elapsed);
    }

    #[test]
    fn the_first_failure_ends_it_also_while_others_wait_for_a_flush() {
        let flush = Some(Flush { interval: 64, drain: true });
        let load = Load { write: Some(7), flush, ..load(640, 32) };
        for rule in ["kind=flush,error=EIO", "kind=write,offset=128K-129K,error=EIO"] {
            let rules: &'static [&str] = Box::leak(Box::new([rule]));
            assert_eq!(put_on(load.clone(), rules), Err(block::error::Error::IO), "{rule}");
        }
    }

    #[test]
    fn places_follow_each_other_as_if_the_end_were_the_beginning() {
        let places = Places { offset: 8192, step_bytes: 500_000, ..places() };
        let written = sim::run(1, async move {
            let disk = disk("memory:1M", &[]);
            put(Load { write: Some(7), places, ..load(6, 1) }, Arc::clone(&disk)).await.unwrap();
            let mut found = Vec::new();
            for offset in [8192, 508_192, 1_008_192, 459_616, 959_616, 411_040, 0] {
                let read = disk.image().read(offset, 1).await.unwrap();
                found.push((offset, read.as_slice()[0][0]));
            }
            found
        });
        let expect =
            [(8192, 7), (508_192, 7), (1_008_192, 7), (459_616, 7), (959_616, 7), (411_040, 7), (0, 0)];
        assert_eq!(written, expect);
    }

    #[test]
    fn random_places_are_everywhere_and_the_same_for_one_seed() {
        let written = |seed| {
            sim::run(1, async move {
                let disk = disk("memory:1M", &[]);
                let load = Load {
                    write: Some(7),
                    places: Places { random: Some(seed), ..places() },
                    ..load(256, 16)
                };
                put(load, Arc::clone(&disk)).await.unwrap();
                let read = disk.image().read(0, 1 << 20).await.unwrap();
                let mut all = vec![0; 1 << 20];
                read.copy_to(&mut all);
                all.chunks(4096).map(|block| block[0] == 7).collect::<Vec<_>>()
            })
        };
        let blocks = written(3).iter().filter(|&&block| block).count();
        assert!((120..200).contains(&blocks), "256 draws of 256 blocks hit {blocks}");
        assert_eq!(written(3), written(3));
        assert_ne!(written(3), written(4));
    }

    /// Which blocks a load writes to.
    fn blocks(load: Load) -> Vec<usize> {
        sim::run(1, async move {
            let disk = disk("memory:1M", &[]);
            put(Load { write: Some(7), ..load }, Arc::clone(&disk)).await.unwrap();
            let mut all = vec![0; 1 << 20];
            disk.image().read(0, 1 << 20).await.unwrap().copy_to(&mut all);
            let blocks = all.chunks(4096).enumerate();
            blocks.filter(|(_, block)| block[0] == 7).map(|(number, _)| number).collect()
        })
    }

    #[test]
    fn readers_begin_at_equal_distances_and_the_slowest_is_told() {
        let load = Load { readers: 4, ..load(20, 1) };
        let expect: Vec<usize> =
            (0..4).flat_map(|reader| (0..5).map(move |block| reader * 63 + block)).collect();
        assert_eq!(blocks(load.clone()), expect);
        assert_eq!(put_on(load, &[]).map(|outcome| outcome.slowest), Ok(5));
    }

    #[test]
    fn backward_comes_the_end_after_the_beginning() {
        let load = Load { places: Places { offset: 8192, backward: true, ..places() }, ..load(5, 1) };
        assert_eq!(blocks(load), [0, 1, 2, 254, 255]);
    }

    #[test]
    fn a_run_goes_on_from_each_random_place() {
        let written = blocks(Load { places: Places { random: Some(1), run: 4, ..places() }, ..load(12, 1) });
        assert!((9..=12).contains(&written.len()), "{written:?}");
        let follow = written.windows(2).filter(|pair| pair[0] + 1 == pair[1]).count();
        assert!(follow >= 8, "{written:?}");
    }
}
