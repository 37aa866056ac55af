//! The keys that every list on the whole screen has, and which of its rows is chosen.
//!
//! Rows move and go: the chosen one is known by its name, and by its place in case it goes.

use std::time::Duration;

use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers};

/// Shortest time between two looks: below it the machine would work for the watcher.
const SHORTEST_INTERVAL: Duration = Duration::from_millis(100);

/// How often a list is drawn anew, as an option's value.
pub fn interval(text: &str) -> Result<Duration, String> {
    let interval = settings::duration(text)?;
    if interval < SHORTEST_INTERVAL {
        return Err("is too short; it may be 100ms at least".to_owned());
    }
    Ok(interval)
}

/// What ends or stops the program, whatever else is on the screen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Leave {
    /// End it.
    End,
    /// Stop it until it is continued.
    Stop,
}

impl Leave {
    /// What Ctrl-C and Ctrl-Z mean.
    pub fn of(key: KeyEvent) -> Option<Self> {
        let is_control = key.modifiers.contains(KeyModifiers::CONTROL);
        match key.code {
            KeyCode::Char('c') if is_control => Some(Self::End),
            KeyCode::Char('z') if is_control => Some(Self::Stop),
            _ => None,
        }
    }
}

/// What a key means in a list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InList {
    /// End the program.
    End,
    /// Choose the row so many rows below; the first or last, where there are fewer.
    Step(isize),
    /// Sort by the next column.
    Sort,
    /// Sort the other way round.
    Reverse,
    /// Explain the keys.
    Help,
}

impl InList {
    /// The meaning of a key in a list of which `page` rows are seen.
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

/// The one of `all` that follows `current`; after the last the first.
pub fn next<T: Copy + PartialEq>(all: &[T], current: T) -> T {
    let index = all.iter().position(|&one| one == current).unwrap_or(0);
    all[(index + 1) % all.len()]
}

/// The chosen row.
#[derive(Clone, Debug, Default)]
pub struct Chosen {
    name: String,
    place: usize,
}

impl Chosen {
    /// Where the chosen row is among rows of these names; 0 if there is none.
    pub fn index<'a>(&self, mut names: impl Iterator<Item = &'a str>) -> usize {
        names.position(|name| name == self.name).unwrap_or(0)
    }

    /// Chooses the row of this name.
    pub fn choose(&mut self, name: String) {
        self.name = name;
    }

    /// Chooses the row `by` rows below, or the first or last; false if there are no rows.
    pub fn step(&mut self, names: &[&str], by: isize) -> bool {
        let last = names.len().saturating_sub(1);
        let next = self.index(names.iter().copied()).saturating_add_signed(by).min(last);
        self.take(names, next)
    }

    /// Chooses what stands where the chosen row was, if that is gone; the first, without `stays`.
    pub fn settle(&mut self, names: &[&str], stays: bool) {
        if stays && names.contains(&self.name.as_str()) {
            return;
        }
        let place = if stays { self.place.min(names.len().saturating_sub(1)) } else { 0 };
        self.take(names, place);
    }

    fn take(&mut self, names: &[&str], place: usize) -> bool {
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
        assert_eq!(all.map(|one| next(&all, one)), ['b', 'c', 'a']);
    }

    #[test]
    fn who_stands_where_the_chosen_one_was_is_chosen_next() {
        let mut chosen = Chosen::default();
        chosen.settle(&["a", "b", "c"], true);
        assert!(chosen.step(&["a", "b", "c"], 1) && !chosen.step(&[], 1));
        chosen.settle(&["z", "c", "b"], true);
        assert_eq!(chosen.index(["z", "c", "b"].into_iter()), 2, "it is the same row elsewhere");
        chosen.settle(&["a", "c"], true);
        assert_eq!(chosen.index(["a", "c"].into_iter()), 1);
        chosen.settle(&["a", "c"], false);
        assert_eq!(chosen.index(["a", "c"].into_iter()), 0, "the first, where the user has chosen none");
    }
}
