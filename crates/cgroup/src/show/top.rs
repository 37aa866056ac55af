//! `weir cgroup top`: cgroups, and the tasks in one of them, live on the terminal.
//!
//! ```text
//!   keyboard, signals ─► console::input ─┐
//!   survey, every interval ──────────────┴─► one channel ─► state (rows, keys) ─► view (drawing)
//! ```
//!
//! `state` and `view` use neither the terminal nor the kernel's files.

mod state;
mod view;

use std::{
    io,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
        mpsc::{self, Receiver, Sender},
    },
    thread,
    time::Duration,
};

use anyhow::{Context as _, anyhow};
use console::{CommandFailure, input, input::TerminalEvent, keys::ExitKey, screen, screen::Screen};
use state::CgroupTopState;

use super::{
    rates::{CgroupSnapshot, RowOptions},
    survey::CgroupSurvey,
};
use crate::{
    hierarchy::{CgroupHierarchy, KernelRoots},
    show::arguments::CgroupTopArgs,
};

enum TopEvent {
    Input(TerminalEvent),
    Looked(RowOptions, anyhow::Result<CgroupSnapshot>),
}

/// Runs until the user quits. A cgroup that disappears after the start is shown again when it
/// returns.
pub(crate) fn top(arguments: CgroupTopArgs) -> Result<(), CommandFailure> {
    if !screen::is_possible() {
        let message = "cgroup top: standard input and output must be terminals (`weir cgroup show` \
                    prints the same)";
        return Err(anyhow!(message).into());
    }
    let named: Vec<String> = arguments.group.into_iter().collect();
    let hierarchy = CgroupHierarchy::discover(KernelRoots::default())?;
    let survey = CgroupSurvey::new(
        hierarchy,
        arguments.limits_file.path(),
        &named,
        arguments.device.as_deref(),
        false,
    )?;
    let state = CgroupTopState::new(survey.row_options());
    // Tasks are numerous and read only while they are shown.
    let has_tasks = Arc::new(AtomicBool::new(false));
    let (events, receiver) = mpsc::channel();
    let inputs = events.clone();
    let listening = input::listen(move |input| inputs.send(TopEvent::Input(input)).is_ok());
    listening.context("cgroup top: cannot start a thread")?;
    let reads_tasks = Arc::clone(&has_tasks);
    thread::Builder::new()
        .name("survey".to_owned())
        .spawn(move || look(&survey, &reads_tasks, &events, arguments.interval))
        .context("cgroup top: cannot start a thread")?;
    let mut screen = Screen::enter().context("the terminal: cannot be drawn on")?;
    Ok(watch(&mut screen, &receiver, state, &has_tasks).context("the terminal: cannot be drawn on")?)
}

fn watch(
    screen: &mut Screen,
    receiver: &Receiver<TopEvent>,
    mut state: CgroupTopState,
    has_tasks: &AtomicBool,
) -> io::Result<()> {
    loop {
        screen.draw(|frame| view::draw(frame, &mut state))?;
        let action = match receiver.recv().unwrap_or(TopEvent::Input(TerminalEvent::End)) {
            TopEvent::Input(TerminalEvent::Key(key)) => state.press(key),
            TopEvent::Input(TerminalEvent::Resized) => None,
            TopEvent::Input(TerminalEvent::Stop) => Some(ExitKey::Stop),
            TopEvent::Input(TerminalEvent::End) => Some(ExitKey::End),
            TopEvent::Looked(wish, result) => {
                state.update(wish, result);
                None
            }
        };
        has_tasks.store(state.has_tasks(), Ordering::Relaxed);
        match action {
            Some(ExitKey::End) => return Ok(()),
            Some(ExitKey::Stop) => screen.suspend()?,
            None => {}
        }
    }
}

fn look(survey: &CgroupSurvey, has_tasks: &AtomicBool, events: &Sender<TopEvent>, interval: Duration) {
    loop {
        let looked = survey.snapshot(has_tasks.load(Ordering::Relaxed));
        if events.send(TopEvent::Looked(survey.row_options(), looked)).is_err() {
            return;
        }
        thread::sleep(interval);
    }
}
