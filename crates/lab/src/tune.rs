//! `weir tune`: measures configurations of a disk on the user's storage, and recommends some.
//!
//! ```text
//!   target ─► images ─► search ──turn──► measure ──samples──► search ─► … ─► choice ─► recommend ─► findings ─► text, JSON, HTML
//!             created,  next slice,      one slice                          per goal   gain, cost,
//!             filled    stop rule        of time                                       commands
//! ```
//!
//! Decisions (`search`, `choice`, `samples`) are separate from I/O (`images`, `measure`) and use no
//! clock. Never leaves an image behind, and writes only to its own files, or to a device on
//! request.

mod apply;
mod arguments;
mod choice;
mod configurations;
mod findings;
mod goal;
mod images;
mod measure;
mod preset;
mod recommend;
mod resume;
mod run;
mod samples;
mod search;
mod session;
mod stop;
mod target;

use std::{io::IsTerminal as _, path::Path, rc::Rc};

use anyhow::{Context as _, anyhow};
pub use arguments::{EXAMPLES, TuneArgs};
use console::{CommandFailure, on_reactor, print, progress::StepProgress};
pub(crate) use goal::TuneGoal;
use image::{
    Image,
    open::{ImageOptions, open},
};
pub(crate) use preset::Preset;
use storage::{CacheMode, ImageFormat, OpenOptions};

use self::{
    resume::StoredSamples,
    run::TuneRunParameters,
    samples::TuneSamples,
    session::TuneSession,
    stop::TuneStop,
    target::{InspectedImage, TuneTarget, TuneTargetKind, TuneTargetOptions},
};
use super::result::{Findings, HeaderStart, INTERRUPTED, ResultFile, ResultHeader};

#[derive(Debug)]
struct TuneOutcome {
    findings: Findings,
    text: String,
    details: serde_json::Value,
    failed: Option<anyhow::Error>,
}

/// Measures, and recommends configurations.
///
/// # Errors
/// Fails on anything that prevents the measurement; results until then are printed and saved.
pub fn run(arguments: TuneArgs) -> Result<(), CommandFailure> {
    let header_start = ResultHeader::begin();
    arguments.results.check()?;
    let stop = TuneStop::after(arguments.budget)?;
    let earlier = arguments.resume.as_deref().map(StoredSamples::load).transpose()?;
    let options = TuneTargetOptions {
        path: &arguments.path,
        // A resumed run must have the same size, which the earlier result contains.
        size_bytes: arguments.size.or(earlier.as_ref().map(|stored| stored.size_bytes)),
        format: arguments.format,
        write: arguments.write,
        force: arguments.force,
        budget_seconds: arguments.budget.as_secs(),
    };
    let place = Rc::new(TuneTarget::open(options, inspect_image)?);
    // From here on a second interruption also removes the directory.
    place.register_for_removal(&stop);
    let parameters = TuneRunParameters {
        place: Rc::clone(&place),
        stop: stop.clone(),
        progress: StepProgress::new(arguments.json),
        budget: arguments.budget,
        seed: arguments.seed,
    };
    let outcome = if let Some(preset) = arguments.preset {
        if !matches!(place.kind, TuneTargetKind::Made { .. }) {
            return Err(CommandFailure::Usage(anyhow!(
                "{}: a published table is measured on images that are created for it (name a directory)",
                arguments.path.display()
            )));
        }
        on_reactor(async move { Ok(preset::measure(preset, parameters).await) })?
    } else {
        let (samples, slice) = match &earlier {
            Some(earlier) => (earlier.samples(&place, &place.space())?, Some(earlier.slice())),
            None => (TuneSamples::default(), None),
        };
        let session = TuneSession::new(parameters, samples, slice, &arguments);
        on_reactor(async move { Ok(session.work().await) })?
    };
    print_and_save(outcome, stop.is_interrupted(), &arguments, header_start)
}

/// An image's properties, and the amount of data in its first `part` bytes (or all).
fn inspect_image(
    path: &Path,
    format: Option<ImageFormat>,
    part: Option<u64>,
) -> anyhow::Result<InspectedImage> {
    let name = path.display().to_string();
    let text = path.to_str().with_context(|| format!("{name}: not UTF-8 (use another name of it)"))?;
    let spec = format!("file:{text}");
    let storage =
        OpenOptions { cache: CacheMode::Writeback, format, read_only: true, ..OpenOptions::default() };
    let found = on_reactor(async move {
        let image = open(&spec, ImageOptions { storage, ..ImageOptions::default() }).await?;
        let cluster_bytes = match &image {
            Image::Raw(_) => None,
            Image::Qcow2(qcow2) => Some(qcow2.header().cluster_bytes()),
        };
        let size_bytes = image.size_bytes();
        let end = part.unwrap_or(size_bytes).min(size_bytes);
        let (mut at, mut data_bytes) = (0, 0);
        while at < end {
            // Both holes and zeros are read without the disk.
            for extent in image.block_status(at, end - at).await? {
                at += extent.length;
                data_bytes += if extent.hole || extent.zero { 0 } else { extent.length };
            }
        }
        let found = InspectedImage { size_bytes, cluster_bytes, data_bytes };
        image.close().await?;
        Ok(found)
    });
    found.map_err(|failure| match failure {
        CommandFailure::Usage(error) | CommandFailure::Failed(error) => error,
        CommandFailure::Found(status) => anyhow::anyhow!("{name}: cannot be opened ({status})"),
    })
}

fn print_and_save(
    outcome: TuneOutcome,
    interrupted: bool,
    arguments: &TuneArgs,
    header_start: HeaderStart,
) -> Result<(), CommandFailure> {
    let TuneOutcome { findings, text, details, failed } = outcome;
    let mut result = ResultFile::new(header_start.end(Some(&arguments.path)), findings);
    result.details = details;
    result.partial = match &failed {
        Some(error) => Some(format!("it failed: {error:#}")),
        None => interrupted.then(|| INTERRUPTED.to_owned()),
    };
    let printed = if arguments.json {
        let json = serde_json::to_string_pretty(&result).context("the result cannot be written as JSON")?;
        print(&(json + "\n"))
    } else {
        let mark = result.partial.as_ref().map_or(String::new(), |why| format!("Partial: {why}.\n\n"));
        print(&(mark + &text))
    };
    // Saved even if standard output is closed.
    let saved = arguments.results.save_files(&result);
    printed?;
    saved?;
    match failed {
        Some(error) => {
            let place = arguments.path.display();
            Err(CommandFailure::Failed(error.context(format!("{place}: cannot be measured to the end"))))
        }
        None if interrupted => Err(CommandFailure::Failed(anyhow!(
            "interrupted: all files were removed (--resume continues with the file of --result)"
        ))),
        None => Ok(()),
    }
}

fn is_bold() -> bool {
    std::io::stdout().is_terminal()
}
