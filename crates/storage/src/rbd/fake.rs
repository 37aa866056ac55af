//! In-memory fake of the library: an image in a cluster that is slow, fails, stops answering, is
//! resized by other clients and blocklists clients, on the simulated reactor.
//!
//! It behaves as librbd was observed to (`tests/cluster`). Without a cache a completed write is
//! durable, since the cluster has it. With a cache it is durable after a flush, and other clients'
//! writes are visible after the cache was dropped. Overlapping requests take effect in any order. A
//! cancelled request still takes effect. If there is a lock, only its holder can write. Acquiring
//! the lock fails if a live owner keeps it.

use std::{
    collections::BTreeSet,
    ops::Range,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use event_listener::Event;
use policy::time::Duration;

use super::{
    backend::{RbdBackend, ResumeOutcome},
    resize_notifier::ResizeNotifier,
    slots::RbdRequestSlot,
};
use reactor::{
    buffer::{IoBuffer, Segments},
    error::{Error, Result},
};

use crate::RangeLocks;

/// Object size of the fake image, in bytes.
pub(super) const OBJECT: u64 = 4096;

/// Number of a client that has the image open.
type Client = u64;
const FIRST: Client = 0;

#[derive(Debug)]
struct FakeCluster {
    /// Content after a crash of all hosts.
    safe: Vec<u8>,
    objects: BTreeSet<u64>,
    owner: Option<Client>,
    open: BTreeSet<Client>,
    clients: Client,
    blocklisted: BTreeSet<Client>,
    /// True while no request completes.
    is_hung: bool,
    /// True if another client has removed the image, without a notification.
    is_removed: bool,
    /// After this many requests, this many fail with this error number.
    failing: (u32, u32, i32),
    max_in_flight: usize,
    in_flight: usize,
    /// Length of the longest range that was zeroed or discarded at once.
    longest: u64,
}

/// A client's cache, if it has content: the image as the client sees it, and the dirty ranges.
type Cache = Option<(Vec<u8>, Vec<Range<usize>>)>;

/// The fake; clones are the same client.
#[derive(Clone, Debug)]
pub(super) struct FakeRbd {
    cluster: Arc<Mutex<FakeCluster>>,
    cache: Arc<Mutex<Cache>>,
    answers_again: Arc<Event>,
    resize_notifier: Arc<ResizeNotifier>,
    /// Serializes acquiring and releasing the lock.
    lock_serializer: Arc<RangeLocks>,
    pub(super) client: Client,
    has_map: bool,
    has_cache: bool,
    has_lock: bool,
}

impl FakeRbd {
    pub(super) fn new(size_bytes: usize) -> Self {
        let cluster = FakeCluster {
            safe: vec![0; size_bytes],
            objects: BTreeSet::new(),
            owner: Some(FIRST),
            open: BTreeSet::from([FIRST]),
            clients: 1,
            blocklisted: BTreeSet::new(),
            is_hung: false,
            is_removed: false,
            failing: (0, 0, 0),
            max_in_flight: 0,
            in_flight: 0,
            longest: 0,
        };
        let (answers_again, resize_notifier, cache, lock_serializer) = Default::default();
        let cluster = Arc::new(Mutex::new(cluster));
        let (client, has_map, has_cache, has_lock) = (FIRST, true, false, true);
        Self {
            cluster,
            cache,
            answers_again,
            resize_notifier,
            lock_serializer,
            client,
            has_map,
            has_cache,
            has_lock,
        }
    }

    /// Another client that has the image open.
    pub(super) fn another_client(&self) -> Self {
        let client = {
            let mut cluster = self.cluster();
            cluster.clients += 1;
            let client = cluster.clients - 1;
            cluster.open.insert(client);
            client
        };
        let (resize_notifier, cache, lock_serializer) = Default::default();
        Self { cache, resize_notifier, lock_serializer, client, ..self.clone() }
    }

    pub(super) fn without_lock(self) -> Self {
        self.cluster().owner = None;
        Self { has_lock: false, ..self }
    }

    pub(super) fn without_map(self) -> Self {
        Self { has_map: false, ..self }
    }

    pub(super) fn with_cache(self) -> Self {
        Self { has_cache: true, ..self }
    }

    fn cluster(&self) -> MutexGuard<'_, FakeCluster> {
        self.cluster.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn stop_answering(&self) {
        self.cluster().is_hung = true;
    }

    pub(super) fn resume_answering(&self) {
        self.cluster().is_hung = false;
        self.answers_again.notify(usize::MAX);
    }

    pub(super) fn blocklist_self(&self) {
        self.cluster().blocklisted.insert(self.client);
    }

    pub(super) fn is_blocklisted(&self) -> bool {
        self.cluster().blocklisted.contains(&self.client)
    }

    pub(super) fn has_the_lock(&self) -> bool {
        self.cluster().owner == Some(self.client)
    }

    /// Acquires the lock if it is free, ignoring any protocol.
    pub(super) fn acquire_free_lock(&self) -> bool {
        let mut cluster = self.cluster();
        if cluster.owner.is_none() {
            cluster.owner = Some(self.client);
        }
        cluster.owner == Some(self.client)
    }

    /// Calls `operation` with the cluster and this client's cache, which is filled if it is empty.
    fn with_view<T>(&self, operation: impl FnOnce(&mut FakeCluster, &mut Cache) -> T) -> T {
        let mut cluster = self.cluster();
        let mut cache = self.cache.lock().unwrap_or_else(PoisonError::into_inner);
        if self.has_cache && cache.is_none() {
            *cache = Some((cluster.safe.clone(), Vec::new()));
        }
        operation(&mut cluster, &mut cache)
    }

    pub(super) fn fail(&self, times: u32, errno: i32) {
        self.fail_behind(0, times, errno);
    }

    pub(super) fn fail_behind(&self, first: u32, times: u32, errno: i32) {
        self.cluster().failing = (first, times, errno);
    }

    /// Removes the image as another client.
    pub(super) fn remove_from_outside(&self) {
        self.cluster().is_removed = true;
    }

    pub(super) fn resize_from_outside(&self, size_bytes: usize) {
        self.cluster().resize(size_bytes);
        self.resize_notifier.notify();
    }

    pub(super) fn max_in_flight(&self) -> usize {
        self.cluster().max_in_flight
    }

    pub(super) fn longest(&self) -> u64 {
        self.cluster().longest
    }

    pub(super) fn is_closed(&self) -> bool {
        !self.cluster().open.contains(&self.client)
    }

    /// Content after a crash of this host.
    pub(super) fn after_a_crash(&self) -> Vec<u8> {
        self.cluster().safe.clone()
    }

    /// Executes a request as its own task, which runs to its end even if the caller is cancelled.
    async fn run<T: 'static>(
        &self,
        slot: RbdRequestSlot,
        request: impl FnOnce(&mut FakeCluster, &mut Cache) -> Result<T> + 'static,
    ) -> Result<T> {
        {
            let mut cluster = self.cluster();
            assert!(cluster.open.contains(&self.client), "a request after the end");
            cluster.in_flight += 1;
            cluster.max_in_flight = cluster.max_in_flight.max(cluster.in_flight);
        }
        let client_view = self.clone();
        let task = async move {
            client_view.answer().await;
            client_view.cluster().in_flight -= 1;
            let result = match client_view.outcome() {
                Ok(()) => client_view.with_view(request),
                Err(error) => Err(error),
            };
            drop(slot);
            result
        };
        reactor::spawn_detached(task).await.unwrap_or(Err(Error::SHUTDOWN))
    }

    /// Waits until the cluster replies.
    async fn answer(&self) {
        let delay = Duration::from_micros(fastrand::u64(1..500));
        reactor::sleep_until(reactor::now() + delay).await;
        loop {
            let listener = self.answers_again.listen();
            if !self.cluster().is_hung {
                return;
            }
            listener.await;
        }
    }

    /// Injected failure of a request, if any.
    fn outcome(&self) -> Result<()> {
        let mut cluster = self.cluster();
        match cluster.failing {
            _ if cluster.blocklisted.contains(&self.client) => Err(Error::SHUTDOWN),
            (_, 0, _) => Ok(()),
            (first @ 1.., ..) => {
                cluster.failing.0 = first - 1;
                Ok(())
            }
            (0, left, errno) => {
                cluster.failing.1 = left - 1;
                Err(Error::from_errno(errno))
            }
        }
    }

    /// As [`FakeRbd::run`], for a request that writes.
    async fn change<T: 'static>(
        &self,
        slot: RbdRequestSlot,
        request: impl FnOnce(&mut FakeCluster, &mut Cache) -> Result<T> + 'static,
    ) -> Result<T> {
        let (client, has_lock) = (self.client, self.has_lock);
        let permitted = move |cluster: &mut FakeCluster, cache: &mut Cache| {
            if has_lock && cluster.owner != Some(client) {
                return Err(Error::from_errno(libc::EROFS));
            }
            request(cluster, cache)
        };
        self.run(slot, permitted).await
    }
}

fn name(client: Client) -> String {
    format!("127.0.0.1:0/{client}")
}

impl FakeCluster {
    fn resize(&mut self, size_bytes: usize) {
        self.safe.resize(size_bytes, 0);
        self.objects.retain(|object| object * OBJECT < size_bytes as u64);
    }

    fn range(&self, offset: u64, length: usize) -> Result<Range<usize>> {
        let start = offset as usize;
        if start + length > self.safe.len() { Err(Error::INVALID) } else { Ok(start..start + length) }
    }

    fn change(&mut self, offset: u64, data: &[u8], cache: &mut Cache) -> Result<()> {
        let range = self.range(offset, data.len())?;
        match cache {
            Some((bytes, dirty)) => {
                bytes.resize(self.safe.len(), 0);
                bytes[range.clone()].copy_from_slice(data);
                dirty.push(range.clone());
            }
            None => self.safe[range.clone()].copy_from_slice(data),
        }
        self.objects.extend(range.start as u64 / OBJECT..(range.end as u64).div_ceil(OBJECT));
        Ok(())
    }

    /// Zeroes in the cluster at once, as librbd does; the cache is only updated.
    fn zero(&mut self, offset: u64, length: u64, cache: &mut Cache) -> Result<()> {
        let range = self.range(offset, length as usize)?;
        self.flush(cache);
        if let Some((bytes, _)) = cache {
            bytes[range.clone()].fill(0);
        }
        self.safe[range.clone()].fill(0);
        let full_objects = (range.start as u64).div_ceil(OBJECT)..range.end as u64 / OBJECT;
        self.objects.retain(|object| !full_objects.contains(object));
        self.longest = self.longest.max(length);
        Ok(())
    }

    fn flush(&mut self, cache: &mut Cache) {
        let Some((bytes, dirty)) = cache else { return };
        bytes.resize(self.safe.len(), 0);
        for range in dirty.drain(..) {
            let range = range.start.min(self.safe.len())..range.end.min(self.safe.len());
            self.safe[range.clone()].copy_from_slice(&bytes[range]);
        }
    }
}

impl RbdBackend for FakeRbd {
    async fn read(
        &self,
        slot: RbdRequestSlot,
        offset: u64,
        mut target: Segments,
    ) -> (Result<usize>, Segments) {
        let length = target.len();
        let read = self.run(slot, move |cluster, cache| {
            // Reads are cut at the end of the image, as by librbd.
            let start = (offset as usize).min(cluster.safe.len());
            let end = (start + length).min(cluster.safe.len());
            Ok(match cache {
                Some((bytes, _)) => {
                    bytes.resize(cluster.safe.len(), 0);
                    bytes[start..end].to_vec()
                }
                None => cluster.safe[start..end].to_vec(),
            })
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

    async fn write(&self, slot: RbdRequestSlot, offset: u64, data: Segments) -> Result<()> {
        let bytes = data.to_vec();
        self.change(slot, move |cluster, cache| cluster.change(offset, &bytes, cache)).await
    }

    async fn flush(&self, slot: RbdRequestSlot) -> Result<()> {
        self.change(slot, |cluster, cache| {
            cluster.flush(cache);
            Ok(())
        })
        .await
    }

    async fn write_zeroes(
        &self,
        slot: RbdRequestSlot,
        offset: u64,
        length: u64,
        is_thick: bool,
    ) -> Result<()> {
        assert!(
            !is_thick || (offset | length).is_multiple_of(512),
            "librbd would cut it, and may wait for ever"
        );
        self.change(slot, move |cluster, cache| {
            cluster.zero(offset, length, cache)?;
            if is_thick { cluster.change(offset, &vec![0; length as usize], &mut None) } else { Ok(()) }
        })
        .await
    }

    async fn discard(&self, slot: RbdRequestSlot, offset: u64, length: u64) -> Result<()> {
        self.change(slot, move |cluster, cache| cluster.zero(offset, length, cache)).await
    }

    async fn resize(&self, size_bytes: u64) -> Result<()> {
        reactor::yield_now().await;
        self.outcome()?;
        self.cluster().resize(size_bytes as usize);
        self.resize_notifier.notify();
        Ok(())
    }

    async fn size_bytes(&self) -> Result<u64> {
        reactor::yield_now().await;
        Ok(self.cluster().safe.len() as u64)
    }

    async fn stored_size(&self) -> Result<Option<u64>> {
        reactor::yield_now().await;
        if self.cluster().is_removed {
            return Err(Error::from_errno(libc::ENOENT));
        }
        Ok(Some(self.cluster().safe.len() as u64))
    }

    async fn allocated(&self, range: Range<u64>, max_pieces: usize) -> Result<Option<Vec<Range<u64>>>> {
        reactor::yield_now().await;
        if !self.has_map {
            return Ok(None);
        }
        let cluster = self.cluster();
        let object_range = |object: &u64| object * OBJECT..(object + 1) * OBJECT;
        let overlapping =
            cluster.objects.iter().map(object_range).filter(|o| o.end > range.start && o.start < range.end);
        let mut pieces: Vec<Range<u64>> = Vec::new();
        for object in overlapping {
            let is_full = pieces.len() == max_pieces;
            match pieces.last_mut() {
                Some(last) if last.end == object.start => last.end = object.end,
                _ if is_full => break,
                _ => pieces.push(object),
            }
        }
        Ok(Some(pieces))
    }

    async fn release_lock(&self) -> Result<()> {
        let client_view = self.clone();
        let task = async move {
            let _guard = client_view.lock_serializer.exclusive(0..1).await;
            client_view.answer().await;
            client_view.outcome()?;
            assert!(!client_view.has_lock || client_view.has_the_lock(), "a lock that it does not have");
            client_view.with_view(|cluster, cache| {
                assert!(
                    cache.as_ref().is_none_or(|(_, dirty)| dirty.is_empty()),
                    "data that no other client sees"
                );
                cluster.owner = None;
            });
            Ok(())
        };
        reactor::spawn_detached(task).await.unwrap_or(Err(Error::SHUTDOWN))
    }

    async fn resume(&self, new_clients: &[u64]) -> Result<ResumeOutcome> {
        let (client_view, new_clients) = (self.clone(), new_clients.to_vec());
        let task = async move {
            let _guard = client_view.lock_serializer.exclusive(0..1).await;
            client_view.blocklist(&new_clients).await?;
            client_view.answer().await;
            client_view.outcome()?;
            let mut cluster = client_view.cluster();
            let owner = cluster.owner.filter(|owner| !cluster.blocklisted.contains(owner));
            if let Some(owner) = owner.filter(|owner| client_view.has_lock && *owner != client_view.client) {
                return Ok(ResumeOutcome::LockedElsewhere(Some(name(owner))));
            }
            cluster.owner = Some(client_view.client).filter(|_| client_view.has_lock);
            *client_view.cache.lock().unwrap_or_else(PoisonError::into_inner) = None;
            Ok(ResumeOutcome::Resumed(cluster.safe.len() as u64))
        };
        reactor::spawn_detached(task).await.unwrap_or(Err(Error::SHUTDOWN))
    }

    async fn blocklist(&self, clients: &[u64]) -> Result<()> {
        self.answer().await;
        self.outcome()?;
        let mut cluster = self.cluster();
        let there: Vec<_> = clients.iter().copied().filter(|client| cluster.open.contains(client)).collect();
        cluster.blocklisted.extend(there);
        Ok(())
    }

    fn resize_notifier(&self) -> &Arc<ResizeNotifier> {
        &self.resize_notifier
    }

    async fn close(&self) -> Result<()> {
        let mut cluster = self.cluster();
        cluster.open.remove(&self.client);
        if cluster.owner == Some(self.client) {
            cluster.owner = None;
        }
        Ok(())
    }
}

/// A buffer filled with one byte.
pub(super) fn full_of(byte: u8, length: usize) -> Segments {
    let mut buffer = IoBuffer::new(length);
    buffer.fill(byte);
    buffer.into()
}
