//! A search on a target, followed by curves from a cold cache.
//!
//! ```text
//!   budget ├── images (a third at most) ──┤── search ──┤── curves from a cold cache (5 %) ──┤ end (2 %) ┤
//! ```
//!
//! The search decides the next measurement.

use std::time::Duration;

use storage::CacheMode;

use super::{
    TuneOutcome,
    apply::{AppliedDisk, DiskOrigin},
    arguments::TuneArgs,
    configurations::DiskConfiguration,
    findings::{ColdCacheCurve, TuneFindings},
    goal::TuneGoal,
    is_bold,
    measure::SampleMeter,
    resume::StoredSamples,
    run::{TuneRun, TuneRunParameters},
    samples::TuneSamples,
    search::ConfigurationSearch,
    target::TuneTargetKind,
};

/// Default size of the disk that the printed options are for, as in the published measurement that
/// recommends clusters of 2 MiB.
const USUAL_DISK: u64 = 100 << 30;
/// Upper bound of the budget's share for images, as a divisor.
const IMAGES_DIVISOR: u32 = 3;
/// The budget's share for all curves, as a divisor.
const GROWTH_DIVISOR: u32 = 20;
/// Slices in a budget: both stages with seven rounds each, and opening and flushing.
const SLICES_PER_BUDGET: u32 = 15 * 22 * 7 * 4;

#[derive(Debug)]
pub(super) struct TuneSession {
    run: TuneRun<ConfigurationSearch>,
    growth: Vec<ColdCacheCurve>,
    /// Disk of the printed options: name, size and origin.
    disk: (String, u64, DiskOrigin),
}

impl TuneSession {
    /// `samples` and `slice` are those of the run that is resumed; otherwise `samples` is empty and
    /// `slice` is `None`.
    pub(super) fn new(
        parameters: TuneRunParameters,
        samples: TuneSamples,
        slice: Option<Duration>,
        arguments: &TuneArgs,
    ) -> Self {
        let TuneRunParameters { place, budget, seed, .. } = &parameters;
        let goals = arguments.goal.map_or_else(|| TuneGoal::ALL.to_vec(), |goal| vec![goal]);
        let path = || place.path.display().to_string();
        let (name, usual, kind) = match &place.kind {
            // The images of the run are removed at its end, so the options are for another disk.
            TuneTargetKind::Made { .. } => ("DISK".to_owned(), USUAL_DISK, DiskOrigin::New),
            TuneTargetKind::Device { .. } => (path(), place.whole_bytes, DiskOrigin::Device),
            TuneTargetKind::Image { .. } => (path(), place.whole_bytes, DiskOrigin::Image),
        };
        let search = ConfigurationSearch::new(place.space(), place.patterns(), goals, samples, *seed);
        // A resumed run keeps the slice, else its samples would not be comparable.
        let slice = slice.unwrap_or(*budget / SLICES_PER_BUDGET);
        let disk = (name, arguments.disk.unwrap_or(usual), kind);
        Self { run: TuneRun::new(search, slice, parameters), growth: Vec::new(), disk }
    }

    pub(super) async fn work(mut self) -> TuneOutcome {
        let failed = self.measure().await.err();
        self.run.progress.end();
        let (name, disk_bytes, kind) = &self.disk;
        let TuneRun { course: search, remarks, place, slice, .. } = &self.run;
        let target = AppliedDisk { name, disk_bytes: *disk_bytes, kind: *kind };
        let found = TuneFindings { search, growth: &self.growth, remarks, target };
        // Cannot fail: only numbers and names.
        let details =
            serde_json::to_value(StoredSamples::new(place, *slice, &search.samples)).unwrap_or_default();
        TuneOutcome { findings: found.findings(), text: found.text(is_bold()), details, failed }
    }

    async fn measure(&mut self) -> anyhow::Result<()> {
        let budget = self.run.budget;
        // The curves come last, and their time is reserved before the search begins.
        let growth = if self.can_grow() { budget / GROWTH_DIVISOR } else { Duration::ZERO };
        match self.run.measure(budget / IMAGES_DIVISOR, growth).await? {
            Some(meter) if self.can_grow() => self.grow(meter, growth).await,
            _ => Ok(()),
        }
    }

    fn can_grow(&self) -> bool {
        let space = &self.run.course.space;
        !space.clusters.is_empty() && space.caches.contains(&CacheMode::None)
    }

    async fn grow(&mut self, mut meter: SampleMeter, time: Duration) -> anyhow::Result<()> {
        let space = &self.run.course.space;
        let default = space.default_configuration();
        let cluster = |one: &DiskConfiguration| one.qcow2.map(|qcow2| qcow2.cluster_bytes);
        // Only the size of the L2 cache varies, and each size has one curve. O_DIRECT is used as in
        // the published curves.
        let mut configurations = space.one_at_a_time();
        configurations.retain(|one| {
            (one.cache, one.prefetch, cluster(one)) == (default.cache, default.prefetch, cluster(&default))
        });
        // All curves get the same time, so that they have the same x axis.
        let each = time / u32::try_from(configurations.len()).unwrap_or(u32::MAX).max(1);
        meter.stop = self.run.stop.clone();
        self.run.progress.end();
        self.run.progress.step("from a cold L2 cache");
        for configuration in configurations {
            let configuration = DiskConfiguration { cache: CacheMode::None, ..configuration };
            let points = meter.cold_cache_curve(&configuration, each).await?;
            if !points.is_empty() {
                self.growth.push(ColdCacheCurve { configuration, points });
            }
        }
        Ok(())
    }
}
