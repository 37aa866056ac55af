//! Options of `weir serve` in the syntax of `qemu-storage-daemon`: nodes, exports, objects, an NBD
//! server and monitors, executed in the order in which they are written.
//!
//! ```text
//!   --object, --blockdev, --nbd-server, --export ─► a command of QMP each, once the daemon runs
//!   --chardev, --monitor                         ─► control sockets, as --qmp
//! ```
//!
//! So these options support the commands of the control socket, with the same error messages.

use std::{path::PathBuf, rc::Rc};

use clap::{Arg, ArgAction, ArgMatches, Args, Command, FromArgMatches};
use control::{qmp, registry::Registry};
use settings::{ConfigError, Origin, keyval};

/// Heading of the options in the help of `qemu-storage-daemon`. The help of `weir serve` hides the
/// options, which are for command lines of that program.
pub const QEMU_HEADING: &str = "As qemu-storage-daemon, in this order";

/// The options in the order of their help: name, value, help.
const OPTIONS: [(&str, &str, &str); 6] = [
    ("blockdev", "NODE", "Add a disk, as blockdev-add of QMP: driver=…,node-name=…, or a JSON object"),
    ("object", "OBJECT", "Create a throttle-group, secret, tls-creds-x509 or tls-creds-psk, as object-add"),
    ("nbd-server", "ADDRESS", "Serve NBD exports, as nbd-server-start: addr.type=unix,addr.path=…"),
    ("export", "EXPORT", "Export a disk, as block-export-add: type=nbd,id=…,node-name=…"),
    ("chardev", "SOCKET", "A Unix socket for a monitor: socket,id=…,path=…,server=on,wait=off"),
    ("monitor", "MONITOR", "Accept QMP commands at a chardev's socket, as --qmp does: chardev=…"),
];

/// The given options, in order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct QemuSteps(Vec<(&'static str, String)>);

impl QemuSteps {
    /// Names of the options, for a clap group.
    pub(super) const NAMES: [&'static str; 6] =
        [OPTIONS[0].0, OPTIONS[1].0, OPTIONS[2].0, OPTIONS[3].0, OPTIONS[4].0, OPTIONS[5].0];

    /// Removes the monitors; returns their sockets.
    pub(super) fn take_monitors(&mut self) -> Result<Vec<(PathBuf, Origin)>, ConfigError> {
        let mut sockets: Vec<(String, (PathBuf, Origin))> = Vec::new();
        let mut monitors = Vec::new();
        for (option, text) in &self.0 {
            let origin = Origin::option(option, text);
            match *option {
                "chardev" => {
                    let (id, path) = chardev(text).map_err(|rule| origin.error(rule))?;
                    if sockets.iter().any(|(other, _)| *other == id) {
                        return Err(
                            origin.error(format!("there is a chardev {id:?} already (choose another id)"))
                        );
                    }
                    // A chardev only defines a socket; the monitor that names it takes it out of
                    // the list.
                    sockets.push((id, (path, origin)));
                }
                "monitor" => {
                    let id = monitor(text).map_err(|rule| origin.error(rule))?;
                    let at = sockets.iter().position(|(known, _)| *known == id);
                    let at =
                        at.ok_or_else(|| origin.error(format!("chardev {id:?} not found (name it before)")))?;
                    monitors.push(sockets.remove(at).1);
                }
                _ => {}
            }
        }
        if let Some((_, (_, place))) = sockets.first() {
            return Err(place.error("is not used (add --monitor with its id)"));
        }
        self.0.retain(|(option, _)| !["chardev", "monitor"].contains(option));
        Ok(monitors)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Executes the remaining steps in order.
    ///
    /// # Errors
    /// Returns the first failure; earlier steps stay in effect.
    pub(super) async fn run(self, registry: &Rc<Registry>) -> anyhow::Result<()> {
        for (option, text) in self.0 {
            let (command, implied) = match option {
                "blockdev" => ("blockdev-add", Some("driver")),
                "object" => ("object-add", Some("qom-type")),
                "nbd-server" => ("nbd-server-start", None),
                _ => ("block-export-add", Some("type")),
            };
            let origin = Origin::option(option, &text);
            qmp::execute_text(registry, command, &text, implied)
                .await
                .map_err(|error| origin.error(error))?;
        }
        Ok(())
    }
}

/// Keys of an option without a QMP command; a flag may stand alone, or with the prefix `no`.
fn keys(text: &str, implied: &str, known: &[&str]) -> Result<Vec<(String, String)>, String> {
    let flags = text.split(',').map(|part| match part {
        "server" | "wait" => format!("{part}=on"),
        "nowait" => "wait=off".to_owned(),
        _ => part.to_owned(),
    });
    let pairs = keyval::pairs(&flags.collect::<Vec<_>>().join(","), Some(implied))?;
    match pairs.iter().find(|(key, _)| !known.contains(&key.as_str())) {
        Some((key, _)) => Err(format!("{key}: not supported (supported: {})", known.join(", "))),
        None => Ok(pairs),
    }
}

/// The last value of a key.
fn value<'a>(pairs: &'a [(String, String)], key: &str) -> Option<&'a str> {
    pairs.iter().rfind(|(known, _)| known == key).map(|(_, value)| value.as_str())
}

/// ID and path of a Unix socket.
fn chardev(text: &str) -> Result<(String, PathBuf), String> {
    let pairs = keys(text, "backend", &["backend", "id", "path", "server", "wait"])?;
    match value(&pairs, "backend") {
        Some("socket") => {}
        other => return Err(format!("backend={}: not supported (supported: socket)", other.unwrap_or(""))),
    }
    if !matches!(value(&pairs, "server"), Some("on" | "yes" | "true")) {
        return Err("server=on is needed, because a monitor's client connects to it".to_owned());
    }
    let id = value(&pairs, "id").ok_or("has no id (add id=NAME)")?;
    let path = value(&pairs, "path").ok_or("has no path (add path=PATH; only Unix sockets are supported)")?;
    Ok((id.to_owned(), settings::parse_unix_socket(&format!("unix:{path}"))?))
}

/// ID of the monitor's chardev.
fn monitor(text: &str) -> Result<String, String> {
    let pairs = keys(text, "chardev", &["chardev", "mode", "pretty"])?;
    for (key, only) in [("mode", "control"), ("pretty", "off")] {
        if let Some(other) = value(&pairs, key).filter(|value| *value != only) {
            return Err(format!("{key}={other}: not supported (leave it out)"));
        }
    }
    value(&pairs, "chardev").map(str::to_owned).ok_or_else(|| "has no chardev (add chardev=ID)".to_owned())
}

impl Args for QemuSteps {
    fn augment_args(command: Command) -> Command {
        let option = |(name, value, help): (&'static str, &'static str, &'static str)| {
            Arg::new(name)
                .long(name)
                .value_name(value)
                .help(help)
                .help_heading(QEMU_HEADING)
                .hide(true)
                .action(ArgAction::Append)
        };
        command.args(OPTIONS.map(option))
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

impl FromArgMatches for QemuSteps {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let mut steps = Vec::new();
        for name in Self::NAMES {
            let (at, texts) = (matches.indices_of(name), matches.get_many::<String>(name));
            steps.extend(
                at.into_iter().flatten().zip(texts.into_iter().flatten()).map(|(at, text)| (at, name, text)),
            );
        }
        // clap groups values by option; the indices restore the order of the command line.
        steps.sort_by_key(|(at, ..)| *at);
        Ok(Self(steps.into_iter().map(|(_, name, text)| (name, text.clone())).collect()))
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(line: &str) -> QemuSteps {
        let arguments = std::iter::once("serve").chain(line.split_whitespace());
        let matches = QemuSteps::augment_args(Command::new("serve")).get_matches_from(arguments);
        QemuSteps::from_arg_matches(&matches).unwrap()
    }

    #[test]
    fn steps_keep_the_order_of_the_command_line() {
        let steps = read("--object a --blockdev b --export c --object d --nbd-server=e");
        let texts: Vec<_> = steps.0.iter().map(|(name, text)| format!("{name} {text}")).collect();
        assert_eq!(texts, ["object a", "blockdev b", "export c", "object d", "nbd-server e"]);
    }

    #[test]
    fn monitors_are_control_sockets() {
        let mut steps = read(
            "--chardev socket,id=a,path=/a,server=on,wait=off --monitor chardev=a,mode=control \
             --blockdev b --chardev socket,path=/c,,d,id=c,server,nowait --monitor c",
        );
        let sockets = steps.take_monitors().unwrap();
        let paths: Vec<_> = sockets.iter().map(|(path, _)| path.display().to_string()).collect();
        assert_eq!(paths, ["/a", "/c,d"]);
        assert_eq!(steps, read("--blockdev b"));
    }

    #[test]
    fn invalid_monitor_is_rejected_by_name() {
        let refused = |line: &str, expect: &str| {
            let wrong = read(line).take_monitors().unwrap_err().to_string();
            assert!(wrong.contains(expect), "{wrong}");
        };
        let socket = "--chardev socket,id=a,path=/a,server=on";
        refused("--monitor a", "--monitor a: chardev \"a\" not found");
        refused(&format!("{socket} --monitor a,pretty=on"), "pretty=on: not supported");
        refused(&format!("{socket} --monitor a,mode=readline"), "mode=readline: not supported");
        refused(socket, "is not used (add --monitor");
        refused(&format!("{socket} {socket}"), "there is a chardev \"a\" already");
        refused("--chardev stdio,id=a", "backend=stdio: not supported");
        refused("--chardev socket,id=a,host=x,port=1,server=on", "host: not supported");
        refused("--chardev socket,id=a,path=/a", "server=on is needed");
        refused("--chardev socket,id=a,server=on", "has no path");
        refused("--chardev socket,path=/a,server=on", "has no id");
    }
}
