//! Keys that all lists of the full-screen commands share, and the selected row of a list.
//!
//! Rows move and disappear: the selection is stored as the name of the row, and as its position
//! for the case that the row disappears.

use std::time::Duration;

use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers};

// Below it, the load of drawing would distort the measured values.
const MIN_INTERVAL: Duration = Duration::from_millis(100);

/// Parses an interval between two drawings of a list, the value of an option.
pub fn interval(text: &str) -> Result<Duration, String> {
    let interval = settings::duration(text)?;
    if interval < MIN_INTERVAL {
        return Err("is too short; the minimum is 100ms".to_owned());
    }
    Ok(interval)
}

/// Key that ends or stops the program on every screen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExitKey {
    /// Ends the program.
    End,
    /// Stops the program until SIGCONT.
    Stop,
}

impl ExitKey {
    /// Meaning of Ctrl-C and Ctrl-Z; `None` for all other keys. In raw mode the terminal does not
    /// turn them into signals.
    pub fn of(key: KeyEvent) -> Option<Self> {
        let is_control = key.modifiers.contains(KeyModifiers::CONTROL);
        match key.code {
            KeyCode::Char('c') if is_control => Some(Self::End),
            KeyCode::Char('z') if is_control => Some(Self::Stop),
            _ => None,
        }
    }
}

/// Meaning of a key in a list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ListKey {
    /// Ends the program.
    End,
    /// Moves the selection down by this number of rows (up if negative), at most to the first or
    /// last.
    Step(isize),
    /// Sorts by the next column.
    Sort,
    /// Reverses the order.
    Reverse,
    /// Shows the help for the keys.
    Help,
}

impl ListKey {
    /// Meaning of a key in a list that shows `page` rows; `None` if the key has none.
    pub fn of(key: KeyEvent, page: usize) -> Option<Self> {
        let page = page.cast_signed();
        Some(match key.code {
            KeyCode::Char('q') => Self::End,
            KeyCode::Up | KeyCode::Char('k') => Self::Step(-1),
            KeyCode::Down | KeyCode::Char('j') => Self::Step(1),
            KeyCode::PageUp => Self::Step(-page),
            KeyCode::PageDown => Self::Step(page),
            KeyCode::Home | KeyCode::Char('g') => Self::Step(isize::MIN),
            KeyCode::End | KeyCode::Char('G') => Self::Step(isize::MAX),
            KeyCode::Char('s') => Self::Sort,
            KeyCode::Char('r') => Self::Reverse,
            KeyCode::Char('?' | 'h') | KeyCode::F(1) => Self::Help,
            _ => return None,
        })
    }
}

/// Element of `all` that follows `current`; the first follows the last.
pub fn next<T: Copy + PartialEq>(all: &[T], current: T) -> T {
    let index = all.iter().position(|&value| value == current).unwrap_or(0);
    all[(index + 1) % all.len()]
}

/// Selected row of a list.
#[derive(Clone, Debug, Default)]
pub struct SelectedRow {
    name: String,
    place: usize,
}

impl SelectedRow {
    /// Index of the selected row in a list of these names; 0 if it is not among them.
    pub fn index<'a>(&self, mut names: impl Iterator<Item = &'a str>) -> usize {
        names.position(|name| name == self.name).unwrap_or(0)
    }

    /// Selects the row of this name.
    pub fn choose(&mut self, name: String) {
        self.name = name;
    }

    /// Moves the selection down by `by` rows (up if negative), at most to the first or last.
    /// Returns false if the list is empty.
    pub fn step(&mut self, names: &[&str], by: isize) -> bool {
        let last = names.len().saturating_sub(1);
        let next = self.index(names.iter().copied()).saturating_add_signed(by).min(last);
        self.select_at(names, next)
    }

    /// Adjusts the selection to a new list. If the selected row was removed, the row at its old
    /// position is selected. Without `keeps_selection` it is the first row.
    pub fn update(&mut self, names: &[&str], keeps_selection: bool) {
        if keeps_selection && names.contains(&self.name.as_str()) {
            return;
        }
        let place = if keeps_selection { self.place.min(names.len().saturating_sub(1)) } else { 0 };
        self.select_at(names, place);
    }

    fn select_at(&mut self, names: &[&str], place: usize) -> bool {
        let Some(name) = names.get(place) else { return false };
        (self.name, self.place) = ((*name).to_owned(), place);
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_follow_each_other_round() {
        let all = ['a', 'b', 'c'];
        assert_eq!(all.map(|current| next(&all, current)), ['b', 'c', 'a']);
    }

    #[test]
    fn row_at_the_old_position_is_selected_next() {
        let mut chosen = SelectedRow::default();
        chosen.update(&["a", "b", "c"], true);
        assert!(chosen.step(&["a", "b", "c"], 1) && !chosen.step(&[], 1));
        chosen.update(&["z", "c", "b"], true);
        assert_eq!(chosen.index(["z", "c", "b"].into_iter()), 2, "it is the same row elsewhere");
        chosen.update(&["a", "c"], true);
        assert_eq!(chosen.index(["a", "c"].into_iter()), 1);
        chosen.update(&["a", "c"], false);
        assert_eq!(chosen.index(["a", "c"].into_iter()), 0, "the first, where the user has chosen none");
    }
}
