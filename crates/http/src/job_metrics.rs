//! Metric families of jobs.
//!
//! A job has samples until it concludes. Its id is the label `job_id`: Prometheus itself sets the
//! label `job` of each sample.

use std::fmt;

use api::JobReport;

use super::{
    family_writer::{FamilyWriter, SampleLabels},
    snapshot::DaemonSnapshot,
};

/// State in which a job has no samples.
const CONCLUDED: &str = "concluded";
/// States of a job with samples.
const STATES: [&str; 5] = ["created", "running", "paused", "ready", "aborting"];

fn labels(job: &JobReport) -> SampleLabels<'_, 4> {
    let group = job.group.as_deref().unwrap_or_default();
    [("job_id", &job.id), ("kind", &job.kind), ("disk", &job.disk), ("group", group)]
}

pub(super) fn write(to: &mut FamilyWriter<'_>, snapshot: &DaemonSnapshot) -> fmt::Result {
    let jobs = || snapshot.jobs.iter().filter(|job| job.state != CONCLUDED);
    let rows = |value: fn(&JobReport) -> u64| jobs().map(move |job| (labels(job), value(job)));
    let states = jobs().flat_map(|job| {
        let [id, kind, disk, group] = labels(job);
        STATES.map(|state| ([id, kind, disk, group, ("state", state)], u64::from(job.state == state)))
    });
    to.gauges("weir_job_state", "1 for the state of the job.", states)?;
    to.gauges("weir_job_done_bytes", "Bytes that the job has done.", rows(|job| job.done_bytes))?;
    to.gauges("weir_job_total_bytes", "Bytes that the job has to do.", rows(|job| job.total_bytes))?;
    let help = "Bytes that the job has copied as data.";
    to.counters("weir_job_copied_bytes", help, rows(|job| job.copied_bytes))?;
    let old_data = jobs().filter_map(|job| Some((labels(job), job.old_data_bytes?)));
    let help = "Bytes of old data of changed clusters that wait for the target of the job.";
    to.gauges("weir_job_old_data_bytes", help, old_data)?;
    let concluded = snapshot.concluded_jobs.iter();
    let concluded = concluded.map(|((kind, result), count)| ([("kind", *kind), ("result", *result)], *count));
    to.counters("weir_jobs_concluded", "Jobs that have concluded.", concluded)
}
