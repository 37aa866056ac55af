//! Allow and deny rules for authenticated client names.

use alloc::{string::String, vec::Vec};

use PatternChar::{Escaped, Plain};

/// One rule: a pattern, and the verdict on names that match.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NameRule {
    /// A name. With `is_glob`, `*` matches any number of characters and `?` matches one.
    pub pattern: String,
    /// True if `*` and `?` are wildcards.
    pub is_glob: bool,
    /// True if matching names are allowed, false if they are denied.
    pub allow: bool,
}

impl NameRule {
    fn matches(&self, name: &str) -> bool {
        if self.is_glob { glob_matches(&self.pattern, name) } else { self.pattern == name }
    }
}

/// An ordered list of rules. The first rule that matches a name decides.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NameRules {
    /// Rules, in the order of evaluation.
    pub rules: Vec<NameRule>,
    /// Result for names that no rule matches.
    pub default_allows: bool,
}

impl NameRules {
    /// Rules that allow names matching one of these patterns and deny all others.
    pub fn any_of(patterns: impl IntoIterator<Item = String>) -> Self {
        let rule = |pattern| NameRule { pattern, is_glob: true, allow: true };
        Self { rules: patterns.into_iter().map(rule).collect(), default_allows: false }
    }

    /// True if the name is allowed.
    pub fn allows(&self, name: &str) -> bool {
        let rule = self.rules.iter().find(|rule| rule.matches(name));
        rule.map_or(self.default_allows, |rule| rule.allow)
    }
}

/// Matches a glob in O(pattern · name) at most: after a mismatch only the last `*` is extended.
fn glob_matches(pattern: &str, name: &str) -> bool {
    let (pattern, name) = (characters(pattern), characters(name));
    let (mut at, mut read) = (0, 0);
    // Position after the last `*` in the pattern, and the end of the text that this `*` matches.
    let mut last = None;
    while read < name.len() {
        match pattern.get(at) {
            Some(Plain('*')) => {
                // Extending an earlier `*` could not help: the last `*` can match the same
                // characters.
                at += 1;
                last = Some((at, read));
            }
            Some(&wanted) if wanted == Plain('?') || wanted == name[read] => {
                at += 1;
                read += 1;
            }
            _ => {
                let Some((after_star, matched_end)) = last else { return false };
                (at, read) = (after_star, matched_end + 1);
                last = Some((at, read));
            }
        }
    }
    pattern[at..].iter().all(|&rest| rest == Plain('*'))
}

/// A character of a name. An escaped character never matches a plain one: a comma inside an
/// attribute value must not be mistaken for the comma between two attributes.
#[derive(Clone, Copy, PartialEq, Eq)]
enum PatternChar {
    Plain(char),
    /// Preceded by a backslash (RFC 4514 section 2.4).
    Escaped(char),
}

fn characters(text: &str) -> Vec<PatternChar> {
    let is_special = |next: &char| matches!(next, '"' | '+' | ',' | ';' | '<' | '>' | '\\' | ' ' | '#');
    let mut rest = text.chars().peekable();
    let mut parsed = Vec::new();
    while let Some(character) = rest.next() {
        let escaped = if character == '\\' { rest.next_if(is_special) } else { None };
        parsed.push(escaped.map_or(Plain(character), Escaped));
    }
    parsed
}

#[cfg(test)]
mod tests {
    use alloc::{borrow::ToOwned as _, format, vec};

    use super::*;

    #[test]
    fn patterns_match_as_in_a_shell() {
        for (pattern, matching, not_matching) in [
            ("alice", &["alice"][..], &["", "alic", "alice2", "Alice"][..]),
            ("*", &["", "a", "é"], &[]),
            ("CN=*,O=Acme", &["CN=,O=Acme", "CN=a,O=x,O=Acme"], &["CN=a,O=Acme Ltd", "O=Acme"]),
            ("vm?", &["vm1", "vmé"], &["vm", "vm10"]),
            ("*a*b", &["ab", "aab", "xaxbxb"], &["ba", "abx", "a"]),
            ("a**", &["a", "ab"], &["ba"]),
            // An attribute value that contains the text of another attribute.
            ("CN=*,O=Acme", &["CN=a\\,b,O=Acme", "CN=\\\\,O=Acme"], &["CN=a\\,O=Acme"]),
            ("O=Acme\\, Inc,CN=a?", &["O=Acme\\, Inc,CN=a\\+"], &["O=Acme, Inc,CN=ab"]),
            ("DOMAIN\\*", &["DOMAIN\\alice"], &["DOMAIN"]),
        ] {
            let names = NameRules::any_of([pattern.to_owned()]);
            assert!(matching.iter().all(|name| names.allows(name)), "{pattern}");
            assert!(!not_matching.iter().any(|name| names.allows(name)), "{pattern}");
        }
    }

    #[test]
    fn matching_many_stars_is_not_exponential() {
        let names = NameRules::any_of([format!("{}b", "*a".repeat(200))]);
        assert!(!names.allows(&"a".repeat(4000)));
    }

    #[test]
    fn first_matching_rule_decides() {
        let rule =
            |pattern: &str, is_glob, allows| NameRule { pattern: pattern.to_owned(), is_glob, allow: allows };
        let names = NameRules {
            rules: vec![rule("eve*", true, false), rule("*", false, false), rule("e*", true, true)],
            default_allows: false,
        };
        assert!(names.allows("earl"));
        // Without `is_glob`, `*` is an ordinary character.
        assert!(!names.allows("eve2") && !names.allows("*") && !names.allows("bob"));
        assert!(NameRules { rules: Vec::new(), default_allows: true }.allows("bob"));
    }
}
