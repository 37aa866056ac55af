//! Screens compared with the files in `golden/`.
//!
//! To update them after a change, and then review them:
//! `WEIR_REFRESH=1 cargo test -p weir --lib top::view`.

use std::{env, fs, path::PathBuf};

use api::{JobReport, ThrottleCause};
use console::screen::without_colours;
use ratatui::{
    Frame, Terminal,
    backend::TestBackend,
    crossterm::event::KeyCode,
    style::{Color, Modifier},
    text::{Line, Span},
};

use super::{draw, truncated};
use crate::top::state::{
    TopState,
    tests::{press, watched, write},
};

/// Text of a screen of this size, without trailing spaces.
fn screen(state: &mut TopState, width: u16, height: u16) -> String {
    let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
    terminal.draw(|frame| draw(frame, state)).unwrap();
    let buffer = terminal.backend().buffer();
    let line = |y| {
        let line: String = (0..width).map(|x| buffer[(x, y)].symbol()).collect();
        line.trim_end().to_owned() + "\n"
    };
    (0..height).map(line).collect()
}

#[track_caller]
fn check(state: &mut TopState, size: (u16, u16), golden: &str) {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("src/top/view/golden").join(golden);
    let drawn = screen(state, size.0, size.1);
    if env::var_os("WEIR_REFRESH").is_some() {
        fs::write(&path, drawn).unwrap();
        return;
    }
    let expect = fs::read_to_string(&path).unwrap_or_default();
    assert!(drawn == expect, "{golden} should be\n{expect}\nbut is\n{drawn}");
}

#[test]
fn truncated_line_ends_with_an_ellipsis() {
    let line = || Line::from(vec![Span::raw(" binding ".to_owned()), Span::raw("iops-total".to_owned())]);
    for (width, expect) in
        [(19, " binding iops-total"), (18, " binding iops-tot…"), (9, " binding…"), (5, " bin…"), (1, "…")]
    {
        let fitted = truncated(line(), width);
        assert_eq!(fitted.to_string(), expect);
        assert!(fitted.width() <= usize::from(width));
    }
}

#[test]
fn smallest_screen() {
    let mut state = watched(60, &["vm1", "vm2", "a-disk-with-a-long-name"]);
    press(&mut state, KeyCode::Char('j'));
    press(&mut state, KeyCode::Char('j'));
    check(&mut state, (80, 24), "least.txt");
}

#[test]
fn wide_screen_has_full_names_and_throttle_causes() {
    check(&mut watched(60, &["vm1", "a-disk-with-a-long-name"]), (220, 24), "wide.txt");
}

#[test]
fn chart_titles_keep_the_unit() {
    let mut state = watched(2, &["customer-17-database-volume-of-a-long-name"]);
    let drawn = screen(&mut state, 80, 24);
    for title in ["me IOPS: reads writes sum", "me bytes/s: reads writes sum"] {
        assert!(drawn.contains(title), "{title} in\n{drawn}");
    }
}

#[test]
fn a_large_screen_has_larger_charts_and_a_longer_list() {
    check(&mut watched(130, &["vm1"]), (132, 43), "large.txt");
}

#[test]
fn editor_shows_the_change_and_its_error() {
    let mut state = watched(2, &["vm1"]);
    write(&mut state, "jtweight=");
    check(&mut state, (80, 24), "edit.txt");
    press(&mut state, KeyCode::Enter);
    check(&mut state, (80, 24), "edit-refused.txt");
}

#[test]
fn without_colours_the_selected_row_is_reversed() {
    let mut state = watched(2, &["vm1", "vm2"]);
    let mut terminal = Terminal::new(TestBackend::new(80, 24)).unwrap();
    let draw = |frame: &mut Frame<'_>| {
        draw(frame, &mut state);
        without_colours(frame.buffer_mut());
    };
    terminal.draw(draw).unwrap();
    let buffer = terminal.backend().buffer();
    assert!(buffer.content.iter().all(|cell| (cell.fg, cell.bg) == (Color::Reset, Color::Reset)));
    let reversed: Vec<u16> =
        (0..24).filter(|&y| buffer[(4, y)].modifier.contains(Modifier::REVERSED)).collect();
    assert_eq!(reversed.len(), 1, "{reversed:?}");
}

#[test]
fn help_window() {
    let mut state = watched(2, &["vm1"]);
    press(&mut state, KeyCode::Char('?'));
    check(&mut state, (80, 24), "help.txt");
}

#[test]
fn unreachable_daemon() {
    let mut state = watched(2, &["vm1"]);
    state.set_unreachable("unix:/run/weir/qmp.sock: no daemon listens there".to_owned());
    check(&mut state, (80, 24), "lost.txt");
}

#[test]
fn small_terminal_shows_the_required_size() {
    let mut state = watched(2, &["vm1"]);
    let message = screen(&mut state, 60, 20);
    assert!(message.starts_with("weir top needs 80×24; this terminal is 60×20"), "{message}");
    for (width, height) in [(0, 0), (1, 1), (79, 24), (80, 23)] {
        screen(&mut state, width, height);
    }
}

/// A state with this number of jobs.
fn with_jobs(count: usize) -> TopState {
    let mut state = watched(60, &["vm1"]);
    let job = |number: usize| JobReport {
        id: format!("backup-vm{number}"),
        kind: "backup".to_owned(),
        disk: format!("vm{number}"),
        group: Some("gold".to_owned()),
        state: "running".to_owned(),
        done_bytes: 42 << 20,
        total_bytes: 100 << 20,
        rate_bps: 20 << 20,
        remaining_s: Some(60 * number as u64),
        throttle_cause: Some(ThrottleCause {
            level: "group".into(),
            name: "gold".to_owned(),
            limit: "bps-total".into(),
        }),
        ..JobReport::default()
    };
    state.report.status.jobs = (1..=count).map(job).collect();
    state
}

#[test]
fn jobs_that_run_or_have_failed_are_below_the_list() {
    let mut state = with_jobs(4);
    let jobs = &mut state.report.status.jobs;
    (jobs[1].state, jobs[1].remaining_s, jobs[1].throttle_cause) = ("paused".to_owned(), None, None);
    for job in &mut jobs[2..] {
        (job.state, job.remaining_s, job.throttle_cause) = ("concluded".to_owned(), None, None);
    }
    jobs[2].error = Some("the target cannot be written at offset 0".to_owned());
    check(&mut state, (80, 24), "jobs.txt");
    check(&mut state, (140, 43), "jobs-wide.txt");
}

#[test]
fn number_of_jobs_that_do_not_fit_is_shown() {
    let drawn = screen(&mut with_jobs(9), 80, 24);
    assert!(drawn.contains("backup-vm2") && !drawn.contains("backup-vm3"), "{drawn}");
    assert!(drawn.contains("7 more jobs (weir jobs)"), "{drawn}");
}

#[test]
fn every_size_and_mode_can_be_drawn() {
    // Every size and mode, with long names, many rows, and characters of several columns.
    let names: Vec<String> =
        (0..200).map(|number| format!("盘\u{1b}[2J-{number}-{}", "x".repeat(300))).collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    for keys in ["", "G", "/vm", "t", "?"] {
        let mut state = watched(3, &names);
        write(&mut state, keys);
        for size in [(80, 24), (81, 25), (200, 24), (80, 100), (500, 200)] {
            let drawn = screen(&mut state, size.0, size.1);
            assert!(!drawn.contains('\u{1b}'), "a name must not move the cursor");
        }
    }
}
