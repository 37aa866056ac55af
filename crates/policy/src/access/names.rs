//! Names that clients have proved to have, and which of them are let in.

use alloc::{string::String, vec::Vec};

use Character::{Escaped, Plain};

/// One rule.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rule {
    /// A name; with `is_glob`, `*` is any number of characters and `?` is one.
    pub pattern: String,
    /// Whether it may have such characters.
    pub is_glob: bool,
    /// Whether a name that fits is let in.
    pub allows: bool,
}

impl Rule {
    fn fits(&self, name: &str) -> bool {
        if self.is_glob { is_like(&self.pattern, name) } else { self.pattern == name }
    }
}

/// The first rule that fits a name decides.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Names {
    /// In order.
    pub rules: Vec<Rule>,
    /// What becomes of a name that no rule fits.
    pub otherwise: bool,
}

impl Names {
    /// Those that fit one of these patterns, and no others.
    pub fn any_of(patterns: impl IntoIterator<Item = String>) -> Self {
        let rule = |pattern| Rule { pattern, is_glob: true, allows: true };
        Self { rules: patterns.into_iter().map(rule).collect(), otherwise: false }
    }

    /// Whether this name is let in.
    pub fn admits(&self, name: &str) -> bool {
        let rule = self.rules.iter().find(|rule| rule.fits(name));
        rule.map_or(self.otherwise, |rule| rule.allows)
    }
}

/// In time proportional to both lengths at most: after a mismatch only the last `*` is tried anew.
fn is_like(pattern: &str, name: &str) -> bool {
    let (pattern, name) = (characters(pattern), characters(name));
    let (mut at, mut read) = (0, 0);
    // Behind the last `*`, and how much of the name that one has taken.
    let mut last = None;
    while read < name.len() {
        match pattern.get(at) {
            Some(Plain('*')) => {
                at += 1;
                last = Some((at, read));
            }
            Some(&wanted) if wanted == Plain('?') || wanted == name[read] => {
                at += 1;
                read += 1;
            }
            _ => {
                let Some((behind, taken)) = last else { return false };
                (at, read) = (behind, taken + 1);
                last = Some((at, read));
            }
        }
    }
    pattern[at..].iter().all(|&rest| rest == Plain('*'))
}

/// One of a name's. A comma inside a part is none between two parts.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Character {
    Plain(char),
    /// Behind a backslash (RFC 4514 section 2.4).
    Escaped(char),
}

fn characters(text: &str) -> Vec<Character> {
    let is_special = |next: &char| matches!(next, '"' | '+' | ',' | ';' | '<' | '>' | '\\' | ' ' | '#');
    let mut rest = text.chars().peekable();
    let mut read = Vec::new();
    while let Some(character) = rest.next() {
        let escaped = if character == '\\' { rest.next_if(is_special) } else { None };
        read.push(escaped.map_or(Plain(character), Escaped));
    }
    read
}

#[cfg(test)]
mod tests {
    use alloc::{borrow::ToOwned as _, format, vec};

    use super::*;

    #[test]
    fn patterns_fit_as_in_a_shell() {
        for (pattern, fits, others) in [
            ("alice", &["alice"][..], &["", "alic", "alice2", "Alice"][..]),
            ("*", &["", "a", "é"], &[]),
            ("CN=*,O=Acme", &["CN=,O=Acme", "CN=a,O=x,O=Acme"], &["CN=a,O=Acme Ltd", "O=Acme"]),
            ("vm?", &["vm1", "vmé"], &["vm", "vm10"]),
            ("*a*b", &["ab", "aab", "xaxbxb"], &["ba", "abx", "a"]),
            ("a**", &["a", "ab"], &["ba"]),
            // A part whose text looks like another part.
            ("CN=*,O=Acme", &["CN=a\\,b,O=Acme", "CN=\\\\,O=Acme"], &["CN=a\\,O=Acme"]),
            ("O=Acme\\, Inc,CN=a?", &["O=Acme\\, Inc,CN=a\\+"], &["O=Acme, Inc,CN=ab"]),
            ("DOMAIN\\*", &["DOMAIN\\alice"], &["DOMAIN"]),
        ] {
            let names = Names::any_of([pattern.to_owned()]);
            assert!(fits.iter().all(|name| names.admits(name)), "{pattern}");
            assert!(!others.iter().any(|name| names.admits(name)), "{pattern}");
        }
    }

    #[test]
    fn a_pattern_of_many_stars_takes_no_time() {
        let names = Names::any_of([format!("{}b", "*a".repeat(200))]);
        assert!(!names.admits(&"a".repeat(4000)));
    }

    #[test]
    fn the_first_rule_that_fits_decides() {
        let rule = |pattern: &str, is_glob, allows| Rule { pattern: pattern.to_owned(), is_glob, allows };
        let names = Names {
            rules: vec![rule("eve*", true, false), rule("*", false, false), rule("e*", true, true)],
            otherwise: false,
        };
        assert!(names.admits("earl"));
        // An exact rule knows no stars.
        assert!(!names.admits("eve2") && !names.admits("*") && !names.admits("bob"));
        assert!(Names { rules: Vec::new(), otherwise: true }.admits("bob"));
    }
}
