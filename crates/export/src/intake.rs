//! Requests that came together: adjacent ones become one I/O, whatever door they came through.

use policy::merge::{Bounds, Candidate, Operation, Planner};
use reactor::Launcher;

/// How far adjacent requests are merged. The kernel splits longer I/O again, and the first request
/// would wait for the last.
const MERGE: Bounds = Bounds { segments: 256, bytes: 256 << 10 };

/// What merging has to know of a request.
pub(crate) trait Mergeable {
    /// What it does, and where.
    fn candidate(&self) -> Candidate;
}

/// One I/O.
pub(crate) enum Joined<R> {
    One(R),
    Reads(Vec<R>),
    Writes(Vec<R>),
}

/// A batch of requests, and the memory to plan their merging.
pub(crate) struct Intake<R> {
    batch: Vec<R>,
    taken: Vec<Option<R>>,
    candidates: Vec<Candidate>,
    planner: Planner,
}

impl<R> Default for Intake<R> {
    fn default() -> Self {
        Self { batch: Vec::new(), taken: Vec::new(), candidates: Vec::new(), planner: Planner::default() }
    }
}

impl<R: Mergeable> Intake<R> {
    pub(crate) fn push(&mut self, request: R) {
        self.batch.push(request);
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.batch.is_empty()
    }

    pub(crate) fn len(&self) -> usize {
        self.batch.len()
    }

    /// The request, if it is the only one.
    pub(crate) fn take_only(&mut self) -> Option<R> {
        if self.batch.len() == 1 { self.batch.pop() } else { None }
    }

    /// All of them as they came.
    pub(crate) fn all(&mut self) -> &mut Vec<R> {
        &mut self.batch
    }

    /// Starts all of them: `one` alone, `reads` and `writes` that were joined.
    pub(crate) fn start<F, G, H>(
        &mut self,
        launcher: &mut Launcher<F>,
        one: impl Fn(R) -> F,
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
            return launcher.launch(one(only));
        }
        for joined in self.take_joined() {
            match joined {
                Joined::One(only) => launcher.launch(one(only)),
                Joined::Reads(parts) => reactor::spawn(reads(parts)),
                Joined::Writes(parts) => reactor::spawn(writes(parts)),
            }
        }
    }

    pub(crate) fn take_joined(&mut self) -> impl Iterator<Item = Joined<R>> {
        let Self { batch, taken, candidates, planner } = self;
        candidates.clear();
        candidates.extend(batch.iter().map(Mergeable::candidate));
        taken.clear();
        taken.extend(batch.drain(..).map(Some));
        planner.plan(candidates, MERGE).groups().map(|group| {
            let mut parts = group.iter().map(|&index| taken[index].take().expect("planned once"));
            if let [_] = group {
                return Joined::One(parts.next().expect("a group of one"));
            }
            let parts: Vec<R> = parts.collect();
            match parts[0].candidate().operation {
                Operation::Read => Joined::Reads(parts),
                _ => Joined::Writes(parts),
            }
        })
    }
}
