//! Requests of the last minutes of all disks, in memory: the web page uses them to preview a change
//! of limits.
//!
//! ```text
//!   requests ─► one open chunk per disk ─► full: into a common queue ─► the oldest chunk is dropped
//! ```
//!
//! All disks share one bound, and the oldest chunk of all disks is dropped first, so all disks
//! cover the same period. Never written to storage.

use std::{
    collections::{HashMap, VecDeque},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use ::recording::{CompletedRequest, RequestOp};
use block::recorder::{DiskOperation, RequestRecord};
use policy::time::{Duration, Instant};

use super::{engine::RecordingOutput, limits::LimitsByOwner, names::RecordedDiskEntry};

/// Maximum age of returned requests.
pub(crate) const MAX_AGE: Duration = Duration::from_secs(600);
/// Requests per allocation.
const CHUNK_REQUESTS: usize = 256;
/// Maximum number of full chunks of all disks: 1.5 million requests of 32 bytes.
const MAX_CHUNKS: usize = 6144;

/// Completed request in 32 bytes.
#[derive(Clone, Copy, Debug)]
struct RecentRequest {
    arrived: Instant,
    wait_ns: u64,
    /// Service time, saturating at four seconds.
    service_ns: u32,
    /// Length of each merged request.
    length: u32,
    /// Number of client requests that were merged; a limit counts each.
    requests: u16,
    operation: DiskOperation,
}

type RecentChunk = Arc<[RecentRequest]>;

/// Recent requests, shared by the recording thread and the readers.
#[derive(Debug, Default)]
pub struct RecentRequests(Mutex<RecentState>);

#[derive(Debug, Default)]
struct RecentState {
    disks: HashMap<Arc<str>, VecDeque<RecentChunk>>,
    /// Disk of each full chunk, the oldest first.
    order: VecDeque<Arc<str>>,
    /// Chunk of each disk that is not full yet.
    open: HashMap<Arc<str>, Vec<RecentRequest>>,
    /// Time of the last loss, or of the recording's start; records before it are incomplete.
    incomplete_until: Option<Instant>,
}

impl RecentRequests {
    fn lock(&self) -> MutexGuard<'_, RecentState> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the latest requests of these disks, limited in total, and the instant from which on
    /// they are complete.
    pub fn latest(
        &self,
        disks: &[Arc<str>],
        now: Instant,
        max_requests: usize,
    ) -> (Instant, Vec<Vec<CompletedRequest>>) {
        // Under the lock only references are copied; the requests are copied after it.
        let (lost, snapshots): (_, Vec<_>) = {
            let all = self.lock();
            let snapshot = |disk: &Arc<str>| {
                let chunks: Vec<RecentChunk> = all.disks.get(disk).into_iter().flatten().cloned().collect();
                (chunks, all.open.get(disk).cloned().unwrap_or_default())
            };
            (all.incomplete_until, disks.iter().map(snapshot).collect())
        };
        let oldest = Instant::from_nanos(now.as_nanos().saturating_sub(MAX_AGE.as_nanos() as u64));
        let mut since = oldest.max(lost.unwrap_or(oldest));
        let each = |(chunks, open): &(Vec<RecentChunk>, Vec<RecentRequest>)| -> Vec<RecentRequest> {
            chunks.iter().flat_map(|chunk| chunk.iter()).chain(open).copied().collect()
        };
        let mut requests: Vec<Vec<RecentRequest>> = snapshots.iter().map(each).collect();
        let arrivals = requests.iter().flatten().map(|request| (request.arrived, request.requests));
        let arrivals: Vec<_> = arrivals.filter(|(at, _)| *at >= since).collect();
        since = first_of_latest(arrivals, max_requests).unwrap_or(since);
        requests.iter_mut().for_each(|kept| kept.retain(|kept| kept.arrived >= since));
        (
            since,
            requests
                .into_iter()
                .map(|disk_requests| disk_requests.iter().flat_map(RecentRequest::expanded).collect())
                .collect(),
        )
    }
}

/// Arrival of the first of the latest requests up to the limit; `None` if there are no more.
fn first_of_latest(mut arrivals: Vec<(Instant, u16)>, max_requests: usize) -> Option<Instant> {
    let sum = |entries: &[(Instant, u16)]| {
        entries.iter().map(|(_, requests)| usize::from(*requests)).sum::<usize>()
    };
    if sum(&arrivals) <= max_requests {
        return None;
    }
    // Each entry counts at least 1, so only as many entries as the limit need sorting.
    let surplus = arrivals.len().saturating_sub(max_requests);
    if surplus > 0 {
        // Linear, instead of sorting all of up to 1.5 million entries.
        arrivals.select_nth_unstable(surplus);
        arrivals.drain(..surplus);
    }
    arrivals.sort_unstable_by(|one, other| other.cmp(one));
    let mut count = 0;
    let within = arrivals.iter().take_while(|(_, requests)| {
        count += usize::from(*requests);
        count <= max_requests
    });
    // At least one entry, even if its merged requests alone exceed the limit.
    within.last().or_else(|| arrivals.first()).map(|(at, _)| *at)
}

impl RecentRequest {
    fn of(finished: &RequestRecord) -> Self {
        let &RequestRecord { arrived, admitted, completed: ended, length, requests, operation, .. } =
            finished;
        let requests = u16::try_from(requests.max(1)).unwrap_or(u16::MAX);
        let (wait_ns, service_ns) = (admitted.nanos_since(arrived), ended.nanos_since(admitted));
        Self {
            arrived,
            wait_ns,
            service_ns: u32::try_from(service_ns).unwrap_or(u32::MAX),
            // No client sends more in one request.
            length: u32::try_from(length / u64::from(requests)).unwrap_or(u32::MAX),
            requests,
            operation,
        }
    }

    /// Expands merged requests; each arrived separately, and all completed together.
    fn expanded(&self) -> impl Iterator<Item = CompletedRequest> {
        let op = match self.operation {
            DiskOperation::Read => RequestOp::Read,
            DiskOperation::Write => RequestOp::Write,
            DiskOperation::WriteZeroes => RequestOp::WriteZeroes,
            DiskOperation::Flush => RequestOp::Flush,
            DiskOperation::Discard => RequestOp::Discard,
        };
        let request = CompletedRequest {
            arrived_ns: self.arrived.as_nanos(),
            wait_ns: self.wait_ns,
            service_ns: self.service_ns.into(),
            length: self.length.into(),
            op,
        };
        std::iter::repeat_n(request, self.requests.into())
    }
}

impl RecentState {
    fn add(&mut self, disk: &Arc<str>, request: RecentRequest) {
        // No `entry` here: it would clone the name for every request.
        let open = match self.open.get_mut(disk) {
            Some(open) => open,
            None => self.open.entry(Arc::clone(disk)).or_insert_with(|| Vec::with_capacity(CHUNK_REQUESTS)),
        };
        open.push(request);
        if open.len() < CHUNK_REQUESTS {
            return;
        }
        let chunk: RecentChunk = open.as_slice().into();
        // Keeps the allocation for the next chunk.
        open.clear();
        self.disks.entry(Arc::clone(disk)).or_default().push_back(chunk);
        self.order.push_back(Arc::clone(disk));
        if self.order.len() > MAX_CHUNKS
            && let Some(newest) = self.drop_oldest()
        {
            self.mark_incomplete(newest);
        }
    }

    /// Drops the oldest chunk; returns the arrival of its newest request.
    fn drop_oldest(&mut self) -> Option<Instant> {
        let disk = self.order.pop_front()?;
        let chunks = self.disks.get_mut(&disk)?;
        let chunk = chunks.pop_front()?;
        if chunks.is_empty() {
            self.disks.remove(&disk);
        }
        newest_arrival(&chunk)
    }

    /// Marks requests until this instant as incomplete.
    fn mark_incomplete(&mut self, until: Instant) {
        self.incomplete_until = Some(self.incomplete_until.map_or(until, |before| before.max(until)));
    }

    /// Drops chunks that are too old to be returned.
    fn drop_older(&mut self, before: Instant) {
        while let Some(disk) = self.order.front() {
            let oldest = self.disks.get(disk).and_then(|chunks| chunks.front());
            if oldest.and_then(|chunk| newest_arrival(chunk)).is_some_and(|newest| newest >= before) {
                break;
            }
            self.drop_oldest();
        }
        self.open.retain(|_, open| newest_arrival(open).is_some_and(|newest| newest >= before));
    }
}

fn newest_arrival(chunk: &[RecentRequest]) -> Option<Instant> {
    chunk.iter().map(|request| request.arrived).max()
}

/// Output of the engine that fills a [`RecentRequests`].
pub(super) struct RecentOutput {
    recent: Arc<RecentRequests>,
    /// Requests since the last `turn`.
    new: Vec<(Arc<str>, RecentRequest)>,
    forgot: Instant,
    has_ended: bool,
}

impl RecentOutput {
    /// Interval between removals of old chunks.
    const REMOVAL_INTERVAL: Duration = Duration::from_secs(1);

    pub(super) fn new(recent: Arc<RecentRequests>, now: Instant) -> Self {
        recent.lock().mark_incomplete(now);
        Self { recent, new: Vec::new(), forgot: now, has_ended: false }
    }

    fn turn_at(&mut self, lost: u64, now: Instant) {
        if lost == 0
            && self.new.is_empty()
            && now.nanos_since(self.forgot) < Self::REMOVAL_INTERVAL.as_nanos() as u64
        {
            return;
        }
        let mut all = self.recent.lock();
        for (disk, request) in self.new.drain(..) {
            all.add(&disk, request);
        }
        if lost > 0 {
            all.mark_incomplete(now);
        }
        if now.nanos_since(self.forgot) >= Self::REMOVAL_INTERVAL.as_nanos() as u64 {
            all.drop_older(Instant::from_nanos(now.as_nanos().saturating_sub(MAX_AGE.as_nanos() as u64)));
            self.forgot = now;
        }
    }
}

impl RecordingOutput for RecentOutput {
    fn add_request(&mut self, finished: &RequestRecord, named: &RecordedDiskEntry, _: &LimitsByOwner) {
        if !finished.has_failed {
            self.new.push((Arc::clone(&named.name), RecentRequest::of(finished)));
        }
    }

    fn write_due(&mut self, lost: u64) {
        self.turn_at(lost, reactor::real_time());
    }

    fn end(&mut self) {
        self.has_ended = true;
    }

    fn has_ended(&mut self) -> bool {
        self.has_ended
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(ms: u64) -> Instant {
        Instant::from_nanos(ms * 1_000_000)
    }

    fn read(ms: u64) -> RequestRecord {
        RequestRecord {
            disk: 0,
            operation: DiskOperation::Read,
            offset: 0,
            length: 4096,
            requests: 1,
            has_failed: false,
            arrived: at(ms),
            admitted: at(ms + 1),
            throttle_cause: None,
            completed: at(ms + 3),
        }
    }

    fn recent_output() -> (Arc<RecentRequests>, RecentOutput) {
        let recent = Arc::<RecentRequests>::default();
        (Arc::clone(&recent), RecentOutput::new(recent, at(0)))
    }

    #[test]
    fn recent_requests_are_returned_unchanged() {
        let (recent, mut output) = recent_output();
        let (a, b) = (RecordedDiskEntry::without_group(0, "a"), RecordedDiskEntry::without_group(1, "b"));
        for ms in 1..=600 {
            output.add_request(&read(ms), if ms % 3 == 0 { &b } else { &a }, &LimitsByOwner::new());
        }
        output.add_request(&RequestRecord { has_failed: true, ..read(601) }, &a, &LimitsByOwner::new());
        output.turn_at(0, at(700));
        let (since, requests) = recent.latest(&["a".into(), "b".into(), "c".into()], at(700), 1000);
        assert_eq!(
            (since, [requests[0].len(), requests[1].len(), requests[2].len()]),
            (at(0), [400, 200, 0])
        );
        let first = CompletedRequest {
            arrived_ns: 1_000_000,
            wait_ns: 1_000_000,
            service_ns: 2_000_000,
            length: 4096,
            op: RequestOp::Read,
        };
        assert_eq!(requests[0][0], first);
        // The latest of both disks together.
        let (since, requests) = recent.latest(&["a".into(), "b".into()], at(700), 30);
        assert_eq!((since, requests[0].len(), requests[1].len()), (at(571), 20, 10));
    }

    #[test]
    fn merged_requests_are_expanded() {
        let (recent, mut output) = recent_output();
        let a = RecordedDiskEntry::without_group(0, "a");
        for ms in 1..=100 {
            output.add_request(
                &RequestRecord { length: 8 * 4096, requests: 8, ..read(ms) },
                &a,
                &LimitsByOwner::new(),
            );
        }
        output.turn_at(0, at(200));
        let (since, requests) = recent.latest(&["a".into()], at(200), 10_000);
        assert_eq!((since, requests[0].len()), (at(0), 800));
        assert!(requests[0].iter().all(|request| request.length == 4096 && request.service_ns == 2_000_000));
        // From the latest 20: two batches of eight; with a bound below one batch, that batch.
        for (max, from, count) in [(20, 99, 16), (3, 100, 8)] {
            let (since, requests) = recent.latest(&["a".into()], at(200), max);
            assert_eq!((since, requests[0].len()), (at(from), count), "{max}");
        }
    }

    #[test]
    fn old_and_incomplete_periods_are_excluded() {
        let (recent, mut output) = recent_output();
        let a = RecordedDiskEntry::without_group(0, "a");
        let longest_ms = MAX_AGE.as_millis() as u64;
        for ms in (0..3000).chain(longest_ms..longest_ms + 100) {
            output.add_request(&read(ms), &a, &LimitsByOwner::new());
        }
        output.turn_at(0, at(longest_ms + 2000));
        let (since, requests) = recent.latest(&["a".into()], at(longest_ms + 2000), usize::MAX);
        assert_eq!((since, requests[0].len()), (at(2000), 1100));
        output.turn_at(5, at(longest_ms + 2001));
        let (since, requests) = recent.latest(&["a".into()], at(longest_ms + 2002), usize::MAX);
        assert_eq!((since, requests[0].len()), (at(longest_ms + 2001), 0));
        output.turn_at(0, at(2 * longest_ms + 3000));
        let all = recent.lock();
        assert!(all.disks.is_empty() && all.order.is_empty() && all.open.is_empty());
    }

    #[test]
    fn all_disks_share_one_bound() {
        assert_eq!(size_of::<RecentRequest>(), 32);
        let (recent, mut output) = recent_output();
        let disks = ["a", "b"].map(|name| RecordedDiskEntry::without_group(0, name));
        let max = MAX_CHUNKS * CHUNK_REQUESTS;
        for number in 0..max + max / 2 {
            output.add_request(&read(number as u64 / 8), &disks[number % 2], &LimitsByOwner::new());
            if number % 10_000 == 0 {
                output.turn_at(0, at(number as u64 / 8));
            }
        }
        let now = at((max + max / 2) as u64 / 8);
        output.turn_at(0, now);
        assert_eq!(recent.lock().order.len(), MAX_CHUNKS);
        let (since, requests) = recent.latest(&["a".into(), "b".into()], now, usize::MAX);
        let all = requests[0].len() + requests[1].len();
        assert!(since > at(0) && all <= max && all > max - 4 * CHUNK_REQUESTS, "{all}");
        assert!(requests[0].len().abs_diff(requests[1].len()) <= 8);
    }
}
