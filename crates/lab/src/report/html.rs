//! Escapes text for a page.
//!
//! Names and notes come from untrusted result files: a disk may be named `<script>`. No character
//! of a text can begin a tag or an entity, or end an attribute.

use reactor::sanitize::is_unsafe_for_display;

/// Escapes text between tags and in quoted attributes.
pub(super) fn escape(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for character in text.chars() {
        match character {
            '&' => escaped += "&amp;",
            '<' => escaped += "&lt;",
            '>' => escaped += "&gt;",
            '"' => escaped += "&quot;",
            '\'' => escaped += "&#39;",
            character => escaped.push(shown(character)),
        }
    }
    escaped
}

/// Replaces characters that are forbidden in HTML, interpreted by terminals or invisible, except
/// line ends; plotters does not.
pub(super) fn clean(text: &str) -> String {
    text.chars().map(shown).collect()
}

fn shown(character: char) -> char {
    // Noncharacters as well (Unicode 16, section 23.7): they make a document ill-formed.
    let noncharacter = matches!(character as u32 & 0xFFFF, 0xFFFE | 0xFFFF)
        || ('\u{FDD0}'..='\u{FDEF}').contains(&character);
    if character != '\n' && is_unsafe_for_display(character) || noncharacter { '?' } else { character }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn any_disk_name_is_escaped() {
        let name = "<script>alert(\"1\" + '&')</script>\u{1b}[2J\0";
        let escaped = "&lt;script&gt;alert(&quot;1&quot; + &#39;&amp;&#39;)&lt;/script&gt;?[2J?";
        assert_eq!(escape(name), escaped);
        assert_eq!(clean("a\nb\x07\u{FFFE}c\u{202E}d"), "a\nb??c?d");
    }

    proptest! {
        #[test]
        fn escaped_text_starts_no_tag(text in any::<String>()) {
            let escaped = escape(&text);
            prop_assert!(!escaped.contains(['<', '>', '"', '\'']), "{escaped}");
            let unescaped = escaped.replace("&lt;", "<").replace("&gt;", ">").replace("&quot;", "\"");
            prop_assert_eq!(unescaped.replace("&#39;", "'").replace("&amp;", "&"), clean(&text));
        }
    }
}
