//! Sanitizes names chosen by other parties (processes, clients, image contents) for terminals and
//! logs.

/// Replaces characters that a terminal would interpret and invisible ones by `?`.
pub fn sanitize(text: &str) -> String {
    text.replace(is_unsafe_for_display, "?")
}

/// True for control characters, characters that change the writing direction, and invisible ones.
pub fn is_unsafe_for_display(character: char) -> bool {
    character.is_control()
        || matches!(
            character,
            '\u{ad}'
                | '\u{61c}'
                | '\u{180e}'
                // Zero width, and direction marks.
                | '\u{200b}'..='\u{200f}'
                // Line and paragraph separators; directional embeddings and overrides.
                | '\u{2028}'..='\u{202e}'
                // Joiners, invisible operators, directional isolates, and deprecated characters.
                | '\u{2060}'..='\u{206f}'
                | '\u{feff}'
                | '\u{fff9}'..='\u{fffb}'
                // Tag characters.
                | '\u{e0000}'..='\u{e007f}'
        )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bidi_and_invisible_characters_are_replaced() {
        assert_eq!(sanitize("a\u{202e}b\u{2066}c\u{200b}d\x1b[2Je\u{feff}\u{e0041}"), "a?b?c?d?[2Je??");
        assert_eq!(sanitize("vm×1 é 日本 ✓ –"), "vm×1 é 日本 ✓ –");
    }
}
