//! State of `weir cgroup top`, and the effect of keys on it. Never draws and never reads files.

use std::{cmp::Ordering, path::PathBuf};

use console::keys::{self, Chosen, InList, Leave};
use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers};

use crate::show::{
    rates,
    rates::{Rate, Row, Snapshot, TaskRow, Wish},
    text,
};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Column {
    Name,
    Reads,
    Writes,
    /// Operations of a cgroup per second; system calls of a task.
    Operations,
    Waited,
}

impl Column {
    pub(super) const ALL: [Self; 5] = [Self::Name, Self::Reads, Self::Writes, Self::Operations, Self::Waited];
}

#[derive(Clone, Debug, PartialEq)]
pub(super) struct Line {
    /// The cgroup's path, or the task's number and name.
    pub(super) name: String,
    pub(super) rate: Option<Rate>,
    pub(super) waited: Option<f64>,
    /// Limits of a cgroup; cgroup of a task.
    pub(super) rest: String,
}

pub(super) struct State {
    pub(super) rows: Vec<Row>,
    pub(super) wrong: Option<String>,
    /// The cgroup whose tasks are shown, including descendants; `None` shows cgroups.
    pub(super) tasks_of: Option<PathBuf>,
    pub(super) column: Column,
    /// Reversed order: the smallest number first, the last name first.
    pub(super) reversed: bool,
    pub(super) has_help: bool,
    /// Lines of a page, set by the view.
    pub(super) page: usize,
    pub(super) wish: Wish,
    last: Option<Snapshot>,
    chosen: Chosen,
    /// True if the user selected a line; otherwise the first line is selected.
    has_chosen: bool,
}

impl State {
    pub(super) fn new(wish: Wish) -> Self {
        Self {
            rows: Vec::new(),
            wrong: None,
            tasks_of: None,
            column: Column::Writes,
            reversed: false,
            has_help: false,
            page: 1,
            wish,
            last: None,
            chosen: Chosen::default(),
            has_chosen: false,
        }
    }

    /// Applies a snapshot or an error; after an error rates start anew.
    pub(super) fn learn(&mut self, wish: Wish, result: anyhow::Result<Snapshot>) {
        self.wish = wish;
        match result {
            Ok(snapshot) => {
                self.rows = rates::rows(self.last.as_ref(), &snapshot, self.wish);
                self.wrong = snapshot.wrong.first().cloned();
                self.last = Some(snapshot);
            }
            Err(error) => {
                self.rows.clear();
                self.wrong = Some(format!("{error:#}"));
                self.last = None;
            }
        }
        self.settle();
    }

    pub(super) fn has_tasks(&self) -> bool {
        self.tasks_of.is_some()
    }

    pub(super) fn lines(&self) -> Vec<Line> {
        let mut lines = match &self.tasks_of {
            None => self.rows.iter().map(of_group).collect::<Vec<_>>(),
            Some(name) => {
                // Whole path components are compared, so `/a` does not include `/ab`.
                let below = self.rows.iter().filter(|row| row.name.starts_with(name));
                let tasks = below.flat_map(|row| row.tasks.iter().map(move |task| (row, task)));
                let shown = tasks.filter(|(_, task)| task.has_done_something());
                shown.map(|(row, task)| of_task(row, task)).collect()
            }
        };
        lines.sort_by(|a, b| {
            let by_column = match self.column {
                Column::Name => Ordering::Equal,
                column => number(b, column).total_cmp(&number(a, column)),
            };
            // Equal lines keep a fixed order, so that they do not jump at each refresh.
            let order = by_column.then_with(|| a.name.cmp(&b.name));
            if self.reversed { order.reverse() } else { order }
        });
        lines
    }

    pub(super) fn chosen(&self, lines: &[Line]) -> usize {
        self.chosen.index(lines.iter().map(|line| line.name.as_str()))
    }

    pub(super) fn press(&mut self, key: KeyEvent) -> Option<Leave> {
        if key.modifiers.contains(KeyModifiers::CONTROL) {
            return Leave::of(key);
        }
        // Any key closes the help, without its usual effect.
        if std::mem::take(&mut self.has_help) {
            return None;
        }
        match InList::of(key, self.page) {
            Some(InList::End) => return Some(Leave::End),
            Some(InList::Step(by)) => {
                self.has_chosen |= self.with_names(|chosen, names| chosen.step(names, by));
            }
            Some(InList::Sort) => {
                (self.column, self.reversed) = (keys::next(&Column::ALL, self.column), false);
            }
            Some(InList::Reverse) => self.reversed = !self.reversed,
            Some(InList::Help) => self.has_help = true,
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
        let stays = self.has_chosen;
        self.with_names(|chosen, names| chosen.settle(names, stays));
    }

    fn with_names<T>(&mut self, choose: impl FnOnce(&mut Chosen, &[&str]) -> T) -> T {
        let lines = self.lines();
        choose(&mut self.chosen, &lines.iter().map(|line| line.name.as_str()).collect::<Vec<_>>())
    }
}

fn of_group(row: &Row) -> Line {
    let limited = row.devices.iter().map(text::limits);
    let limits = limited.filter(|limits| limits != text::NOTHING).collect::<Vec<_>>().join(" · ");
    Line { name: row.name.display().to_string(), rate: row.rate(), waited: row.waited, rest: limits }
}

fn of_task(row: &Row, task: &TaskRow) -> Line {
    Line {
        name: format!("{:>7} {}", task.id.tid, task.task.name),
        rate: task.rate,
        waited: task.waited,
        rest: row.name.display().to_string(),
    }
}

/// Sort key; unknown values come last.
fn number(line: &Line, column: Column) -> f64 {
    let of = |figure: fn(&Rate) -> f64| line.rate.as_ref().map(figure);
    let figure = match column {
        Column::Name => None,
        Column::Reads => of(|rate| rate.read_bps),
        Column::Writes => of(|rate| rate.write_bps),
        Column::Operations => of(Rate::iops),
        Column::Waited => line.waited,
    };
    figure.unwrap_or(-1.0)
}

#[cfg(test)]
#[path = "state_tests.rs"]
pub(super) mod tests;
