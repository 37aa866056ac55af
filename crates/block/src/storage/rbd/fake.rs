//! The library's twin in memory: an image in a cluster that is slow, fails, stands still, is
//! resized by others and shuts this client out, on the simulated reactor.
//!
//! It does what librbd was seen to do (`tests/cluster`): a write that has ended is there for good,
//! since the cluster has it; with a cache it is there once a flush has ended. Requests that overlap
//! take effect in any order. One that nobody waits for any more still takes effect.

use std::{
    collections::BTreeSet,
    ops::Range,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use event_listener::Event;
use policy::time::Duration;

use super::{backend::Backend, bell::Bell, in_flight::Place};
use crate::{
    buffer::{Buffer, Segments},
    error::{Error, Result},
    reactor,
};

/// Of the fake image.
pub(super) const OBJECT: u64 = 4096;

#[derive(Debug)]
struct Cluster {
    /// What readers see.
    bytes: Vec<u8>,
    /// What a crash of this host would leave.
    safe: Vec<u8>,
    objects: BTreeSet<u64>,
    is_shut_out: bool,
    is_closed: bool,
    /// Zero: it answers when it likes.
    stands_still: bool,
    /// The next so many requests fail with this.
    failing: (u32, i32),
    most_under_way: usize,
    under_way: usize,
    /// The longest piece that was zeroed or discarded at once.
    longest: u64,
}

/// A twin; clones are of one image.
#[derive(Clone, Debug)]
pub(super) struct Fake {
    cluster: Arc<Mutex<Cluster>>,
    goes_on: Arc<Event>,
    bell: Arc<Bell>,
    has_map: bool,
    has_cache: bool,
}

impl Fake {
    pub(super) fn new(size_bytes: usize) -> Self {
        let cluster = Cluster {
            bytes: vec![0; size_bytes],
            safe: vec![0; size_bytes],
            objects: BTreeSet::new(),
            is_shut_out: false,
            is_closed: false,
            stands_still: false,
            failing: (0, 0),
            most_under_way: 0,
            under_way: 0,
            longest: 0,
        };
        let (goes_on, bell) = Default::default();
        Self { cluster: Arc::new(Mutex::new(cluster)), goes_on, bell, has_map: true, has_cache: false }
    }

    pub(super) fn without_map(self) -> Self {
        Self { has_map: false, ..self }
    }

    pub(super) fn with_cache(self) -> Self {
        Self { has_cache: true, ..self }
    }

    fn cluster(&self) -> MutexGuard<'_, Cluster> {
        self.cluster.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn stand_still(&self) {
        self.cluster().stands_still = true;
    }

    pub(super) fn go_on(&self) {
        self.cluster().stands_still = false;
        self.goes_on.notify(usize::MAX);
    }

    pub(super) fn shut_out(&self) {
        self.cluster().is_shut_out = true;
    }

    pub(super) fn fail(&self, times: u32, errno: i32) {
        self.cluster().failing = (times, errno);
    }

    /// As another client does.
    pub(super) fn resize_from_outside(&self, size_bytes: usize) {
        self.cluster().resize(size_bytes);
        self.bell.ring();
    }

    pub(super) fn most_under_way(&self) -> usize {
        self.cluster().most_under_way
    }

    pub(super) fn longest(&self) -> u64 {
        self.cluster().longest
    }

    pub(super) fn is_closed(&self) -> bool {
        self.cluster().is_closed
    }

    /// What is there after this host has crashed.
    pub(super) fn after_a_crash(&self) -> Vec<u8> {
        self.cluster().safe.clone()
    }

    /// Carries out a request as a task of its own, which ends whether somebody waits or not.
    async fn run<T: 'static>(
        &self,
        place: Place,
        request: impl FnOnce(&mut Cluster) -> Result<T> + 'static,
    ) -> Result<T> {
        {
            let mut cluster = self.cluster();
            assert!(!cluster.is_closed, "a request after the end");
            cluster.under_way += 1;
            cluster.most_under_way = cluster.most_under_way.max(cluster.under_way);
        }
        let twin = self.clone();
        let task = async move {
            let delay = Duration::from_micros(fastrand::u64(1..500));
            reactor::sleep_until(reactor::now() + delay).await;
            loop {
                let listener = twin.goes_on.listen();
                if !twin.cluster().stands_still {
                    break;
                }
                listener.await;
            }
            let mut cluster = twin.cluster();
            cluster.under_way -= 1;
            let result = match cluster.failing {
                _ if cluster.is_shut_out => Err(Error::SHUTDOWN),
                (0, _) => request(&mut cluster),
                (left, errno) => {
                    cluster.failing.0 = left - 1;
                    Err(Error::from_errno(errno))
                }
            };
            drop((cluster, place));
            result
        };
        reactor::spawn_to_end(task).await.unwrap_or(Err(Error::SHUTDOWN))
    }
}

impl Cluster {
    fn resize(&mut self, size_bytes: usize) {
        self.bytes.resize(size_bytes, 0);
        self.safe.resize(size_bytes, 0);
        self.objects.retain(|object| object * OBJECT < size_bytes as u64);
    }

    fn range(&self, offset: u64, length: usize) -> Result<Range<usize>> {
        let start = offset as usize;
        if start + length > self.bytes.len() { Err(Error::INVALID) } else { Ok(start..start + length) }
    }

    fn change(&mut self, offset: u64, data: &[u8], is_safe: bool) -> Result<()> {
        let range = self.range(offset, data.len())?;
        self.bytes[range.clone()].copy_from_slice(data);
        if is_safe {
            self.safe[range.clone()].copy_from_slice(data);
        }
        self.objects.extend(range.start as u64 / OBJECT..(range.end as u64).div_ceil(OBJECT));
        Ok(())
    }

    fn zero(&mut self, offset: u64, length: u64) -> Result<()> {
        let range = self.range(offset, length as usize)?;
        self.bytes[range.clone()].fill(0);
        self.safe[range.clone()].fill(0);
        let whole = (range.start as u64).div_ceil(OBJECT)..range.end as u64 / OBJECT;
        self.objects.retain(|object| !whole.contains(object));
        self.longest = self.longest.max(length);
        Ok(())
    }
}

impl Backend for Fake {
    async fn read(&self, place: Place, offset: u64, mut target: Segments) -> (Result<usize>, Segments) {
        let length = target.len();
        let read = self.run(place, move |cluster| {
            // What lies past the end is not read, as librbd has it.
            let start = (offset as usize).min(cluster.bytes.len());
            let end = (start + length).min(cluster.bytes.len());
            Ok(cluster.bytes[start..end].to_vec())
        });
        let bytes = match read.await {
            Ok(bytes) => bytes,
            Err(error) => return (Err(error), target),
        };
        if bytes.len() == length {
            target.copy_from(&bytes);
        }
        (Ok(bytes.len()), target)
    }

    async fn write(&self, place: Place, offset: u64, data: Segments) -> Result<()> {
        let (bytes, is_safe) = (data.to_vec(), !self.has_cache);
        self.run(place, move |cluster| cluster.change(offset, &bytes, is_safe)).await
    }

    async fn flush(&self, place: Place) -> Result<()> {
        self.run(place, |cluster| {
            cluster.safe = cluster.bytes.clone();
            Ok(())
        })
        .await
    }

    async fn write_zeroes(&self, place: Place, offset: u64, length: u64, is_thick: bool) -> Result<()> {
        self.run(place, move |cluster| {
            cluster.zero(offset, length)?;
            if is_thick { cluster.change(offset, &vec![0; length as usize], true) } else { Ok(()) }
        })
        .await
    }

    async fn discard(&self, place: Place, offset: u64, length: u64) -> Result<()> {
        self.run(place, move |cluster| cluster.zero(offset, length)).await
    }

    async fn resize(&self, size_bytes: u64) -> Result<()> {
        reactor::yield_now().await;
        let mut cluster = self.cluster();
        if cluster.is_shut_out {
            return Err(Error::SHUTDOWN);
        }
        cluster.resize(size_bytes as usize);
        drop(cluster);
        self.bell.ring();
        Ok(())
    }

    async fn size_bytes(&self) -> Result<u64> {
        reactor::yield_now().await;
        Ok(self.cluster().bytes.len() as u64)
    }

    async fn allocated(&self, range: Range<u64>, most: usize) -> Result<Option<Vec<Range<u64>>>> {
        reactor::yield_now().await;
        if !self.has_map {
            return Ok(None);
        }
        let cluster = self.cluster();
        let whole = |object: &u64| object * OBJECT..(object + 1) * OBJECT;
        let inside = cluster.objects.iter().map(whole).filter(|o| o.end > range.start && o.start < range.end);
        let mut pieces: Vec<Range<u64>> = Vec::new();
        for object in inside {
            let is_full = pieces.len() == most;
            match pieces.last_mut() {
                Some(last) if last.end == object.start => last.end = object.end,
                _ if is_full => break,
                _ => pieces.push(object),
            }
        }
        Ok(Some(pieces))
    }

    fn bell(&self) -> &Arc<Bell> {
        &self.bell
    }

    async fn close(&self) -> Result<()> {
        self.cluster().is_closed = true;
        Ok(())
    }
}

/// A buffer full of one byte.
pub(super) fn full_of(byte: u8, length: usize) -> Segments {
    let mut buffer = Buffer::new(length);
    buffer.fill(byte);
    buffer.into()
}
