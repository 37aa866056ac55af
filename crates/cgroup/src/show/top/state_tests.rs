//! State after keys and snapshots; nothing is drawn.

use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers};

use super::*;
use crate::show::rates::tests::{sample, snapshots};

pub(in crate::show::top) const WISH: RowOptions = RowOptions { device: None, are_waits_counted: true };

pub(in crate::show::top) fn sampled() -> CgroupTopState {
    let (earlier, later) = snapshots();
    let mut state = CgroupTopState::new(WISH);
    state.update(WISH, Ok(earlier));
    state.update(WISH, Ok(later));
    state
}

/// Presses keys; returns the action of the last one.
pub(in crate::show::top) fn press(state: &mut CgroupTopState, keys: &str) -> Option<ExitKey> {
    let press = |key| state.press(KeyEvent::new(KeyCode::Char(key), KeyModifiers::NONE));
    keys.chars().map(press).last().flatten()
}

fn names(state: &CgroupTopState) -> Vec<String> {
    state.lines().into_iter().map(|line| line.name.trim().to_owned()).collect()
}

fn chosen(state: &CgroupTopState) -> String {
    let lines = state.lines();
    lines[state.chosen(&lines)].name.trim().to_owned()
}

#[test]
fn lines_are_sorted_by_writes_and_then_by_any_column() {
    let mut state = sampled();
    assert_eq!(names(&state), ["/system/a.db", "/idle"]);
    press(&mut state, "sss");
    assert_eq!(state.column, TopColumn::Name);
    assert_eq!(names(&state), ["/idle", "/system/a.db"]);
    press(&mut state, "r");
    assert_eq!(names(&state), ["/system/a.db", "/idle"]);
    for column in [TopColumn::Reads, TopColumn::Writes, TopColumn::Operations, TopColumn::Waited] {
        press(&mut state, "s");
        assert_eq!((state.column, state.reversed), (column, false));
        assert_eq!(names(&state), ["/system/a.db", "/idle"], "the largest first, what is not known last");
    }
    press(&mut state, "s");
    assert_eq!(names(&state), ["/idle", "/system/a.db"]);
    assert_eq!(state.lines()[1].rate, sample().1[1].rate());
}

#[test]
fn tasks_of_a_cgroup_and_those_below_it() {
    let mut state = sampled();
    assert!(!state.has_tasks());
    press(&mut state, "t");
    assert_eq!(names(&state), ["7 dd", "8 a\nb"], "and not one that has done nothing");
    assert!(state.has_tasks());
    press(&mut state, "t");
    assert_eq!(state.tasks_of, Some("/system/a.db".into()), "there is nothing in a task");
    state.press(KeyEvent::new(KeyCode::Esc, KeyModifiers::NONE));
    assert_eq!(chosen(&state), "/system/a.db", "where it came from");
}

#[test]
fn removed_cgroups_leave_the_list() {
    let (earlier, mut later) = snapshots();
    let mut state = sampled();
    press(&mut state, "tj");
    assert_eq!(chosen(&state), "8 a\nb");
    later.groups[1].tasks.retain(|id, _| id.tid == 7);
    state.update(WISH, Ok(later.clone()));
    assert_eq!(chosen(&state), "7 dd");
    later.groups.pop();
    state.update(WISH, Ok(later));
    assert_eq!(names(&state), [""; 0]);
    press(&mut state, "jkgGsr");
    state.update(WISH, Err(anyhow::anyhow!("cgroup /a: removed meanwhile")));
    assert_eq!(state.error.as_deref(), Some("cgroup /a: removed meanwhile"));
    state.update(WISH, Ok(earlier));
    assert_eq!(state.error, None);
    assert!(state.rows.iter().all(|row| row.rate().is_none()), "there is nothing to compare with");
}

#[test]
fn keys_end_stop_and_explain() {
    let mut state = sampled();
    assert_eq!(press(&mut state, "?q"), None, "any key closes the help");
    assert_eq!(press(&mut state, "q"), Some(ExitKey::End));
    let mut control = |key| state.press(KeyEvent::new(KeyCode::Char(key), KeyModifiers::CONTROL));
    assert_eq!([control('c'), control('z'), control('s')], [Some(ExitKey::End), Some(ExitKey::Stop), None]);
}
