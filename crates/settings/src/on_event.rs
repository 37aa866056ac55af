//! `--on-event COMMAND`: the command that receives each event.

use std::{fmt, str::FromStr};

/// Longest command line in bytes.
const MOST: usize = 4096;

/// A command that receives each event as JSON on standard input.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OnEvent {
    /// The absolute path of the program, then its arguments; never empty.
    pub words: Vec<String>,
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
        // No shell: no quoting, and no injection by an event's content.
        let words: Vec<String> = text.split_whitespace().map(str::to_owned).collect();
        match words.first() {
            Some(program) if program.starts_with('/') => Ok(Self { words }),
            Some(url) if ["http://", "https://", "unix:"].iter().any(|scheme| url.starts_with(scheme)) => {
                Err("is a URL; weir 0.2.0 removed webhooks (write /usr/bin/curl --fail --silent --json @- URL; for a socket, --unix-socket PATH http://localhost/)"
                    .to_owned())
            }
            _ => Err("is not a program with its absolute path and its arguments".to_owned()),
        }
    }
}

impl fmt::Display for OnEvent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.words.join(" "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_separated_by_spaces() {
        let target: OnEvent = " /usr/bin/logger  -t weir ".parse().unwrap();
        assert_eq!(target.to_string(), "/usr/bin/logger -t weir");
        assert_eq!(target.to_string().parse(), Ok(target));
    }

    #[test]
    fn other_text_is_refused_with_its_rule() {
        let rule = "is not a program with its absolute path and its arguments";
        for (text, wrong) in [
            ("", rule),
            ("logger -t weir", rule),
            ("ftp://host/", rule),
            ("/bin/true\r\nX: 1", "holds a control character (leave it out)"),
        ] {
            assert_eq!(text.parse::<OnEvent>().unwrap_err(), wrong, "{text:?}");
        }
        for url in ["http://host", "https://[::1]:8080/a?b", "unix:/run/x.sock"] {
            let wrong = url.parse::<OnEvent>().unwrap_err();
            assert!(wrong.contains("removed webhooks") && wrong.contains("/usr/bin/curl"), "{wrong}");
        }
        assert!("x".repeat(5000).parse::<OnEvent>().unwrap_err().contains("too long"));
    }
}
