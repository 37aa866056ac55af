//! A run: creates images, then measures the turns of a [`TurnSource`] within the budget.
//!
//! ```text
//!   budget ├── images (a bounded share) ──┤── turns ──┤── reserved for the caller ──┤ end (2 %) ┤
//! ```

use std::{rc::Rc, time::Duration};

use console::progress::StepProgress;

use super::{
    images::TuneImages,
    measure::{SLICES, SampleMeter, TurnError},
    search::TurnSource,
    stop::TuneStop,
    target::TuneTarget,
};

const END_SHARE: u32 = 50;

/// Parameters of a run.
pub(super) struct TuneRunParameters {
    pub(super) place: Rc<TuneTarget>,
    pub(super) stop: TuneStop,
    pub(super) progress: StepProgress,
    pub(super) budget: Duration,
    pub(super) seed: u64,
}

#[derive(Debug)]
pub(super) struct TuneRun<C> {
    pub(super) course: C,
    pub(super) place: Rc<TuneTarget>,
    pub(super) remarks: Vec<String>,
    pub(super) progress: Rc<StepProgress>,
    pub(super) stop: TuneStop,
    pub(super) budget: Duration,
    pub(super) slice: Duration,
    pub(super) seed: u64,
}

impl<C: TurnSource> TuneRun<C> {
    /// Clamps the slice to a useful length.
    pub(super) fn new(course: C, slice: Duration, parameters: TuneRunParameters) -> Self {
        let TuneRunParameters { place, stop, progress, budget, seed } = parameters;
        let (remarks, progress) = (place.remarks(), Rc::new(progress));
        let slice = slice.clamp(*SLICES.start(), *SLICES.end());
        Self { course, place, remarks, progress, stop, budget, slice, seed }
    }

    /// Creates the images, in at most `for_images`, and measures turns until the source ends or the
    /// budget is used up, except for the time reserved for the caller. Returns `None` if it was
    /// interrupted.
    pub(super) async fn measure(
        &mut self,
        for_images: Duration,
        reserved: Duration,
    ) -> anyhow::Result<Option<SampleMeter>> {
        let images = TuneImages::new(Rc::clone(&self.place));
        self.make(&images, for_images).await?;
        // The rest of the budget is for closing images and removing them.
        let left = self.stop.left().saturating_sub(self.budget / END_SHARE);
        let stop = self.stop.within(left.saturating_sub(reserved));
        let mut meter = SampleMeter::new(images, self.slice, stop, self.seed);
        self.turns(&mut meter).await?;
        Ok((!self.stop.is_interrupted()).then_some(meter))
    }

    async fn make(&mut self, images: &TuneImages, time: Duration) -> anyhow::Result<()> {
        let all = self.course.clusters();
        let created = images.make(&all, &self.stop.within(time), &self.progress).await;
        self.progress.end();
        let created = match created {
            // After an interruption a failure to write is expected; the caller reports the
            // interruption.
            Err(_) if self.stop.is_interrupted() => return Ok(()),
            created => created?,
        };
        for cluster_bytes in all.into_iter().filter(|cluster_bytes| !created.contains(cluster_bytes)) {
            self.remarks.extend(self.course.leave_out(cluster_bytes).into_iter().map(|subject| {
                format!(
                    "Not measured: {subject} writing the images took too long (give a smaller --size \
                     or a longer --budget)."
                )
            }));
        }
        Ok(())
    }

    async fn turns(&mut self, meter: &mut SampleMeter) -> anyhow::Result<()> {
        let stop = meter.stop.clone();
        let all = stop.left();
        let mut shown_round = None;
        loop {
            // The share that is left steers the search; 0 ends it.
            let left =
                if stop.is_due() { 0.0 } else { stop.left().as_secs_f64() / all.as_secs_f64().max(1e-9) };
            let Some(turn) = self.course.next(left) else { return Ok(()) };
            // One progress message for each round.
            if shown_round.replace(turn.round) != Some(turn.round) {
                self.progress.end();
                self.progress.step(&self.course.is_at());
            }
            let course = &mut self.course;
            match meter.measure_turn(&turn, |pattern, value| course.record(&turn, pattern, value)).await {
                Ok(()) => {}
                // Many file systems lack O_DIRECT, which the direct cache modes need.
                Err(TurnError::NotOpened(why)) if turn.configuration.cache.is_direct() => {
                    let subject = self.course.refuse(turn.configuration);
                    self.remarks.push(format!("Not measured: {subject}: {why:#}."));
                }
                Err(TurnError::NotOpened(error) | TurnError::Failed(error)) => return Err(error),
            }
        }
    }
}
