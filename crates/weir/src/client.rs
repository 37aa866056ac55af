//! Client of a daemon's control socket, for `weir status`, `weir throttle`, `weir top` and others.
//!
//! A QMP client with one command in flight: it connects, reads the greeting, negotiates, and then
//! waits for the response of each command before it sends the next. Events in between are ignored.
//!
//! Never waits without limit: connecting, writing and reading have a deadline each. Never holds
//! more of a response than [`MAX_RESPONSE_BYTES`], since the process that listens need not be weir.

pub(crate) mod change;
pub(crate) mod latency;
mod message;
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

use api::ClusterReport;
use console::CommandFailure;
use latency::DiskRequestTimes;
use message::{QmpRequest, QmpServerError, QmpServerEvent, QmpServerMessage};
use nix::sys::socket::{ControlMessage, MsgFlags, sendmsg};
use report::DaemonReport;
use serde::de::DeserializeOwned;
use serde_json::{Value, json, value::RawValue};
use settings::control::{ControlSocketLocation, VARIABLE};

/// Deadline for each message. A daemon responds within milliseconds.
const TIMEOUT: Duration = Duration::from_secs(10);
/// Longest line that is read. The status of ten thousand disks has about a tenth of it.
const MAX_RESPONSE_BYTES: u64 = 256 << 20;

/// Failure of a command. Its text is a complete message, to follow `weir: `.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ClientError {
    /// No daemon listens, or the connection broke: a later attempt may succeed.
    #[error("{0}")]
    Unreachable(String),
    /// The connection is open, and no response came in time.
    #[error("{0}")]
    Timeout(String),
    /// The daemon rejected the command; nothing has changed.
    #[error("{0}")]
    Rejected(String),
}

/// The control socket of a daemon.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ControlAddress(PathBuf);

impl ControlAddress {
    /// The socket given by `--qmp`, else the default one. Fails if the environment variable names
    /// no socket.
    pub(crate) fn choose(option: Option<Self>) -> Result<Self, String> {
        option.map_or_else(|| Ok(Self(ControlSocketLocation::for_commands()?.path)), Ok)
    }

    pub(crate) fn path(&self) -> &Path {
        &self.0
    }

    /// This socket with an absolute path, for a process in another directory.
    pub(crate) fn to_absolute(&self) -> io::Result<Self> {
        absolute(&self.0).map(Self)
    }

    fn unreachable(&self, why: &io::Error) -> ClientError {
        let advice = match why.kind() {
            io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused
                // Without XDG_RUNTIME_DIR, a user's daemon and its commands would look in different
                // directories.
                if ControlSocketLocation::is_fallback(&self.0) =>
            {
                format!(
                    "no daemon listens there, and a daemon of this user cannot be found, because \
                     XDG_RUNTIME_DIR is not set (set it for both, or give both --qmp unix:PATH, or \
                     {VARIABLE})"
                )
            }
            io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused => format!(
                "no daemon listens there (start it with `weir serve`, or give its socket with \
                 --qmp or {VARIABLE})"
            ),
            io::ErrorKind::PermissionDenied => {
                "no permission (only root and the daemon's user have access)".to_owned()
            }
            io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => {
                "no response in time (is the daemon stopped, or another program listening there?)".to_owned()
            }
            io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe => {
                "the daemon closed the connection (it is ending, or this user has no permission: see its log)"
                    .to_owned()
            }
            _ => format!("{why} (is this the socket that the daemon's --qmp names?)"),
        };
        let message = format!("{self}: {advice}");
        match why.kind() {
            io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => ClientError::Timeout(message),
            _ => ClientError::Unreachable(message),
        }
    }
}

impl std::str::FromStr for ControlAddress {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.strip_prefix("unix:") {
            Some(path) if !path.is_empty() => Ok(Self(PathBuf::from(path))),
            _ => Err("is not the address of a control socket; write unix:PATH".to_owned()),
        }
    }
}

impl fmt::Display for ControlAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "unix:{}", self.0.display())
    }
}

pub(crate) struct ControlClient {
    target: ControlAddress,
    stream: BufReader<UnixStream>,
}

impl ControlClient {
    /// Deadline for commands that open images or derive keys from passphrases.
    pub(crate) const LONG: Duration = Duration::from_secs(600);

    /// Connects to the daemon that `--qmp` names, or to the default one.
    pub(crate) fn reach(option: Option<ControlAddress>) -> Result<Self, CommandFailure> {
        let target = ControlAddress::choose(option)
            .map_err(|message| CommandFailure::Usage(anyhow::Error::msg(message)))?;
        Ok(Self::connect(&target)?)
    }

    /// Fails if no process listens, this user lacks permission, or the peer does not speak QMP.
    pub(crate) fn connect(target: &ControlAddress) -> Result<Self, ClientError> {
        Self::connect_with(target, TIMEOUT)
    }

    /// As [`ControlClient::connect`], with this deadline for each message.
    pub(crate) fn connect_with(target: &ControlAddress, timeout: Duration) -> Result<Self, ClientError> {
        let open = || {
            let stream = UnixStream::connect(target.path())?;
            stream.set_read_timeout(Some(timeout))?;
            stream.set_write_timeout(Some(timeout))?;
            Ok(stream)
        };
        let stream = open().map_err(|error| target.unreachable(&error))?;
        let mut client = Self { target: target.clone(), stream: BufReader::new(stream) };
        let greeting = client.line()?;
        let greeting: Value = serde_json::from_slice(&greeting)
            .map_err(|_| client.protocol_error("sent a response that is not JSON"))?;
        // Any JSON server could listen on the path; the greeting identifies QMP.
        if greeting.get("QMP").is_none() {
            return Err(client.protocol_error("did not send a QMP greeting"));
        }
        // A QMP server accepts no other command before the negotiation.
        client.query("qmp_capabilities")?;
        Ok(client)
    }

    /// Sets the deadline of all further responses.
    pub(crate) fn with_timeout(self, timeout: Duration) -> Result<Self, ClientError> {
        let set = self.stream.get_ref().set_read_timeout(Some(timeout));
        set.map_err(|error| self.target.unreachable(&error))?;
        Ok(self)
    }

    pub(crate) fn target(&self) -> &ControlAddress {
        &self.target
    }

    /// Executes a command. Fails with the daemon's own error, or if no response came.
    pub(crate) fn execute(&mut self, command: &str, arguments: Value) -> Result<Value, ClientError> {
        let text = self.execute_text(command, arguments)?;
        Ok(serde_json::from_str(text.get()).expect("the text was checked as a part of the message"))
    }

    /// As [`ControlClient::execute`], without arguments.
    pub(crate) fn query(&mut self, command: &str) -> Result<Value, ClientError> {
        self.execute(command, Value::Null)
    }

    /// As [`ControlClient::execute`], with the type of the result.
    pub(crate) fn execute_typed<R: DeserializeOwned>(
        &mut self,
        command: &str,
        arguments: Value,
    ) -> Result<R, ClientError> {
        let text = self.execute_text(command, arguments)?;
        serde_json::from_str(text.get())
            .map_err(|error| self.protocol_error(&format!("sent a malformed response to {command}: {error}")))
    }

    /// As [`ControlClient::execute`], with the text of the response: deserializing the status of
    /// thousands of disks from text is several times faster than from a tree of values.
    fn execute_text(&mut self, command: &str, arguments: Value) -> Result<Box<RawValue>, ClientError> {
        self.finish_command(command, &QmpRequest::line(command, arguments))
    }

    /// Sends the rest of a command and waits for its response.
    fn finish_command(&mut self, command: &str, rest: &str) -> Result<Box<RawValue>, ClientError> {
        let written = self.stream.get_mut().write_all(rest.as_bytes());
        written.map_err(|error| self.target.unreachable(&error))?;
        loop {
            match self.message()? {
                // Events are asynchronous and may precede any response.
                Some(QmpServerMessage::Event(_)) => {}
                Some(QmpServerMessage::Return(value)) => return Ok(value),
                Some(QmpServerMessage::Error(QmpServerError { class, description })) => {
                    return Err(ClientError::Rejected(self.explain(command, &class, description)));
                }
                None => return Err(self.protocol_error("sent a response that is not QMP")),
            }
        }
    }

    /// Passes a descriptor under this name, for the next command that uses it.
    pub(crate) fn pass_descriptor(&mut self, name: &str, descriptor: impl AsFd) -> Result<(), ClientError> {
        let request = QmpRequest::line("getfd", json!({ "fdname": name }));
        let descriptors = [descriptor.as_fd().as_raw_fd()];
        let ancillary = [ControlMessage::ScmRights(&descriptors)];
        let socket = self.stream.get_ref().as_raw_fd();
        let bytes = [IoSlice::new(request.as_bytes())];
        let sent = sendmsg::<()>(socket, &bytes, &ancillary, MsgFlags::MSG_NOSIGNAL, None);
        let sent = sent.map_err(|error| self.target.unreachable(&error.into()))?;
        // SCM_RIGHTS travels with the first byte. The rest of a short send needs no ancillary data.
        self.finish_command("getfd", &request[sent..]).map(drop)
    }

    /// Status of everything that the daemon serves.
    pub(crate) fn status(&mut self) -> Result<DaemonReport, ClientError> {
        self.status_with(Value::Null)
    }

    /// As [`ControlClient::status`], without disks, groups, devices and exports: its length does
    /// not depend on their number. A daemon of an older version returns all of them.
    pub(crate) fn summary(&mut self) -> Result<DaemonReport, ClientError> {
        match self.status_with(json!({ "lists": false })) {
            // An older daemon rejects the unknown argument.
            Err(ClientError::Rejected(_)) => self.status(),
            summary => summary,
        }
    }

    fn status_with(&mut self, arguments: Value) -> Result<DaemonReport, ClientError> {
        let text = self.execute_text("x-weir-query-status", arguments)?;
        // serde deserializes a struct from a list as well.
        if !text.get().starts_with('{') {
            return Err(self.protocol_error("sent a status that is not an object"));
        }
        DaemonReport::read(text.get())
            .map_err(|error| self.protocol_error(&format!("sent a malformed status: {error}")))
    }

    /// Hosts and groups of the daemon's cluster.
    pub(crate) fn cluster(&mut self) -> Result<ClusterReport, ClientError> {
        self.execute_typed("x-weir-query-cluster", Value::Null)
    }

    /// Latency histograms of each disk. The daemon counts from the first such command.
    pub(crate) fn latencies(&mut self) -> Result<DiskRequestTimes, ClientError> {
        let response = self.query("x-weir-query-latencies")?;
        latency::read(response)
            .map_err(|error| self.protocol_error(&format!("sent malformed latencies: {error}")))
    }

    /// As [`ControlClient::status`], with [`ControlClient::latencies`] in the report. A daemon of
    /// an older version does not count latencies; they are empty then.
    pub(crate) fn status_with_latencies(&mut self) -> Result<DaemonReport, ClientError> {
        let mut report = self.status()?;
        report.latencies = match self.latencies() {
            Err(ClientError::Rejected(_)) => DiskRequestTimes::default(),
            counted => counted?,
        };
        Ok(report)
    }

    /// Changes all settings or none; an error names the setting and the rule.
    pub(crate) fn set(
        &mut self,
        name: &str,
        mut settings: serde_json::Map<String, Value>,
    ) -> Result<(), ClientError> {
        settings.insert("name".to_owned(), Value::from(name));
        self.execute("x-weir-set", Value::Object(settings)).map(drop)
    }

    /// Deletes an export. `hard` disconnects its clients; otherwise the daemon refuses while there
    /// are some.
    pub(crate) fn delete_export(&mut self, id: &str, hard: bool) -> Result<(), ClientError> {
        let mode = if hard { "hard" } else { "safe" };
        self.execute("block-export-del", json!({ "id": id, "mode": mode })).map(drop)
    }

    /// Waits, without limit, until the export of this id is deleted. Deletions before this
    /// connection was made are missed.
    pub(crate) fn await_export_end(mut self, id: &str) -> Result<(), ClientError> {
        let unlimited = self.stream.get_ref().set_read_timeout(None);
        unlimited.map_err(|error| self.target.unreachable(&error))?;
        loop {
            if let Some(QmpServerMessage::Event(QmpServerEvent { name, id: Some(export) })) =
                self.message()?
                && name == "BLOCK_EXPORT_DELETED"
                && export == id
            {
                return Ok(());
            }
        }
    }

    /// Reads one line. QMP servers, including QEMU, end each message with a newline.
    fn line(&mut self) -> Result<Vec<u8>, ClientError> {
        let mut line = Vec::new();
        let read = (&mut self.stream).take(MAX_RESPONSE_BYTES).read_until(b'\n', &mut line);
        read.map_err(|error| self.target.unreachable(&error))?;
        // A truncated line is not a message: the peer hung up, or it exceeds the limit.
        if line.last() != Some(&b'\n') {
            if line.len() as u64 == MAX_RESPONSE_BYTES {
                return Err(self.protocol_error("sent a response that is too long"));
            }
            return Err(self.target.unreachable(&io::ErrorKind::UnexpectedEof.into()));
        }
        Ok(line)
    }

    /// The next message; `None` if it is JSON but not a QMP message.
    fn message(&mut self) -> Result<Option<QmpServerMessage>, ClientError> {
        let line = self.line()?;
        QmpServerMessage::read(&line).map_err(|_| self.protocol_error("sent a response that is not JSON"))
    }

    fn protocol_error(&self, problem: &str) -> ClientError {
        let target = &self.target;
        ClientError::Unreachable(format!("{target}: the server {problem} (is it weir of this version?)"))
    }

    fn explain(&self, command: &str, class: &str, description: String) -> String {
        match class {
            "CommandNotFound" => {
                let target = &self.target;
                format!("{target}: the server does not support {command} (is it weir of this version?)")
            }
            _ => description,
        }
    }
}

#[cfg(test)]
pub(crate) mod fake;
#[cfg(test)]
mod tests;
