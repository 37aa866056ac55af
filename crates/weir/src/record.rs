//! `weir record`: records the requests of disks, with their latencies, into a file.
//!
//! ```text
//!   daemon ─► pipe ─► this command ─► FILE, in the format given by its name
//!     ▲                    │
//!     └─ getfd, start, stop ┘
//! ```
//!
//! This process opens and writes the file, so that it belongs to the user and the daemon needs no
//! permission for it. When this command ends, for whatever reason, the pipe loses its reader and
//! the daemon stops recording.

use std::{
    fs::{self, File, OpenOptions},
    io::{self, IsTerminal as _, Read as _, Write as _, stdout},
    os::{
        fd::{AsFd as _, OwnedFd},
        unix::fs::OpenOptionsExt as _,
    },
    path::{Path, PathBuf},
    process,
    sync::mpsc,
    thread,
    time::Duration,
};

use anyhow::{Context as _, anyhow, bail};
use api::{FinishedRecording, RecordingStatus, StartedRecording};
use clap::Args;
use console::{
    CommandFailure, figures, print_json, print_notice,
    signals::{BlockedSignals, SignalRequest},
};
use lab::trace::convert::LiveConversion;
use nix::{
    errno::Errno,
    fcntl::{FcntlArg, Flock, FlockArg, OFlag, fcntl},
    unistd::pipe2,
};
use serde_json::json;

use crate::client::{ControlAddress, ControlClient};

pub(crate) const EXAMPLES: &str = "\
Examples:
  weir record --output day.recording
      All requests of all disks, until Ctrl-C.
  weir record vm1 gold --for 10m --output vm1.recording
      Requests of the disk vm1 and of the disks in the group gold, for ten minutes.
  weir simulate vm1.recording --iops-total 500
      Simulates the effect of a limit.
  weir trace info vm1.recording
      Shows waits, the limits that caused them, and service times.
  weir record --for 1m --output vm1.csv.zst
      As text: times of arrival, admission and completion, and the throttle cause of each request.

A recording takes about 10 bytes per request. It never delays a request: requests that cannot be
recorded in time are counted as lost and reported. The extension of FILE selects a format of `weir
trace convert` (.csv, .iolog, .spc, also followed by .gz or .zst); any other name is a recording. If
this command or the daemon is killed, a recording or .csv is complete up to a second before. FILE -
is standard output.
Exit status: 0 recorded, 1 failed or incomplete, 2 wrong use of the command line.";

/// Name under which the descriptor is passed.
const NAME: &str = "weir-record";
const COPY_BYTES: usize = 256 << 10;
/// Largest pipe for unprivileged users (pipe(7), pipe-max-size).
const PIPE_BYTES: i32 = 1 << 20;

/// Arguments of `weir record`.
#[derive(Debug, Args)]
pub(crate) struct RecordArgs {
    /// Disks, and groups of disks [default: all disks, including those added later]
    #[arg(value_name = "DISK|GROUP")]
    names: Vec<String>,
    /// File to write, which is replaced if it exists; - is standard output
    #[arg(long, short, value_name = "FILE")]
    output: PathBuf,
    /// Length of the recording [default: until SIGINT or SIGTERM]
    #[arg(long = "for", value_name = "TIME", value_parser = settings::long_duration)]
    length: Option<Duration>,
    /// Print a summary of the recording as JSON; not with --output -
    #[arg(long)]
    json: bool,
    /// The daemon's control socket [default: the one that `weir serve` opens]
    #[arg(long, value_name = "unix:PATH")]
    qmp: Option<ControlAddress>,
}

/// Events of the thread that waits for the end.
enum RecordEvent {
    /// The user requested the end.
    Stop,
    /// The pipe reached its end, or writing the file failed.
    Copied(anyhow::Result<()>),
}

pub(crate) fn run(arguments: RecordArgs) -> Result<(), CommandFailure> {
    if arguments.json && arguments.output == Path::new("-") {
        return Err(CommandFailure::Usage(anyhow!(
            "--json: the recording is written to standard output (give --output a file, or omit --json)"
        )));
    }
    let signals = BlockedSignals::block().context("cannot wait for signals")?;
    let mut client = ControlClient::reach(arguments.qmp)?.with_timeout(ControlClient::LONG)?;
    let is_new = !arguments.output.exists();
    let (file, alone) = open(&arguments.output)?;
    let (reader, writer) = pipe().context("cannot create a pipe")?;
    // Only the daemon may hold the write end: its end is then the end of the data.
    client.pass_descriptor(NAME, &writer)?;
    drop(writer);
    let parameters = json!({ "fdname": NAME, "of": arguments.names });
    let started = client.execute_typed("x-weir-record-start", parameters);
    let started: StartedRecording = started.inspect_err(|_| {
        // A failed start must not leave an empty file.
        if is_new && alone.is_some() {
            let _ = fs::remove_file(&arguments.output);
        }
    })?;
    let transcript = LiveConversion::named(&arguments.output);
    // Standard output may be a file with other content: it is not truncated.
    if alone.is_some() {
        file.set_len(0).with_context(|| output_error(&arguments.output))?;
    }
    let (events, event) = mpsc::channel();
    let stop_sender = events.clone();
    let on_signal = move |request| match request {
        // A second Ctrl-C, if writing the file hangs.
        SignalRequest::EndAtOnce(_) => process::exit(1),
        SignalRequest::End(_) => stop_sender.send(RecordEvent::Stop).is_ok(),
        SignalRequest::HangUp | SignalRequest::ReopenLog | SignalRequest::Meaningless(_) => true,
    };
    signals.forward(on_signal).context("cannot start a thread")?;
    let carried = move || match transcript {
        Some(transcript) => transcript.write(File::from(reader), file),
        None => Ok(copy_until_end(reader, file)?),
    };
    thread::spawn(move || events.send(RecordEvent::Copied(carried())));
    print_notice(&format!("recording to {} (stop with Ctrl-C)", arguments.output.display()));
    let first = match arguments.length {
        Some(length) => event.recv_timeout(length).unwrap_or(RecordEvent::Stop),
        None => event.recv().unwrap_or(RecordEvent::Stop),
    };
    // Stopping makes the daemon flush and close its end of the pipe, which ends the copying thread.
    let stopped = client.execute_typed("x-weir-record-stop", json!({ "id": started.id }));
    let (is_early, copied) = match first {
        RecordEvent::Copied(copied) => (true, copied),
        // Data in the pipe must still be written.
        RecordEvent::Stop => {
            let copied = event.iter().find_map(|event| match event {
                RecordEvent::Copied(copied) => Some(copied),
                RecordEvent::Stop => None,
            });
            (false, copied.unwrap_or(Ok(())))
        }
    };
    let output = arguments.output.display();
    copied.with_context(|| format!("{output}: cannot be written (it has the recording until then)"))?;
    if is_early {
        return Err(anyhow!("the daemon has ended ({output} has the recording until then)").into());
    }
    let RecordingStatus { requests, lost, bytes, error, .. } = stopped?;
    let written = transcript.and_then(|_| fs::metadata(&arguments.output).ok()).map(|file| file.len());
    let finished = FinishedRecording {
        output: arguments.output.display().to_string(),
        requests,
        lost,
        bytes: written.unwrap_or(bytes),
        error,
    };
    if arguments.json {
        print_json(&finished)?;
    }
    print_summary(&finished)
}

fn print_summary(finished: &FinishedRecording) -> Result<(), CommandFailure> {
    print_notice(&match finished.requests {
        0 => "no requests".to_owned(),
        requests => {
            format!("{} in {}", figures::counted(requests, "request"), figures::sized(finished.bytes))
        }
    });
    if let Some(error) = &finished.error {
        return Err(anyhow!("the recording is incomplete: {error}").into());
    }
    match finished.lost {
        0 => Ok(()),
        lost => Err(anyhow!(
            "{} lost, as they arrived faster than they could be recorded (the recording marks the gaps)",
            figures::counted(lost, "request")
        )
        .into()),
    }
}

/// Opens the file without truncating it. A regular file is locked against a second recording.
fn open(path: &Path) -> anyhow::Result<(File, Option<Flock<File>>)> {
    if path == Path::new("-") {
        if stdout().is_terminal() {
            bail!("--output -: a recording is not written to a terminal (redirect it, or give a file)");
        }
        return Ok((stdout().as_fd().try_clone_to_owned()?.into(), None));
    }
    // Without O_NONBLOCK, opening a FIFO would block until it has a reader, with signals blocked.
    let mut options = OpenOptions::new();
    options.write(true).create(true).truncate(false).custom_flags(OFlag::O_NONBLOCK.bits());
    let file = options.open(path).map_err(|error| match error.raw_os_error() {
        Some(number) if number == Errno::ENXIO as i32 => {
            anyhow!("--output {}: this pipe has no reader (start its reader first)", path.display())
        }
        _ => anyhow!(error).context(output_error(path)),
    })?;
    // Writes should block: the pipe's reader may be slow.
    fcntl(&file, FcntlArg::F_SETFL(OFlag::empty())).with_context(|| output_error(path))?;
    if !file.metadata().with_context(|| output_error(path))?.is_file() {
        return Ok((file, None));
    }
    let lock = Flock::lock(file.try_clone()?, FlockArg::LockExclusiveNonblock);
    let lock = lock.map_err(|(_, errno)| match errno {
        Errno::EWOULDBLOCK => {
            anyhow!("--output {}: another `weir record` writes to it (choose another file)", path.display())
        }
        other => anyhow!(other).context(output_error(path)),
    })?;
    Ok((file, Some(lock)))
}

fn output_error(path: &Path) -> String {
    format!("--output {}: cannot be written", path.display())
}

/// Pipe with an increased capacity, if the kernel permits it.
fn pipe() -> nix::Result<(OwnedFd, OwnedFd)> {
    let (reader, writer) = pipe2(OFlag::O_CLOEXEC)?;
    let _ = fcntl(&writer, FcntlArg::F_SETPIPE_SZ(PIPE_BYTES));
    Ok((reader, writer))
}

/// Copies until the daemon closes its end.
fn copy_until_end(reader: OwnedFd, mut file: File) -> io::Result<()> {
    let mut reader = File::from(reader);
    let mut piece = vec![0; COPY_BYTES];
    loop {
        match reader.read(&mut piece)? {
            0 => return file.flush(),
            count => file.write_all(&piece[..count])?,
        }
    }
}
