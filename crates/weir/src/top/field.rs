//! A text field for one line.

use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers};

/// Longest text in bytes. All settings with their largest values have a tenth of it.
const MAX_BYTES: usize = 4096;

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct TextField {
    text: String,
    /// Byte offset on a character boundary.
    cursor: usize,
}

impl TextField {
    pub(super) fn new(text: impl Into<String>) -> Self {
        let text = text.into();
        Self { cursor: text.len(), text }
    }

    pub(super) fn text(&self) -> &str {
        &self.text
    }

    /// The part around the cursor that fits into `width` columns, and the cursor's column.
    pub(super) fn window(&self, width: usize) -> (String, usize) {
        let column = self.text[..self.cursor].chars().count();
        let first = (column + 1).saturating_sub(width);
        (self.text.chars().skip(first).take(width).collect(), column - first)
    }

    pub(super) fn press(&mut self, key: KeyEvent) -> bool {
        let control = key.modifiers.contains(KeyModifiers::CONTROL);
        match key.code {
            KeyCode::Char('u') if control => drop(self.text.drain(..std::mem::take(&mut self.cursor))),
            KeyCode::Char('w') if control => self.delete_word(),
            KeyCode::Char('a') if control => self.cursor = 0,
            KeyCode::Char('e') if control => self.cursor = self.text.len(),
            // Ctrl with other letters is left to the caller (Ctrl-C, Ctrl-Z).
            KeyCode::Char(_) if control => return false,
            KeyCode::Char(character) => self.insert(character),
            KeyCode::Left => self.cursor = self.before(),
            KeyCode::Right => self.cursor = self.next_boundary(),
            KeyCode::Home => self.cursor = 0,
            KeyCode::End => self.cursor = self.text.len(),
            KeyCode::Delete => drop(self.text.drain(self.cursor..self.next_boundary())),
            KeyCode::Backspace => {
                let before = self.before();
                self.text.drain(before..self.cursor);
                self.cursor = before;
            }
            _ => return false,
        }
        true
    }

    fn insert(&mut self, character: char) {
        if self.text.len() < MAX_BYTES && !character.is_control() {
            self.text.insert(self.cursor, character);
            self.cursor += character.len_utf8();
        }
    }

    fn delete_word(&mut self) {
        let before = self.text[..self.cursor].trim_end();
        let start = before.rfind(' ').map_or(0, |space| space + 1);
        self.text.drain(start..self.cursor);
        self.cursor = start;
    }

    fn before(&self) -> usize {
        self.text[..self.cursor].char_indices().next_back().map_or(0, |(index, _)| index)
    }

    fn next_boundary(&self) -> usize {
        self.text[self.cursor..]
            .chars()
            .next()
            .map_or(self.cursor, |character| self.cursor + character.len_utf8())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn typed(start: &str, keys: &[KeyCode]) -> (String, usize) {
        let mut field = TextField::new(start);
        for &key in keys {
            assert!(field.press(KeyEvent::new(key, KeyModifiers::NONE)));
        }
        field.window(80)
    }

    #[test]
    fn text_is_edited_at_the_cursor() {
        use KeyCode::{Backspace, Char, Delete, End, Home, Left, Right};
        assert_eq!(typed("iops=1", &[Char('0')]), ("iops=10".to_owned(), 7));
        assert_eq!(typed("aé", &[Left, Char('b'), Right, Char('c')]), ("abéc".to_owned(), 4));
        assert_eq!(typed("aé", &[Backspace, Backspace, Backspace]), (String::new(), 0));
        assert_eq!(typed("éa", &[Home, Delete, End, Delete]), ("a".to_owned(), 1));
    }

    #[test]
    fn words_and_lines_are_deleted_with_control() {
        let press = |field: &mut TextField, character| {
            field.press(KeyEvent::new(KeyCode::Char(character), KeyModifiers::CONTROL))
        };
        let mut field = TextField::new("one two  ");
        press(&mut field, 'w');
        assert_eq!(field.text(), "one ");
        press(&mut field, 'u');
        assert_eq!(field, TextField::default());
        assert!(!press(&mut field, 'c'), "a key that it does not handle is passed on");
    }

    #[test]
    fn long_text_scrolls_with_the_cursor() {
        let mut field = TextField::new("0123456789");
        assert_eq!(field.window(5), ("6789".to_owned(), 4));
        field.press(KeyEvent::new(KeyCode::Home, KeyModifiers::NONE));
        assert_eq!(field.window(5), ("01234".to_owned(), 0));
    }
}
