//! `--on-event TARGET`: who is told of events beside the log: a webhook, or a command.

use std::{fmt, path::PathBuf, str::FromStr};

/// Bytes of a target.
const MOST: usize = 4096;

/// Who is handed each event, as JSON.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum OnEvent {
    /// A server that gets it with a POST.
    Webhook(Webhook),
    /// A program, with its arguments, that has it on standard input.
    Command(Vec<String>),
}

/// Where a webhook is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Webhook {
    /// How it is reached.
    pub server: WebServer,
    /// Of the URL: begins with a slash.
    pub path: String,
}

/// A server of HTTP.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum WebServer {
    /// A Unix socket.
    Unix(PathBuf),
    /// A host, by name or address without brackets.
    Tcp {
        /// Who.
        host: String,
        /// Where.
        port: u16,
        /// Whether it speaks TLS.
        tls: bool,
    },
}

impl FromStr for OnEvent {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let text = text.trim();
        if text.len() > MOST {
            return Err(format!("is too long; it has {MOST} bytes at most"));
        }
        if text.contains(|letter: char| letter.is_control()) {
            return Err("holds a control character (leave it out)".to_owned());
        }
        if let Some(path) = text.strip_prefix("unix:") {
            let path = crate::socket(&format!("unix:{path}"))?;
            return Ok(Self::Webhook(Webhook { server: WebServer::Unix(path), path: "/".to_owned() }));
        }
        for (scheme, tls) in [("http://", false), ("https://", true)] {
            if let Some(rest) = text.strip_prefix(scheme) {
                return webhook(rest, tls).map(Self::Webhook);
            }
        }
        let words: Vec<String> = text.split_whitespace().map(str::to_owned).collect();
        match words.first() {
            Some(program) if program.starts_with('/') => Ok(Self::Command(words)),
            _ => Err("is neither http://…, https://… or unix:PATH, nor a program by its whole path, with its arguments"
                .to_owned()),
        }
    }
}

fn webhook(rest: &str, tls: bool) -> Result<Webhook, String> {
    let usage = "is no URL; write http://HOST[:PORT][/PATH]";
    let end = rest.find(['/', '?']).unwrap_or(rest.len());
    let (authority, path) = rest.split_at(end);
    if authority.contains('@') {
        return Err("has a name or a password, which everybody could see (leave it out)".to_owned());
    }
    if rest.contains(['#', ' ', '\\']) {
        return Err(usage.to_owned());
    }
    let standard = if tls { 443 } else { 80 };
    // A port behind the last colon, but not one within an address's brackets.
    let has_port = authority.rsplit_once(':').is_some_and(|(_, port)| !port.contains(']'));
    let with_port = if has_port { authority.to_owned() } else { format!("{authority}:{standard}") };
    match with_port.parse()? {
        crate::Address::Tcp { host, port } if port > 0 => {
            let path = if path.starts_with('/') { path.to_owned() } else { format!("/{path}") };
            Ok(Webhook { server: WebServer::Tcp { host, port, tls }, path })
        }
        _ => Err(usage.to_owned()),
    }
}

/// As it may be given again.
impl fmt::Display for OnEvent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Command(words) => f.write_str(&words.join(" ")),
            Self::Webhook(Webhook { server: WebServer::Unix(path), .. }) => {
                write!(f, "unix:{}", path.display())
            }
            Self::Webhook(Webhook { server: WebServer::Tcp { host, port, tls }, path }) => {
                let scheme = if *tls { "https" } else { "http" };
                let address = crate::Address::Tcp { host: host.clone(), port: *port };
                write!(f, "{scheme}://{address}{path}")
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_said_is_read_and_said_again() {
        for (text, again) in [
            ("http://host", "http://host:80/"),
            ("https://[::1]/a?b=1", "https://[::1]:443/a?b=1"),
            ("http://192.0.2.1:8080?x", "http://192.0.2.1:8080/?x"),
            ("unix:/run/x.sock", "unix:/run/x.sock"),
            (" /usr/bin/logger  -t weir ", "/usr/bin/logger -t weir"),
        ] {
            let target: OnEvent = text.parse().unwrap();
            assert_eq!(target.to_string(), again);
            assert_eq!(again.parse(), Ok(target));
        }
    }

    #[test]
    fn what_cannot_be_is_named() {
        let neither = "is neither http://…, https://… or unix:PATH, nor a program by its whole path, with its arguments";
        for (text, wrong) in [
            ("", neither),
            ("logger -t weir", neither),
            ("ftp://host/", neither),
            ("http://", "has no host; write localhost, or [::] for every address of this machine"),
            ("http://host:0/", "is no URL; write http://HOST[:PORT][/PATH]"),
            ("http://host/a b", "is no URL; write http://HOST[:PORT][/PATH]"),
            ("http://me:secret@host/", "has a name or a password, which everybody could see (leave it out)"),
            ("http://host/\r\nX: 1", "holds a control character (leave it out)"),
            ("unix:", "has no path; write unix:PATH"),
        ] {
            assert_eq!(text.parse::<OnEvent>().unwrap_err(), wrong, "{text:?}");
        }
        assert!("x".repeat(5000).parse::<OnEvent>().unwrap_err().contains("too long"));
    }
}
