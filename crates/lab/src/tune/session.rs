//! A search on a place: images made, turns measured, curves recorded, within the budget.
//!
//! ```text
//!   budget ├── images (a third at most) ──┤── search ──┤── curves from a cold cache (5 %) ──┤ end (2 %) ┤
//! ```
//!
//! Never decides what is measured next: that is the search's.

use std::{rc::Rc, time::Duration};

use block::storage::CacheMode;
use console::progress::Progress;

use super::{
    Outcome,
    apply::{Target, Written},
    findings::{Found, Growth},
    goal::Goal,
    images::Images,
    is_bold,
    matrix::Configuration,
    measure::{Meter, SLICES, TurnError},
    place::{Kind, Place},
    resume::Kept,
    samples::Samples,
    search::{Search, Stage},
    stop::Stop,
};
use crate::tune::arguments::TuneArgs;

/// The disk that options are printed for where nothing is said: the one of the measurement that named clusters of 2 MiB.
const USUAL_DISK: u64 = 100 << 30;
/// Of the budget, what preparing images may take at most.
const SHARE_FOR_IMAGES: u32 = 3;
/// Of the budget, what the curves from a cold cache take together.
const SHARE_FOR_GROWTH: u32 = 20;
/// Kept back for putting away and telling.
const SHARE_FOR_END: u32 = 50;
/// Slices that a budget should suffice for: both stages with seven rounds each, and what opening and flushing take beside them.
const SLICES_PER_BUDGET: u32 = 14 * 22 * 7 * 4;

/// A run.
#[derive(Debug)]
pub(super) struct Session {
    place: Rc<Place>,
    search: Search,
    growth: Vec<Growth>,
    /// What is to be said beside what was found.
    remarks: Vec<String>,
    /// What the options are for: its name, its size, and what it is.
    disk: (String, u64, Written),
    progress: Rc<Progress>,
    stop: Stop,
    budget: Duration,
    /// Of time, for one sample.
    slice: Duration,
    seed: u64,
}

impl Session {
    /// For what the command line says, at this place; `samples` are those of an earlier run, each of a `slice` of time, or none.
    pub(super) fn new(
        place: Rc<Place>,
        (samples, slice): (Samples, Option<Duration>),
        stop: Stop,
        progress: Progress,
        arguments: &TuneArgs,
    ) -> Self {
        let goals = arguments.goal.map_or_else(|| Goal::ALL.to_vec(), |goal| vec![goal]);
        let path = || place.path.display().to_string();
        let (name, usual, kind) = match &place.kind {
            Kind::Made { .. } => ("DISK".to_owned(), USUAL_DISK, Written::New),
            Kind::Device { .. } => (path(), place.whole_bytes, Written::Device),
            Kind::Image { .. } => (path(), place.whole_bytes, Written::Image),
        };
        Self {
            search: Search::new(place.space(), place.patterns(), goals, samples, arguments.seed),
            growth: Vec::new(),
            remarks: place.remarks(),
            disk: (name, arguments.disk.unwrap_or(usual), kind),
            slice: slice
                .unwrap_or(arguments.budget / SLICES_PER_BUDGET)
                .clamp(*SLICES.start(), *SLICES.end()),
            budget: arguments.budget,
            seed: arguments.seed,
            place,
            progress: Rc::new(progress),
            stop,
        }
    }

    /// Measures, as far as there is time, and tells what was found.
    pub(super) async fn work(mut self) -> Outcome {
        let failed = self.measure().await.err();
        self.progress.end();
        let (name, disk_bytes, kind) = &self.disk;
        let found = Found {
            search: &self.search,
            growth: &self.growth,
            remarks: &self.remarks,
            target: Target { name, disk_bytes: *disk_bytes, kind: *kind },
        };
        // Rates and names: nothing that JSON lacks a form for.
        let details = serde_json::to_value(Kept::new(&self.place, self.slice, self.search.samples()));
        Outcome {
            findings: found.findings(),
            text: found.text(is_bold()),
            details: details.unwrap_or_default(),
            failed,
        }
    }

    async fn measure(&mut self) -> anyhow::Result<()> {
        let images = Images::new(Rc::clone(&self.place));
        self.make(&images).await?;
        let end = self.budget / SHARE_FOR_END;
        let whole = self.stop.left().saturating_sub(end);
        let growth = if self.can_grow() { self.budget / SHARE_FOR_GROWTH } else { Duration::ZERO };
        let mut meter =
            Meter::new(images, self.slice, self.stop.within(whole.saturating_sub(growth)), self.seed);
        self.search(&mut meter).await?;
        if !self.stop.is_interrupted() {
            self.grow(meter, growth).await?;
        }
        Ok(())
    }

    /// Makes what there is to be made, as far as there is time.
    async fn make(&mut self, images: &Images) -> anyhow::Result<()> {
        let all = self.search.space().clusters.clone();
        let stop = self.stop.within(self.budget / SHARE_FOR_IMAGES);
        let made = images.make(&all, &stop, &self.progress).await;
        self.progress.end();
        let made = match made {
            // Then it is no fault of the disk's.
            Err(_) if self.stop.is_interrupted() => return Ok(()),
            made => made?,
        };
        for cluster_bytes in all.into_iter().filter(|cluster_bytes| !made.contains(cluster_bytes)) {
            self.search.leave_out(cluster_bytes);
            let size = settings::exact_size(cluster_bytes);
            self.remarks.push(format!(
                "Not measured: clusters of {size}, because writing the images took too long (give a smaller --size or a longer --budget)."
            ));
        }
        Ok(())
    }

    async fn search(&mut self, meter: &mut Meter) -> anyhow::Result<()> {
        let stop = meter.stop().clone();
        let all = stop.left();
        let mut told = None;
        loop {
            let left =
                if stop.is_due() { 0.0 } else { stop.left().as_secs_f64() / all.as_secs_f64().max(1e-9) };
            let Some(turn) = self.search.next(left) else { return Ok(()) };
            if told != Some(turn.round) {
                told = Some(turn.round);
                self.progress.end();
                self.progress.step(&self.search_is_at());
            }
            let search = &mut self.search;
            match meter.turn(&turn, |pattern, value| search.record(&turn, pattern, value)).await {
                Ok(()) => {}
                Err(TurnError::NotOpened(why)) if turn.configuration.cache.is_direct() => {
                    self.search.refuse(turn.configuration);
                    self.remarks.push(format!("Not measured: {}: {why:#}.", turn.configuration.cache));
                }
                Err(TurnError::NotOpened(error) | TurnError::Failed(error)) => return Err(error),
            }
        }
    }

    fn search_is_at(&self) -> String {
        let what = match self.search.stage() {
            Stage::Factors => "one factor at a time",
            Stage::Combinations => "combinations",
            Stage::Done => "done",
        };
        format!("{what}: round {} of {} configurations", self.search.rounds(), self.search.candidates())
    }

    /// Whether there is an L2 cache that could be cold.
    fn can_grow(&self) -> bool {
        let space = self.search.space();
        !space.clusters.is_empty() && space.caches.contains(&CacheMode::None)
    }

    /// Records how IOPS grow from a cold cache, for each size of the L2 cache.
    async fn grow(&mut self, mut meter: Meter, time: Duration) -> anyhow::Result<()> {
        if !self.can_grow() {
            return Ok(());
        }
        let space = self.search.space();
        let default = space.default_configuration();
        let cluster = |one: &Configuration| one.qcow2.map(|qcow2| qcow2.cluster_bytes);
        // Past the page cache, as the measurement did that shows such curves; shares that come to the same are one.
        let mut configurations = space.one_at_a_time();
        configurations
            .retain(|one| one.cache == default.cache && !one.prefetch && cluster(one) == cluster(&default));
        let each = time / u32::try_from(configurations.len()).unwrap_or(u32::MAX).max(1);
        meter.until(self.stop.clone());
        self.progress.end();
        self.progress.step("from a cold L2 cache");
        for configuration in configurations {
            let configuration = Configuration { cache: CacheMode::None, ..configuration };
            let points = meter.growth(&configuration, each).await?;
            if !points.is_empty() {
                self.growth.push(Growth { configuration, points });
            }
        }
        Ok(())
    }
}
