//! Names that are somebody else's choice, made fit for a terminal and for the log: of processes, of
//! clients, of what lies in an image.

/// Without what a terminal would act on, and without what nobody sees: a `?` stands for each.
pub fn plain(text: &str) -> String {
    text.replace(is_hidden, "?")
}

/// Whether a character is for control, turns the direction of writing, or cannot be seen.
pub fn is_hidden(character: char) -> bool {
    character.is_control()
        || matches!(
            character,
            '\u{ad}'
                | '\u{61c}'
                | '\u{180e}'
                // Zero width, and marks of direction.
                | '\u{200b}'..='\u{200f}'
                // Ends of lines and paragraphs; embeddings and overrides of direction.
                | '\u{2028}'..='\u{202e}'
                // Joiners, what cannot be seen in formulae, isolates, and what is deprecated.
                | '\u{2060}'..='\u{206f}'
                | '\u{feff}'
                | '\u{fff9}'..='\u{fffb}'
                // Tags.
                | '\u{e0000}'..='\u{e007f}'
        )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_turns_or_hides_is_not_shown() {
        assert_eq!(plain("a\u{202e}b\u{2066}c\u{200b}d\x1b[2Je\u{feff}\u{e0041}"), "a?b?c?d?[2Je??");
        assert_eq!(plain("vm×1 é 日本 ✓ –"), "vm×1 é 日本 ✓ –");
    }
}
