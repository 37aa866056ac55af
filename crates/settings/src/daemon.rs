//! The config of the daemon process, and the table of its keys.
//!
//! `[daemon]` of the config file and the options of `weir serve` follow from the table
//! ([`daemon_keys`]).

mod security;

use std::{path::PathBuf, sync::LazyLock, thread};

use policy::access::AccessRules;
use reactor::PollingMode;

use crate::{
    ControlSocketPolicy, EventCommand, FileOwner, HttpConfig, ListenAddress, LogFormat, LogSettings,
    NbdServerConfig, RecordingConfig, SandboxMode, SocketAccess, TlsMode,
    address::resolve_socket,
    clients,
    diagnostics::{Diagnostics, Origin},
    key::{
        ConfigKey, ConfigValue, KeyField, KeyLiteral,
        KeyType::{Count, Flag, Integer, Path, Size, Table, Text, Word, WordOr},
        each, maybe, one, table,
    },
    log,
    origins::{ConfigWithOrigins, KeyTable},
    parse_http_name,
};

/// Largest default number of workers: beyond it the queue of a disk is the bottleneck.
const MAX_DEFAULT_WORKERS: usize = 8;
/// Largest number of workers: each has rings and buffers of several MiB.
pub const MAX_WORKERS: usize = 256;
/// As the default of QEMU's `max-connections`.
const DEFAULT_MAX_CONNECTIONS: u32 = 100;
/// Smallest budget of memory for data, in bytes: half of it is reserved for requests.
pub const MIN_MEMORY: u64 = 128 << 20;

/// Settings of the process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DaemonConfig {
    /// Addresses of NBD servers for disks without exports of their own.
    pub nbd: Vec<NbdServerConfig>,
    /// Permissions of the Unix sockets of exports.
    pub sockets: SocketAccess,
    /// True to end the daemon when the last client disconnects.
    pub exit_when_idle: bool,
    /// Unix sockets of the control protocol.
    pub qmp: Vec<PathBuf>,
    /// Control socket at the default address: forced on or off. `None`: opened if `qmp` is empty
    /// and the address is free.
    pub control: Option<bool>,
    /// Address of the metrics, over HTTP.
    pub metrics: Option<ListenAddress>,
    /// Command that receives events.
    pub on_event: Option<EventCommand>,
    /// Address of the page and its API, over HTTP.
    pub http_address: Option<ListenAddress>,
    /// File of the token that permits changes over HTTP.
    pub http_token_file: Option<PathBuf>,
    /// Names of this host in URLs of the page, in lower case.
    pub http_names: Vec<String>,
    /// Number of I/O threads, from 1 to [`MAX_WORKERS`].
    pub workers: usize,
    /// Busy polling of the workers.
    pub poll: PollingMode,
    /// Maximum number of simultaneous clients of each server; 0 is unlimited.
    pub max_connections: u32,
    /// Maximum number of simultaneous clients with one address; 0 is unlimited, `None` nine tenths
    /// of `max_connections`.
    pub max_connections_per_address: Option<u32>,
    /// Access rules for NBD clients.
    pub access: AccessRules,
    /// Memory budget for data in bytes; `None` derives it from the machine's memory.
    pub memory: Option<u64>,
    /// Encryption of connections.
    pub tls_mode: TlsMode,
    /// Directory of X.509 certificates.
    pub tls_certificates: Option<PathBuf>,
    /// True if clients have to present a certificate.
    pub tls_verify_peer: bool,
    /// File of pre-shared keys.
    pub tls_psk: Option<PathBuf>,
    /// Content, form and destination of the log.
    pub log: LogSettings,
    /// File with the process id, present while the daemon serves.
    pub pid_file: Option<PathBuf>,
    /// State directory; `None` is the default one.
    pub state: Option<PathBuf>,
    /// Directory outside of which no image file may be opened.
    pub image_root: Option<PathBuf>,
    /// File of the control groups' limits to enforce.
    pub cgroup_limits: Option<PathBuf>,
    /// Settings of the recordings of all requests.
    pub record: Option<RecordingConfig>,
    /// Sandbox of the daemon after its start.
    pub sandbox: SandboxMode,
    /// User of the daemon after its start; `None` keeps the user that started it.
    pub user: Option<FileOwner>,
}

impl Default for DaemonConfig {
    fn default() -> Self {
        Self {
            nbd: Vec::new(),
            sockets: SocketAccess::default(),
            exit_when_idle: false,
            qmp: Vec::new(),
            control: None,
            metrics: None,
            on_event: None,
            http_address: None,
            http_token_file: None,
            http_names: Vec::new(),
            // Respects the cgroup's CPU quota and the affinity mask.
            workers: thread::available_parallelism().map_or(1, usize::from).min(MAX_DEFAULT_WORKERS),
            poll: PollingMode::Off,
            max_connections: DEFAULT_MAX_CONNECTIONS,
            max_connections_per_address: None,
            access: AccessRules::default(),
            memory: None,
            tls_mode: TlsMode::Off,
            tls_certificates: None,
            tls_verify_peer: false,
            tls_psk: None,
            log: LogSettings { filter: "info".to_owned(), format: LogFormat::Text, file: None },
            pid_file: None,
            state: None,
            image_root: None,
            cgroup_limits: None,
            record: None,
            sandbox: SandboxMode::default(),
            user: None,
        }
    }
}

impl DaemonConfig {
    /// Policy for the control socket at the default address.
    #[must_use]
    pub fn control_socket(&self) -> ControlSocketPolicy {
        match self.control {
            None if self.qmp.is_empty() => ControlSocketPolicy::IfAvailable,
            None | Some(false) => ControlSocketPolicy::Off,
            Some(true) => ControlSocketPolicy::Required,
        }
    }

    /// The page and its API; `None` if it is not served.
    #[must_use]
    pub fn page(&self) -> Option<HttpConfig> {
        let (token_file, names) = (self.http_token_file.clone(), self.http_names.clone());
        self.http_address.clone().map(|address| HttpConfig { address, token_file, names })
    }
}

impl ConfigWithOrigins<DaemonConfig> {
    /// Origin of the control socket at this index of the field `qmp`. The value `default` has an
    /// origin too, but no entry in the field.
    pub fn qmp_origin(&self, index: usize) -> &Origin {
        let is_default = |origin: &Origin| {
            let text = origin.to_string();
            text.ends_with(" default") || text.ends_with("\"default\"")
        };
        let given = self.given_origins().filter(|(key, _)| key.starts_with("qmp["));
        let mut sockets = given.map(|(_, origin)| origin).filter(|place| !is_default(place));
        sockets.nth(index).unwrap_or(self.own_origin())
    }

    /// Warning with the replacement, if the deprecated key `control` or one of its options was
    /// given.
    pub(crate) fn deprecated_control(&self) -> Option<&'static str> {
        self.origin_of_given(DEPRECATED_CONTROL)?;
        Some(match self.control {
            Some(false) => {
                "control = false and --no-control are deprecated (write qmp = \"none\", or --qmp none)"
            }
            _ => "control = true and --control are deprecated (write qmp = \"default\", or --qmp default)",
        })
    }

    /// True if the command line replaces this key of the file. `qmp` and the deprecated `control`
    /// are one setting, and so are `allow` and `deny`.
    pub(crate) fn overrides(&self, key: &str) -> bool {
        let is_given = |key| self.origin_of_given(key).is_some();
        match key {
            "qmp" => is_given("qmp") || self.control == Some(false),
            DEPRECATED_CONTROL => is_given(DEPRECATED_CONTROL) || is_given("qmp"),
            "allow" | "deny" => is_given("allow") || is_given("deny"),
            _ => is_given(key),
        }
    }
}

impl KeyTable for DaemonConfig {
    fn keys() -> &'static [ConfigKey<Self>] {
        static KEYS: LazyLock<Vec<ConfigKey<DaemonConfig>>> = LazyLock::new(daemon_keys);
        &KEYS
    }

    fn check_rules(daemon: &ConfigWithOrigins<Self>, diagnostics: &Diagnostics) {
        // Compared after paths were made absolute.
        let duplicate = (1..daemon.qmp.len()).find(|&index| daemon.qmp[..index].contains(&daemon.qmp[index]));
        if let Some(index) = duplicate {
            diagnostics.report(daemon.qmp_origin(index).error("is given twice (remove one)"));
        }
        // Contradictory: `control = false` disables the control socket.
        if daemon.control == Some(false) && !daemon.qmp.is_empty() {
            let key =
                if daemon.origin_of_given(DEPRECATED_CONTROL).is_some() { DEPRECATED_CONTROL } else { "qmp" };
            diagnostics.report(daemon.error(key, "conflicts with a named control socket (remove one)"));
        }
    }
}

/// Deprecated key that `qmp` replaces. Its options are `--control` and `--no-control`.
pub(crate) const DEPRECATED_CONTROL: &str = "control";

type Config = DaemonConfig;

// Names all fields, so that a new field is a compile error here. It needs a row in the table below,
// which the compiler does not check.
const _: fn(DaemonConfig) = |DaemonConfig {
                                 nbd: _,
                                 sockets: SocketAccess { mode: _, owner: _ },
                                 exit_when_idle: _,
                                 qmp: _,
                                 control: _,
                                 metrics: _,
                                 on_event: _,
                                 http_address: _,
                                 http_token_file: _,
                                 http_names: _,
                                 workers: _,
                                 poll: _,
                                 max_connections: _,
                                 max_connections_per_address: _,
                                 access: AccessRules { networks: _, names: _ },
                                 memory: _,
                                 tls_mode: _,
                                 tls_certificates: _,
                                 tls_verify_peer: _,
                                 tls_psk: _,
                                 log: LogSettings { filter: _, format: _, file: _ },
                                 pid_file: _,
                                 state: _,
                                 image_root: _,
                                 cgroup_limits: _,
                                 record: _,
                                 sandbox: _,
                                 user: _,
                             }| ();

/// The table of keys, in the order of the help.
fn daemon_keys() -> Vec<ConfigKey<DaemonConfig>> {
    table! {
        // name, value, placeholder, field, default, change, transfer, help
        "Network" {
            "nbd", Text, "ADDRESS", nbd(), "inherited sockets, else localhost:10809", Apply, Separate,
                "Serve disks without an export over NBD here: unix:PATH, HOST:PORT or fd:NAME, a \
                 socket passed by a service manager; port 0 is any free port. Not together with \
                 inherited sockets (LISTEN_FDS)";
            "max-connections", Integer, "N", one!(max_connections, crate::connections), "100", Reject, Separate,
                "Maximum number of clients at each address, further clients wait; 0 is no maximum";
            "max-connections-per-address", Integer, "N", maybe!(max_connections_per_address, crate::connections), "nine tenths of --max-connections", Reject, Separate,
                "Maximum number of TCP clients from one address, or from one IPv6 network of 64 \
                 bits; further ones are closed. 0 is no maximum";
            "allow", Text, "NETWORK", clients::allow(access, access_mut), "", Reject, Separate,
                "Accept NBD clients over TCP only from this network, such as 10.0.0.0/8 or \
                 2001:db8::/32; repeatable. If an address is in several networks, the narrowest \
                 decides";
            "deny", Text, "NETWORK", clients::deny(access, access_mut), "", Reject, Separate,
                "Close TCP connections from this network; repeatable";
            "socket-mode", Text, "MODE", socket_mode(), "0600", Reject, Separate,
                "Permissions of the Unix sockets of exports, in octal, independent of the umask";
            "socket-owner", Text, "OWNER", maybe!(sockets.owner), "the daemon's user and group", Reject, Separate,
                "Owner of the Unix sockets of exports: USER, USER:GROUP or :GROUP, by name or number";
            "exit-when-idle", Flag, "", one!(exit_when_idle), "", Reject, Separate,
                "Exit after the last client has disconnected and all jobs have ended";
            "qmp", Text, "ADDRESS", qmp(), "$WEIR_QMP, else /run/weir/qmp.sock, or \
                                            $XDG_RUNTIME_DIR/weir/qmp.sock if not root; weir \
                                            serves and warns if it cannot listen there", Reject, Separate,
                "Address of the control socket, where weir answers commands of QMP, such as those \
                 of `weir status`: unix:PATH, default (the default address; weir fails if it \
                 cannot listen there) or none. Only root and the daemon's own user may connect; \
                 repeatable";
            "metrics", Text, "ADDRESS", maybe!(metrics), "nowhere", Reject, Separate,
                "Serve metrics for Prometheus over HTTP at unix:PATH or HOST:PORT, in /metrics. \
                 Every client that connects sees the names and the activity of disks; 0.0.0.0 or \
                 :: is every address of this host";
            "on-event", Text, "COMMAND", maybe!(on_event), "none; events are in the log", Reject, Separate,
                "Run a command for each event, such as a limit reached or an image failure. \
                 COMMAND is an absolute path with arguments; it reads the event as JSON from \
                 standard input";
            "http", Text, "ADDRESS", maybe!(http_address), "nowhere", Reject, Separate,
                "Serve a status page over HTTP at unix:PATH or HOST:PORT, and a JSON API in \
                 /api/v1. HOST:PORT uses TLS with --tls and --tls-certificates. Read-only without \
                 --http-token-file";
            "http-token-file", Path, "FILE", maybe!(http_token_file), "", Reject, Separate,
                "Allow changes of limits over --http with the token in this file: one line of at \
                 least 16 characters. Only its owner may have access to the file";
            "http-name", Text, "NAME", each!(http_names, parse_http_name), "its addresses and localhost", Reject, Separate,
                "Another host name of the page; repeatable. Requests to other names are rejected";
        }
        "TLS" {
            "tls", Word(&["off", "on", "required"]), "MODE", one!(tls_mode), "off", Reject, Separate,
                "Encryption: off, on (if the client requests it) or required";
            "tls-certificates", Path, "DIR", maybe!(tls_certificates), "", Reject, Separate,
                "Directory with server-cert.pem and server-key.pem, and ca-cert.pem to verify clients";
            "tls-verify-peer", Flag, "", one!(tls_verify_peer), "", Reject, Separate,
                "Reject clients without a certificate signed by ca-cert.pem";
            "tls-psk", Path, "FILE", maybe!(tls_psk), "", Reject, Separate,
                "File of pre-shared keys, user:hexkey lines as psktool writes them";
            "tls-authz", Text, "NAME", clients::names(access, access_mut), "", Reject, Separate,
                "Serve only clients with this certificate subject, such as O=Acme,CN=vm1, or this \
                 user of a pre-shared key; * and ? are wildcards; repeatable";
        }
        "Process" {
            "workers", Count, "N", workers(), "one per CPU, at most 8", Reject, Separate,
                "Number of I/O threads, from 1 to 256";
            "poll", WordOr(&["auto", "off"]), "TIME|auto|off", one!(poll), "off", Reject, Separate,
                "Time for which an idle worker polls for completions before it sleeps, at most 1s: \
                 lower latency for more CPU time. off (or 0) never polls; auto measures both, and \
                 polls only while that raises the throughput";
            "memory", Size, "SIZE", memory(), "four fifths of the memory that the host, weir's \
                                               cgroup and ulimit allow", Reject, Separate,
                "Maximum memory for data: requests, disks in memory, metadata caches and prefetched \
                 data; at least 128M. If it is used up, requests wait, and writes to disks in \
                 memory fail with ENOSPC";
            "pid-file", Path, "FILE", maybe!(pid_file), "", Reject, Separate,
                "Write the process id to this file, and keep it locked while serving";
            "image-root", Path, "DIR", maybe!(image_root), "", Reject, Separate,
                "Reject images outside this directory, and images that refer to files outside it";
            "cgroup-limits", Path, "FILE", maybe!(cgroup_limits), "", Reject, Separate,
                "Also run the bursts, watermarks and groups of these limits of control groups, as \
                 `weir cgroup watch` does";
            "record", Table, "DIR[,KEY=VALUE]", record(), "", Apply, Separate,
                "Record all requests and their waits in this directory, in files of one hour each; \
                 keep=TIME keeps the newest [default: 24h], limit=SIZE bounds their size [default: \
                 1G]";
            "sandbox", Word(&["on", "require", "off"]), "MODE", one!(sandbox), "on", Reject, Separate,
                "After the start, drop privileges that serving does not need, by seccomp, landlock \
                 and capabilities: on, require (fail if the kernel lacks one of them), or off";
            "user", Text, "USER[:GROUP]", maybe!(user, user), "", Reject, Separate,
                "After the start, continue as this user, with this group or the user's own; only as root";
            "state", Path, "DIR", maybe!(state), "/var/lib/weir, or ~/.local/state/weir if not root", Reject, Separate,
                "Directory for data that survives a restart: results of `weir probe`, the last \
                 known limits of a cluster, and counts of quotas";
        }
        "Logging" {
            "log", Text, "FILTER", one!(log.filter, log::filter), "info", Reject, Separate,
                "Level of messages: off, error, warn, info, debug or trace, or MODULE=LEVEL for one \
                 module; several are separated by commas";
            "log-format", Word(&["text", "json"]), "FORMAT", one!(log.format), "text", Reject, Separate,
                "Format of log messages: text or json";
            "log-file", Path, "FILE", maybe!(log.file), "", Reject, Separate,
                "Append to this file instead of standard error; SIGUSR1 reopens it, for logrotate";
        }
    }
}

fn access(daemon: &DaemonConfig) -> &AccessRules {
    &daemon.access
}

fn access_mut(daemon: &mut DaemonConfig) -> &mut AccessRules {
    &mut daemon.access
}

/// Addresses, without the keys that `--nbd` accepts after a comma.
fn nbd() -> KeyField<DaemonConfig> {
    KeyField::new(
        |daemon: &mut DaemonConfig, given| {
            daemon.nbd.push(NbdServerConfig::new(ConfigValue::read(given)?));
            Ok(())
        },
        |daemon| {
            let texts = daemon.nbd.iter().map(|nbd| KeyLiteral::Text(nbd.to_string())).collect();
            (!daemon.nbd.is_empty()).then_some(KeyLiteral::List(texts))
        },
    )
    .list()
}

fn qmp() -> KeyField<DaemonConfig> {
    KeyField::new(
        |daemon: &mut DaemonConfig, given| {
            match given.text {
                "default" | "none" => {
                    let control = given.text == "default";
                    if daemon.control.replace(control) == Some(!control) {
                        return Err("conflicts with its opposite (remove one)".to_owned());
                    }
                }
                text => daemon.qmp.push(resolve_socket(given.directory, &crate::parse_unix_socket(text)?)?),
            }
            Ok(())
        },
        |daemon| {
            // Written with the prefix that the parser requires.
            let keyword = daemon.control.map(|control| if control { "default" } else { "none" });
            let sockets = daemon.qmp.iter().map(|path| format!("unix:{}", path.display()));
            let texts: Vec<_> =
                keyword.map(str::to_owned).into_iter().chain(sockets).map(KeyLiteral::Text).collect();
            (!texts.is_empty()).then_some(KeyLiteral::List(texts))
        },
    )
    .list()
}

fn socket_mode() -> KeyField<DaemonConfig> {
    KeyField::new(
        |daemon: &mut DaemonConfig, given| {
            daemon.sockets.mode = crate::socket_mode(given.text)?;
            Ok(())
        },
        |daemon| Some(KeyLiteral::Text(format!("{:04o}", daemon.sockets.mode))),
    )
}

fn workers() -> KeyField<DaemonConfig> {
    KeyField::new(
        |daemon: &mut DaemonConfig, given| {
            // A value above `usize` is out of range as well.
            let number = usize::try_from(given.number).ok().filter(|n| (1..=MAX_WORKERS).contains(n));
            daemon.workers =
                number.ok_or_else(|| format!("is out of range; it must be from 1 to {MAX_WORKERS}"))?;
            Ok(())
        },
        |daemon| Some(KeyLiteral::Number(daemon.workers as u64)),
    )
}

fn memory() -> KeyField<DaemonConfig> {
    KeyField::new(
        |daemon: &mut DaemonConfig, given| match given.number {
            bytes if bytes < MIN_MEMORY => Err("is too small; it must be at least 128M".to_owned()),
            bytes => {
                daemon.memory = Some(bytes);
                Ok(())
            }
        },
        |daemon| daemon.memory.map(KeyLiteral::Number),
    )
}

/// The text of an option. In a config file the key is a table with a separate reader.
fn record() -> KeyField<DaemonConfig> {
    KeyField::new(
        |daemon: &mut DaemonConfig, given| {
            daemon.record = Some(given.text.parse()?);
            Ok(())
        },
        |daemon| daemon.record.as_ref().map(|record| KeyLiteral::Text(record.to_string())),
    )
}

/// Requires a user: a group alone would leave root its rights.
fn user(text: &str) -> Result<FileOwner, String> {
    let owner: FileOwner = text.parse()?;
    match owner.user {
        Some(_) => Ok(owner),
        None => Err("has no user (write USER, or USER:GROUP)".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Value of each key that differs from the default.
    fn sample(key: &ConfigKey<DaemonConfig>) -> &'static str {
        match key.name {
            "nbd" | "metrics" | "http" => "localhost:1",
            "max-connections" | "max-connections-per-address" | "workers" => "201",
            "allow" | "deny" => "10.0.0.0/8",
            "socket-mode" => "0660",
            "socket-owner" | "user" => "qemu:kvm",
            "qmp" => "unix:/q",
            "on-event" => "/bin/true x",
            "poll" => "5us",
            "record" => "/day,keep=7200s",
            "log" => "debug",
            _ => match key.value {
                Word(words) => words.iter().find(|word| **word != key.default).expect("two words"),
                Flag => "true",
                Size => "1G",
                _ => "/text",
            },
        }
    }

    #[test]
    fn each_row_round_trips_and_changes_one_key() {
        let directory = std::path::Path::new("");
        for key in DaemonConfig::keys() {
            let mut daemon = DaemonConfig::default();
            let text = if key.name == "http-name" { "weir.example.org" } else { sample(key) };
            assert_eq!(key.read(&mut daemon, text, directory), Ok(()), "{}", key.name);
            // A sample equal to the default would prove nothing.
            assert!(!key.is_default(&daemon), "{}", key.name);
            // Fails if two rows share a field, as after copying a row.
            let changed: Vec<_> = daemon.differences(&DaemonConfig::default()).map(|key| key.name).collect();
            assert_eq!(changed, [key.name]);
            let mut restored = DaemonConfig::default();
            for text in key.write(&daemon).expect("a value").texts() {
                key.read(&mut restored, &text, directory).expect("what was written");
            }
            assert_eq!(restored, daemon, "{}", key.name);
        }
    }
}
