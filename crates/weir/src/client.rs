//! The other end of a daemon's control socket: what `weir status`, `weir throttle` and `weir top`
//! speak through.
//!
//! A QMP client that does one thing at a time: it connects, reads the greeting, leaves negotiation,
//! and then has a command answered before the next. Events that arrive in between are passed over.
//!
//! Never waits without an end: connecting, writing and reading have a deadline each. Never holds
//! more of an answer than [`MAX_ANSWER_BYTES`], since what listens on a path need not be weir.

mod answer;
pub(crate) mod change;
pub(crate) mod latency;
pub(crate) mod rates;
pub(crate) mod report;

use std::{
    fmt,
    io::{self, BufRead as _, BufReader, IoSlice, Read as _, Write as _},
    os::{
        fd::{AsFd, AsRawFd as _},
        unix::net::UnixStream,
    },
    path::{Path, PathBuf, absolute},
    time::Duration,
};

use answer::{Answer, Event, Refusal};
use console::CommandFailure;
use latency::Counted;
use nix::sys::socket::{ControlMessage, MsgFlags, sendmsg};
use report::Report;
use serde_json::{Value, json, value::RawValue};
use settings::control::{ControlSocketLocation, VARIABLE};

/// How long the daemon may take over anything. It answers within milliseconds.
const PATIENCE: Duration = Duration::from_secs(10);
/// Longest line that is read: the status of some ten thousand disks has a tenth of it.
const MAX_ANSWER_BYTES: u64 = 256 << 20;

/// Why a daemon did not do what it was asked. Its text is a whole message, to follow `weir: `.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    /// There is nobody to talk to, or the talk broke off: trying again later makes sense.
    #[error("{0}")]
    Unreachable(String),
    /// There is somebody, who does not answer in time.
    #[error("{0}")]
    Silent(String),
    /// The daemon understood and refused; nothing has changed.
    #[error("{0}")]
    Refused(String),
}

/// The control socket of a daemon.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Target(PathBuf);

impl Target {
    /// What `--qmp` said, else where daemons open it that are not told where. Fails if the variable
    /// for that names no socket.
    pub(crate) fn choose(option: Option<Self>) -> Result<Self, String> {
        option.map_or_else(|| Ok(Self(ControlSocketLocation::for_commands()?.path)), Ok)
    }

    pub(crate) fn path(&self) -> &Path {
        &self.0
    }

    /// The same for a process that works in another directory.
    pub(crate) fn whole(&self) -> io::Result<Self> {
        absolute(&self.0).map(Self)
    }

    fn unreachable(&self, why: &io::Error) -> Error {
        let advice = match why.kind() {
            io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused
                if ControlSocketLocation::is_fallback(&self.0) =>
            {
                format!(
                    "no daemon listens there, and one of this user's is not found, because XDG_RUNTIME_DIR is not set (set it for both, or give both --qmp unix:PATH, or {VARIABLE})"
                )
            }
            io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused => format!(
                "no daemon listens there (start it with `weir serve`, or name its socket with --qmp or {VARIABLE})"
            ),
            io::ErrorKind::PermissionDenied => {
                "no permission (only root and the daemon's own user may; try as one of them)".to_owned()
            }
            io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => {
                "no answer in time (is the daemon stopped, or something else listening there?)".to_owned()
            }
            io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe => {
                "the daemon closed the connection (its log says why: it ends, or this user may not)"
                    .to_owned()
            }
            _ => format!("{why} (is this the socket that the daemon's --qmp names?)"),
        };
        let said = format!("{self}: {advice}");
        match why.kind() {
            io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => Error::Silent(said),
            _ => Error::Unreachable(said),
        }
    }
}

impl std::str::FromStr for Target {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.strip_prefix("unix:") {
            Some(path) if !path.is_empty() => Ok(Self(PathBuf::from(path))),
            _ => Err("is not the address of a control socket; write unix:PATH".to_owned()),
        }
    }
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "unix:{}", self.0.display())
    }
}

pub(crate) struct Client {
    target: Target,
    stream: BufReader<UnixStream>,
}

impl Client {
    /// How long a daemon may take where images are opened and passphrases derived.
    pub(crate) const LONG: Duration = Duration::from_secs(600);

    /// Connects to the daemon that `--qmp` names, or the usual one.
    pub(crate) fn reach(option: Option<Target>) -> Result<Self, CommandFailure> {
        let target = Target::choose(option).map_err(|said| CommandFailure::Usage(anyhow::Error::msg(said)))?;
        Ok(Self::connect(&target)?)
    }

    /// Fails if nobody listens, this user may not, or what listens does not speak QMP.
    pub(crate) fn connect(target: &Target) -> Result<Self, Error> {
        Self::connect_with(target, PATIENCE)
    }

    /// As [`Client::connect`], with so much patience for each message.
    pub(crate) fn connect_with(target: &Target, patience: Duration) -> Result<Self, Error> {
        let open = || {
            let stream = UnixStream::connect(target.path())?;
            stream.set_read_timeout(Some(patience))?;
            stream.set_write_timeout(Some(patience))?;
            Ok(stream)
        };
        let stream = open().map_err(|error| target.unreachable(&error))?;
        let mut client = Self { target: target.clone(), stream: BufReader::new(stream) };
        let greeting = client.line()?;
        let greeting: Value = serde_json::from_slice(&greeting)
            .map_err(|_| client.nonsense("answered with something that is no JSON"))?;
        if greeting.get("QMP").is_none() {
            return Err(client.nonsense("did not greet as a QMP server does"));
        }
        client.execute("qmp_capabilities", json!({}))?;
        Ok(client)
    }

    /// Waits so long for each answer from now on.
    pub(crate) fn with_patience(self, patience: Duration) -> Result<Self, Error> {
        let set = self.stream.get_ref().set_read_timeout(Some(patience));
        set.map_err(|error| self.target.unreachable(&error))?;
        Ok(self)
    }

    pub(crate) fn target(&self) -> &Target {
        &self.target
    }

    /// Fails with the daemon's own words, or if no answer came.
    pub(crate) fn execute(&mut self, command: &str, arguments: Value) -> Result<Value, Error> {
        let text = self.execute_text(command, arguments)?;
        Ok(serde_json::from_str(text.get()).expect("the text was checked as a part of the message"))
    }

    /// As [`Client::execute`], with the text of the answer: the status of thousands of disks is read
    /// into its type several times faster than into a tree of values.
    fn execute_text(&mut self, command: &str, arguments: Value) -> Result<Box<RawValue>, Error> {
        let mut request = json!({ "execute": command });
        if arguments.as_object().is_some_and(|arguments| !arguments.is_empty()) {
            request["arguments"] = arguments;
        }
        self.finish(command, &format!("{request}\n"))
    }

    /// Says the rest of a command, and hears what comes of it.
    fn finish(&mut self, command: &str, rest: &str) -> Result<Box<RawValue>, Error> {
        let written = self.stream.get_mut().write_all(rest.as_bytes());
        written.map_err(|error| self.target.unreachable(&error))?;
        loop {
            match self.message()? {
                Some(Answer::Event(_)) => {}
                Some(Answer::Return(value)) => return Ok(value),
                Some(Answer::Error(Refusal { class, description })) => {
                    return Err(Error::Refused(self.explain(command, &class, description)));
                }
                None => return Err(self.nonsense("answered with something that is no QMP")),
            }
        }
    }

    /// Gives the daemon a descriptor by this name, for the next command that wants it.
    pub(crate) fn pass(&mut self, name: &str, descriptor: impl AsFd) -> Result<(), Error> {
        let request = format!("{}\n", json!({ "execute": "getfd", "arguments": { "fdname": name } }));
        let descriptors = [descriptor.as_fd().as_raw_fd()];
        let beside = [ControlMessage::ScmRights(&descriptors)];
        let socket = self.stream.get_ref().as_raw_fd();
        let bytes = [IoSlice::new(request.as_bytes())];
        let sent = sendmsg::<()>(socket, &bytes, &beside, MsgFlags::MSG_NOSIGNAL, None);
        let sent = sent.map_err(|error| self.target.unreachable(&error.into()))?;
        self.finish("getfd", &request[sent..]).map(drop)
    }

    /// Returns the status of everything that the daemon serves.
    pub(crate) fn status(&mut self) -> Result<Report, Error> {
        self.status_with(json!({}))
    }

    /// As [`Client::status`], without disks, groups, devices and exports: its length does not
    /// depend on their number. An older daemon, which does not have this, returns all of them.
    pub(crate) fn summary(&mut self) -> Result<Report, Error> {
        match self.status_with(json!({ "lists": false })) {
            Err(Error::Refused(_)) => self.status(),
            summary => summary,
        }
    }

    fn status_with(&mut self, arguments: Value) -> Result<Report, Error> {
        let text = self.execute_text("x-weir-query-status", arguments)?;
        // serde reads a struct from a list as well.
        if !text.get().starts_with('{') {
            return Err(self.nonsense("answered with a status that is no object"));
        }
        Report::read(text.get())
            .map_err(|error| self.nonsense(&format!("answered with a status that cannot be read: {error}")))
    }

    /// How many requests of each disk took how long; counted from the first time this is asked.
    pub(crate) fn latencies(&mut self) -> Result<Counted, Error> {
        let answer = self.execute("x-weir-query-latencies", json!({}))?;
        latency::read(answer)
            .map_err(|error| self.nonsense(&format!("answered with latencies that cannot be read: {error}")))
    }

    /// As [`Client::status`], with [`Client::latencies`] in the report; without, of a daemon of
    /// before, which does not count them.
    pub(crate) fn measured(&mut self) -> Result<Report, Error> {
        let mut report = self.status()?;
        report.latencies = match self.latencies() {
            Err(Error::Refused(_)) => Counted::default(),
            counted => counted?,
        };
        Ok(report)
    }

    /// Changes all or none; a refusal names the setting and the rule.
    pub(crate) fn set(
        &mut self,
        name: &str,
        mut settings: serde_json::Map<String, Value>,
    ) -> Result<(), Error> {
        settings.insert("name".to_owned(), Value::from(name));
        self.execute("x-weir-set", Value::Object(settings)).map(drop)
    }

    /// Waits until the export of this id has gone, which may never be. What happened before this
    /// connection was made is not heard of.
    pub(crate) fn await_export_end(mut self, id: &str) -> Result<(), Error> {
        let unlimited = self.stream.get_ref().set_read_timeout(None);
        unlimited.map_err(|error| self.target.unreachable(&error))?;
        loop {
            if let Some(Answer::Event(Event { name, id: Some(of) })) = self.message()?
                && name == "BLOCK_EXPORT_DELETED"
                && of == id
            {
                return Ok(());
            }
        }
    }

    /// One line of the stream. QMP servers end each message with one, QEMU's included.
    fn line(&mut self) -> Result<Vec<u8>, Error> {
        let mut line = Vec::new();
        let read = (&mut self.stream).take(MAX_ANSWER_BYTES).read_until(b'\n', &mut line);
        read.map_err(|error| self.target.unreachable(&error))?;
        if line.last() != Some(&b'\n') {
            if line.len() as u64 == MAX_ANSWER_BYTES {
                return Err(self.nonsense("sent more than an answer can have"));
            }
            return Err(self.target.unreachable(&io::ErrorKind::UnexpectedEof.into()));
        }
        Ok(line)
    }

    /// The next message of the daemon; `None` if it is JSON and no message of QMP.
    fn message(&mut self) -> Result<Option<Answer>, Error> {
        let line = self.line()?;
        Answer::read(&line).map_err(|_| self.nonsense("answered with something that is no JSON"))
    }

    fn nonsense(&self, what: &str) -> Error {
        let target = &self.target;
        Error::Unreachable(format!("{target}: what listens there {what} (is it a weir of this version?)"))
    }

    fn explain(&self, command: &str, class: &str, description: String) -> String {
        match class {
            "CommandNotFound" => {
                let target = &self.target;
                format!("{target}: does not know {command} (is it a weir, and of this version?)")
            }
            _ => description,
        }
    }
}

#[cfg(test)]
pub(crate) mod fake;
#[cfg(test)]
mod tests;
