//! Jobs: their list and settings, and QEMU's commands for jobs and block jobs. The modules
//! [`backup`](super::backup) and [`stream`](super::stream) start them.
//!
//! A block job's `device` is its id, as for QEMU's jobs that were started with one.

use std::rc::Rc;

use block::layer::throttle::BackgroundSettings;
use jobs::job::{Completion, Job, JobRefusal, JobState};
use policy::throttle::NodeShare;
use serde_json::{Value, json};

use crate::{
    job_start::{check_settings, notify_dismissal},
    qmp::{
        arguments::QmpArguments,
        command::{QmpCommand, response},
        error::{QmpError, QmpErrorClass},
        json::excerpt,
    },
    registry::{Registry, RunningJob},
};

/// Largest limit, as for disks.
pub(super) const MAX_RATE: u64 = 1_000_000_000_000_000;

/// Limits and weight that a command gives; the others stay.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct GivenSettings {
    pub(super) bps_total: Option<u64>,
    iops_total: Option<u64>,
    /// `Some(None)` returns to spare capacity.
    weight: Option<Option<u32>>,
}

impl GivenSettings {
    pub(super) fn read(arguments: &mut QmpArguments) -> Result<Self, QmpError> {
        let weights = u64::from(*NodeShare::WEIGHTS.start())..=u64::from(*NodeShare::WEIGHTS.end());
        let weight = match arguments.take_null("weight") {
            true => Some(None),
            false => arguments.number("weight", weights)?.map(|weight| u32::try_from(weight).ok()),
        };
        Ok(Self {
            bps_total: arguments.number("bps-total", 0..=MAX_RATE)?,
            iops_total: arguments.number("iops-total", 0..=MAX_RATE)?,
            weight,
        })
    }

    pub(super) fn over(&self, settings: BackgroundSettings) -> BackgroundSettings {
        BackgroundSettings {
            bps_total: self.bps_total.unwrap_or(settings.bps_total),
            iops_total: self.iops_total.unwrap_or(settings.iops_total),
            weight: self.weight.unwrap_or(settings.weight),
        }
    }
}

fn generic(error: anyhow::Error) -> QmpError {
    QmpError::from_daemon_error(error)
}

query!(QueryJobReports, "x-weir-query-jobs", |registry| {
    response(registry.jobs.all().iter().map(|job| job.report(&registry.disks)).collect::<Vec<_>>())
});

#[derive(Debug)]
pub(super) struct SetJob {
    id: String,
    settings: GivenSettings,
}

impl QmpCommand for SetJob {
    const NAME: &'static str = "x-weir-job-set";

    fn read(arguments: &mut QmpArguments) -> Result<Self, QmpError> {
        let (id, settings) = (arguments.required("id")?, GivenSettings::read(arguments)?);
        if settings == GivenSettings::default() {
            let message = "nothing to change (give bps-total, iops-total or weight)";
            return Err(QmpError::generic(message.to_owned()));
        }
        Ok(Self { id, settings })
    }

    async fn run(self, registry: Rc<Registry>) -> Result<Value, QmpError> {
        let job = job(&registry, &self.id)?;
        set(&registry, &job, &self.settings)?;
        Ok(json!({}))
    }
}

fn set(registry: &Registry, job: &RunningJob, settings: &GivenSettings) -> Result<(), QmpError> {
    if job.job.state() == JobState::Concluded {
        return Err(QmpError::generic(format!("job {}: it has concluded", job.job.id())));
    }
    let settings = settings.over(job.member.settings());
    let disk = registry.disks.get(&job.disk)?;
    check_settings(&disk.disk, settings).map_err(generic)?;
    Ok(job.member.set(settings)?)
}

fn job(registry: &Registry, id: &str) -> Result<Rc<RunningJob>, QmpError> {
    let unknown = || {
        let id = excerpt(id);
        QmpError::generic(format!("job {id}: no job has this id (`weir jobs` lists all)"))
    };
    registry.jobs.find(id).ok_or_else(unknown)
}

/// The running job that is named as a device.
fn block_job(registry: &Registry, device: &str) -> Result<Rc<RunningJob>, QmpError> {
    let running = registry.jobs.find(device).filter(|job| job.job.state() != JobState::Concluded);
    let unknown = || {
        let description = format!("Block job '{}' not found", excerpt(device));
        QmpError::new(QmpErrorClass::DeviceNotActive, description)
    };
    running.ok_or_else(unknown)
}

fn refused(job: &Job, error: JobRefusal) -> QmpError {
    let id = job.id();
    match job.is_cancelled() && job.state() != JobState::Concluded {
        // The state alone would not explain it: a job that is being cancelled may still be running.
        true => QmpError::generic(format!("job {id}: it is being cancelled (wait for its end)")),
        false => QmpError::generic(format!("job {id}: {error}")),
    }
}

/// Defines a command that has an effect on one job.
macro_rules! job_command {
    ($type:ident, $name:literal, $key:literal, $find:path, |$registry:pat_param, $job:pat_param| $effect:expr) => {
        #[derive(Debug)]
        pub(super) struct $type(String);

        impl QmpCommand for $type {
            const NAME: &'static str = $name;

            fn read(arguments: &mut QmpArguments) -> Result<Self, QmpError> {
                Ok(Self(arguments.required($key)?))
            }

            async fn run(self, registry: Rc<Registry>) -> Result<Value, QmpError> {
                let found = $find(&registry, &self.0)?;
                let effect = |$registry: &Registry, $job: &RunningJob| $effect;
                effect(&registry, &found).map_err(|error| refused(&found.job, error))?;
                Ok(json!({}))
            }
        }
    };
}

job_command!(PauseJob, "job-pause", "id", job, |_, job| job.job.pause());
job_command!(ResumeJob, "job-resume", "id", job, |_, job| job.job.resume());
job_command!(CancelJob, "job-cancel", "id", job, |_, job| job.job.cancel());
job_command!(CompleteJob, "job-complete", "id", job, |_, job| job.job.complete(Completion::Switch));
job_command!(DismissJob, "job-dismiss", "id", job, |registry, job| {
    match registry.jobs.dismiss(job) {
        true => {
            notify_dismissal(registry, job.job.id().to_string());
            Ok(())
        }
        false => Err(JobRefusal::State { state: job.job.state(), action: "dismissed" }),
    }
});
job_command!(PauseBlockJob, "block-job-pause", "device", block_job, |_, job| job.job.pause());
job_command!(ResumeBlockJob, "block-job-resume", "device", block_job, |_, job| job.job.resume());
job_command!(CompleteBlockJob, "block-job-complete", "device", block_job, |_, job| {
    job.job.complete(Completion::Switch)
});

#[derive(Debug)]
pub(super) struct CancelBlockJob {
    device: String,
    is_forced: bool,
}

impl QmpCommand for CancelBlockJob {
    const NAME: &'static str = "block-job-cancel";

    fn read(arguments: &mut QmpArguments) -> Result<Self, QmpError> {
        Ok(Self {
            device: arguments.required("device")?,
            is_forced: arguments.optional("force")?.unwrap_or(false),
        })
    }

    async fn run(self, registry: Rc<Registry>) -> Result<Value, QmpError> {
        let job = block_job(&registry, &self.device)?;
        // A mirror that is ready ends with a target of this instant, as in QEMU.
        let cancelled = match job.job.state() {
            JobState::Ready if !self.is_forced => job.job.complete(Completion::Stay),
            _ => job.job.cancel(),
        };
        cancelled.map_err(|error| refused(&job.job, error))?;
        Ok(json!({}))
    }
}

#[derive(Debug)]
pub(super) struct SetBlockJobSpeed {
    device: String,
    speed: u64,
}

impl QmpCommand for SetBlockJobSpeed {
    const NAME: &'static str = "block-job-set-speed";

    fn read(arguments: &mut QmpArguments) -> Result<Self, QmpError> {
        Ok(Self {
            device: arguments.required("device")?,
            speed: arguments.number("speed", 0..=MAX_RATE)?.ok_or_else(|| QmpError::missing("speed"))?,
        })
    }

    async fn run(self, registry: Rc<Registry>) -> Result<Value, QmpError> {
        let job = block_job(&registry, &self.device)?;
        let settings = GivenSettings { bps_total: Some(self.speed), ..GivenSettings::default() };
        set(&registry, &job, &settings)?;
        Ok(json!({}))
    }
}

query!(QueryJobs, "query-jobs", |registry| {
    let entry = |job: &Rc<RunningJob>| {
        let report = job.report(&registry.disks);
        let mut entry = json!({
            "id": report.id,
            "type": report.kind,
            "status": report.state,
            "current-progress": report.done_bytes,
            "total-progress": report.total_bytes,
        });
        if let Some(error) = report.error {
            entry["error"] = error.into();
        }
        entry
    };
    Value::Array(registry.jobs.all().iter().map(entry).collect())
});

query!(QueryBlockJobs, "query-block-jobs", |registry| {
    let entry = |job: &Rc<RunningJob>| {
        let report = job.report(&registry.disks);
        let mut entry = json!({
            "type": report.kind,
            "device": report.id,
            "len": report.total_bytes,
            "offset": report.done_bytes,
            "busy": report.state == JobState::Running.name(),
            "paused": report.state == JobState::Paused.name(),
            "speed": report.bps_total.unwrap_or(0),
            "io-status": if report.error.is_some() { "failed" } else { "ok" },
            "ready": report.state == JobState::Ready.name(),
            "status": report.state,
            "auto-finalize": true,
            "auto-dismiss": job.is_auto_dismissed,
        });
        if let Some(error) = report.error {
            entry["error"] = error.into();
        }
        entry
    };
    Value::Array(registry.jobs.all().iter().map(entry).collect())
});
