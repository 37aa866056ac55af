//! A batch of requests that arrived together, of any export. Adjacent requests become one I/O.

use policy::merge::{MergeBounds, MergeCandidate, MergeOperation, MergePlanner};
use reactor::TaskSpawner;

/// Bounds of merging. The kernel splits longer I/O again, and the first request would wait for the
/// last.
const MERGE: MergeBounds = MergeBounds { segments: 256, bytes: 256 << 10 };

/// A request that may be merged.
pub(crate) trait Mergeable {
    /// Operation and range, for the merge planner.
    fn candidate(&self) -> MergeCandidate;
}

/// Requests that are served by one I/O.
pub(crate) enum MergedRequest<R> {
    One(R),
    Reads(Vec<R>),
    Writes(Vec<R>),
}

/// A request batch, and reusable memory for planning its merges.
pub(crate) struct MergeBatch<R> {
    batch: Vec<R>,
    taken: Vec<Option<R>>,
    candidates: Vec<MergeCandidate>,
    planner: MergePlanner,
}

impl<R> Default for MergeBatch<R> {
    fn default() -> Self {
        Self {
            batch: Vec::new(),
            taken: Vec::new(),
            candidates: Vec::new(),
            planner: MergePlanner::default(),
        }
    }
}

impl<R: Mergeable> MergeBatch<R> {
    pub(crate) fn push(&mut self, request: R) {
        self.batch.push(request);
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.batch.is_empty()
    }

    pub(crate) fn len(&self) -> usize {
        self.batch.len()
    }

    /// Removes and returns the request if the batch has exactly one.
    pub(crate) fn take_only(&mut self) -> Option<R> {
        if self.batch.len() == 1 { self.batch.pop() } else { None }
    }

    /// All requests in the order of arrival.
    pub(crate) fn all(&mut self) -> &mut Vec<R> {
        &mut self.batch
    }

    /// Starts a task for each I/O: `single` for a single request, `reads` and `writes` for merged
    /// ones.
    pub(crate) fn start<F, G, H>(
        &mut self,
        spawner: &mut TaskSpawner<F>,
        single: impl Fn(R) -> F,
        reads: impl Fn(Vec<R>) -> G,
        writes: impl Fn(Vec<R>) -> H,
    ) where
        F: Future<Output = ()> + 'static,
        G: Future<Output = ()> + 'static,
        H: Future<Output = ()> + 'static,
    {
        if self.is_empty() {
            return;
        }
        if let Some(only) = self.take_only() {
            // The common case at low queue depths: no planning, no allocation.
            return spawner.spawn(single(only));
        }
        for joined in self.take_merged() {
            match joined {
                MergedRequest::One(only) => spawner.spawn(single(only)),
                MergedRequest::Reads(parts) => reactor::spawn(reads(parts)),
                MergedRequest::Writes(parts) => reactor::spawn(writes(parts)),
            }
        }
    }

    pub(crate) fn take_merged(&mut self) -> impl Iterator<Item = MergedRequest<R>> {
        let Self { batch, taken, candidates, planner } = self;
        candidates.clear();
        candidates.extend(batch.iter().map(Mergeable::candidate));
        // Options, because the planner's groups take requests out of order.
        taken.clear();
        taken.extend(batch.drain(..).map(Some));
        planner.plan(candidates, MERGE).groups().map(|group| {
            // The planner returns each index exactly once, so each request is served exactly once.
            let mut parts = group.iter().map(|&index| taken[index].take().expect("planned once"));
            if let [_] = group {
                return MergedRequest::One(parts.next().expect("a group of one"));
            }
            let parts: Vec<R> = parts.collect();
            match parts[0].candidate().operation {
                // Barriers are never merged, so a group of several is of reads or of writes.
                MergeOperation::Read => MergedRequest::Reads(parts),
                _ => MergedRequest::Writes(parts),
            }
        })
    }
}
