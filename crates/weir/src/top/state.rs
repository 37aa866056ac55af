//! Content of `weir top` and the meaning of keys.
//!
//! Input: reports and keys; output: actions. Never draws and never communicates with a daemon.

use std::time::Duration;

use api::MemberSettings;
use console::keys::{self, SelectedRow, ListKey, ExitKey};
use ratatui::crossterm::event::{KeyCode, KeyEvent};

use super::{
    field::Field,
    history::History,
    list::{self, Column, Order, Row},
};
use crate::client::{
    change::{Change, listing},
    rates::Rates,
    report::Report,
};

#[derive(Debug, PartialEq, Eq)]
pub(super) enum Action {
    Leave(ExitKey),
    Change { name: String, change: Change },
}

#[derive(Clone, Debug, PartialEq)]
pub(super) enum Mode {
    List,
    Filter(Field),
    Edit(Box<Edit>),
    Help,
}

#[derive(Clone, Debug, PartialEq)]
pub(super) struct Edit {
    pub(super) name: String,
    pub(super) field: Field,
    pub(super) error: Option<String>,
    pub(super) is_waiting: bool,
    /// Settings when the edit began. Only settings that the user changed are sent, even if others
    /// changed meanwhile.
    before: MemberSettings,
    /// Message to show once the daemon has applied the change.
    told: String,
}

pub(super) struct State {
    pub(super) target: String,
    pub(super) report: Report,
    /// Rates between the last two reports.
    pub(super) rates: Rates,
    pub(super) history: History,
    /// Error of the last query; `None` if it succeeded.
    pub(super) lost: Option<String>,
    pub(super) mode: Mode,
    pub(super) order: Order,
    pub(super) filter: String,
    /// Result of the last action, shown until the next key.
    pub(super) notice: Option<String>,
    /// Time of the last report, since the program's start.
    pub(super) now: Duration,
    chosen: SelectedRow,
    /// Rows in a page, set by the view.
    pub(super) page: usize,
}

impl State {
    pub(super) fn new(target: String) -> Self {
        Self {
            target,
            report: Report::default(),
            rates: Rates::default(),
            history: History::default(),
            lost: None,
            mode: Mode::List,
            order: Order { column: Column::Name, reversed: false },
            filter: String::new(),
            notice: None,
            now: Duration::ZERO,
            chosen: SelectedRow::default(),
            page: 1,
        }
    }

    pub(super) fn learn(&mut self, report: Report, now: Duration) {
        self.rates = Rates::between(&self.report, &report);
        self.history.add(&report, &self.rates, now);
        self.report = report;
        self.now = now;
        self.lost = None;
        self.settle();
    }

    pub(super) fn lose(&mut self, said: String) {
        self.lost = Some(said);
        // Rates of an interval that has ended must not look current.
        self.rates = Rates::default();
    }

    pub(super) fn changed(&mut self, result: Result<(), String>) {
        let Mode::Edit(edit) = &mut self.mode else { return };
        edit.is_waiting = false;
        match result {
            Ok(()) => {
                self.notice = Some(std::mem::take(&mut edit.told));
                self.mode = Mode::List;
            }
            Err(said) => edit.error = Some(said),
        }
    }

    pub(super) fn rows(&self) -> Vec<Row<'_>> {
        list::rows(&self.report, &self.rates, &self.filter, self.order)
    }

    /// Index of the selected row; 0 if there is none.
    pub(super) fn chosen(&self, rows: &[Row<'_>]) -> usize {
        self.chosen.index(rows.iter().map(|row| row.name))
    }

    pub(super) fn press(&mut self, key: KeyEvent) -> Option<Action> {
        // Ctrl-C and Ctrl-Z work in every mode.
        if let Some(leave) = ExitKey::of(key) {
            return Some(Action::Leave(leave));
        }
        self.notice = None;
        match std::mem::replace(&mut self.mode, Mode::List) {
            Mode::List => return self.press_in_list(key),
            Mode::Help => {}
            Mode::Filter(field) => self.press_in_filter(field, key),
            Mode::Edit(edit) => return self.press_in_edit(edit, key),
        }
        None
    }

    fn press_in_list(&mut self, key: KeyEvent) -> Option<Action> {
        match ListKey::of(key, self.page) {
            Some(ListKey::End) => return Some(Action::Leave(ExitKey::End)),
            Some(ListKey::Step(by)) => self.with_names(|chosen, names| {
                chosen.step(names, by);
            }),
            Some(ListKey::Sort) => {
                let column = keys::next(&Column::ALL, self.order.column);
                self.order = Order { column, reversed: false };
            }
            Some(ListKey::Reverse) => self.order.reversed = !self.order.reversed,
            Some(ListKey::Help) => self.mode = Mode::Help,
            None => match key.code {
                KeyCode::Char('/') => self.mode = Mode::Filter(Field::new(self.filter.as_str())),
                KeyCode::Char('t') | KeyCode::Enter => self.begin_edit(),
                KeyCode::Esc => self.set_filter(String::new()),
                _ => {}
            },
        }
        None
    }

    /// The filter applies while it is typed; Escape clears it.
    fn press_in_filter(&mut self, mut field: Field, key: KeyEvent) {
        match key.code {
            KeyCode::Enter => {}
            KeyCode::Esc => self.set_filter(String::new()),
            _ => {
                field.press(key);
                self.set_filter(field.text().to_owned());
                self.mode = Mode::Filter(field);
            }
        }
    }

    fn set_filter(&mut self, filter: String) {
        self.filter = filter;
        self.settle();
    }

    fn begin_edit(&mut self) {
        let rows = self.rows();
        let Some(row) = rows.get(self.chosen(&rows)) else { return };
        let before = row.node.settings().clone();
        let text = listing(&before);
        // A trailing space, so that the next setting can be typed at once.
        let field = Field::new(if text.is_empty() { text } else { text + " " });
        let name = row.name.to_owned();
        let edit = Edit { name, field, error: None, is_waiting: false, before, told: String::new() };
        self.mode = Mode::Edit(Box::new(edit));
    }

    fn press_in_edit(&mut self, mut edit: Box<Edit>, key: KeyEvent) -> Option<Action> {
        let mut action = None;
        match key.code {
            KeyCode::Esc => return None,
            // The daemon's response is outstanding: a second Enter would send the change twice.
            _ if edit.is_waiting => {}
            KeyCode::Enter => match Change::to_listing(&edit.before, edit.field.text()) {
                Ok(change) if change.is_empty() => return None,
                Ok(change) => {
                    let name = edit.name.clone();
                    edit.told = format!("{name}: {}", change.describe(&edit.before).join(", "));
                    edit.is_waiting = true;
                    edit.error = None;
                    action = Some(Action::Change { name, change });
                }
                Err(said) => edit.error = Some(said),
            },
            _ => {
                if edit.field.press(key) {
                    edit.error = None;
                }
            }
        }
        self.mode = Mode::Edit(edit);
        action
    }

    /// If the selected row is gone, selects the row in its position.
    fn settle(&mut self) {
        self.with_names(|chosen, names| chosen.update(names, true));
    }

    fn with_names(&mut self, choose: impl FnOnce(&mut SelectedRow, &[&str])) {
        let mut chosen = std::mem::take(&mut self.chosen);
        choose(&mut chosen, &self.rows().iter().map(|row| row.name).collect::<Vec<_>>());
        self.chosen = chosen;
    }
}

#[cfg(test)]
#[path = "state_tests.rs"]
pub(super) mod tests;
