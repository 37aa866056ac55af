//! State of `weir top`, and the effect of each key on it.
//!
//! Reports of the daemon and keys come in; actions for the main loop go out. Never draws and never
//! communicates with a daemon.

use std::time::Duration;

use api::MemberSettings;
use console::keys::{self, ExitKey, ListKey, SelectedRow};
use ratatui::crossterm::event::{KeyCode, KeyEvent};

use super::{
    field::TextField,
    history::RateHistory,
    list::{self, TopRow, TopSortOrder, WeirTopColumn},
};
use crate::client::{
    change::{SettingsChange, listing},
    rates::IntervalRates,
    report::DaemonReport,
};

#[derive(Debug, PartialEq, Eq)]
pub(super) enum TopAction {
    Leave(ExitKey),
    Change { name: String, change: SettingsChange },
}

#[derive(Clone, Debug, PartialEq)]
pub(super) enum TopMode {
    List,
    Filter(TextField),
    Edit(Box<SettingsEditor>),
    Help,
}

#[derive(Clone, Debug, PartialEq)]
pub(super) struct SettingsEditor {
    pub(super) name: String,
    pub(super) field: TextField,
    pub(super) error: Option<String>,
    pub(super) is_waiting: bool,
    /// Settings when the edit began. Only settings that the user changed are sent, so that
    /// concurrent changes of other settings stay in force.
    initial_settings: MemberSettings,
    /// Message to show once the daemon has applied the change.
    success_message: String,
}

pub(super) struct TopState {
    pub(super) target: String,
    pub(super) report: DaemonReport,
    /// Rates between the last two reports.
    pub(super) rates: IntervalRates,
    pub(super) history: RateHistory,
    /// Error of the last query; `None` if it succeeded.
    pub(super) query_error: Option<String>,
    pub(super) mode: TopMode,
    pub(super) order: TopSortOrder,
    pub(super) filter: String,
    /// Result of the last action, shown until the next key.
    pub(super) notice: Option<String>,
    /// Time of the last report, since the program's start.
    pub(super) reported_at: Duration,
    selected: SelectedRow,
    /// Rows in a page, set by the view.
    pub(super) page_rows: usize,
}

impl TopState {
    pub(super) fn new(target: String) -> Self {
        Self {
            target,
            report: DaemonReport::default(),
            rates: IntervalRates::default(),
            history: RateHistory::default(),
            query_error: None,
            mode: TopMode::List,
            order: TopSortOrder { column: WeirTopColumn::Name, reversed: false },
            filter: String::new(),
            notice: None,
            reported_at: Duration::ZERO,
            selected: SelectedRow::default(),
            page_rows: 1,
        }
    }

    pub(super) fn add_report(&mut self, report: DaemonReport, now: Duration) {
        self.rates = IntervalRates::between(&self.report, &report);
        self.history.add(&report, &self.rates, now);
        self.report = report;
        self.reported_at = now;
        self.query_error = None;
        self.update_selection();
    }

    pub(super) fn set_unreachable(&mut self, message: String) {
        self.query_error = Some(message);
        // Rates of an interval that has ended must not look current.
        self.rates = IntervalRates::default();
    }

    pub(super) fn finish_edit(&mut self, result: Result<(), String>) {
        let TopMode::Edit(edit) = &mut self.mode else { return };
        edit.is_waiting = false;
        match result {
            Ok(()) => {
                self.notice = Some(std::mem::take(&mut edit.success_message));
                self.mode = TopMode::List;
            }
            Err(message) => edit.error = Some(message),
        }
    }

    pub(super) fn rows(&self) -> Vec<TopRow<'_>> {
        list::rows(&self.report, &self.rates, &self.filter, self.order)
    }

    /// Index of the selected row in `rows`; 0 if no row is selected.
    pub(super) fn selected_row(&self, rows: &[TopRow<'_>]) -> usize {
        self.selected.index(rows.iter().map(|row| row.name))
    }

    pub(super) fn press(&mut self, key: KeyEvent) -> Option<TopAction> {
        // Ctrl-C and Ctrl-Z work in every mode.
        if let Some(exit_key) = ExitKey::of(key) {
            return Some(TopAction::Leave(exit_key));
        }
        self.notice = None;
        match std::mem::replace(&mut self.mode, TopMode::List) {
            TopMode::List => return self.press_in_list(key),
            TopMode::Help => {}
            TopMode::Filter(field) => self.press_in_filter(field, key),
            TopMode::Edit(edit) => return self.press_in_edit(edit, key),
        }
        None
    }

    fn press_in_list(&mut self, key: KeyEvent) -> Option<TopAction> {
        match ListKey::of(key, self.page_rows) {
            Some(ListKey::End) => return Some(TopAction::Leave(ExitKey::End)),
            Some(ListKey::Step(by)) => self.change_selection(|chosen, names| {
                chosen.step(names, by);
            }),
            Some(ListKey::Sort) => {
                let column = keys::next(&WeirTopColumn::ALL, self.order.column);
                self.order = TopSortOrder { column, reversed: false };
            }
            Some(ListKey::Reverse) => self.order.reversed = !self.order.reversed,
            Some(ListKey::Help) => self.mode = TopMode::Help,
            None => match key.code {
                KeyCode::Char('/') => self.mode = TopMode::Filter(TextField::new(self.filter.as_str())),
                KeyCode::Char('t') | KeyCode::Enter => self.begin_edit(),
                KeyCode::Esc => self.set_filter(String::new()),
                _ => {}
            },
        }
        None
    }

    /// The filter applies while it is typed; Escape clears it.
    fn press_in_filter(&mut self, mut field: TextField, key: KeyEvent) {
        match key.code {
            KeyCode::Enter => {}
            KeyCode::Esc => self.set_filter(String::new()),
            _ => {
                field.press(key);
                self.set_filter(field.text().to_owned());
                self.mode = TopMode::Filter(field);
            }
        }
    }

    fn set_filter(&mut self, filter: String) {
        self.filter = filter;
        self.update_selection();
    }

    /// Opens the editor with the settings of the selected disk or group.
    fn begin_edit(&mut self) {
        let rows = self.rows();
        let Some(row) = rows.get(self.selected_row(&rows)) else { return };
        let before = row.node.settings().clone();
        let text = listing(&before);
        // A trailing space, so that the next setting can be typed at once.
        let field = TextField::new(if text.is_empty() { text } else { text + " " });
        let name = row.name.to_owned();
        let edit = SettingsEditor {
            name,
            field,
            error: None,
            is_waiting: false,
            initial_settings: before,
            success_message: String::new(),
        };
        self.mode = TopMode::Edit(Box::new(edit));
    }

    fn press_in_edit(&mut self, mut edit: Box<SettingsEditor>, key: KeyEvent) -> Option<TopAction> {
        let mut action = None;
        match key.code {
            KeyCode::Esc => return None,
            // Keys are ignored until the daemon responds: a second Enter would send the change
            // twice.
            _ if edit.is_waiting => {}
            KeyCode::Enter => match SettingsChange::from_listing(&edit.initial_settings, edit.field.text()) {
                Ok(change) if change.is_empty() => return None,
                Ok(change) => {
                    let name = edit.name.clone();
                    edit.success_message =
                        format!("{name}: {}", change.describe(&edit.initial_settings).join(", "));
                    edit.is_waiting = true;
                    edit.error = None;
                    action = Some(TopAction::Change { name, change });
                }
                Err(message) => edit.error = Some(message),
            },
            _ => {
                if edit.field.press(key) {
                    edit.error = None;
                }
            }
        }
        self.mode = TopMode::Edit(edit);
        action
    }

    /// Keeps the selection on a listed row: if the selected one is gone, the row in its position is
    /// selected.
    fn update_selection(&mut self) {
        self.change_selection(|chosen, names| chosen.update(names, true));
    }

    /// Calls `choose` with the selection and the names of all rows.
    fn change_selection(&mut self, choose: impl FnOnce(&mut SelectedRow, &[&str])) {
        let mut chosen = std::mem::take(&mut self.selected);
        choose(&mut chosen, &self.rows().iter().map(|row| row.name).collect::<Vec<_>>());
        self.selected = chosen;
    }
}

#[cfg(test)]
#[path = "state_tests.rs"]
pub(super) mod tests;
