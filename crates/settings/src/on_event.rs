//! `--on-event COMMAND`: the command that receives each event.

use std::{fmt, str::FromStr};

/// Longest command line in bytes.
const MAX_BYTES: usize = 4096;

/// A command that receives each event as JSON on standard input.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EventCommand {
    /// The absolute path of the program, then its arguments; never empty.
    pub arguments: Vec<String>,
}

impl FromStr for EventCommand {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let text = text.trim();
        if text.len() > MAX_BYTES {
            return Err(format!("is too long; at most {MAX_BYTES} bytes"));
        }
        if text.contains(|character: char| character.is_control()) {
            return Err("has a control character (remove it)".to_owned());
        }
        // No shell: no quoting, and no injection by an event's content.
        let arguments: Vec<String> = text.split_whitespace().map(str::to_owned).collect();
        match arguments.first() {
            Some(program) if program.starts_with('/') => Ok(Self { arguments }),
            Some(url) if ["http://", "https://", "unix:"].iter().any(|scheme| url.starts_with(scheme)) => {
                Err("is a URL; weir 0.2.0 removed webhooks (write /usr/bin/curl --fail --silent \
                     --json @- URL; for a socket, --unix-socket PATH http://localhost/)"
                    .to_owned())
            }
            _ => Err("is not a program with its absolute path and its arguments".to_owned()),
        }
    }
}

impl fmt::Display for EventCommand {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.arguments.join(" "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_separated_by_spaces() {
        let target: EventCommand = " /usr/bin/logger  -t weir ".parse().unwrap();
        assert_eq!(target.to_string(), "/usr/bin/logger -t weir");
        assert_eq!(target.to_string().parse(), Ok(target));
    }

    #[test]
    fn malformed_text_is_rejected_with_the_rule() {
        let rule = "is not a program with its absolute path and its arguments";
        for (text, wrong) in [
            ("", rule),
            ("logger -t weir", rule),
            ("ftp://host/", rule),
            ("/bin/true\r\nX: 1", "has a control character (remove it)"),
        ] {
            assert_eq!(text.parse::<EventCommand>().unwrap_err(), wrong, "{text:?}");
        }
        for url in ["http://host", "https://[::1]:8080/a?b", "unix:/run/x.sock"] {
            let wrong = url.parse::<EventCommand>().unwrap_err();
            assert!(wrong.contains("removed webhooks") && wrong.contains("/usr/bin/curl"), "{wrong}");
        }
        assert!("x".repeat(5000).parse::<EventCommand>().unwrap_err().contains("too long"));
    }
}
