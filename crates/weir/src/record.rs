//! `weir record`: what disks are asked, and how long it takes, into a file.
//!
//! ```text
//!   daemon ─► pipe ─► this command ─► FILE, in the format that its name asks for
//!     ▲                    │
//!     └─ getfd, start, stop ┘
//! ```
//!
//! The file is opened and written here, so that it is of the user who asks, and the daemon needs no
//! right to it. When this command goes, however it does, nobody reads the pipe any more, and the
//! daemon stops recording.

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
use clap::Args;
use console::{
    CommandFailure, figures, print_notice,
    signals::{SignalRequest, BlockedSignals},
};
use lab::trace::convert::LiveConversion;
use nix::{
    errno::Errno,
    fcntl::{FcntlArg, Flock, FlockArg, OFlag, fcntl},
    unistd::pipe2,
};
use serde_json::{Value, json};

use crate::client::{Client, Target};

pub(crate) const EXAMPLES: &str = "\
Examples:
  weir record --output day.recording
      Every request to every disk, until Ctrl-C.
  weir record vm1 gold --for 10m --output vm1.recording
      Those to the disk vm1 and to the disks of the group gold, for ten minutes.
  weir simulate vm1.recording --iops-total 500
      What a limit would have done.
  weir trace info vm1.recording
      How long they waited, for which limits, and how long they were served.
  weir record --for 1m --output vm1.csv.zst
      As text, with when each request came, passed its limits and was complete, and what held it.

A recording takes about 10 bytes a request. No request waits for it: what cannot be kept in time is
counted as lost, and said. A FILE whose name ends as `weir trace convert` has it (.csv, .iolog,
.spc; behind these .gz or .zst) is written in that format, any other as a recording. If this command
or the daemon is killed, a recording and .csv have what came until a second before. --output - is
standard output.
Exit status: 0 recorded, 1 failed or not all of it, 2 wrong use of the command line.";

/// The descriptor's name while it is passed.
const NAME: &str = "weir-record";
const PIECE: usize = 256 << 10;
/// The most that the kernel gives a pipe of who is not root (pipe(7)).
const PIPE_BYTES: i32 = 1 << 20;

/// What `weir record` is told.
#[derive(Debug, Args)]
pub(crate) struct RecordArgs {
    /// Disks, and groups of disks [default: all disks, also those that come later]
    #[arg(value_name = "DISK|GROUP")]
    of: Vec<String>,
    /// Where to; an earlier file is replaced; - is standard output
    #[arg(long, short, value_name = "FILE")]
    output: PathBuf,
    /// How long [default: until SIGINT or SIGTERM]
    #[arg(long = "for", value_name = "TIME", value_parser = settings::long_duration)]
    length: Option<Duration>,
    /// The daemon's control socket [default: the one that `weir serve` opens]
    #[arg(long, value_name = "unix:PATH")]
    qmp: Option<Target>,
}

/// What happens to a recording.
enum Event {
    /// It is to end.
    Asked,
    /// Nothing more comes through the pipe, or the file takes no more.
    Over(anyhow::Result<()>),
}

pub(crate) fn run(arguments: RecordArgs) -> Result<(), CommandFailure> {
    let signals = BlockedSignals::block().context("signals cannot be awaited")?;
    let mut client = Client::reach(arguments.qmp)?.with_patience(Client::LONG)?;
    let is_new = !arguments.output.exists();
    let (file, alone) = open(&arguments.output)?;
    let (reader, writer) = pipe().context("no pipe can be made")?;
    client.pass(NAME, &writer)?;
    drop(writer);
    let begun = client.execute("x-weir-record-start", json!({ "fdname": NAME, "of": arguments.of }));
    let begun = begun.inspect_err(|_| {
        if is_new && alone.is_some() {
            let _ = fs::remove_file(&arguments.output);
        }
    })?;
    let transcript = LiveConversion::named(&arguments.output);
    // What is behind standard output is somebody else's.
    if alone.is_some() {
        file.set_len(0).with_context(|| cannot(&arguments.output))?;
    }
    let (events, event) = mpsc::channel();
    let asked = events.clone();
    let hear = move |request| match request {
        SignalRequest::EndAtOnce(_) => process::exit(1),
        SignalRequest::End(_) => asked.send(Event::Asked).is_ok(),
        SignalRequest::HangUp | SignalRequest::ReopenLog | SignalRequest::Meaningless(_) => true,
    };
    signals.forward(hear).context("no thread can be started")?;
    let carried = move || match transcript {
        Some(transcript) => transcript.write(File::from(reader), file),
        None => Ok(carry(reader, file)?),
    };
    thread::spawn(move || events.send(Event::Over(carried())));
    print_notice(&format!("recording to {} (Ctrl-C ends it)", arguments.output.display()));
    let first = match arguments.length {
        Some(length) => event.recv_timeout(length).unwrap_or(Event::Asked),
        None => event.recv().unwrap_or(Event::Asked),
    };
    let told = client.execute("x-weir-record-stop", json!({ "id": begun["id"] }));
    let (is_early, over) = match first {
        Event::Over(over) => (true, over),
        // What is in the pipe still has to be written.
        Event::Asked => {
            let over = event.iter().find_map(|event| match event {
                Event::Over(over) => Some(over),
                Event::Asked => None,
            });
            (false, over.unwrap_or(Ok(())))
        }
    };
    let output = arguments.output.display();
    over.with_context(|| format!("{output}: cannot be written (it has what was recorded until then)"))?;
    if is_early {
        return Err(anyhow!("the daemon has ended (what it was asked until then is in {output})").into());
    }
    let told = told?;
    let written = transcript.and_then(|_| fs::metadata(&arguments.output).ok()).map(|file| file.len());
    summarise(&told, written.or(told["bytes"].as_u64()))
}

fn summarise(told: &Value, bytes: Option<u64>) -> Result<(), CommandFailure> {
    let number = |key: &str| told[key].as_u64().unwrap_or_default();
    print_notice(&match number("requests") {
        0 => "no requests".to_owned(),
        requests => format!(
            "{} in {}",
            figures::counted(requests, "request"),
            figures::sized(bytes.unwrap_or_default())
        ),
    });
    if let Some(error) = told["error"].as_str() {
        return Err(anyhow!("the recording is not whole: {error}").into());
    }
    match number("lost") {
        0 => Ok(()),
        lost => Err(anyhow!(
            "{} lost, which came faster than could be kept (the recording says where)",
            figures::counted(lost, "request")
        )
        .into()),
    }
}

/// The file as it is, and of a regular one what keeps others from recording into it.
fn open(path: &Path) -> anyhow::Result<(File, Option<Flock<File>>)> {
    if path == Path::new("-") {
        if stdout().is_terminal() {
            bail!("--output -: a recording is nothing to look at (redirect it, or name a file)");
        }
        return Ok((stdout().as_fd().try_clone_to_owned()?.into(), None));
    }
    // A pipe without a reader would be waited for, and no signal would be heard.
    let mut options = OpenOptions::new();
    options.write(true).create(true).truncate(false).custom_flags(OFlag::O_NONBLOCK.bits());
    let file = options.open(path).map_err(|error| match error.raw_os_error() {
        Some(number) if number == Errno::ENXIO as i32 => {
            anyhow!("--output {}: nobody reads from this pipe (start its reader first)", path.display())
        }
        _ => anyhow!(error).context(cannot(path)),
    })?;
    fcntl(&file, FcntlArg::F_SETFL(OFlag::empty())).with_context(|| cannot(path))?;
    if !file.metadata().with_context(|| cannot(path))?.is_file() {
        return Ok((file, None));
    }
    let held = Flock::lock(file.try_clone()?, FlockArg::LockExclusiveNonblock);
    let held = held.map_err(|(_, errno)| match errno {
        Errno::EWOULDBLOCK => {
            anyhow!("--output {}: another weir records into it (name another file)", path.display())
        }
        other => anyhow!(other).context(cannot(path)),
    })?;
    Ok((file, Some(held)))
}

fn cannot(path: &Path) -> String {
    format!("--output {}: cannot be made", path.display())
}

/// A large one, if it may be.
fn pipe() -> nix::Result<(OwnedFd, OwnedFd)> {
    let (reader, writer) = pipe2(OFlag::O_CLOEXEC)?;
    let _ = fcntl(&writer, FcntlArg::F_SETPIPE_SZ(PIPE_BYTES));
    Ok((reader, writer))
}

/// Until the daemon closes its end.
fn carry(reader: OwnedFd, mut file: File) -> io::Result<()> {
    let mut reader = File::from(reader);
    let mut piece = vec![0; PIECE];
    loop {
        match reader.read(&mut piece)? {
            0 => return file.flush(),
            count => file.write_all(&piece[..count])?,
        }
    }
}
