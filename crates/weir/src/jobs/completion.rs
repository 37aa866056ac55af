//! `weir job complete`: moves a disk to the target of its mirror, and saves that in the config
//! file.
//!
//! ```text
//!   config: image that does not exist ─► job-complete ─► switched ─► config: the target
//!                                              └─ not switched ─► config as before
//! ```
//!
//! Before the switch only the present image has all data, after it only the target does. So the
//! config file names neither in between: if the host fails at that moment, the next start reports a
//! missing image instead of serving old data. The daemon gives up a completion that takes long, so
//! that moment is short.

use std::{
    path::{Path, PathBuf},
    sync::mpsc::{self, RecvTimeoutError},
    time::Duration,
};

use anyhow::{Context as _, anyhow, bail, ensure};
use api::JobReport;
use console::{
    print,
    signals::{BlockedSignals, SignalRequest},
};
use serde_json::json;

use super::find_job;
use crate::{
    client::{ClientError, ControlClient, report::DaemonReport},
    settings_command::{NewImage, SaveArgs, SavedImages},
};

/// Interval at which the job is read.
const POLL_INTERVAL: Duration = Duration::from_millis(50);
/// End of the name that the config file has until the disk is switched.
const PLACEHOLDER: &str = ".unfinished-switch";

/// Completes a job, and waits until it has ended or the daemon has given up.
pub(super) fn complete(client: ControlClient, id: &str, save: &SaveArgs) -> anyhow::Result<()> {
    // An interruption in the middle would leave the placeholder in the config file: it cancels the
    // job instead.
    let signals = BlockedSignals::block().context("cannot wait for signals")?;
    let (interrupt, interrupted) = mpsc::channel();
    let on_signal = move |request| match request {
        SignalRequest::End(_) | SignalRequest::EndAtOnce(_) => interrupt.send(()).is_ok(),
        SignalRequest::HangUp | SignalRequest::ReopenLog | SignalRequest::Meaningless(_) => true,
    };
    let mut client = client.with_timeout(ControlClient::LONG)?;
    let (report, job) = (client.status()?, find_job(&mut client, id)?);
    ensure!(
        job.state == "ready",
        "job {id}: it is {} and cannot be completed (`weir jobs` shows its progress)",
        job.state
    );
    signals.forward(on_signal).context("cannot start a thread")?;
    let mut before = prepare(&report, save, &job, PLACEHOLDER)?;
    before.commit()?;
    let unknown = |error: anyhow::Error, state: &str| match save.save {
        true => error.context(format!(
            "{}: {state} (see `weir status`, and write its image into the config file, which names \
             {}{PLACEHOLDER} now)",
            job.disk, job.target
        )),
        false => error,
    };
    let ended =
        finish(&mut client, id, &interrupted).map_err(|error| unknown(error, "its image is unknown"))?;
    if !ended.is_switched {
        before.restore()?;
        let why = match (&ended.error, ended.remark) {
            (Some(error), _) => error.clone(),
            (None, _) if ended.is_cancelled => "the job was cancelled".to_owned(),
            (None, Some(remark)) if ended.state == "ready" => remark,
            (None, _) => "another client ends the job".to_owned(),
        };
        bail!("{}: it stays on its image: {why}", job.disk);
    }
    let saved = prepare(&report, save, &job, "").and_then(|mut saved| saved.commit());
    saved.map_err(|error| unknown(error, &format!("it has moved to {}", job.target)))?;
    let _ = client.execute("job-dismiss", json!({ "id": id }));
    print(&format!("{}: the disk continues on {}\n", job.disk, job.target))
}

fn prepare(
    report: &DaemonReport,
    save: &SaveArgs,
    job: &JobReport,
    suffix: &str,
) -> anyhow::Result<SavedImages> {
    let format = if job.format == "qcow2" { "qcow2" } else { "raw" };
    let path = PathBuf::from(format!("{}{suffix}", job.target));
    // Without --save, the file must have the target already.
    let path = if save.save { path } else { Path::new(&job.target).to_owned() };
    SavedImages::prepare(report, save, vec![NewImage { disk: job.disk.clone(), path, format, is_new: false }])
}

/// Requests the completion, and waits until the job has ended or is ready again.
fn finish(
    client: &mut ControlClient,
    id: &str,
    interrupted: &mpsc::Receiver<()>,
) -> anyhow::Result<JobReport> {
    match client.execute("job-complete", json!({ "id": id })) {
        // Rejected: it has ended or is being cancelled, which the report says.
        Ok(_) | Err(ClientError::Rejected(_)) => {}
        Err(error) => return Err(anyhow!("{error}")),
    }
    loop {
        let job = find_job(client, id)?;
        if job.state == "concluded" || job.state == "ready" && !job.is_completing {
            return Ok(job);
        }
        match interrupted.recv_timeout(POLL_INTERVAL) {
            Ok(()) => {
                // It may have concluded in the meantime.
                let _ = client.execute("job-cancel", json!({ "id": id }));
            }
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => bail!("signals are not received any more"),
        }
    }
}
