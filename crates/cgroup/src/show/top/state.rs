//! State of `weir cgroup top`, and the effect of keys on it. Never draws and never reads files.

use std::{cmp::Ordering, path::PathBuf};

use console::keys::{self, ExitKey, ListKey, SelectedRow};
use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers};

use crate::show::{
    rates,
    rates::{CgroupRate, CgroupRow, CgroupSnapshot, RowOptions, TaskRow},
    text,
};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TopColumn {
    Name,
    Reads,
    Writes,
    /// Operations of a cgroup per second; system calls of a task.
    Operations,
    Waited,
}

impl TopColumn {
    pub(super) const ALL: [Self; 5] = [Self::Name, Self::Reads, Self::Writes, Self::Operations, Self::Waited];
}

#[derive(Clone, Debug, PartialEq)]
pub(super) struct TopLine {
    /// The cgroup's path, or the task's number and name.
    pub(super) name: String,
    pub(super) rate: Option<CgroupRate>,
    pub(super) waited: Option<f64>,
    /// Limits of a cgroup; cgroup of a task.
    pub(super) rest: String,
}

pub(super) struct CgroupTopState {
    pub(super) rows: Vec<CgroupRow>,
    pub(super) error: Option<String>,
    /// The cgroup whose tasks are shown, including descendants; `None` shows cgroups.
    pub(super) tasks_of: Option<PathBuf>,
    pub(super) column: TopColumn,
    /// True for reversed order: the smallest number first, the last name first.
    pub(super) reversed: bool,
    pub(super) has_help: bool,
    /// Lines of a page, set by the view.
    pub(super) page: usize,
    pub(super) options: RowOptions,
    last: Option<CgroupSnapshot>,
    chosen: SelectedRow,
    /// True if the user selected a line; otherwise the first line is selected.
    has_chosen: bool,
}

impl CgroupTopState {
    pub(super) fn new(options: RowOptions) -> Self {
        Self {
            rows: Vec::new(),
            error: None,
            tasks_of: None,
            column: TopColumn::Writes,
            reversed: false,
            has_help: false,
            page: 1,
            options,
            last: None,
            chosen: SelectedRow::default(),
            has_chosen: false,
        }
    }

    /// Applies a snapshot or an error; after an error rates start anew.
    pub(super) fn update(&mut self, options: RowOptions, result: anyhow::Result<CgroupSnapshot>) {
        self.options = options;
        match result {
            Ok(snapshot) => {
                self.rows = rates::rows(self.last.as_ref(), &snapshot, self.options);
                self.error = snapshot.errors.first().cloned();
                self.last = Some(snapshot);
            }
            Err(error) => {
                self.rows.clear();
                self.error = Some(format!("{error:#}"));
                self.last = None;
            }
        }
        self.settle();
    }

    pub(super) fn has_tasks(&self) -> bool {
        self.tasks_of.is_some()
    }

    pub(super) fn lines(&self) -> Vec<TopLine> {
        let mut lines = match &self.tasks_of {
            None => self.rows.iter().map(of_group).collect::<Vec<_>>(),
            Some(name) => {
                // Whole path components are compared, so `/a` does not include `/ab`.
                let below = self.rows.iter().filter(|row| row.name.starts_with(name));
                let tasks = below.flat_map(|row| row.tasks.iter().map(move |task| (row, task)));
                let shown = tasks.filter(|(_, task)| task.has_io());
                shown.map(|(row, task)| of_task(row, task)).collect()
            }
        };
        lines.sort_by(|a, b| {
            let by_column = match self.column {
                TopColumn::Name => Ordering::Equal,
                column => number(b, column).total_cmp(&number(a, column)),
            };
            // Equal lines keep a fixed order, so that they do not jump at each refresh.
            let order = by_column.then_with(|| a.name.cmp(&b.name));
            if self.reversed { order.reverse() } else { order }
        });
        lines
    }

    pub(super) fn chosen(&self, lines: &[TopLine]) -> usize {
        self.chosen.index(lines.iter().map(|line| line.name.as_str()))
    }

    pub(super) fn press(&mut self, key: KeyEvent) -> Option<ExitKey> {
        if key.modifiers.contains(KeyModifiers::CONTROL) {
            return ExitKey::of(key);
        }
        // Any key closes the help, without its usual effect.
        if std::mem::take(&mut self.has_help) {
            return None;
        }
        match ListKey::of(key, self.page) {
            Some(ListKey::End) => return Some(ExitKey::End),
            Some(ListKey::Step(by)) => {
                self.has_chosen |= self.with_names(|chosen, names| chosen.step(names, by));
            }
            Some(ListKey::Sort) => {
                (self.column, self.reversed) = (keys::next(&TopColumn::ALL, self.column), false);
            }
            Some(ListKey::Reverse) => self.reversed = !self.reversed,
            Some(ListKey::Help) => self.has_help = true,
            None => match key.code {
                KeyCode::Enter | KeyCode::Char('t') => self.enter(),
                KeyCode::Esc | KeyCode::Backspace => self.leave(),
                _ => {}
            },
        }
        None
    }

    fn enter(&mut self) {
        // A task has no further level.
        if self.tasks_of.is_some() {
            return;
        }
        let lines = self.lines();
        if let Some(line) = lines.get(self.chosen(&lines)) {
            self.tasks_of = Some(PathBuf::from(&line.name));
            self.has_chosen = false;
            self.settle();
        }
    }

    fn leave(&mut self) {
        if let Some(name) = self.tasks_of.take() {
            self.chosen.choose(name.display().to_string());
            self.has_chosen = true;
            self.settle();
        }
    }

    /// Keeps the user's selection, or its successor at the same position; else selects the first
    /// line.
    fn settle(&mut self) {
        let keeps_selection = self.has_chosen;
        self.with_names(|chosen, names| chosen.update(names, keeps_selection));
    }

    fn with_names<T>(&mut self, choose: impl FnOnce(&mut SelectedRow, &[&str]) -> T) -> T {
        let lines = self.lines();
        choose(&mut self.chosen, &lines.iter().map(|line| line.name.as_str()).collect::<Vec<_>>())
    }
}

fn of_group(row: &CgroupRow) -> TopLine {
    let limited = row.devices.iter().map(text::limits);
    let limits = limited.filter(|limits| limits != text::NOTHING).collect::<Vec<_>>().join(" · ");
    TopLine { name: row.name.display().to_string(), rate: row.rate(), waited: row.waited, rest: limits }
}

fn of_task(row: &CgroupRow, task: &TaskRow) -> TopLine {
    TopLine {
        name: format!("{:>7} {}", task.id.tid, task.task.name),
        rate: task.rate,
        waited: task.waited,
        rest: row.name.display().to_string(),
    }
}

/// Sort key; unknown values come last.
fn number(line: &TopLine, column: TopColumn) -> f64 {
    let rate_figure = |figure: fn(&CgroupRate) -> f64| line.rate.as_ref().map(figure);
    let figure = match column {
        TopColumn::Name => None,
        TopColumn::Reads => rate_figure(|rate| rate.read_bps),
        TopColumn::Writes => rate_figure(|rate| rate.write_bps),
        TopColumn::Operations => rate_figure(CgroupRate::iops),
        TopColumn::Waited => line.waited,
    };
    figure.unwrap_or(-1.0)
}

#[cfg(test)]
#[path = "state_tests.rs"]
pub(super) mod tests;
